"""Find the dynamic sizes that may not be 0 in an AOTInductor package.

.. code-block:: text

    rows = torch.cat([state, x], 1)[:, -x.shape[1] :]     for no row of x, -0 is the beginning: all rows of the state
    return rows * x                                       torch refuses 4 rows times none, and a package returns none
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch.export import ExportedProgram

from ...errors import FlattenError, ReplayError
from ...errors.failures import result_or
from ...runners.signature import Signature, Size
from ..program.flat_program import quietly

_Shapes = Mapping[str, tuple[int, ...]]


def refused_when_empty(program: ExportedProgram, signature: Signature) -> list[str]:
    """Return the names of the sizes of which torch refuses 0, in runs without memory or values."""
    # program: a program that takes tensors; see `flat_program.flat_program`
    # returns: names of sizes in the signature; none where torch cannot run the program without values
    example = {row[0]: tuple(leaf.shape) for row, leaf in zip(signature.inputs, program.example_inputs[0], strict=True)}
    given = {
        next(iter(size)): example[name][axis]
        for name, _, sizes in signature.inputs
        for axis, size in enumerate(sizes)
        if isinstance(size, Mapping) and list(size.values()) == [1] and "" not in size
    }
    calls = {name: _call_without(name, given, signature, example) for name in given}
    refused = [name for name, call in calls.items() if call is not None and not _runs(program, call)]
    return refused if refused and _runs(program, example) else []


def _call_without(empty: str, given: Mapping[str, int], signature: Signature, example: _Shapes) -> _Shapes | None:
    """The shapes of a call in which one size is 0, and one other changed where it has to fit; ``None`` if none does."""
    for sizes in _nearby({**given, empty: 0}, empty):
        shapes = {
            name: tuple(_value(size, sizes, one) for size, one in zip(of, example[name], strict=True))
            for name, _, of in signature.inputs
        }
        try:
            signature.check_sizes(shapes, ReplayError, "")
        except FlattenError:
            continue
        return shapes
    return None


def _nearby(sizes: Mapping[str, int], kept: str) -> Iterator[Mapping[str, int]]:
    yield sizes
    likely = {first + sign * second for first in sizes.values() for second in sizes.values() for sign in (1, -1)}
    for name in sizes:
        for other in sorted(likely):
            if other > 0 and name != kept:
                yield {**sizes, name: other}


def _value(size: Size, sizes: Mapping[str, int], example: int) -> int:
    if isinstance(size, Mapping):
        return sum(factor * sizes.get(name, 1) for name, factor in size.items())
    return example if size is None else size


def _runs(program: ExportedProgram, shapes: _Shapes) -> bool:
    """Whether torch computes the shapes of all values, from those of the inputs."""
    # half a second: sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from ...private_names.of_torch import FakeTensorMode

    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    weights = [tuple(value.shape) for value in values[: len(values) - len(shapes)]]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with quietly("torch._subclasses.fake_tensor", logging.CRITICAL), torch.no_grad(), mode:
        pairs = zip(values, [*weights, *shapes.values()], strict=True)
        given = [torch.empty(shape, dtype=value.dtype, device=value.device) for value, shape in pairs]
        return result_or(lambda: _takes(program, given), lambda error: False)  # an operator raises what it likes


def _takes(program: ExportedProgram, given: list[torch.Tensor]) -> bool:
    torch.fx.Interpreter(program.graph_module).run(*given)
    return True
