"""Operators that torch's ONNX exporter does not know although models use them: what to put in their place.

* ``unsqueeze`` of complex numbers (rotary embeddings of Llama 4 and DeepSeek V2): as real numbers with one axis more.
* ``erf_inv`` (``Normal.icdf``, Gemma 3n's sparse activations): a polynomial, exact to the last digits of float32.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["translations", "without_complex_unsqueeze"]

# M. Giles, "Approximating the erfinv function", GPU Computing Gems Jade Edition (2011), single precision: two
# polynomials, in w - 2.5 for w = -log(1 - x^2) below 5, and in sqrt(w) - 3 above
_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503),
    *(-0.00417768164, 0.246640727, 1.50140941),
)
_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613),
    *(0.00943887047, 1.00167406, 2.83297682),
)


def without_complex_unsqueeze(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the program with axes inserted into real numbers only.

    Args:
        program: the program to be converted; returned as it is when it inserts no axis into a complex tensor.
    """
    unsqueeze = torch.ops.aten.unsqueeze.default
    if not any(node.target is unsqueeze and _is_complex(node) for node in program.graph.nodes):
        return program

    def real(x: torch.Tensor, dim: int) -> Any:
        if not x.is_complex():
            return NotImplemented
        # the last axis of the view holds real and imaginary part, so a place counted from the end moves by one
        return torch.view_as_complex(torch.view_as_real(x).unsqueeze(dim if dim >= 0 else dim - 1))

    decomposed: torch.export.ExportedProgram = program.run_decompositions({unsqueeze: real})
    return decomposed


def translations() -> dict[Any, Any]:
    """Return what ``torch.onnx.export(custom_translation_table=...)`` needs beside torch's own translations."""
    return {torch.ops.prims.erf_inv.default: _erf_inv}  # what every spelling of it is decomposed into


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _erf_inv(x: Any) -> Any:
    from onnxscript import opset18 as op

    def polynomial(at: Any, coefficients: tuple[float, ...]) -> Any:
        value = op.Constant(value_float=coefficients[0])
        for coefficient in coefficients[1:]:
            value = op.Add(op.Mul(value, at), op.Constant(value_float=coefficient))
        return value

    def number(value: float) -> Any:
        return op.Constant(value_float=value)

    given = op.Cast(x, to=1)  # float32
    w = op.Neg(op.Log(op.Mul(op.Sub(number(1.0), given), op.Add(number(1.0), given))))
    centre = polynomial(op.Sub(w, number(2.5)), _CENTRE)
    tail = polynomial(op.Sub(op.Sqrt(w), number(3.0)), _TAIL)
    found = op.Mul(op.Where(op.Less(w, number(5.0)), centre, tail), given)
    # at 1 the polynomial of the infinite w is no number
    return op.CastLike(op.Where(op.Equal(op.Abs(given), number(1.0)), op.Mul(given, number(float("inf"))), found), x)
