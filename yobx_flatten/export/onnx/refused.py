"""Explain which operator cannot be exported to ONNX, where the model calls it, and which line to type."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from ...errors import FlattenError, InvalidArgumentError
from ...errors.messages import first_line
from ...trace.program_inputs import arguments_of
from ..program.traced import Traced

_TORCH = os.path.dirname(torch.__file__)


class ConversionRefusedError(InvalidArgumentError):
    """torch's exporter cannot convert a program to ONNX."""

    def __init__(self, message: str, reason: str, axes: Collection[tuple[str, int]] | None) -> None:
        super().__init__(message)
        self.reason = reason
        # those that vary where it stopped, by name of the input and axis; `None` where no size is the cause
        self.axes = axes


def refused_conversion(error: Exception, name: str, traced: Traced) -> Exception:
    """Return an error instead of the one that torch's exporter raised; errors of ours stay as they are."""
    # name: name of the class of the module
    if isinstance(error, (FlattenError, OSError, MemoryError)):
        return error
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = "\n".join(map(str, causes))
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", text)
    failed = re.search(r"Error when translating node %\w+ .*?call_function\[target=torch\.ops\.([\w.]+)\]", text, re.S)
    of_sizes = missing is None or missing[1].startswith("aten.sym_")
    if missing is not None:
        operator, reason = f"{missing[1]}.{missing[2]}", "torch's exporter has no translation for the operator"
    elif failed is not None:
        operator, reason = failed[1], f"torch's exporter raises {_shown(causes[-1])} for the operator"
    else:
        operator, reason = "", f"torch's exporter raises {_shown(causes[-1])}"
    reason = f"{reason} {operator}{_place(traced.program, operator)}" if operator else reason
    fixed = "    dynamic_shapes=None  # or the axes that vary"
    if not operator or (missing is not None and of_sizes):
        advice = f"Fix the sizes that it stops at:\n{fixed}"
    else:
        advice = (
            "Use other operators, or pass a function of onnxscript that implements it:\n"
            f"    translations={{torch.ops.{operator}: function}}"
        )
    refused = ConversionRefusedError(
        f"{name} cannot be exported to ONNX: {reason}. {advice}", reason, _axes(traced, text) if of_sizes else None
    )
    refused.__cause__ = error
    return refused


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error).rstrip('.')[:200]}"


def _axes(traced: Traced, text: str) -> set[tuple[str, int]]:
    """The axes of inputs whose symbols a text names."""
    symbols = set(re.findall(r"\bs\d+\b", text))
    values = {node.name: node.meta.get("val") for node in traced.program.graph.find_nodes(op="placeholder")}
    arguments = [arg.name for arg in arguments_of(traced.program) if not isinstance(arg, ConstantArgument)]
    return {
        (name, axis)
        for name, argument in zip(traced.input_names, arguments, strict=True)
        for axis, size in enumerate(getattr(values[argument], "shape", ()))
        if str(size) in symbols
    }


def _place(program: ExportedProgram, operator: str) -> str:
    """``" (model.py:12: x.cummax(1))"``, where the program has the operator, or one that is decomposed into it."""
    short = operator.split(".")[1]
    for node in program.graph.nodes:
        own = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
        lines = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.*)', node.meta.get("stack_trace") or "")
        lines = [line for line in lines if not line[0].startswith((_TORCH, "torch/"))]
        if own and own in short and lines:
            file, number, code = lines[-1]
            return f" ({file}:{number}: {code.strip()})"
    return ""
