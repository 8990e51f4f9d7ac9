"""Positions of pictures in time, height and width, and encoders of pictures of any size, next to the model's own."""

import pytest
import torch

from tests.transformers_versions import needs_transformers
from yobx_flatten import InvalidArgumentError
from yobx_flatten.generate.pictures import Pictures, image_positions
from yobx_flatten.generate.settings import settings_of
from yobx_flatten.model_folder.pieces.vision_language import GridVisionEncoder, grid_image
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = needs_transformers("5.17", "no small configuration of Qwen2-VL can be made")

PICTURE, VIDEO = 3, 258
GRIDS = torch.tensor([[1, 4, 6], [1, 6, 4], [1, 2, 8]])  # of 2 x 3, 3 x 2 and 1 x 4 tokens


def grids(word, token, sizes, spacing=()):
    return Pictures(word, torch.zeros(1), sizes, token, spacing)


PICTURES = grids("image", PICTURE, GRIDS)
FILMS = torch.tensor([[2, 4, 4], [3, 2, 4]])  # of 2 x 2 x 2 and 3 x 1 x 2 tokens


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def qwen(request):
    """A small model; the layers of the second see windows of 2 x 2 tokens."""
    return small(request.param)


def small(name):
    model = small_model(name)
    if not GridVisionEncoder.fits(model):
        pytest.skip("its vision encoder makes the positions of patches by itself")
    return model


def test_positions_are_those_of_the_model(qwen):
    tokens = torch.randint(4, 258, (3, 18), generator=torch.Generator().manual_seed(0))
    tokens[0, 2:8] = tokens[0, 9:15] = tokens[1, 9:13] = PICTURE
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    kinds = torch.eq(tokens, PICTURE).long()
    wanted, _ = qwen.model.get_rope_index(tokens, kinds, image_grid_thw=GRIDS, attention_mask=mask)
    assert image_positions(tokens, mask, [PICTURES], 2).tolist() == wanted.tolist()
    plain = image_positions(tokens, mask, [], 2)
    assert plain.tolist() == [((mask.cumsum(1) - 1) * mask).tolist()] * 3


@needs_transformers("5.23", "the model leaves out seconds of a video")
def test_frames_of_a_video_are_seconds_apart_as_in_the_model(qwen):
    """A picture and a video, then padding and a longer video; Qwen2.5-VL has positions for each second."""
    tokens = torch.randint(4, 258, (2, 20), generator=torch.Generator().manual_seed(0))
    tokens[0, 1:7], tokens[0, 8:16], tokens[1, 6:12] = PICTURE, VIDEO, VIDEO
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    kinds = torch.eq(tokens, PICTURE).long() + 2 * torch.eq(tokens, VIDEO).long()
    seconds = torch.tensor([0.7, 1.6])
    wanted, _ = qwen.model.get_rope_index(
        tokens, kinds, image_grid_thw=GRIDS[:1], video_grid_thw=FILMS, second_per_grid_ts=seconds, attention_mask=mask
    )
    settings = settings_of(qwen.config.to_dict(), {})
    films = settings.videos(torch.ones(1), FILMS, seconds)
    found = image_positions(tokens, mask, [grids("image", PICTURE, GRIDS[:1]), films], 2)
    assert found.tolist() == wanted.tolist()


def test_frames_with_text_between_them_are_counted_one_by_one():
    """Qwen3-VL states the time of each frame as text."""
    model = small("qwen3_vl")
    tokens = torch.randint(4, 258, (1, 22), generator=torch.Generator().manual_seed(0))
    for begin, count in ((1, 4), (6, 4), (12, 2), (15, 2), (18, 2)):
        tokens[0, begin : begin + count] = VIDEO
    kinds = 2 * torch.eq(tokens, VIDEO).long()
    wanted, _ = model.model.get_rope_index(tokens, kinds, video_grid_thw=FILMS)
    found = image_positions(tokens, torch.ones_like(tokens), [grids("video", VIDEO, FILMS)], 2)
    assert found.tolist() == wanted.tolist()


def test_a_picture_of_another_size_than_its_tokens_is_refused():
    tokens = torch.tensor([[5, PICTURE, PICTURE, PICTURE, 6]])
    with pytest.raises(InvalidArgumentError, match="3 image tokens in a row, but image_grid_thw states 6"):
        image_positions(tokens, torch.ones_like(tokens), [PICTURES], 2)
    tokens = torch.tensor([[5, VIDEO, VIDEO, VIDEO, 6]])
    with pytest.raises(InvalidArgumentError, match="3 video tokens in a row, but video_grid_thw states 8"):
        image_positions(tokens, torch.ones_like(tokens), [grids("video", VIDEO, FILMS)], 2)


def test_an_encoder_without_sizes_that_depend_on_values_has_the_features_of_the_model(qwen):
    encoder = GridVisionEncoder(qwen)
    for high, wide in ((2, 3), (3, 2), (1, 4), (5, 4), (4, 5)):
        picture = grid_image(qwen, high, wide)
        with torch.no_grad():
            wanted = torch.cat(tuple(qwen.get_image_features(**picture).pooler_output))
            found = encoder(**picture)["image_features"]
        assert found.shape[0] == high * wide
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
