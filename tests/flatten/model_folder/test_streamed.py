"""Weights of a checkpoint: streamed one by one, or read from a GGUF file."""

import dataclasses
import json
import re

import gguf
import numpy
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.flatten.model_folder.exported_folders import restate
from tests.tiny_gguf import LAYERS, WORDS, write
from tests.transformers_versions import is_older_than, needs_transformers
from yobx_flatten import InvalidArgumentError, ModelSourceError, NoRoomError, export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.huggingface.layer_weights import streamed_readers
from yobx_flatten.model_folder.source import open as loading
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.gguf_file import gguf_config, gguf_tokenizer
from yobx_flatten.model_folder.source.open import open_model


def _streamed(folder, dtype="float32"):
    return open_model(find_model(str(folder)), dtype=dtype, weights="stream", to="onnx")


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
    found = _streamed(tmp_path, dtype).model
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


@pytest.fixture
def copied(tmp_path):
    small_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_file_or_a_weight_that_is_missing_is_named(tmp_path):
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    held = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    name = next(key for key in held if "down_proj" in key)
    file = tmp_path / held[name]
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(ModelSourceError, match=rf"lacks {re.escape(name)}, listed in .*index.json"):
        _streamed(tmp_path)
    file.unlink()
    with pytest.raises(ModelSourceError, match=re.escape(file.name)):
        _streamed(tmp_path)


