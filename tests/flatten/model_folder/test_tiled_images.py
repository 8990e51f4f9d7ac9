"""Folders of models that cut pictures into tiles, or read whole blocks, next to `model.generate`."""

import functools

import pytest
import torch
import transformers

from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.models import SIZES
from tests.transformers_versions import is_older_than, needs_transformers
from yobx_flatten import GenerationError, InvalidArgumentError, OnnxGenerator, export_folder, open_generator
from yobx_flatten.model_folder.pieces.vision_language import (
    BlockwiseDecoder,
    DeepstackDecoder,
    GridVisionEncoder,
    TiledVisionEncoder,
    grid_image,
)
from yobx_flatten.model_folder.source.configuration import small_config, small_model

pytestmark = pytest.mark.slow

TEXT = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5, "eos_token_id": None}
GRIDS = [[16, 16], [16, 32], [32, 16], [32, 32]]
IMAGE = 3


def onevision():
    vision = transformers.SiglipVisionConfig(**SIZES, image_size=16, patch_size=8, vision_use_head=False)
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=IMAGE,
        video_token_index=4,
        image_grid_pinpoints=GRIDS,
        vision_aspect_ratio="anyres_max_1",  # so that features of many tiles are made fewer
    )
    return _made(transformers.LlavaOnevisionForConditionalGeneration, config)


def llava_next():
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    config = transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_grid_pinpoints=GRIDS,
    )
    return _made(transformers.LlavaNextForConditionalGeneration, config)


def _made(kind, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module", params=[onevision, llava_next], ids=["onevision", "next"])
def exported(request, tmp_path_factory):
    model, folder = request.param(), tmp_path_factory.mktemp("tiled") / "out"
    assert export_folder(model, folder).task == "image-text-to-text"
    return model, open_generator(folder)


def pictures(*sizes, room):
    pixels = torch.randn((len(sizes), room, 3, 16, 16), generator=torch.Generator().manual_seed(room))
    return {"pixel_values": 3 * pixels, "image_sizes": torch.tensor(sizes)}


def prompts(*counts):
    rows = [torch.tensor([5, 6, *[IMAGE] * count, 7, 8]) for count in counts]
    length = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long()}


@pytest.mark.parametrize("sizes", [((30, 32),), ((16, 31), (9, 5), (31, 30))])
def test_pictures_of_any_size_generate_as_their_model(exported, sizes):
    model, generator = exported
    given = pictures(*sizes, room=5)
    features = model.get_image_features(**given, return_dict=True).pooler_output
    given |= prompts(*map(len, features))
    wanted = model.generate(**given, max_new_tokens=8, do_sample=False)
    assert torch.equal(generator.generate(**given, max_new_tokens=8), wanted)
    streamed = torch.stack([*generator.stream(**given, max_new_tokens=8)], 1)
    assert torch.equal(streamed, wanted[:, -8:])


def test_tiles_in_one_list_are_those_of_rows(exported):
    """Some processors return all tiles one after another."""
    model, generator = exported
    given = pictures((16, 31), room=3)
    (features,) = model.get_image_features(**given, return_dict=True).pooler_output
    given |= prompts(len(features))
    found = generator.generate(**given, max_new_tokens=6)
    given["pixel_values"] = given["pixel_values"][0]
    assert torch.equal(generator.generate(**given, max_new_tokens=6), found)


def test_several_pictures_in_a_prompt_are_not_cut(tmp_path):
    """LLaVA-OneVision shows the whole of each only, where `batch_num_images` states several."""
    model = onevision()
    export_folder(model, tmp_path / "out")
    given = pictures((16, 31), (31, 16), room=3)
    given["batch_num_images"] = torch.tensor([2])
    features = model.get_image_features(**given, return_dict=True).pooler_output
    assert [len(one) for one in features] == [5, 5]
    given |= prompts(10)
    wanted = model.generate(**given, max_new_tokens=6, do_sample=False)
    assert torch.equal(open_generator(tmp_path / "out").generate(**given, max_new_tokens=6), wanted)


def test_pictures_that_do_not_fit_their_sizes_are_refused(exported):
    _, generator = exported
    given = {**pictures((16, 31), room=3), **prompts(4)}
    with pytest.raises(InvalidArgumentError, match=r"image_sizes of shape \(images, 2\)"):
        generator.generate(**{**given, "image_sizes": None})
    with pytest.raises(InvalidArgumentError, match="1 pictures of 3 tiles"):
        generator.generate(**{**given, "pixel_values": given["pixel_values"][:, :2]})
    with pytest.raises(InvalidArgumentError, match="batch_num_images states 2 pictures, but image_sizes has 1 row"):
        generator.generate(**given, batch_num_images=torch.tensor([2]))
    with pytest.raises(InvalidArgumentError, match="The prompt has 4 image tokens"):
        generator.generate(**given)
    with pytest.raises(InvalidArgumentError, match="image_grid_thw is for models that read patches"):
        generator.generate(**given, image_grid_thw=torch.tensor([[1, 4, 4]]))


def test_sizes_for_a_model_that_cuts_nothing_are_refused(tmp_path):
    """They would be ignored: LLaVA has pictures of one size."""
    export_folder(small_model("llava"), tmp_path / "out", to="program", proof="none")
    with pytest.raises(InvalidArgumentError, match="image_sizes is for models that cut pictures into tiles"):
        open_generator(tmp_path / "out", trust=True).generate(torch.tensor([[5]]), image_sizes=torch.tensor([[8, 8]]))


def test_a_model_that_does_more_with_its_tiles_is_refused():
    model = llava_next()
    encoder = TiledVisionEncoder(model)
    encoder.check(model)
    model.model.pack_image_features = lambda features, *_, **__: ([2 * one for one in features[0]], None)
    with pytest.raises(GenerationError, match="processes images in more modules"):
        encoder.check(model)


NAMES = ["gemma3", "paligemma", "paligemma2"]


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
