"""State sizes that a trace fixed although the model takes others: an LSTM's length, a loop over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.export import Dim, ExportedProgram

from ...core.effects import undisturbed
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ...storage.matching import leaves_of
from ...trace.program_inputs import traced_inputs
from ...trees.naming import leaf_names
from ...trees.shapes import shapes_of_leaves
from ..example.example import Example
from ..proof.module_state import written_parameters
from .traced import Traced

_REFUSALS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, AttributeError, ArithmeticError)


def notes_on_fixed_axes(example: Example, traced: Traced) -> list[str]:
    """Return a note on sizes that were left to the trace and became numbers; none where the model needs them."""
    if example.shapes is None:
        return []
    fixed: dict[int, dict[str, list[int]]] = {}  # by size: sizes that belong together change together
    for name, axis, size in _left_to_the_trace(example, traced.program):
        fixed.setdefault(size, {}).setdefault(name, []).append(axis)
    # a mask may vary in the program, and the model still needs it to be as long as its tokens
    every = _of_each_size(example)
    taken = [
        (size, axes)
        for size, axes in fixed.items()
        if _takes_more(example, traced, axes) or (every[size] != axes and _takes_more(example, traced, every[size]))
    ]
    places = [_place(name, axis, size) for size, axes in taken for name, axis in _each(axes)]
    if not places:
        return []
    return [f"{', '.join(places)}: the model takes other sizes there. Its program and files refuse them."]


def _place(name: str, axis: int, size: int) -> str:
    return f"{name}.shape[{axis}] is fixed at {size} by the trace"


def _each(axes: Mapping[str, list[int]]) -> Iterator[tuple[str, int]]:
    return ((name, axis) for name, those in axes.items() for axis in those)


def _left_to_the_trace(example: Example, program: ExportedProgram) -> Iterator[tuple[str, int, int]]:
    """Yield leaf, axis and size where the trace was to decide, and decided for the size of the example."""
    inputs, given = dict(zip(example.names, traced_inputs(program), strict=True)), example.inputs
    for name, leaf, dims in zip(
        leaf_names(given), leaves_of(given), shapes_of_leaves(given, example.shapes), strict=True
    ):
        value = inputs.get(name)
        if not isinstance(leaf, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        for axis, dim in (dims or {}).items():
            # sizes of 0 and 1 have a note of their own
            if dim == Dim.AUTO and leaf.shape[axis] > 1 and not isinstance(value.shape[axis], torch.SymInt):
                yield name, axis, leaf.shape[axis]


def _of_each_size(example: Example) -> dict[int, dict[str, list[int]]]:
    """All axes that may vary, by their size."""
    found: dict[int, dict[str, list[int]]] = {}
    given = example.inputs
    for name, leaf, dims in zip(
        leaf_names(given), leaves_of(given), shapes_of_leaves(given, example.shapes), strict=True
    ):
        for axis, dim in (dims or {}).items():
            if isinstance(leaf, torch.Tensor) and dim is not None:
                found.setdefault(leaf.shape[axis], {}).setdefault(name, []).append(axis)
    return found


def _takes_more(example: Example, traced: Traced, axes: Mapping[str, list[int]]) -> bool:
    """Whether the model itself takes one more along axes."""
    given, larger = example.inputs, {}
    for name, leaf in zip(leaf_names(given), leaves_of(given), strict=True):
        made = leaf
        for axis in axes.get(name, ()):
            made = torch.cat([made, made.narrow(axis, made.shape[axis] - 1, 1)], dim=axis)
        larger[id(leaf)] = made

    def other(leaf: PyTree) -> PyTree:
        made = larger.get(id(leaf), leaf)
        return made.clone() if isinstance(made, torch.Tensor) else made

    args, kwargs = pytree.tree_map(other, (example.args, dict(example.kwargs)))
    try:
        written = written_parameters(example.module, traced.written)
        with torch.no_grad(), undisturbed(seed=0, module=example.module, parameters=written):
            example.module(*args, **kwargs)
    except _REFUSALS:
        return False
    return True
