"""Positions of pictures in time, height and width, and encoders of pictures of any size, next to the model's own."""

import pytest
import torch

pytest.importorskip("transformers")

from yobx_flatten import InvalidArgumentError
from yobx_flatten.generate.image_positions import image_positions
from yobx_flatten.model_folder.grid_images import GridVisionEncoder, grid_image
from yobx_flatten.model_folder.tiny_models import small_model

PICTURE = 3
GRIDS = torch.tensor([[1, 4, 6], [1, 6, 4], [1, 2, 8]])  # of 2 x 3, 3 x 2 and 1 x 4 tokens


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def qwen(request):
    """A small model; the layers of the second see windows of 2 x 2 tokens."""
    model = small_model(request.param)
    if not GridVisionEncoder.fits(model):
        pytest.skip("its vision encoder makes the positions of patches by itself")
    return model


def test_positions_are_those_of_the_model(qwen):
    """A row with two pictures, one with padding and a picture, one of text only."""
    tokens = torch.randint(4, 259, (3, 18), generator=torch.Generator().manual_seed(0))
    tokens[0, 2:8] = tokens[0, 9:15] = tokens[1, 9:13] = PICTURE
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    kinds = torch.eq(tokens, PICTURE).long()
    wanted, _ = qwen.model.get_rope_index(tokens, kinds, image_grid_thw=GRIDS, attention_mask=mask)
    assert image_positions(tokens, mask, GRIDS, PICTURE, 2).tolist() == wanted.tolist()
    plain = image_positions(tokens, mask, None, PICTURE, 2)
    assert plain.tolist() == [((mask.cumsum(1) - 1) * mask).tolist()] * 3


def test_a_picture_of_another_size_than_its_tokens_is_refused():
    """With both numbers."""
    tokens = torch.tensor([[5, PICTURE, PICTURE, PICTURE, 6]])
    with pytest.raises(InvalidArgumentError, match="3 image tokens in a row, and image_grid_thw states 6"):
        image_positions(tokens, torch.ones_like(tokens), GRIDS, PICTURE, 2)


def test_an_encoder_without_sizes_that_depend_on_values_has_the_features_of_the_model(qwen):
    """Of pictures of five sizes."""
    encoder = GridVisionEncoder(qwen)
    for high, wide in ((2, 3), (3, 2), (1, 4), (5, 4), (4, 5)):
        picture = grid_image(qwen, high, wide)
        with torch.no_grad():
            wanted = torch.cat(tuple(qwen.get_image_features(**picture).pooler_output))
            found = encoder(**picture)["image_features"]
        assert found.shape[0] == high * wide
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
