"""Export a module to a program, and replay it against the eager module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..declare.scopes import options_in_use, register_flattening_functions
from ..recipe.aliases import DynamicShapes
from ..trees.arguments import check_arguments
from .example.bounds import Bounds
from .example.example import Example, make_example
from .exported_model import ExportedModel, finish
from .fewer_sizes import with_fewer_sizes
from .program.traced import fill
from .proof.case import Case, Proof
from .source import Asked, prove, traced_example


def export_program(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: DynamicShapes = "auto",
    bounds: Mapping[str, int] | None = None,
    strict: bool = False,
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    proof: Proof = "auto",
    loop: bool = True,
) -> ExportedModel:
    """Export a module with ``torch.export`` and compare the program with the module.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments; none by default.
        kwargs: example keyword arguments, with caches among them; none by default. Of a transformers model, sizes of 0
            and 1, which ``torch.export`` would fix, are replaced by larger ones, and the report states it.
        dynamic_shapes: as for ``torch.export.export``; ``"auto"`` writes them; ``None`` keeps every size fixed.
        bounds: the largest sizes, ``{"batch": 4, "length": 512}``: rows, and tokens in the cache; ``"new"`` for tokens
            of one call, where these are fewer. ``to_executorch`` needs them; larger inputs are refused.
        strict: as for ``torch.export.export``; ``False`` by default.
        cases: what to replay in addition; by default, for a transformers model, sizes around its window and padding,
            and for any other module other sizes and values that it accepts.
        steps: calls per case, 3 by default; each gets the cache that the call before returned.
        tolerance: largest absolute difference to the module's own outputs; by default 1e-4, and for weights in half
            precision five times what the type costs the model itself on that case.
        proof: what is replayed: ``"full"``, the example and all cases; ``"standard"``, the same, of a file without its
            program; ``"sample"``, the example and the largest case, two calls each; ``"none"``, nothing, which the
            report states as unchecked. ``"auto"``, the default, is ``"full"`` for weights of less than 100 MB,
            ``"standard"`` for less than 1 GB, and ``"sample"`` for others.
        loop: whether calls follow each other, the default: what ``forward`` leaves in its arguments and does not
            return, as a cache that it extends, is returned in addition, and calling the result leaves it there.
            ``False`` for a module that no call follows, as one that reads a cache for a score.

    Returns:
        The program with a report. It can also be called outside ``register_flattening_functions``.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or another argument is invalid.
        NotRegisteredError: when an input holds an object of a class that is not registered.
        DynamicShapesError: when ``dynamic_shapes`` or ``bounds`` does not fit the inputs or the model.
        ReplayError: when a case fails or differs by more than ``tolerance``; ``error.report`` holds all of them.

    >>> class Scale(torch.nn.Module):
    ...     def forward(self, pair):
    ...         return {"sum": pair[0] + pair[1]}
    >>> pair = (torch.ones(2, 3), torch.ones(2, 3))
    >>> larger = Case("batch 5", ((torch.ones(5, 3), torch.ones(5, 3)),))
    >>> exported = export_program(Scale(), (pair,), cases=[larger])
    >>> [(result.case, result.differences) for result in exported.report.cases]
    [('the example', {'sum': 0.0}), ('batch 5', {'sum': 0.0})]
    """
    check_arguments(module, args, kwargs)
    asked = Asked.of(module, cases, steps, tolerance, proof)
    largest = Bounds.of(bounds)
    if largest is not None:
        largest.check_positions(module)

    def export(example: Example, is_fixed: bool) -> ExportedModel:
        report = asked.report()
        traced = traced_example(example, report, strict=strict)
        fill(traced.program, traced.readers)
        return finish(prove(example, traced, asked, report, only_fitting=is_fixed), report)

    with register_flattening_functions(**options_in_use()):
        example = make_example(module, args, dict(kwargs or {}), dynamic_shapes, largest, loop=loop)
        return with_fewer_sizes(export, example, dynamic_shapes)
