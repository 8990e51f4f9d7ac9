"""onnxruntime-genai sees with a LLaVA whose files are split for it, and this package runs the same files."""

import numpy
import pytest
import torch

from yobx_flatten import InvalidArgumentError, export_folder, open_generator, verify_folder
from yobx_flatten.model_folder.pieces.vision_language import images_for
from yobx_flatten.model_folder.plan import check_genai
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow

NEW = 12


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    model, folder = small_model("llava"), tmp_path_factory.mktemp("genai") / "llava"
    export_folder(model, folder, layout="genai", proof="sample")
    return model, folder


def _prompt(model, pictures):
    token = model.config.image_token_id
    count = model.get_image_features(images_for(model, 1)).pooler_output[0].shape[0]
    ids = torch.tensor([[7, 8, *[token] * count * pictures, 9, 10]])
    return {"input_ids": ids, **({"pixel_values": images_for(model, 1)} if pictures else {})}


@pytest.mark.parametrize("pictures", [1, 0])
@torch.no_grad()
def test_the_library_writes_the_tokens_of_the_model(llava, pictures):
    """After a picture, and after text alone, for which its loop hands over no features."""
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model, folder = llava
    given = _prompt(model, pictures)
    ids = given["input_ids"]
    wanted = model.generate(**given, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    params = genai.GeneratorParams(opened := genai.Model(str(folder)))
    params.set_search_options(max_length=ids.shape[1] + NEW, do_sample=False)
    generator = genai.Generator(opened, params)
    if pictures:  # the library copies neither: both have to live as long
        pixels, count = given["pixel_values"].numpy(), numpy.array([ids.shape[1] - 4])
        generator.set_model_input("pixel_values", pixels)
        generator.set_model_input("num_image_tokens", count)
    generator.append_tokens(ids.to(torch.int32).numpy())
    while not generator.is_done():
        generator.generate_next_token()
    found = generator.get_sequence(0).tolist()
    assert found == wanted[0].tolist()[: len(found)]
    assert len(found) > ids.shape[1] + 8


@torch.no_grad()
def test_this_package_runs_the_same_files(llava):
    model, folder = llava
    report = verify_folder(folder)
    assert report.ok
    assert {check.file for check in report.checks} == {
        *("vision_encoder.onnx", "embed_tokens.onnx", "decoder_model_merged.onnx", "embedding.onnx", "generate")
    }
    given = _prompt(model, 1)
    mask = torch.ones_like(given["input_ids"])
    wanted = model.generate(**given, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert open_generator(folder).generate(**given, max_new_tokens=NEW).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma3", "onnxruntime-genai passes no token types"),
        ("qwen2_vl", "3D positions"),
        ("llava_next", "cut into tiles"),
        ("idefics3", "cut into tiles"),
    ],
)
def test_pictures_that_the_library_cannot_show_are_refused(name, why):
    """Before anything is exported: what it would write is not what the model writes."""
    with pytest.raises(InvalidArgumentError, match=f"does not run the files of a .*{why}"):
        check_genai(small_model(name), "image-text-to-text")
