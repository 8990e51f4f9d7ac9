"""Weights are written once, also those on `meta` or read layer by layer, and are held twice at most."""

from __future__ import annotations

import collections
import sys
import textwrap

import accelerate
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import fresh_process
from tests.cache_words import cache_of
from yobx_flatten import DecodeSizes, InvalidArgumentError, decode_inputs, export_onnx, export_program
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.huggingface.layer_weights import stream_layers
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.runners.onnx_session import mapped_options, open_session

pytestmark = pytest.mark.slow


def test_tied_weights_are_on_disk_once_and_the_head_multiplies_with_the_table_itself(tmp_path, monkeypatch):
    """Weights are next to the file, as those of a model of 256 MB are."""
    monkeypatch.setattr(onnx_file, "LARGE", 0)
    module, path = TiedHead(512, 32).eval(), tmp_path / "a.onnx"
    found = export_onnx(module, kwargs={"tokens": TOKENS}, path=path, cases=[])
    stored = (tmp_path / "a.onnx.data").stat().st_size
    assert stored == 512 * 32 * 4 + 2 * 32 * 32 * 4
    assert found.report.onnx_bytes == path.stat().st_size + stored
    model = onnx.load(path, load_external_data=False)
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
    places = [(int(entry["offset"]), int(entry["length"])) for entry in entries if entry]
    assert sorted(length for _, length in places) == [32 * 32 * 4, 32 * 32 * 4, 512 * 32 * 4]
    assert all(offset % 4096 == 0 for offset, _ in places)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tokens = torch.arange(20).reshape(4, 5)
    (logits,) = session.run(["logits"], {"tokens": tokens.numpy()})
    assert np.abs(logits - module(tokens)["logits"].detach().numpy()).max() < 1e-5
    options = mapped_options(path)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(path, caller="a test", options=options)
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    assert "Transpose" not in {node.op_type for node in graph.node}
    (product,) = [node for node in graph.node if node.op_type == "FusedMatMul"]
    assert {one.name: one.i for one in product.attribute}["transB"] == 1
    assert product.input[1] == next(node.input[0] for node in graph.node if node.op_type == "Gather")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_an_export_holds_the_weights_twice_at_most(tmp_path):
    """Measured in a fresh process, above what the libraries take, for 307 MB of weights; an allowance of 200 MB."""
    script = textwrap.dedent(r"""
        import pathlib, re, sys, torch
        from tests.flatten.export.test_weights_on_disk import TOKENS, TiedHead
        from yobx_flatten import export_onnx

        def peak():
            status = pathlib.Path("/proc/self/status").read_text()
            return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

        def export(name, **sizes):
            export_onnx(TiedHead(**sizes).eval(), kwargs={"tokens": TOKENS}, path=name, cases=[])

        folder = pathlib.Path(sys.argv[1])
        export(folder / "small.onnx")
        before = peak()
        export(folder / "large.onnx", words=300_000, width=256)
        print(peak() - before)
    """)
    done = fresh_process.run("-c", script, tmp_path, imported=fresh_process.TRAINER)
    weights = 300_000 * 256 * 4 + 2 * 256 * 257 * 4
    assert int(done.stdout.splitlines()[-1]) < 2 * weights + 200e6


class TiedHead(torch.nn.Module):
    def __init__(self, words=40, width=16):
        super().__init__()
        self.table = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(width, width)) for _ in range(2)])
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        found = self.table(tokens)
        for layer in self.layers:
            found = torch.relu(layer(found))
        return {"logits": self.head(found)}


TOKENS = torch.arange(6).reshape(2, 3)


def tied_head():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TiedHead().eval()


def test_a_streamed_module_gives_the_same_file_and_holds_a_layer_while_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGE", 0)
    module, reads = tied_head(), collections.Counter()

    def reader(name, weight):
        def read():
            reads[name] += 1
            return weight

        return read

    with torch.device("meta"):
        empty = TiedHead().eval()
    by_weight = {id(p): reader(name, p.detach()) for name, p in module.named_parameters()}
    stream_layers(empty, {name: by_weight[id(p)] for name, p in module.named_parameters(remove_duplicate=False)})
    assert torch.equal(empty(TOKENS)["logits"], module(TOKENS)["logits"])
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert reads["table.weight"] == 2  # for the table, and for the head
    with pytest.raises(IndexError):
        empty(TOKENS + 100)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.head.weight is empty.table.weight
    for name, one in (("whole", module), ("streamed", empty)):
        report = export_onnx(one, kwargs={"tokens": TOKENS}, path=tmp_path / name / "m.onnx", cases=[]).report
        assert [case.runtime for case in report.cases][-1] == "onnxruntime"
    for file in ("m.onnx", "m.onnx.data"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "streamed" / file).read_bytes()
    stored = onnx.load(tmp_path / "streamed" / "m.onnx").graph.initializer
    table = module.table.weight.detach().numpy()
    assert sum(np.array_equal(onnx.numpy_helper.to_array(tensor), table) for tensor in stored) == 1


