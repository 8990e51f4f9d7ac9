"""Find the inputs of a program that come out again with new tokens after them, and change the program there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ...trace.program_inputs import arguments_of

aten = torch.ops.aten


class Flat(torch.nn.Module):
    """A graph, called with a list of tensors."""

    def __init__(self, called: torch.fx.GraphModule) -> None:
        super().__init__()
        self.called = called

    def forward(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the graph."""
        return self.called(*tensors)


def sizes_of(program: ExportedProgram, inputs: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the sizes of the inputs in the trace."""
    # program: what `flat_program` returned
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    return {name: values[arg.name].shape for name, arg in zip(inputs, arguments_of(program), strict=True)}


def joined(past: torch.fx.Node, present: Any) -> torch.fx.Node | None:
    """Return the node that puts new tokens after those of an input and returns them; ``None`` for anything else."""
    value = past.meta.get("val")
    if value is None or value.ndim != 4:
        return None
    cats = [user for user in past.users if user.target is not aten.sym_size.int]
    if len(cats) != 1 or cats[0] is not present or present.target is not aten.cat.default:
        return None
    parts: Any = present.args[0]
    axis = present.args[1] if len(present.args) > 1 else 0
    is_after = len(parts) == 2 and parts[0] is past and parts[1] is not past and axis in (2, -2)
    return present if is_after and not present.kwargs else None
