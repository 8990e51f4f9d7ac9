"""Weights are written once, next to the model, from the memory they lie in, and are held twice at most."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests import fresh_process
from tests.flatten.export.test_offloaded import TOKENS, TiedHead
from yobx_flatten import export_onnx
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.runners.onnx_session import mapped_options, open_session

pytestmark = pytest.mark.slow


@pytest.fixture
def external(tmp_path, monkeypatch):
    """A file whose weights are next to it, as those of a model of 256 MB are."""
    monkeypatch.setattr(onnx_file, "LARGE", 0)
    module = TiedHead(512, 32).eval()
    path = tmp_path / "a.onnx"
    found = export_onnx(module, kwargs={"tokens": TOKENS}, path=path, cases=[])
    return module, path, found


def test_tied_weights_are_on_disk_once(external):
    _, path, _ = external
    assert (path.parent / "a.onnx.data").stat().st_size == 512 * 32 * 4 + 2 * 32 * 32 * 4
    model = onnx.load(path, load_external_data=False)
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
    places = [(int(entry["offset"]), int(entry["length"])) for entry in entries if entry]
    assert sorted(length for _, length in places) == [32 * 32 * 4, 32 * 32 * 4, 512 * 32 * 4]
    assert all(offset % 4096 == 0 for offset, _ in places)


def test_onnxruntime_computes_with_the_second_file(external):
    module, path, found = external
    assert found.report.onnx_bytes == path.stat().st_size + (path.parent / "a.onnx.data").stat().st_size
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tokens = torch.arange(20).reshape(4, 5)
    (logits,) = session.run(["logits"], {"tokens": tokens.numpy()})
    assert np.abs(logits - module(tokens)["logits"].detach().numpy()).max() < 1e-5


def test_the_head_multiplies_with_the_table_itself(external, tmp_path):
    """A session of a replay makes no second table: onnxruntime multiplies with that of the file, transposed."""
    _, path, _ = external
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
        from tests.flatten.export.test_offloaded import TOKENS, TiedHead
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
