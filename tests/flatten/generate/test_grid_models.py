"""Folders of models that see pictures of any size generate what the model generates, token by token."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, OnnxGenerator
from yobx_flatten.model_folder.grid_images import GridVisionEncoder, grid_image
from yobx_flatten.model_folder.tiny_models import small_model

pytestmark = pytest.mark.slow

PICTURE = 3


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def qwen(request):
    """A small model and its generator; the second sees windows of 2 x 2 tokens, the third features."""
    if not GridVisionEncoder.fits(small_model(request.param)):
        pytest.skip("its vision encoder makes the positions of patches by itself")
    model, folder = exported(request.param)
    return model, OnnxGenerator(folder, threads=1)


def prompts():
    """Rows with two pictures, with padding and a picture, with text only."""
    ids = torch.randint(4, 259, (3, 20), generator=torch.Generator().manual_seed(0))
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
    """A batch of two pictures, a padded one, and text; the positions of what follows are those after the pictures."""
    model, generator = qwen
    ids, mask, pictures = prompts()
    found = generator.generate(ids, mask, **pictures, max_new_tokens=14).tolist()
    assert found == wanted(model, ids, mask, pictures)
    assert (
        found
        != generator.generate(
            ids, mask, **{**pictures, "pixel_values": pictures["pixel_values"] * 0 + 3}, max_new_tokens=14
        ).tolist()
    )


def test_text_alone_and_a_search_with_beams_are_those_of_the_model(qwen):
    """Positions of text are the same in time, height and width; beams have those of their row."""
    model, generator = qwen
    ids, mask, pictures = prompts()
    assert generator.generate(ids[2:], max_new_tokens=14).tolist() == wanted(model, ids[2:], mask[2:], {})
    one = {"pixel_values": pictures["pixel_values"][:40], "image_grid_thw": pictures["image_grid_thw"][:2]}
    found = generator.generate(ids[:1], **one, num_beams=2, max_new_tokens=14).tolist()
    assert found == wanted(model, ids[:1], mask[:1], one, num_beams=2)


def test_patches_without_a_grid_and_videos_are_refused(qwen):
    """With what to pass."""
    _, generator = qwen
    ids, mask, pictures = prompts()
    with pytest.raises(InvalidArgumentError, match=r"Pass image_grid_thw of shape \(pictures, 3\)"):
        generator.generate(ids, mask, pixel_values=pictures["pixel_values"])
    grid = torch.tensor([[2, 4, 8]])
    with pytest.raises(InvalidArgumentError, match="states several frames"):
        generator.generate(ids, mask, pixel_values=pictures["pixel_values"], image_grid_thw=grid)
