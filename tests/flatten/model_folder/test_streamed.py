"""A folder of safetensors is exported weight by weight, to the same files as a loaded model."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.flatten.model_folder.exported_folders import saved
from tests.flatten.model_folder.words import restate
from tests.transformers_versions import is_older_than, needs_transformers
from yobx_flatten import export_folder
from yobx_flatten.errors import InvalidArgumentError, ModelSourceError, NoRoomError
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.huggingface.layer_weights import streamed_readers
from yobx_flatten.model_folder.source import open as loading
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.open import open_model

# transformers before 5.0 says so of parameters that are read for each call
on_meta = pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")


def _ties(model):
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "phi3", "bert", "whisper", "mamba"])
def test_a_streamed_model_is_the_one_that_transformers_loads(name, dtype, tmp_path):
    if (name, dtype) == ("mamba", "float16") and is_older_than("5.17"):
        pytest.skip("transformers before 5.17 keeps A_log in float32, which nothing states")
    model = small_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    expected = type(model).from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    found = open_model(find_model(str(tmp_path)), dtype=dtype, weights="stream", to="onnx").model
    readers = streamed_readers(found)
    assert all(parameter.is_meta for parameter in found.parameters())
    assert _ties(found) == _ties(expected)
    for key, tensor in expected.named_parameters(remove_duplicate=False):
        assert readers[key]().dtype == tensor.dtype
        assert torch.equal(readers[key](), tensor), key
    buffers = dict(found.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    assert all(torch.equal(buffers[key], tensor) for key, tensor in expected.named_buffers())
    assert found.config.to_dict() == expected.config.to_dict()


@on_meta
def test_a_streamed_model_generates_the_same_tokens():
    """transformers' `generate`, on weights that are read for each call of a layer."""
    model, folder = saved("llama")
    found = open_model(find_model(str(folder)), dtype="float32", weights="stream", to="onnx").model
    prompt = {"input_ids": torch.arange(10).reshape(2, 5), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(found.generate(**prompt), model.generate(**prompt))


@pytest.fixture
def copied(tmp_path):
    small_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_missing_file_of_weights_is_named(tmp_path):
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    held = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    name = sorted(held.values())[1]
    (tmp_path / name).unlink()
    with pytest.raises(ModelSourceError, match=re.escape(name)):
        open_model(find_model(str(tmp_path)), dtype="float32", weights="stream", to="onnx")


def test_a_weight_that_its_file_does_not_hold_is_named(tmp_path):
    """The index says where it is, and the file has been replaced."""
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    held = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    name = next(key for key in held if "down_proj" in key)
    file = tmp_path / held[name]
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(ModelSourceError, match=rf"index.json lists {re.escape(name)} in .*, which lacks it"):
        open_model(find_model(str(tmp_path)), dtype="float32", weights="stream", to="onnx")


def _with_other_output(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    restate(folder / "config.json", tie_word_embeddings=True)


def _with_float32(folder):
    LlamaForCausalLM._keep_in_fp32_modules_strict = {"norm"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_other_output, r"model.embed_tokens.weight, lm_head.weight are tied, but differ in the files"),
        (_with_float32, "norm stays in float32"),
    ],
)
def test_files_that_do_not_hold_the_weights_as_the_model_has_them_are_loaded(change, reason, copied, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", None)
    change(copied)
    found = open_model(find_model(str(copied)), dtype="float16", weights="stream", to="onnx")
    assert not found.is_streamed
    assert re.search(reason, found.remarks[0]), found.remarks


def test_large_weights_are_streamed_by_themselves(copied, monkeypatch):
    """From a quarter of the free memory on; what would fill the memory is refused before it is loaded."""
    found = find_model(str(copied))
    assert not open_model(found, dtype="float32", weights="auto", to="onnx").is_streamed
    monkeypatch.setattr(loading, "memory_available", lambda: 1000)
    streamed = open_model(found, dtype="float32", weights="auto", to="onnx")
    assert streamed.is_streamed
    assert "were read from" in streamed.remarks[0]
    with pytest.raises(NoRoomError, match=r"(?s)in float16, and 1.* are available.*weights=.stream."):
        open_model(found, dtype="float16", weights="memory", to="onnx")


@needs_transformers("5.0", "experts are not joined")
def test_weights_that_are_joined_when_they_are_loaded_are_not_streamed(tmp_path):
    """transformers makes one weight of all experts; the report states why the model was loaded."""
    small_model("mixtral").save_pretrained(tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if "experts" in name]
    if len(names) < 4:
        pytest.skip("this transformers stores experts as it holds them")
    found = open_model(find_model(str(tmp_path)), dtype="float32", weights="stream", to="onnx")
    assert not found.is_streamed
    assert "loaded as a whole" in found.remarks[0]


def test_what_cannot_be_streamed_is_refused(copied, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"weights='stream' is for ONNX files"):
        export_folder(copied, tmp_path / "out", to="program", weights="stream")
    with pytest.raises(InvalidArgumentError, match=r"reads safetensors files, and llama has no complete set"):
        export_folder("llama", tmp_path / "out", weights="stream")
    with pytest.raises(InvalidArgumentError, match=r"weights must be one of .*'disk'"):
        export_folder(copied, tmp_path / "out", weights="disk")
    with pytest.raises(InvalidArgumentError, match=r"dtype='float16' is for a model given by name"):
        export_folder(small_model("llama"), tmp_path / "out", dtype="float16")


@on_meta
@pytest.mark.slow  # two exports of a whole model
def test_a_streamed_folder_is_the_one_of_the_loaded_model(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGE", 0)
    done = export_folder(copied, tmp_path / "streamed", dtype="float16", weights="stream", proof="sample")
    export_folder(copied, tmp_path / "whole", dtype="float16", weights="memory", proof="none")
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    report = done.reports["model.onnx"]
    assert done.verified.ok
    assert [case.runtime for case in report.cases] == ["onnxruntime", "onnxruntime"]
    assert any("were read from" in remark for remark in report.remarks)


def test_a_model_that_reads_a_weight_elsewhere_is_loaded_as_a_whole(copied, monkeypatch):
    """Its first call shows it; what has to be loaded then is checked against the memory again."""
    streamed = open_model(find_model(str(copied)), dtype="float32", weights="stream", to="onnx")
    whole = streamed.as_a_whole("a weight is read where its layer is not called")
    assert not whole.is_streamed
    assert not any(parameter.is_meta for parameter in whole.model.parameters())
    half = open_model(find_model(str(copied)), dtype="float16", weights="stream", to="onnx")
    monkeypatch.setattr(loading, "memory_available", lambda: 1000)
    with pytest.raises(NoRoomError, match=r"The model is loaded as a whole: a weight is read where"):
        half.as_a_whole("a weight is read where its layer is not called")
