"""Every keyword of `model.generate` does the same with files: the loop is transformers' own, over their cache."""

import contextlib
import copy
import os
import shutil

import pytest
import torch

from tests.cases import cases
from tests.flatten.generate.keywords import KEYWORDS, ONE_ROW, same_tokens
from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, Sampling, export_folder, open_generator, open_model
from yobx_flatten.generate.stand_ins import FileCache
from yobx_flatten.huggingface.cache_names import cache_of, installed_name
from yobx_flatten.model_folder.pieces.vision_language import grid_image
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow

with contextlib.suppress(ImportError):  # torchao, which both import, registers classes
    import executorch.exir  # noqa: F401
    import transformers.quantizers.auto  # noqa: F401

PICTURE = 3
NAMES = ["llama", "gemma3_text", "t5", "whisper", "qwen2_vl", "gemma3"]


def given(model, name: str) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(5)
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 100, generator=seeded)}
    ids = torch.randint(4, 258, (2, 16), generator=seeded)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    pictures = {}
    if name == "t5":  # encoders are padded on the right
        mask = mask.flip(1)
    if name == "gemma3":
        ids[:, 4:8] = PICTURE
        pictures = {"pixel_values": torch.randn(2, 3, 32, 32, generator=seeded)}
        pictures["token_type_ids"] = torch.eq(ids, PICTURE).long()
    if name == "qwen2_vl":
        ids[0, 2:8] = ids[1, 5:9] = PICTURE
        made = [grid_image(model, *size) for size in ((2, 3), (1, 4))]
        pictures = {part: torch.cat([picture[part] for picture in made]) for part in made[0]}
        pictures["mm_token_type_ids"] = torch.eq(ids, PICTURE).long()
    return {"input_ids": ids, "attention_mask": mask, **pictures}


def first_row(inputs: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    counts = {"pixel_values": 4 * 6} if name == "qwen2_vl" else {}
    return {part: value[: counts.get(part, 1)] for part, value in inputs.items()}


@pytest.fixture(scope="module", params=cases(NAMES, quick=["llama"]))
def pair(request):
    model, folder = exported(request.param)
    return request.param, model, open_model(folder, threads=1)


# what the model itself refuses, or has no meaning: Whisper's own loop, and guidance without a prompt of text
UNSUPPORTED = {(name, "guidance_scale") for name in ("whisper", "t5", "qwen2_vl")}


@pytest.mark.parametrize("keyword", list(KEYWORDS))
def test_a_keyword_gives_the_tokens_of_the_model(pair, keyword):
    name, model, files = pair
    if (name, keyword) in UNSUPPORTED:
        pytest.skip("generate() of the model itself raises")
    inputs = given(model, name)
    inputs = first_row(inputs, name) if keyword in ONE_ROW else inputs
    expected, found = same_tokens(keyword, (model, files), inputs, small_model(name, seed=1))
    assert found == expected


def test_a_generator_takes_the_same_keywords(pair):
    name, model, files = pair
    generator = open_generator(exported(name)[1], threads=1)
    inputs = {part: value for part, value in given(model, name).items() if "type_ids" not in part}
    options = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2, "max_new_tokens": 9}
    found = []
    for door in (files, generator):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found.append(door.generate(**inputs, **options).tolist())
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def llama():
    model, folder = exported("llama")
    return model, open_generator(folder, threads=1), open_model(folder, threads=1)


