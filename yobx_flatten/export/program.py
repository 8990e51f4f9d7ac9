"""Export with proof: a module to a program, which is replayed against the eager module before it is returned.

.. code-block:: text

    inputs --> dynamic shapes --> torch.export --> program --> replay --+
                                                      |                 +--> report
                                     (onnx_export)    +--> ONNX --> replay
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from ..declare.scopes import options_in_use, register_flattening_functions
from ..diagnose.export_errors import explain_error
from ..diagnose.refused import explain_leaf
from ..errors import DynamicShapesError, FlattenError, InvalidArgumentError, NotRegisteredError, ReplayError
from ..huggingface.cases import cache_name
from ..log import STEP
from ..storage.matching import leaves_of
from ..trees.arguments import check_arguments, refuse_modules, shapes_by_name
from ..trees.naming import leaf_names, output_names
from ..trees.node import node_of
from ..trees.shapes import check_dynamic_shapes, without_names
from ..trees.shapes import dynamic_shapes as write_dynamic_shapes
from ..trees.walk import torch_leaves
from ..trees.weights import about_devices, has_no_data, on_other_devices, refuse_offloaded
from .replay import Case, check_cases, clone, replay
from .report import ExportReport
from .sizes_in_specs import refuse_sizes_in_static_parts
from .swallowed import named_in_forward, refuse_misspelt, refuse_unread, swallowed_names
from .undisturbed import draws_random_numbers, own_written_state, seeded, undisturbed, written_state

__all__ = ["Export", "ExportedModel", "export_program"]

logger = logging.getLogger("yobx_flatten")


@dataclasses.dataclass
class ExportedModel:
    """An exported program that can be called anywhere: it enters the context manager itself.

    Attributes:
        program: the ``torch.export.ExportedProgram``.
        report: the record of the export and of every replay.
        path: the ONNX file, ``None`` without one.

    >>> exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> exported(torch.ones(7, 3)).shape
    torch.Size([7, 2])
    >>> exported.report.input_names, exported.path
    (['input'], None)
    """

    program: ExportedProgram
    report: ExportReport
    path: pathlib.Path | None = None
    _patches: dict[str, bool] = dataclasses.field(default_factory=dict, repr=False)
    _module: Any = dataclasses.field(default=None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program with the arguments of the original module."""
        with register_flattening_functions(**self._patches):
            if self._module is None:
                self._module = self.program.module()
            return self._module(*args, **kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Store the program with ``torch.export.save``.

        Load it with ``torch.export.load`` inside ``register_flattening_functions``; a class of your own must be
        registered before that.

        Args:
            path: the file to write, usually with the suffix ``.pt2``.
        """
        with register_flattening_functions(**self._patches):
            torch.export.save(self.program, path)

    def __str__(self) -> str:
        return str(self.report)


def export_program(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = "auto",
    strict: bool = False,
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float = 1e-4,
) -> ExportedModel:
    """Export a module with ``torch.export`` and replay the program against the module.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments; none by default.
        kwargs: example keyword arguments, with caches among them; none by default. For a transformers model an
            example that ``torch.export`` would fix at a size of 0 or 1 (one row, one token, an empty cache) is replaced
            by a larger one, and the report states it.
        dynamic_shapes: as for ``torch.export.export``; ``"auto"`` writes them (see
            :func:`~yobx_flatten.dynamic_shapes`); ``None`` keeps every size fixed.
        strict: as for ``torch.export.export``; ``False`` by default.
        cases: what to replay in addition to the example. By default, for a transformers model: other
            batch sizes and lengths below, at and past its window, several tokens at once, a padded row.
        steps: number of calls per case, 3 by default; after the first, each gets the cache that the call before
            returned.
        tolerance: largest absolute difference to the module's own outputs; 1e-4 by default.

    Returns:
        The program with a report. It can also be called outside ``register_flattening_functions``.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or another argument is invalid.
        NotRegisteredError: when an input holds an object of a class that is not registered.
        DynamicShapesError: when ``dynamic_shapes`` does not fit the inputs.
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
    cases = cases if cases is None else check_cases(cases)
    export = Export(module, args, dict(kwargs or {}), dynamic_shapes, steps, tolerance)
    with export.block():
        program = export.to_program(strict)
        export.replay_program(program, cases)
    return export.finish(program, None)


class Export:
    """One export on its way: what the steps share."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shapes: Any,
        steps: int,
        tolerance: float,
    ) -> None:
        self.module, self.args, self.kwargs, self.steps = module, args, kwargs, steps
        self.cache_is = cache_name(kwargs) or ""
        self.patches = options_in_use()
        self.report = ExportReport(type(module).__qualname__, [], [], 0.0, tolerance=tolerance)
        self.why_not = "transformers is not imported"
        if args:
            self.why_not = "there are positional arguments"
        elif self.patches["patch_transformers"]:
            from ..huggingface.cases import why_not_resizable

            self.why_not = why_not_resizable(module, kwargs) or ""
        if self.patches["patch_transformers"]:
            from ..huggingface.cases import ambiguous_without

            missing = ambiguous_without(module, kwargs)
            self.report.remarks += [missing] if missing else []
        refuse_offloaded(module)
        with self.block():
            inputs = self.named(args, kwargs)
            refuse_modules(inputs)
            self.no_data = has_no_data(module, pytree.tree_leaves(inputs))
        if self.no_data:
            self.why_not = self.no_data
        self.axis_names: dict[tuple[str, int], str] = {}
        self.shapes = self.complete_shapes(shapes)
        self.shapes_are_given = not (shapes is None or (isinstance(shapes, str) and shapes == "auto"))
        fixed = self.fixed_axes()
        if fixed and not self.why_not:
            self.replace_example(shapes, fixed)
        if fixed and self.why_not:
            self.report.remarks.append(
                f"sizes of 0 and 1 in the example stay fixed ({', '.join(fixed)}): pass an example of size 2 or more."
            )

    def block(self) -> contextlib.AbstractContextManager[Any]:
        """Return the block in which everything of this export happens."""
        return register_flattening_functions(**self.patches)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All inputs by parameter name."""
        return {**inspect.signature(self.module.forward).bind_partial(*args).arguments, **kwargs}

    def resized(self, sizes: Any, seed: int) -> dict[str, Any]:
        """The example's inputs in other sizes, for a transformers model; a cache only where the example has one."""
        from ..huggingface.cases import decode_inputs

        like = {name: value for name, value in self.kwargs.items() if value is not None}
        with undisturbed(self.module):
            return {**self.kwargs, **decode_inputs(self.module, sizes, like, seed)}

    def replace_example(self, shapes: Any, fixed: list[str]) -> None:
        """Take an example of sizes that torch does not fix, if the model takes it."""
        from ..huggingface.cases import DecodeSizes

        try:
            larger = self.resized(DecodeSizes(), 0)
            with self.block(), torch.no_grad(), undisturbed(self.module):  # outside, a cache is no tree, and no copy
                self.module(**clone(larger))
        except Exception as error:  # some take one token at a time (ProphetNet)
            lines = str(error).splitlines() or [""]
            self.why_not = f"the model refuses {DecodeSizes()} ({type(error).__name__}: {lines[0]})"
            return
        self.kwargs = larger
        self.shapes = self.complete_shapes(shapes)
        self.report.remarks.append(
            f"the example was replaced by one of {DecodeSizes()}: torch.export fixes sizes of 0 and 1 "
            f"({', '.join(fixed)})."
        )

    def complete_shapes(self, shapes: Any) -> Any:
        """Dynamic shapes for all inputs, in the form torch wants them: by parameter name."""
        if shapes is None:
            return None
        refuse_misspelt(self.module, swallowed_names(self.module, self.kwargs))
        inputs = self.named(self.args, self.kwargs)
        if isinstance(shapes, str) and shapes == "auto":
            return write_dynamic_shapes(inputs)
        shapes = shapes_by_name(inputs, shapes)
        check_dynamic_shapes(inputs, shapes)
        self.axis_names = _named_axes(inputs, shapes)
        return without_names(shapes)

    def fixed_axes(self) -> list[str]:
        """Axes that may vary, but that torch takes for fixed, since the example has size 0 or 1 there."""
        if self.shapes is None:
            return []
        cache = self.kwargs.get(self.cache_is)
        # who writes shapes for an empty cache means a program for the prefill
        if cache is not None and not leaf_names(cache) and not self.shapes_are_given:
            return [f"{self.cache_is} is empty"]
        inputs = self.named(self.args, self.kwargs)
        with self.block():
            leaves = zip(leaf_names(inputs), pytree.tree_leaves(inputs), _leaf_shapes(inputs, self.shapes), strict=True)
        return [
            f"{name} axis {axis}"
            for name, leaf, shape in leaves
            for axis, dim in (shape or {}).items()
            if dim is not None and isinstance(leaf, torch.Tensor) and leaf.shape[axis] in (0, 1)
        ]

    def to_program(self, strict: bool) -> ExportedProgram:
        """Trace the module, and name the inputs and outputs of the program."""
        logger.info("tracing %s", self.report.module, extra=STEP)
        swallowed = [] if self.shapes is None else swallowed_names(self.module, self.kwargs)
        start = time.perf_counter()
        try:
            with torch.no_grad(), named_in_forward(self.module, swallowed):
                program = torch.export.export(
                    self.module,
                    clone(self.args),
                    clone(self.kwargs),
                    dynamic_shapes=self.shapes,
                    strict=strict,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
        except Exception as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error
        refuse_sizes_in_static_parts(program)
        self.report.export_seconds = time.perf_counter() - start
        self.input_leaves = leaf_names(self.named(self.args, self.kwargs))
        signature = program.graph_signature
        inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        refuse_unread(self.module, swallowed, program, _by_argument(self.input_leaves, inputs))
        self.remark_on_state(program)
        with torch.no_grad(), undisturbed(self.module, self.written), seeded(0):
            outputs = self.module(*clone(self.args), **clone(self.kwargs))
        results = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
        self.report.input_names = _named(self.input_leaves, inputs)
        self.report.output_names = _named(output_names(outputs, self.input_leaves), results)
        return program

    def explain(self, error: Exception) -> FlattenError | None:
        """An error of the trace in our words, where it is one of those that name neither place nor remedy."""
        inputs, message = self.named(self.args, self.kwargs), str(error)
        if "Unsupported input type" in message:
            return explain_leaf(inputs, message)
        if "in output, which is not a known type" in message:
            with undisturbed(self.module):
                return NotRegisteredError(str(explain_error(error, self.module, clone(self.args), clone(self.kwargs))))
        if "to be on the same device" in message:
            leaves = [item for name, value in inputs.items() for item in torch_leaves(value, name)]
            tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
            for path, device, weights in on_other_devices(self.module, tensors):
                return InvalidArgumentError(f"{about_devices(path, device, weights)}\n    {path}.to({weights!r})")
        return None

    def remark_on_state(self, program: ExportedProgram) -> None:
        """Give the program what it writes to for itself; say so, and that it draws random numbers."""
        self.written, self.drawing = written_state(program), draws_random_numbers(program)
        own_written_state(program, self.written)
        if self.written:
            self.report.remarks.append(
                f"forward writes to {', '.join(self.written)}: the program has its own, which it keeps from call to "
                "call; the module's are as they were."
            )
        if self.drawing:
            self.report.remarks.append(
                f"random numbers are drawn ({', '.join(self.drawing)}): model and program had the same seed."
            )

    def replay_program(self, program: ExportedProgram, cases: Iterable[Case] | None) -> list[Case]:
        """Replay the example and the cases; return all of them."""
        if self.no_data:
            self.report.remarks.append(f"nothing was replayed, since {self.no_data}.")
            return []
        chosen = [Case("the example", self.args, self.kwargs, self.steps), *self.choose_cases(cases)]
        module = program.module()

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                outputs = module(*args, **clone(dict(kwargs)))
            self.last_outputs = outputs
            return {}

        def feed_back(kwargs: Mapping[str, Any], outputs: dict[str, Any]) -> Mapping[str, Any]:
            return {**kwargs, self.cache_is: getattr(self.last_outputs, self.cache_is, None)}

        for case in chosen:
            logger.info("replaying %s with torch.export", case.name, extra=STEP)
            with undisturbed(module, self.written):
                result = replay(
                    "torch.export",
                    run,
                    self.module,
                    case,
                    following(),
                    feed_back,
                    taken=self.input_leaves,
                    returned=lambda: self.last_outputs,
                    written=self.written,
                )
            self.report.cases.append(result)
        return chosen

    def choose_cases(self, cases: Iterable[Case] | None) -> Sequence[Case]:
        """Return the cases that were asked for, or those of other sizes."""
        if cases is not None:
            return list(cases)
        if self.shapes is None:
            return []
        if self.why_not:
            self.report.remarks.append(
                f"other sizes were not replayed, since {self.why_not}: pass cases=[Case(name, args, kwargs), ...]."
            )
            return []
        from ..huggingface.cases import default_sizes

        sizes, remark = default_sizes(self.module)
        self.report.remarks += [remark] if remark else []
        return [Case(str(s), (), self.resized(s, seed), self.steps) for seed, s in enumerate(sizes)]

    def finish(self, program: ExportedProgram, path: pathlib.Path | None, otherwise: str = "") -> ExportedModel:
        """Hand out what was proven; raise with the report of what was not, and ``otherwise``."""
        if not self.report.ok:
            raise ReplayError(
                f"The exported {self.report.module} does not do what the eager model does (largest difference "
                f"{self.report.max_difference:.1e}, allowed {self.report.tolerance:.1e}).\n{self.report}{otherwise}",
                self.report,
            )
        return ExportedModel(program, self.report, path, self.patches)


def _named(names: list[str], specs: Sequence[Any]) -> list[str]:
    """The names of the leaves that are inputs or outputs of the graph; numbers and None are part of the program."""
    if len(names) != len(specs):
        raise FlattenError(f"{len(names)} leaves {names} for {len(specs)} arguments of the program.")
    return [name for name, spec in zip(names, specs, strict=True) if not isinstance(spec.arg, ConstantArgument)]


def _by_argument(names: list[str], specs: Sequence[Any]) -> dict[str, list[str]]:
    """For each argument, the inputs of the graph that its leaves are."""
    found: dict[str, list[str]] = {}
    for name, spec in zip(names, specs, strict=True):
        if not isinstance(spec.arg, ConstantArgument):
            found.setdefault(name.split(".")[0], []).append(spec.arg.name)
    return found


def _leaf_shapes(inputs: Any, shapes: Any) -> list[dict[int, Any] | None]:
    """The entry of ``shapes`` for every leaf of the inputs; ``None`` above a leaf stands for all below it."""
    node = node_of(inputs)
    if node is None:
        return [dict(enumerate(shapes)) if isinstance(shapes, (list, tuple)) else _mapping(shapes)]
    below = [None] * len(node.children) if shapes is None else shapes
    below = [below[key] for key in inputs] if isinstance(below, Mapping) else below
    return [leaf for child, spec in zip(node.children, below, strict=True) for leaf in _leaf_shapes(child, spec)]


def _named_axes(inputs: Any, shapes: Any) -> dict[tuple[str, int], str]:
    """The names that a specification gives to axes, by input and axis: those of ``Dim`` objects, or texts."""
    names: dict[tuple[str, int], str] = {}
    sizes: dict[str, tuple[str, int]] = {}
    rows = zip(leaf_names(inputs), leaves_of(inputs), _leaf_shapes(inputs, shapes), strict=True)
    for name, leaf, entries in rows:
        for axis, dim in (entries or {}).items():
            chosen = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
            if chosen is None or not isinstance(leaf, torch.Tensor):
                continue
            first, size = sizes.setdefault(chosen, (name, leaf.shape[axis]))
            if leaf.shape[axis] != size:
                raise DynamicShapesError(
                    f"{name}: axis {axis} is called {chosen!r} and has size {leaf.shape[axis]}, but {first} has size "
                    f"{size} under that name. Axes of one name are equal: give it a name of its own."
                )
            names[name, axis] = chosen
    return names


def _mapping(shapes: Any) -> dict[int, Any] | None:
    return dict(shapes) if isinstance(shapes, Mapping) else None


def following() -> Any:
    """Return what makes the inputs of the next step from the outputs of the last."""
    if "transformers" not in sys.modules:
        return lambda kwargs, outputs, seed: None
    from ..huggingface.cases import next_inputs

    return next_inputs
