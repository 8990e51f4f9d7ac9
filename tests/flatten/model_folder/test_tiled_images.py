"""Folders of models that cut pictures into tiles: LLaVA-NeXT and LLaVA-OneVision, next to `model.generate`."""

import pytest
import torch
import transformers

from tests.models import SIZES
from yobx_flatten import GenerationError, InvalidArgumentError, export_folder, open_generator
from yobx_flatten.model_folder.pieces.vision_language import TiledVisionEncoder
from yobx_flatten.model_folder.source.configuration import small_model

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
    """Pictures of these sizes, with so many tiles that pad the smaller ones."""
    pixels = torch.randn((len(sizes), room, 3, 16, 16), generator=torch.Generator().manual_seed(room))
    return {"pixel_values": 3 * pixels, "image_sizes": torch.tensor(sizes)}


def prompts(*counts):
    """Rows of text around so many tokens of each row's pictures, padded on the left."""
    rows = [torch.tensor([5, 6, *[IMAGE] * count, 7, 8]) for count in counts]
    length = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long()}


@pytest.mark.parametrize("sizes", [((30, 32),), ((16, 31), (9, 5), (31, 30))])
def test_pictures_of_any_size_generate_as_their_model(exported, sizes):
    """Other sizes than any example: their tiles and the features left out differ, and one row has a single tile."""
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
    """Before anything is exported: its own features are compared on a wide and a high picture."""
    model = llava_next()
    encoder = TiledVisionEncoder(model)
    encoder.check(model)
    model.model.pack_image_features = lambda features, *_, **__: ([2 * one for one in features[0]], None)
    with pytest.raises(GenerationError, match="processes images in more modules"):
        encoder.check(model)
