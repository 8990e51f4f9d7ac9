"""Weights of half precision that would fill the memory are converted one at a time."""

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto, helper

from yobx_flatten.runners.onnx_session import mapped_options, open_session, session_options, without_spinning

SIZE, COUNT = 64, 3


@pytest.fixture
def half(tmp_path):
    weights = np.random.default_rng(0).normal(scale=0.1, size=(COUNT, SIZE, SIZE)).astype(np.float16)
    weights.tofile(tmp_path / "m.onnx.data")
    stored = []
    for index in range(COUNT):
        entry = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT16, dims=[SIZE, SIZE])
        entry.data_location = TensorProto.EXTERNAL
        size = SIZE * SIZE * 2
        for key, value in (("location", "m.onnx.data"), ("offset", index * size), ("length", size)):
            entry.external_data.add(key=key, value=str(value))
        stored.append(entry)
    nodes = [helper.make_node("MatMul", [f"x{index}", f"w{index}"], [f"x{index + 1}"]) for index in range(COUNT)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["rows", SIZE]) for name in ("x0", f"x{COUNT}")]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], stored)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path, weights


@pytest.mark.parametrize("free", [10**12, 3 * 2 * SIZE * SIZE * 2 - 1])
def test_weights_of_half_precision_give_the_same_result_where_memory_is_short(half, monkeypatch, free):
    """Converted at every call, or all of them when the file is loaded: the products of numpy either way."""
    path, weights = half
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    options = mapped_options(path)
    one_by_one = options.execution_order == onnxruntime.ExecutionOrder.PRIORITY_BASED
    assert one_by_one == (free < 10**12)
    x = np.random.default_rng(1).normal(size=(2, SIZE)).astype(np.float16)
    (found,) = open_session(path, caller="a test", options=options).run(None, {"x0": x})
    expected = x.astype(np.float64)
    for weight in weights:
        expected = (expected @ weight.astype(np.float64)).astype(np.float16).astype(np.float64)
    assert np.abs(found - expected).max() < 5e-3


def test_threads_of_a_check_sleep_while_they_wait():
    """Those of a session that a user opens do not: it answers faster so."""
    key = "session.intra_op.allow_spinning"
    with without_spinning():
        assert session_options().get_session_config_entry(key) == "0"
    with pytest.raises(RuntimeError, match=key):
        session_options().get_session_config_entry(key)
