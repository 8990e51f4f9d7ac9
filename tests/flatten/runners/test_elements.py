"""How the elements of a tensor are stored."""

import numpy
import onnx
import pytest
import torch

from tests.flatten.storage.storage_values import TORCH_TYPES, random_tensor
from yobx_flatten import (
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    load_nested,
    save_nested,
)
from yobx_flatten.runners.ports import ELEMENTS

# What ONNX calls the types that it has under their own name, and what stands for the others.
NAMES = {
    "float32": "FLOAT", "float64": "DOUBLE", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "bool": "BOOL",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16",
    "uint32": "UINT32", "uint64": "UINT64", "float8_e4m3fn": "FLOAT8E4M3FN", "float8_e4m3fnuz": "FLOAT8E4M3FNUZ",
    "float8_e5m2": "FLOAT8E5M2", "float8_e5m2fnuz": "FLOAT8E5M2FNUZ", "float8_e8m0fnu": "FLOAT8E8M0",
    "complex32": "FLOAT16", "complex64": "FLOAT", "complex128": "DOUBLE", "float4_e2m1fn_x2": "UINT8",
    "int4": "INT4", "uint4": "UINT4", "float4_e2m1fn": "FLOAT4E2M1", "int2": "INT2", "uint2": "UINT2",
}  # fmt: skip


def test_the_codes_are_those_of_onnx():
    found = {name: onnx.TensorProto.DataType.Name(element.code) for name, element in ELEMENTS.items()}
    assert found == NAMES


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_what_is_stored_has_the_bytes_of_the_tensor(dtype):
    element = ELEMENTS[str(dtype).removeprefix("torch.")]
    stored = onnx.helper.tensor_dtype_to_np_dtype(element.code).itemsize * (2 if element.pair else 1)
    assert stored == dtype.itemsize


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


def run(path, engine):
    if engine == "onnxruntime":
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return dict(zip([output.name for output in session.get_outputs()], session.run(None, {}), strict=True))
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(str(path))
    return dict(zip(session.output_names, session.run(None, {}), strict=True))


PACKED = ["int4", "uint4", "float4_e2m1fn", "int2", "uint2"]


def every_code(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="onnx is installed without ml_dtypes")
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    count = 4 if name.endswith("2") else 16
    return numpy.arange(count, dtype=numpy.uint8).view(getattr(ml_dtypes, name))


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_type_is_stored_as_onnx_packs_it(name, tmp_path):
    codes = every_code(name)
    arrays = {"all": codes, "odd": codes[1:], "grid": codes[:4].reshape(2, 2), "one": codes[3], "none": codes[:0]}
    save_nested(tmp_path / "x.onnx", arrays)
    stored = {
        tensor.name.removesuffix(".stored"): tensor for tensor in onnx.load(tmp_path / "x.onnx").graph.initializer
    }
    for key, array in arrays.items():
        found = onnx.numpy_helper.to_array(stored[key])
        assert (found.dtype, found.shape) == (numpy.asarray(array).dtype, numpy.shape(array))
        assert found.astype(numpy.float32).tolist() == array.astype(numpy.float32).tolist()
        assert stored[key].raw_data == onnx.numpy_helper.from_array(numpy.asarray(array)).raw_data


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_type_comes_back_bit_by_bit(name, external, tmp_path):
    codes = every_code(name)
    arrays = [codes, codes[1:].copy(), codes[::-1], codes[:4].reshape(2, 2), codes[3], codes[:0].reshape(0, 3)]
    arrays.append(numpy.tile(codes, 700)[:-1])
    save_nested(tmp_path / "x.onnx", arrays, external_data=external)
    for found, array in zip(load_nested(tmp_path / "x.onnx"), arrays, strict=True):
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
    found = run(tmp_path / "x.onnx", "onnxruntime" if engine == "onnxruntime" else "onnx.reference")["x"]
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
