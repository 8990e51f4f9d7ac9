"""Folders of models that cut pictures into tiles, or read whole blocks, next to `model.generate`."""

import pytest
import torch
import transformers

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import made
from tests.models import SIZES
from tests.transformers_versions import is_older_than
from yobx_flatten import GenerationError, InvalidArgumentError, OnnxGenerator, export_folder, open_generator
from yobx_flatten.model_folder.pieces.vision_language import TiledVisionEncoder
from yobx_flatten.model_folder.source.configuration import small_config, small_model

pytestmark = pytest.mark.slow

TEXT = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5, "eos_token_id": None}
GRIDS = [[16, 16], [16, 32], [32, 16], [32, 32]]
IMAGE = 3


def onevision():
    vision = transformers.SiglipVisionConfig(**SIZES, image_size=16, patch_size=8, vision_use_head=False)
    tokens = {"image_token_index": IMAGE, "video_token_index": 4, "image_grid_pinpoints": GRIDS}
    few = {"vision_aspect_ratio": "anyres_max_1"}  # so that features of many tiles are made fewer
    text = transformers.Qwen2Config(**TEXT)
    config = transformers.LlavaOnevisionConfig(vision_config=vision, text_config=text, **tokens, **few)
    return _made(transformers.LlavaOnevisionForConditionalGeneration, config)


def llava_next():
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    tokens = {"image_token_index": IMAGE, "image_grid_pinpoints": GRIDS}
    config = transformers.LlavaNextConfig(vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), **tokens)
    return _made(transformers.LlavaNextForConditionalGeneration, config)


def _made(kind, config):
    model = made(kind, config)
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
    for change, words in [
        ({"image_sizes": None}, r"image_sizes of shape \(images, 2\)"),
        ({"pixel_values": given["pixel_values"][:, :2]}, "1 pictures of 3 tiles"),
        ({"batch_num_images": torch.tensor([2])}, "batch_num_images states 2 pictures, but image_sizes has 1 row"),
        ({}, "The prompt has 4 image tokens"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4]])}, "image_grid_thw is for models that read patches"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            generator.generate(**{**given, **change})


def test_sizes_for_a_model_that_cuts_nothing_are_refused(tmp_path):
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


@pytest.mark.slow  # exports three files
@pytest.mark.parametrize("name", cases(["gemma3", "paligemma2"], quick=["paligemma2"]))
def test_a_folder_generates_what_its_model_generates(name, tmp_path):
    config, kind, places = small_config(name.rstrip("2")), "PaliGemmaForConditionalGeneration", 16
    if name == "paligemma2":  # layers that slide, and scores that are capped
        if is_older_than("5.23"):
            pytest.skip("transformers before 5.23 computes the layers of Gemma 2 behind a picture in another way")
        config.text_config = small_config("gemma2")
        config.text_config.use_bidirectional_attention = True
    else:
        kind, places = "Gemma3ForConditionalGeneration", 4
    model = made(getattr(transformers, kind), config)
    if name == "gemma3":  # zeros by default, so that images would show nothing
        weight = model.model.multi_modal_projector.mm_input_projection_weight
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    done = export_folder(model, tmp_path / "out")
    assert (done.task, done.verified.ok) == ("image-text-to-text", True)
    row = [5, *[IMAGE] * places, 9, 11, *[IMAGE] * places, 13, 17]
    ids = torch.tensor([[0, 0, *row], [*row, 19, 21]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    types = ids.eq(IMAGE).long() if name == "gemma3" else torch.zeros_like(ids)
    for options in ({"max_new_tokens": 8}, {"max_new_tokens": 8, "num_beams": 2}):
        expected = model.generate(**inputs, token_type_ids=types, **options, do_sample=False)
        assert OnnxGenerator(tmp_path / "out").generate(**inputs, **options).tolist() == expected.tolist()
