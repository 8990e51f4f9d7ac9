"""Qwen3-VL, whose first layers of text also get features of pictures."""

import torch

from tests.transformers_versions import needs_transformers
from yobx_flatten.model_folder.pieces.grid_images import DeepstackDecoder, GridVisionEncoder, grid_image
from yobx_flatten.model_folder.source.classes import small_model

pytestmark = needs_transformers("5.17", "no small configuration of Qwen3-VL can be made")

PICTURE = 3


def test_a_prompt_with_a_picture_has_the_scores_of_its_model():
    """Features of every token, zeros for text, add up to what the model adds to the places of the picture."""
    model = small_model("qwen3_vl")
    decoder, before = DeepstackDecoder(model), dict(vars(model.model.language_model))
    picture = grid_image(model, 5, 3)
    ids = torch.randint(4, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    ids[0, 2:17] = PICTURE
    shown = ids == PICTURE
    with torch.no_grad():
        expected = model(ids, mm_token_type_ids=shown.long(), **picture).logits
        positions, _ = model.model.get_rope_index(ids, shown.long(), picture["image_grid_thw"])
        features = GridVisionEncoder(model)(**picture)
        embeds = model.get_input_embeddings()(ids)
        embeds[shown] = features["image_features"]
        added = torch.zeros(1, 20, 2, 64)
        added[shown] = features["deepstack_features"]
        found = decoder(embeds, torch.ones_like(ids), positions, added)["logits"]
        without = decoder(embeds, torch.ones_like(ids), positions, added * 0)["logits"]
    torch.testing.assert_close(found, expected)
    assert (without - expected).abs().max() > 0.1
    assert vars(model.model.language_model) == before
