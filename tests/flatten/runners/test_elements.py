"""Weights as they lie in memory: elements of each type, huge pages, and files that are mapped."""

import ctypes
import mmap
import pathlib

import numpy
import onnx
import onnxruntime
import psutil
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.flatten.storage.storage_values import TORCH_TYPES, random_tensor
from tests.modules import module_class
from yobx_flatten import create_onnx_model_from_input_tensors, export_onnx, load_nested, save_nested
from yobx_flatten.runners import onnx_runner, onnx_session
from yobx_flatten.runners.onnx_session import (
    in_huge_pages,
    mapped_options,
    open_session,
    session_options,
    without_spinning,
)
from yobx_flatten.runners.ports import ELEMENTS
from yobx_flatten.storage import create_input_tensors_from_onnx_model

# What ONNX calls the types that it has under their own name, and what stands for the others.
NAMES = {
    "float32": "FLOAT", "float64": "DOUBLE", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "bool": "BOOL",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16",
    "uint32": "UINT32", "uint64": "UINT64", "float8_e4m3fn": "FLOAT8E4M3FN", "float8_e4m3fnuz": "FLOAT8E4M3FNUZ",
    "float8_e5m2": "FLOAT8E5M2", "float8_e5m2fnuz": "FLOAT8E5M2FNUZ", "float8_e8m0fnu": "FLOAT8E8M0",
    "complex32": "FLOAT16", "complex64": "FLOAT", "complex128": "DOUBLE", "float4_e2m1fn_x2": "UINT8",
    "int4": "INT4", "uint4": "UINT4", "float4_e2m1fn": "FLOAT4E2M1", "int2": "INT2", "uint2": "UINT2",
}  # fmt: skip


PACKED = ["int4", "uint4", "float4_e2m1fn", "int2", "uint2"]


def run(path, engine):
    if engine == "onnxruntime":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return dict(zip([output.name for output in session.get_outputs()], session.run(None, {}), strict=True))
    session = ReferenceEvaluator(str(path))
    return dict(zip(session.output_names, session.run(None, {}), strict=True))


def test_the_codes_are_those_of_onnx_with_the_bytes_of_the_tensor():
    assert {name: onnx.TensorProto.DataType.Name(element.code) for name, element in ELEMENTS.items()} == NAMES
    for dtype in TORCH_TYPES:
        element = ELEMENTS[str(dtype).removeprefix("torch.")]
        stored = onnx.helper.tensor_dtype_to_np_dtype(element.code).itemsize * (2 if element.pair else 1)
        assert stored == dtype.itemsize, dtype


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
@pytest.mark.parametrize("engine", ["onnxruntime", "onnx.reference"])
def test_a_run_returns_the_numbers(dtype, engine, tmp_path):
    tensor = random_tensor(dtype, (64,), seed=3)
    save_nested(tmp_path / "x.onnx", {"x": tensor})
    found = run(tmp_path / "x.onnx", engine)["x"]
    found = found.view(found.dtype.str)  # onnxruntime's uint64 is another type of C than NumPy's
    if dtype.is_complex:
        expected = torch.view_as_real(tensor)
    elif dtype == torch.float4_e2m1fn_x2:
        expected = tensor.view(torch.uint8)
    elif ELEMENTS[str(dtype).removeprefix("torch.")].cast:
        expected = tensor.float()
    else:
        expected = tensor
    assert found.dtype == expected.numpy().dtype
    assert torch.equal(torch.tensor(found).nan_to_num(7.0), expected.nan_to_num(7.0))


def every_code(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="onnx is installed without ml_dtypes")
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    count = 4 if name.endswith("2") else 16
    return numpy.arange(count, dtype=numpy.uint8).view(getattr(ml_dtypes, name))


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_type_is_stored_as_onnx_packs_it_and_comes_back_bit_by_bit(name, tmp_path):
    codes = every_code(name)
    arrays = {"all": codes, "odd": codes[1:], "grid": codes[:4].reshape(2, 2), "one": codes[3], "none": codes[:0]}
    save_nested(tmp_path / "x.onnx", arrays)
    initializers = onnx.load(tmp_path / "x.onnx").graph.initializer
    stored = {tensor.name.removesuffix(".stored"): tensor for tensor in initializers}
    for key, array in arrays.items():
        found = onnx.numpy_helper.to_array(stored[key])
        assert (found.dtype, found.shape) == (numpy.asarray(array).dtype, numpy.shape(array))
        assert found.astype(numpy.float32).tolist() == array.astype(numpy.float32).tolist()
        assert stored[key].raw_data == onnx.numpy_helper.from_array(numpy.asarray(array)).raw_data
    codes = every_code(name)
    arrays = [codes, codes[1:].copy(), codes[::-1], codes[:4].reshape(2, 2), codes[3], codes[:0].reshape(0, 3)]
    arrays.append(numpy.tile(codes, 700)[:-1])
    for external in (False, True):
        save_nested(tmp_path / f"{external}.onnx", arrays, external_data=external)
        for found, array in zip(load_nested(tmp_path / f"{external}.onnx"), arrays, strict=True):
            assert (type(found), found.dtype, found.shape) == (type(array), array.dtype, array.shape)
            assert found.view(numpy.uint8).tolist() == array.view(numpy.uint8).tolist()