def test_the_cache_of_a_call_goes_on_with_more_tokens(llama):
    model, _, files = llama
    prompt, more = torch.tensor([[7, 8, 9, 10]]), torch.tensor([[11, 12, 13]])
    texts, counts = [], []
    for door in (model, files):
        first = door.generate(prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        cache = cache_of(first)
        counts.append(cache.get_seq_length())
        text = torch.cat([first["sequences"], more], dim=1)
        texts.append(door.generate(text, **{installed_name(): cache}, max_new_tokens=5, do_sample=False).tolist())
    assert texts[0] == texts[1]
    assert counts == [8, 8]
    assert isinstance(cache, FileCache)


def test_logits_of_a_padded_call_and_of_a_further_one_are_those_of_the_model(llama):
    model, _, files = llama
    ids = torch.randint(4, 258, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        wanted, found = model(ids, attention_mask=mask), files(ids, attention_mask=mask)
        assert float((wanted.logits - found.logits)[mask.bool()].abs().max()) < 1e-4
        grown = torch.cat([mask, torch.ones(2, 3).long()], dim=1)
        wanted = model(ids[:, :3], attention_mask=grown, **{installed_name(): cache_of(wanted)})
        found = files(ids[:, :3], attention_mask=grown, **{installed_name(): cache_of(found)})
    assert float((wanted.logits - found.logits).abs().max()) < 1e-4


def test_what_files_cannot_do_is_refused_with_what_to_do(llama, tmp_path):
    model, generator, files = llama
    ids = torch.tensor([[7, 8, 9, 10]])
    with pytest.raises(InvalidArgumentError, match="output_attentions: the files of this LlamaForCausalLM take"):
        files.generate(ids, output_attentions=True, max_new_tokens=3)
    with torch.no_grad():
        cache = cache_of(model(ids))
    with pytest.raises(InvalidArgumentError, match="4 tokens from another model"):
        files(ids, **{installed_name(): cache})
    with pytest.raises(InvalidArgumentError, match=r"attention_mask has shape \(1, 9\); it must be \(1, 4\)"):
        files(ids, attention_mask=torch.ones(1, 9))
    with pytest.raises(InvalidArgumentError, match="Pass all options as keywords"):
        generator.generate(ids, sampling=Sampling(), top_p=0.9)
    with pytest.raises(InvalidArgumentError, match=r"not meta tensors\. Choose the device"):
        files.to("meta")
    assert files.to("cpu").device.type == "cpu"
    with pytest.raises(InvalidArgumentError, match="max_new_token"):
        generator.generate(ids, max_new_token=3)


def test_new_pictures_after_a_filled_cache_are_refused():
    """The second turn of a chat: text alone continues the cache; a picture would be embedded as text."""
    model, folder = exported("qwen2_vl")
    files, inputs, tokens = open_model(folder, threads=1), {}, []
    for door in (model, files):
        inputs = first_row(given(model, "qwen2_vl"), "qwen2_vl")
        inputs["image_grid_thw"] = inputs["image_grid_thw"][:1]
        first = door.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        cache, text = copy.deepcopy(cache_of(first)), torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        tokens.append(door.generate(text, **{installed_name(): cache_of(first)}, max_new_tokens=4, do_sample=False))
    assert torch.equal(*tokens)
    shown = text.clone()
    shown[0, -2:] = PICTURE
    new = {**grid_image(model, 1, 2), installed_name(): cache}
    with pytest.raises(InvalidArgumentError, match=r"the cache has 19 tokens.*\n.* generate\(\*\*inputs"):
        files.generate(shown, **new, max_new_tokens=4)
    with pytest.raises(InvalidArgumentError, match="Pass the whole conversation"):
        files(shown[:, 19:], **new)


def test_drafts_are_refused_by_a_file_that_returns_the_last_scores_only(tmp_path):
    """Each drafted token is checked by scores of its own; other keywords work."""
    model = small_model("llama")
    export_folder(model, tmp_path / "last", logits="last", proof="none")
    files, ids = open_model(tmp_path / "last"), torch.tensor([[7, 8, 9, 10]])
    with pytest.raises(InvalidArgumentError, match='without logits="last"'):
        files.generate(ids, prompt_lookup_num_tokens=3)
    expected = model.generate(ids, repetition_penalty=1.4, max_new_tokens=6).tolist()
    assert files.generate(ids, repetition_penalty=1.4, max_new_tokens=6).tolist() == expected


# in Gemma 3 some layers slide: OpenVINO returns its cache, and writes that of Llama in place, as AOTInductor does both
OTHER_FILES = {
    "program": ("gemma3_text", {"to": "program"}),
    "shared": ("gemma3_text", {"optimize": "onnxruntime"}),
    "openvino": ("gemma3_text", {"target": "openvino"}),
    "openvino in place": ("llama", {"target": "openvino"}),
    "aotinductor": ("gemma3_text", {"target": "aotinductor"}),
    "executorch": ("llama", {"target": "executorch", "bounds": {"batch": 4, "length": 64}}),
}


@pytest.mark.parametrize("to", cases(list(OTHER_FILES), quick=["shared"]))
def test_other_files_do_the_same(to, tmp_path):
    name, how = OTHER_FILES[to]
    runtime = how.get("target")
    if runtime == "aotinductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    if runtime in ("openvino", "executorch"):
        pytest.importorskip(runtime)
    model = small_model(name)
    export_folder(model, tmp_path / "out", proof="none" if runtime != "openvino" else "sample", **how)
    files = open_model(tmp_path / "out", trust=to in ("program", "aotinductor"))
    ids = torch.randint(4, 258, (1, 6), generator=torch.Generator().manual_seed(2))
    for options in ({"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        found = []
        for door in (model, files):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                found.append(door.generate(ids, **options, max_new_tokens=20).tolist())
        assert found[0] == found[1], options
