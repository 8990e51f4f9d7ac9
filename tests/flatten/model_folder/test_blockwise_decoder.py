"""Gemma 3, PaliGemma (tokens of an image see each other) and Qwen3-VL (layers get features): scores and generation."""

import functools

import pytest
import torch
import transformers

from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.transformers_versions import is_older_than, needs_transformers
from yobx_flatten import OnnxGenerator, export_folder
from yobx_flatten.model_folder.pieces.vision_language import (
    BlockwiseDecoder,
    DeepstackDecoder,
    GridVisionEncoder,
    grid_image,
)
from yobx_flatten.model_folder.source.configuration import small_config, small_model

NAMES = ["gemma3", "paligemma", "paligemma2"]
IMAGE = 3


@functools.cache
def make_model(name):
    config = small_config(name.rstrip("2"))
    if name == "paligemma2":  # layers that slide, and scores that are capped
        if is_older_than("5.23"):
            pytest.skip("transformers before 5.23 computes the layers of Gemma 2 behind a picture in another way")
        config.text_config = small_config("gemma2")
        config.text_config.use_bidirectional_attention = True
    kind = "Gemma3ForConditionalGeneration" if name == "gemma3" else "PaliGemmaForConditionalGeneration"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config).eval()
        if name == "gemma3":  # zeros by default, so that images would show nothing
            model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    return model


def types_of(name, ids):
    return (ids == IMAGE).long() if name == "gemma3" else torch.zeros_like(ids)


@pytest.mark.parametrize("name", NAMES)
def test_one_decoder_computes_first_and_later_calls(name):
    model, first_position = make_model(name), int(name != "gemma3")
    decoder, embed = BlockwiseDecoder(model), model.get_input_embeddings()
    ids = torch.randint(4, 250, (2, 13), generator=torch.Generator().manual_seed(1))
    ids[:, 4:8] = ids[:, 9:12] = IMAGE
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    types, positions, shown = types_of(name, ids), (mask.cumsum(-1) - 1).clamp(min=0), mask.bool()
    given = {"inputs_embeds": embed(ids), "attention_mask": mask}
    with torch.no_grad():
        expected = model(**given, position_ids=positions + first_position, token_type_ids=types, use_cache=True)
        found = decoder(**given, position_ids=positions, token_type_ids=types)
        causal = decoder(**given, position_ids=positions, token_type_ids=torch.full_like(types, first_position))
    torch.testing.assert_close(found["logits"][shown], expected.logits[shown])
    assert (causal["logits"] - expected.logits)[shown].abs().max() > 0.1

    given = {"inputs_embeds": embed(ids[:, :1]), "attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    positions = positions[:, -1:] + 1
    with torch.no_grad():
        expected = model(**given, position_ids=positions + first_position, **{WORD: cache_of(expected)}, use_cache=True)
        types = torch.cat([types, torch.full((2, 1), first_position)], 1)
        found = decoder(**given, position_ids=positions, token_type_ids=types, cache=cache_of(found))
    torch.testing.assert_close(found["logits"], expected.logits)


@pytest.mark.slow  # exports three files
@pytest.mark.parametrize("name", cases(["gemma3", "paligemma2"], quick=["paligemma2"]))
def test_a_folder_generates_what_its_model_generates(name, tmp_path):
    model = make_model(name)
    places = 4 if name == "gemma3" else 16
    done = export_folder(model, tmp_path / "out")
    assert (done.task, done.verified.ok) == ("image-text-to-text", True)
    row = [5, *[IMAGE] * places, 9, 11, *[IMAGE] * places, 13, 17]
    ids = torch.tensor([[0, 0, *row], [*row, 19, 21]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    settings = {"max_new_tokens": 8, "do_sample": False}
    generator = OnnxGenerator(tmp_path / "out")
    with torch.no_grad():
        expected = model.generate(**inputs, token_type_ids=types_of(name, ids), **settings)
        beams = model.generate(**inputs, token_type_ids=types_of(name, ids), num_beams=2, **settings)
    assert generator.generate(**inputs, max_new_tokens=8).tolist() == expected.tolist()
    assert generator.generate(**inputs, max_new_tokens=8, num_beams=2).tolist() == beams.tolist()


@needs_transformers("5.17", "no small configuration of Qwen3-VL can be made")
def test_a_prompt_with_a_picture_has_the_scores_of_qwen3_vl():
    """Features of every token, zeros for text, add up to what the model adds to the places of the picture."""
    model = small_model("qwen3_vl")
    decoder, before = DeepstackDecoder(model), dict(vars(model.model.language_model))
    picture = grid_image(model, 5, 3)
    ids = torch.randint(4, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    ids[0, 2:17] = IMAGE
    shown = ids == IMAGE
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