@pytest.mark.parametrize("engine", ["onnxruntime", "ReferenceEvaluator"])
@pytest.mark.parametrize("name", PACKED)
def test_a_run_returns_the_numbers_of_a_packed_type(name, engine, tmp_path):
    if engine == "onnxruntime" and name == "float4_e2m1fn":
        pytest.skip("onnxruntime 1.31 has no kernel that casts it")
    codes = every_code(name)
    model = create_onnx_model_from_input_tensors({"x": codes})
    (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
    found = run(tmp_path / "x.onnx", engine)["x"]
    assert (found.dtype, found.tolist()) == (numpy.float32, codes.astype(numpy.float32).tolist())
    back = create_input_tensors_from_onnx_model(model, engine=engine)["x"]
    assert (back.dtype, back.view(numpy.uint8).tolist()) == (codes.dtype, codes.view(numpy.uint8).tolist())


def test_both_engines_find_data_in_the_second_file(tmp_path):
    tensor = torch.arange(5000.0)
    save_nested(tmp_path / "x.onnx", [tensor, tensor.bfloat16()], external_data=True)
    for engine in ("onnxruntime", "onnx.reference"):
        found = run(tmp_path / "x.onnx", engine)
        assert found["0"].tolist() == tensor.tolist()
        assert found["1"].tolist() == tensor.bfloat16().tolist()


SETTING = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 64 * 2**20


def _huge_bytes(address):
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(others[0]) * 1024
    return 0


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(encoding="utf-8"), reason="Linux gives no huge pages here"
)
def test_memory_of_the_block_is_in_huge_pages_with_its_contents():
    with in_huge_pages():
        memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(bytes(range(256)) * (SIZE // 256))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _huge_bytes(address) >= SIZE // 2
    assert memory[:] == bytes(range(256)) * (SIZE // 256)


@pytest.mark.parametrize(
    ("ranges", "others", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 4)], [(4, 10)]),
        ([(0, 10)], [(6, 12)], [(0, 6)]),
        ([(0, 10), (20, 30)], [(22, 24), (2, 3)], [(0, 2), (3, 10), (20, 22), (24, 30)]),
        ([(0, 10)], [(0, 10)], []),
    ],
)
def test_what_was_there_before_is_left_out(ranges, others, expected):
    """Linux joins new memory to its neighbours, which may be of others."""
    assert [*onnx_session._without(ranges, others)] == expected


_Loop = module_class("_Loop", lambda self, tokens, past: (tokens + 1, torch.cat([past, tokens], 2)))


def test_only_a_long_loop_asks_for_huge_pages(tmp_path, monkeypatch):
    """Opening a file is as fast as without; the memory of one session is asked for once."""
    asked = []
    monkeypatch.setattr(onnx_session, "_advise", lambda start, end: asked.append((start, end)))
    free = ({2: torch.export.Dim.DYNAMIC}, {2: torch.export.Dim.DYNAMIC})
    x = torch.zeros(1, 2, 3, 4)
    export_onnx(_Loop(), (x, x), path=tmp_path / "m.onnx", dynamic_shapes=free, cases=[])
    session = onnx_session.open_session(tmp_path / "m.onnx", caller="test")
    onnx_session._MEMORY[session] = [(0, 2**30)]
    runner = onnx_runner.OnnxRunner(session, "m.onnx")
    for step in range(2 * onnx_runner._LONG):
        outputs, _ = runner.step({"tokens": x, "past": x}, {})
        assert bool((outputs[runner.outputs[0]] == 1).all())
        assert asked == ([] if step + 1 < onnx_runner._LONG else [(0, 2**30)])
    monkeypatch.setattr(onnx_session, "_MAPS", tmp_path / "maps")  # Linux without a list of memory
    with in_huge_pages():
        pass
    assert asked == [(0, 2**30)]


MATRIX_SIZE, COUNT = 64, 3


@pytest.mark.parametrize("free", [10**12, 3 * 2 * MATRIX_SIZE * MATRIX_SIZE * 2 - 1])
def test_weights_of_half_precision_give_the_same_result_where_memory_is_short(tmp_path, monkeypatch, free):
    """Converted at every call, or all of them when the file is loaded: the products of numpy either way."""
    weights = numpy.random.default_rng(0).normal(scale=0.1, size=(COUNT, MATRIX_SIZE, MATRIX_SIZE))
    weights = weights.astype(numpy.float16)
    stored = [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)]
    nodes = [helper.make_node("MatMul", [f"x{index}", f"w{index}"], [f"x{index + 1}"]) for index in range(COUNT)]
    first, last = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["rows", MATRIX_SIZE]) for name in ("x0", f"x{COUNT}")
    )
    graph = helper.make_graph(nodes, "products", [first], [last], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    options = mapped_options(path)
    one_by_one = options.execution_order == onnxruntime.ExecutionOrder.PRIORITY_BASED
    assert one_by_one == (free < 10**12)
    x = numpy.random.default_rng(1).normal(size=(2, MATRIX_SIZE)).astype(numpy.float16)
    (found,) = open_session(path, caller="a test", options=options).run(None, {"x0": x})
    expected = x.astype(numpy.float64)
    for weight in weights:
        expected = (expected @ weight.astype(numpy.float64)).astype(numpy.float16).astype(numpy.float64)
    assert numpy.abs(found - expected).max() < 5e-3


def test_threads_of_a_check_sleep_while_they_wait():
    """Those of a session that a user opens do not: it answers faster so."""
    key = "session.intra_op.allow_spinning"
    with without_spinning():
        assert session_options().get_session_config_entry(key) == "0"
    with pytest.raises(RuntimeError, match=key):
        session_options().get_session_config_entry(key)
