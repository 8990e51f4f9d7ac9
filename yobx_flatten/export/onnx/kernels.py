"""Test whether onnxruntime has a CPU kernel for a type of weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ...errors import InvalidArgumentError, ReplayError
from ...runners.onnx_session import open_session


@functools.cache
def has_kernels(dtype: str) -> bool:
    """Return whether the CPU provider multiplies tensors of a type. It is asked once per process.

    >>> has_kernels("float32")
    True
    """
    # dtype: `"float16"`, `"bfloat16"`; a type that ONNX does not have is left to the exporter
    from onnx import TensorProto, helper

    code = getattr(TensorProto, {"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper()), None)
    if code is None:
        return True
    x, y = (helper.make_tensor_value_info(name, code, [2, 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "probe", [x], [y])
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    try:
        open_session(probe.SerializeToString(), caller="export_onnx")
    except ReplayError:
        return False
    return True


def check_kernels(types: Iterable[str], caller: str) -> None:
    """Refuse to prove a file that onnxruntime cannot run on the CPU, before anything is traced."""
    # types: those of the weights: `"float32"`
    for dtype in types:
        if not has_kernels(dtype):
            raise InvalidArgumentError(
                f"{caller}: onnxruntime has no kernels for weights of {dtype} on the CPU, so the file cannot be "
                "checked there. Use float32 or float16 (model.half()), or write it unchecked for another provider:\n"
                '    proof="none"'
            )
