"""A GGUF file becomes a folder with the integers it holds; a damaged one is an error of one line."""

import dataclasses
import json

import gguf
import numpy
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_gguf import LAYERS, WORDS, write
from yobx_flatten import export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.errors import ModelSourceError
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.source.gguf_file import gguf_config, gguf_tokenizer


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


def test_the_file_holds_the_integers_of_the_checkpoint(folder, held):
    """4 bits, and 8 for the table: what the library gguf reads is what onnxruntime gathers."""
    done, place = folder
    assert done.verified.ok
    assert done.reports["model.onnx"].quality.weights == "keep"
    graph = onnx.load(place / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulNBits") == 7 * LAYERS + 1
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


def test_the_folder_reads_and_writes_text(folder):
    _, place = folder
    tokenizer = AutoTokenizer.from_pretrained(place)
    assert tokenizer("ab c", add_special_tokens=False).input_ids == [256, 32, 99]
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
    ],
)
def test_a_file_that_is_no_model_is_an_error_of_one_line(tmp_path, held, name, message, capsys):
    whole = held.read_bytes()
    contents = {
        "cut.gguf": whole[: len(whole) // 2],
        "text.gguf": b"{}",
        "unknown.gguf": whole.replace(b"llama", b"lxama"),
        "random.gguf": b"GGUF" + numpy.random.default_rng(0).bytes(5000),
    }
    if name in contents:
        (tmp_path / name).write_bytes(contents[name])
    assert main(["export", str(tmp_path / name), "-o", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cannot_be_read_is_found_before_the_export(tmp_path, held, capsys):
    """Its merges are of words that it does not have."""
    (tmp_path / "small.gguf").write_bytes(held.read_bytes().replace(b"a b", b"a!b"))
    assert main(["export", str(tmp_path / "small.gguf"), "-o", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert "exporting" not in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_gguf_file_names_it(tmp_path, held, capsys):
    (tmp_path / "small.gguf").write_bytes(held.read_bytes())
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert f"Pass the GGUF file: {tmp_path / 'small.gguf'}" in capsys.readouterr().err


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
