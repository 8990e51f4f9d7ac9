"""Choose the cases whose sizes a program takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from ...private_names.of_torch import pytree
from ...trace.program_inputs import traced_inputs
from ...trees.naming import leaf_names
from .case import Case
from .report import ExportReport


def shapes_taken(program: ExportedProgram) -> list[tuple[Any, ...]]:
    """The sizes of every leaf of the inputs, symbols among them; none of what is not a tensor."""
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in traced_inputs(program)]


def fitting(program: ExportedProgram, cases: list[Case], report: ExportReport) -> list[Case]:
    """The cases whose sizes a program takes; the report names the others."""
    shapes, kept = shapes_taken(program), []
    for case in cases:
        misfit = _misfit(program, shapes, case)
        if misfit:
            report.remark(f"{case.name}: not replayed, since {misfit}.")
        else:
            kept.append(case)
    return kept


def _misfit(program: ExportedProgram, shapes: list[tuple[Any, ...]], case: Case) -> str:
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    for name, shape, leaf in zip(leaf_names(dict(case.kwargs)), shapes, leaves, strict=False):
        for axis, (size, given) in enumerate(zip(shape, getattr(leaf, "shape", ()), strict=False)):
            if isinstance(size, int):
                if size != given:
                    return f"the program has fixed axis {axis} of {name} at {size}"
            elif (known := program.range_constraints.get(size.node.expr)) is not None and given > known.upper:
                return f"the program takes at most {known.upper} in axis {axis} of {name}"
    return ""
