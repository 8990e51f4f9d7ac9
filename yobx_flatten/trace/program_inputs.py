"""List the inputs that the caller of a traced program passes, with their values in the trace."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ArgumentSpec, ConstantArgument, InputKind


def arguments_of(program: ExportedProgram) -> list[ArgumentSpec]:
    """Return the argument of each leaf of the inputs, in order; parameters and buffers are left out."""
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def traced_inputs(program: ExportedProgram) -> list[Any]:
    """Return a tensor or a size for each leaf of the inputs; ``None`` for what is part of the program."""
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return [None if isinstance(arg, ConstantArgument) else values[arg.name] for arg in arguments_of(program)]