def _with_other_output(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    restate(folder / "config.json", tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_other_output, r"model.embed_tokens.weight, lm_head.weight are tied, but differ in the files"),
        (lambda _: setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"}), "norm stays in float32"),
    ],
)
def test_files_that_do_not_hold_the_weights_as_the_model_has_them_are_loaded(change, reason, copied, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", None)
    change(copied)
    found = _streamed(copied, "float16")
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
    with pytest.raises(NoRoomError, match=r"(?s)in float16, but 1.* are available.*weights=.stream."):
        open_model(found, dtype="float16", weights="memory", to="onnx")


@needs_transformers("5.0", "experts are not joined")
def test_weights_that_are_joined_when_they_are_loaded_are_not_streamed(tmp_path):
    """transformers makes one weight of all experts; the report states why the model was loaded."""
    small_model("mixtral").save_pretrained(tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if "experts" in name]
    if len(names) < 4:
        pytest.skip("this transformers stores experts as it holds them")
    found = _streamed(tmp_path)
    assert not found.is_streamed
    assert "loaded as a whole" in found.remarks[0]


def test_what_cannot_be_streamed_is_refused(copied, tmp_path):
    for model, how, words in [
        (copied, {"to": "program", "weights": "stream"}, r"weights='stream' is for ONNX files"),
        ("llama", {"weights": "stream"}, "unquantized safetensors files, and llama has none"),
        (copied, {"weights": "disk"}, r"weights must be one of .*'disk'"),
        (small_model("llama"), {"dtype": "float16"}, "dtype='float16' is for a model given by name"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            export_folder(model, tmp_path / "out", **how)


# transformers before 5.0 says so of parameters that are read for each call
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")
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
    whole = _streamed(copied).as_a_whole("a weight is read where its layer is not called")
    assert not whole.is_streamed
    assert not any(parameter.is_meta for parameter in whole.model.parameters())
    half = _streamed(copied, "float16")
    monkeypatch.setattr(loading, "memory_available", lambda: 1000)
    with pytest.raises(NoRoomError, match=r"The model is loaded as a whole: a weight is read where"):
        half.as_a_whole("a weight is read where its layer is not called")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def folder(held, tmp_path_factory):
    place = tmp_path_factory.mktemp("exported") / "out"
    return export_folder(held, place), place


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_weights_that_the_file_lacks_are_random_on_purpose_only(held, task):
    """`--unmatched-weights` was ignored for a GGUF file."""
    found = find_model(str(held)).for_task(task)
    with pytest.raises(
        ModelSourceError, match=r"^\S*small\.gguf lacks .*score\.weight of Llama.*--unmatched-weights random"
    ):
        found.load()
    model, remarks = dataclasses.replace(found, unmatched_weights="random").load_with_remarks()
    assert type(model).__name__.startswith("LlamaFor")
    assert remarks[0].startswith("weights with random values, because")
    again = dataclasses.replace(found, unmatched_weights="random").load()
    assert torch.equal(model.score.weight, again.score.weight)
    assert torch.equal(model.model.embed_tokens.weight, find_model(str(held)).load().model.embed_tokens.weight)


def test_the_file_holds_the_integers_of_the_checkpoint_and_the_folder_reads_text(folder, held):
    """4 bits, and 8 for the table: what the library gguf reads is what onnxruntime gathers."""
    done, place = folder
    assert done.verified.ok
    assert done.reports["model.onnx"].quality.weights == "keep"
    graph = onnx.load(place / "model.onnx").graph
    assert [node.op_type for node in graph.node].count("MatMulNBits") == 7 * LAYERS + 1
    held_values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    stored = []
    for name in (name for name in held_values if name.endswith("_Q4")):
        scales, lowest = held_values[name[:-3] + "_scales"], held_values[name[:-3] + "_lowest"]
        assert (scales.dtype, lowest.dtype) == (numpy.float32, numpy.float16)
        numbers = numpy.stack([held_values[name] & 15, held_values[name] >> 4], -1).reshape(*scales.shape, 32)
        found = numbers * scales[..., None].astype("f4") + lowest[..., None].astype("f4")
        stored.append(found.reshape(len(found), -1))
    assert len(stored) == 7 * LAYERS
    for tensor in gguf.GGUFReader(held).tensors:
        if "ffn" in tensor.name and "norm" not in tensor.name:  # transformers reorders rows of queries and keys
            read = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert any(found.shape == read.shape and bool((found == read).all()) for found in stored)
    assert AutoTokenizer.from_pretrained(place)("ab c", add_special_tokens=False).input_ids == [256, 32, 99]
    stated = json.loads((place / "tokenizer_config.json").read_text())
    assert stated["tokenizer_class"] == "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    assert "quantization_config" not in json.loads((place / "config.json").read_text())


def test_the_model_is_that_of_transformers(held):
    model = find_model(str(held)).load()
    eager = AutoModelForCausalLM.from_pretrained(held.parent, gguf_file=held.name, dtype=torch.float32).eval()
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, eager(ids).logits)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_weights_in_full_are_stored_in_full(tmp_path):
    done = export_folder(write(tmp_path / "f.gguf", ("F32", "F32")), tmp_path / "out")
    assert done.verified.ok
    assert done.reports["model.onnx"].quality is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut.gguf", "cannot be read as a model"),
        ("text.gguf", "is not a GGUF file: it does not begin with GGUF."),
        ("none.gguf", "There is no file"),
        ("unknown.gguf", "cannot be read as a model"),
        ("random.gguf", "cannot be read as a model"),
        ("merges.gguf", ""),
        ("folder/small.gguf", "Pass the GGUF file: "),
    ],
)
def test_a_file_that_is_no_model_is_an_error_of_one_line_before_the_export(tmp_path, held, name, message, capsys):
    whole = held.read_bytes()
    contents = {
        "cut.gguf": whole[: len(whole) // 2],
        "text.gguf": b"{}",
        "unknown.gguf": whole.replace(b"llama", b"lxama"),
        "random.gguf": b"GGUF" + numpy.random.default_rng(0).bytes(5000),
        "merges.gguf": whole.replace(b"a b", b"a!b"),  # of words that the tokenizer does not have
        "folder/small.gguf": whole,
    }
    given = tmp_path / name
    given.parent.mkdir(exist_ok=True)
    if name in contents:
        given.write_bytes(contents[name])
    if given.parent != tmp_path:
        given, message = given.parent, f"{message}{given}"
    assert main(["export", str(given), "-o", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert message in line
    assert "exporting" not in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("read", [gguf_config, gguf_tokenizer], ids=lambda read: read.__name__)
def test_nothing_that_stands_next_to_the_file_is_read(tmp_path, held, monkeypatch, read):
    """transformers reads configurations next to a GGUF file, and asks on the terminal whether their code is to run."""
    monkeypatch.setattr("builtins.input", lambda text="": pytest.fail(f"the user was asked: {text}"))
    (tmp_path / "small.gguf").write_bytes(held.read_bytes())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Own: pass\n")
    code = {
        "auto_map": {name: ["evil.Own", None] for name in ("AutoTokenizer", "AutoConfig")},
        "tokenizer_class": "Own",
    }
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps(code))
    assert type(read(tmp_path / "small.gguf")).__module__.startswith("transformers.")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("count", ["block_count", "head_count"])
def test_a_number_of_layers_that_the_file_cannot_hold_is_refused(tmp_path, architecture, count):
    """Four billion layers in a file of a kilobyte: an object for each of them filled the memory."""
    writer = gguf.GGUFWriter(str(tmp_path / "small.gguf"), architecture)
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(4_000_000_000 if name == count else 2)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ModelSourceError, match=rf"{architecture}\..*{count} = 4,000,000,000, but holds only 0 t"):
        gguf_config(tmp_path / "small.gguf")
