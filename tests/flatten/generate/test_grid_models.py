"""Pictures of any size: their positions, and folders that generate what the model generates."""

import pytest
import torch

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from tests.transformers_versions import needs_transformers
from yobx_flatten import InvalidArgumentError, OnnxGenerator
from yobx_flatten.generate.pictures import Pictures, image_positions
from yobx_flatten.generate.settings import settings_of
from yobx_flatten.model_folder.pieces.vision_language import GridVisionEncoder, grid_image
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = [pytest.mark.slow, needs_transformers("5.17", "no small configuration of Qwen2-VL can be made")]

PICTURE, VIDEO = 3, 258


@pytest.fixture(scope="module", params=cases(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], quick=["qwen2_vl"]))
def qwen(request):
    if not GridVisionEncoder.fits(small_model(request.param)):
        pytest.skip("its vision encoder makes the positions of patches by itself")
    model, folder = exported(request.param)
    return model, OnnxGenerator(folder, threads=1)


def prompts():
    ids = torch.randint(4, 258, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[0, 2:8] = ids[0, 9:13] = ids[1, 9:15] = PICTURE
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    made = [grid_image(small_model("qwen2_vl"), *size) for size in ((2, 3), (1, 4), (3, 2))]
    return ids, mask, {name: torch.cat([picture[name] for picture in made]) for name in made[0]}


def wanted(model, ids, mask, pictures, **options):
    if pictures:
        pictures = {**pictures, "mm_token_type_ids": torch.eq(ids, PICTURE).long()}
    return model.generate(ids, attention_mask=mask, **pictures, max_new_tokens=14, do_sample=False, **options).tolist()


def test_pictures_of_several_sizes_and_text_are_read_as_the_model_does(qwen):
    model, generator = qwen
    ids, mask, pictures = prompts()
    found = generator.generate(ids, mask, **pictures, max_new_tokens=14).tolist()
    assert found == wanted(model, ids, mask, pictures)
    pictures["pixel_values"] = pictures["pixel_values"] * 0 + 3
    assert found != generator.generate(ids, mask, **pictures, max_new_tokens=14).tolist()


@needs_transformers("5.23", "generate() of the model fails with beams")
def test_text_alone_and_a_search_with_beams_are_those_of_the_model(qwen):
    model, generator = qwen
    ids, mask, pictures = prompts()
    assert generator.generate(ids[2:], max_new_tokens=14).tolist() == wanted(model, ids[2:], mask[2:], {})
    one = {"pixel_values": pictures["pixel_values"][:40], "image_grid_thw": pictures["image_grid_thw"][:2]}
    found = generator.generate(ids[:1], **one, num_beams=2, max_new_tokens=14).tolist()
    assert found == wanted(model, ids[:1], mask[:1], one, num_beams=2)


def test_a_video_is_read_as_the_model_does(qwen):
    """Next to a picture, in a batch with a padded row; Qwen2.5-VL counts seconds, Qwen3-VL has text between frames."""
    model, generator = qwen
    ids = torch.randint(4, 258, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[0, 1:7], ids[1, 9:13], ids[1, 14:18] = PICTURE, VIDEO, VIDEO
    if model.config.model_type != "qwen3_vl":
        ids[1, 13:17], ids[1, 17] = VIDEO, 9
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    frames = [grid_image(model, 2, 2)["pixel_values"] * scale for scale in (1, -1)]
    given = {**grid_image(model, 2, 3), "pixel_values_videos": torch.cat(frames)}
    given["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    if model.config.model_type == "qwen2_5_vl":
        given["second_per_grid_ts"] = [2.6]
    kinds = torch.eq(ids, PICTURE).long() + 2 * torch.eq(ids, VIDEO).long()
    options = {"max_new_tokens": 14, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **given, mm_token_type_ids=kinds, **options).tolist()
    assert generator.generate(ids, mask, **given, max_new_tokens=14).tolist() == expected
    still = {**given, "pixel_values_videos": torch.cat(frames[:1] * 2)}
    assert generator.generate(ids, mask, **still, max_new_tokens=14).tolist() != expected


def test_patches_without_a_grid_and_frames_among_pictures_are_refused(qwen):
    _, generator = qwen
    ids, mask, pictures = prompts()
    patches, grid = pictures["pixel_values"], torch.tensor([[2, 4, 8]])
    films = {"pixel_values_videos": patches, "video_grid_thw": grid}
    for given, words in [
        ({"pixel_values": patches}, r"image_grid_thw must have shape \(pictures, 3\).*Pass image_grid_thw from"),
        ({"pixel_values_videos": patches}, r"video_grid_thw must have shape \(videos, 3\).*Pass video_grid_thw from"),
        ({"pixel_values": patches, "image_grid_thw": grid}, "pass videos as pixel_values_videos"),
        (films, r"0 video tokens \(id 258\), but the videos need 16"),
        ({**films, "second_per_grid_ts": [1.0, 1.0]}, "has 2 numbers for 1 rows of video_grid_thw"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            generator.generate(ids, mask, **given)


GRIDS = torch.tensor([[1, 4, 6], [1, 6, 4], [1, 2, 8]])  # of 2 x 3, 3 x 2 and 1 x 4 tokens


def grids(word, token, sizes, spacing=()):
    return Pictures(word, torch.zeros(1), sizes, token, spacing)


FILMS = torch.tensor([[2, 4, 4], [3, 2, 4]])  # of 2 x 2 x 2 and 3 x 1 x 2 tokens


@needs_transformers("5.23", "the model leaves out seconds of a video")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_frames_of_a_video_are_seconds_apart_as_in_the_model(name):
    """A picture and a video, then padding and a longer video; Qwen2.5-VL has positions for each second."""
    model = small_model(name)
    tokens = torch.randint(4, 258, (2, 20), generator=torch.Generator().manual_seed(0))
    tokens[0, 1:7], tokens[0, 8:16], tokens[1, 6:12] = PICTURE, VIDEO, VIDEO
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    kinds = torch.eq(tokens, PICTURE).long() + 2 * torch.eq(tokens, VIDEO).long()
    seconds = torch.tensor([0.7, 1.6])
    wanted, _ = model.model.get_rope_index(
        tokens, kinds, image_grid_thw=GRIDS[:1], video_grid_thw=FILMS, second_per_grid_ts=seconds, attention_mask=mask
    )
    settings = settings_of(model.config.to_dict(), {})
    films = settings.videos(torch.ones(1), FILMS, seconds)
    found = image_positions(tokens, mask, [grids("image", PICTURE, GRIDS[:1]), films], 2)
    assert found.tolist() == wanted.tolist()


def test_a_picture_of_another_size_than_its_tokens_is_refused():
    for word, token, sizes, stated in (("image", PICTURE, GRIDS, 6), ("video", VIDEO, FILMS, 8)):
        tokens = torch.tensor([[5, token, token, token, 6]])
        message = f"3 {word} tokens in a row, but {word}_grid_thw states a .* of {stated} tokens"
        with pytest.raises(InvalidArgumentError, match=message):
            image_positions(tokens, torch.ones_like(tokens), [grids(word, token, sizes)], 2)