def test_an_interrupted_file_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGE", 0)
    with torch.device("meta"):
        empty = TiedHead().eval()
    weights = {name: torch.zeros(p.shape) for name, p in empty.named_parameters(remove_duplicate=False)}

    def stops():
        raise KeyboardInterrupt

    stream_layers(empty, {n: stops if n.startswith("layers.1") else lambda w=w: w for n, w in weights.items()})
    with pytest.raises(KeyboardInterrupt):
        export_onnx(empty, kwargs={"tokens": TOKENS}, path=tmp_path / "m.onnx", proof="none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("large", [0, 8000])  # the second is between the sizes of both files
def test_quantised_weights_are_those_of_the_float_file(tmp_path, monkeypatch, bits, large):
    monkeypatch.setattr(onnx_file, "LARGE", large)
    linear, x, weights = torch.nn.Linear(64, 48).eval(), torch.randn(3, 64), []
    for proof in ("full", "none"):
        folder = tmp_path / proof
        how = {"quantize": bits, "proof": proof}
        report = export_onnx(linear, (x,), path=folder / "m.onnx", cases=[], **how).report
        assert report.onnx_bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert {path.name for path in folder.iterdir()} == {"m.onnx", *(() if large else ("m.onnx.data",))}
        stored = onnx.load(folder / "m.onnx").graph.initializer
        weights.append({tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in stored})
    assert weights[0] == weights[1]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_weights_that_accelerate_offloads_are_traced_and_replayed(where, tmp_path):
    module = tied_head()
    expected = module(TOKENS)["logits"]
    if where == "cpu":
        accelerate.cpu_offload(module, torch.device("cpu"))
    else:
        accelerate.disk_offload(module, tmp_path / "weights", torch.device("cpu"))
    exported = export_program(module, kwargs={"tokens": TOKENS}, cases=[])
    assert [case.max_difference for case in exported.report.cases] == [0.0]
    assert torch.equal(exported(tokens=TOKENS)["logits"], expected)
    assert module.table.weight.is_meta
    assert torch.equal(module(TOKENS)["logits"], expected)
    assert export_onnx(module, kwargs={"tokens": TOKENS}, path=tmp_path / "m.onnx", cases=[]).report.ok


def test_inputs_are_made_for_an_offloaded_model():
    model = small_model("llama")
    expected = decode_inputs(model, DecodeSizes())
    accelerate.cpu_offload(model, torch.device("cpu"))
    found = decode_inputs(model, DecodeSizes())
    assert torch.equal(found["input_ids"], expected["input_ids"])
    layers = zip(cache_of(found).layers, cache_of(expected).layers, strict=True)
    assert all(torch.equal(one.keys, other.keys) for one, other in layers)


class Joins(torch.nn.Module):
    """Joins its weight to what it is given: a trace refuses tensors of two devices."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.register_buffer("shift", torch.full((3,), 5.0))

    def forward(self, x):
        return {"joined": torch.cat([x, self.weight]) + self.shift}


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode])
def test_a_program_without_weights_computes_with_those_it_is_given(mode, tmp_path):
    """The weights have shapes only: the report states that nothing was replayed, and no ONNX file is written."""
    with mode():
        module = Joins()
    weight, x = module.weight, torch.ones(4, 3)
    exported = export_program(module, (x,))
    assert (exported.report.input_names, exported.report.output_names) == (["x"], ["joined"])
    assert exported.report.cases == []
    assert "nothing was replayed, since weight is" in str(exported.report)
    assert module.weight is weight
    real = Joins()
    exported.program.state_dict.update(weight=real.weight, shift=real.shift)
    assert torch.equal(exported(torch.zeros(6, 3))["joined"], real(torch.zeros(6, 3))["joined"])
    with pytest.raises(InvalidArgumentError, match="writes weights to a file, but weight is"):
        export_onnx(module, (x,), path=tmp_path / "joined.onnx")
