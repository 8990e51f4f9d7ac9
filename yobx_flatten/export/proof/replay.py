"""Compare an exported program with the eager model. Every case runs in a loop over its own outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...diagnose.compare import shares_of_nan
from ...diagnose.export_errors import explain_error
from ...errors import FlattenError, InvalidArgumentError, ReplayError, describe_class
from ...errors.failures import raised_as, result_or
from ...errors.messages import first_line
from ...errors.tried_versions import without_cause
from ...huggingface.cache_names import forward_of, named_for
from ...huggingface.sliding_decoder import SlidingDecoder
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ...trees.naming import output_names
from .module_state import seeded, undisturbed
from .padding import Padding
from .untouched_copy import untouched_copy

__all__ = ["Case", "CaseResult", "Pair", "Side", "check_cases", "clone", "eager_steps", "replay", "side_by_side"]

Next = Callable[[Mapping[str, Any], Any, int], dict[str, Any] | None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs to replay.

    Attributes:
        name: a short description of the case, for the report.
        args: positional arguments; none by default.
        kwargs: keyword arguments; none by default.
        steps: number of calls, 1 by default; after the first, each gets the cache that the call before returned.

    >>> import torch
    >>> from yobx_flatten import export_program
    >>> case = Case("one row", (torch.ones(1, 3),))
    >>> exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), cases=[case])
    >>> [result.case for result in exported.report.cases]
    ['the example', 'one row']
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Attributes:
        case: name of the case.
        runtime: library that ran the program: ``"torch.export"`` or ``"onnxruntime"``.
        steps: number of calls.
        differences: largest absolute difference to the eager model over all steps, by output name.
        seconds: duration of the program's calls.
        error: reason why the case stopped, ``None`` if it did not.
        left_out: outputs of which positions of padding were left out of the comparison.
        nan: share of elements that are NaN in the eager model, by output name, the mean over all steps; 1.0 where no
            element is finite.
        allowed: what outputs may differ by, where that was measured; the others by the tolerance of the report.
    """

    case: str
    runtime: str
    steps: int
    differences: dict[str, float]
    seconds: float
    error: str | None = None
    left_out: tuple[str, ...] = ()
    nan: Mapping[str, float] = dataclasses.field(default_factory=dict)
    allowed: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def worst(self, tolerance: float) -> tuple[str, float, float]:
        """Return the output that is furthest off for what it is allowed, how far, and what is allowed.

        Args:
            tolerance: what an output may differ by that was not measured.
        """
        rows = [(name, found, self.allowed.get(name, tolerance)) for name, found in self.differences.items()]
        # nothing is further off than what is not within, also where nothing is allowed
        return max(
            rows, key=lambda row: (not row[1] <= row[2], row[1] / (row[2] or 1.0)), default=("-", 0.0, tolerance)
        )

    def within(self, tolerance: float) -> bool:
        """Return whether the case ran, and every output is as close as it has to be.

        Args:
            tolerance: what an output may differ by that was not measured.
        """
        _, found, allowed = self.worst(tolerance)
        return self.error is None and found <= allowed

    @property
    def max_difference(self) -> float:
        """The largest difference of all outputs; infinite when the case stopped."""
        return max(self.differences.values(), default=0.0) if self.error is None else float("inf")

    def cells(self) -> list[str]:
        """Return the last cells of its row in a table: the largest difference and its output, or the reason."""
        if self.error is not None:
            return [self.error]
        return [f"{self.max_difference:.1e}", max(self.differences, key=self.differences.__getitem__, default="-")]


def clone(tree: PyTree) -> PyTree:
    """Copy every tensor of nested inputs: static caches are written to in place."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


class _Step(NamedTuple):
    given: Mapping[str, Any]
    outputs: Any
    goes_on: bool  # whether its cache is the one that the step before returned


def eager_steps(
    module: torch.nn.Module, case: Case, written: Collection[str] = (), *, twice: bool = False
) -> list[_Step]:
    """Run a case eagerly: inputs and outputs of each step, both copied before anything writes to them.

    The module gets the objects of the caller, copied as they are; what is returned is flattened, as the other side is
    given it. With ``twice``, a single call that leaves other values in attributes of the module is made again: a
    program has the values of the trace, so the next call of the module may do what no call of the program does.

    Afterwards the state of the module is restored; from step to step the module keeps its changes.
    """

    def copied() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        args, kwargs = untouched_copy((case.args, dict(case.kwargs)), module)
        return args, named_for(forward_of(module), kwargs)

    steps: list[_Step] = []
    following = _following(module)
    args, first = copied()
    kwargs: Mapping[str, Any] | None = first
    with undisturbed(module, written) as changed:
        while kwargs is not None:
            given, index = clone(kwargs), len(steps)
            with _naming(case, module, index), torch.no_grad(), seeded(index):
                outputs = module(*args, **kwargs)
            steps.append(_Step(given, clone(outputs), goes_on=index > 0))
            args = untouched_copy(case.args, module)
            kwargs = following(given, outputs, index) if index + 1 < case.steps else None
        if twice and len(steps) == 1 and changed():
            args, again = copied()
            with _naming(case, module, 1), torch.no_grad(), seeded(1):
                outputs = module(*args, **again)
            steps.append(_Step(steps[0].given, clone(outputs), goes_on=False))
    return steps


@contextlib.contextmanager
def _naming(case: Case, module: torch.nn.Module, step: int) -> Iterator[None]:
    """Name the case in an error of the module itself, which knows of none."""

    def stopped(error: Exception) -> InvalidArgumentError:
        explanation = explain_error(error, module)
        known = f"\n{explanation}" if explanation.known and not isinstance(error, FlattenError) else ""
        return InvalidArgumentError(
            f"case {case.name!r}, step {step}: {type(module).__qualname__} itself stops, before anything is compared "
            f"({type(error).__name__}: {first_line(error)}).{known}"
        )

    with raised_as(stopped):
        yield


class Side(Protocol):
    """One side of a replay: something exported that is called step after step. See :mod:`.exported_call`."""

    runtime: str  # name of the library that runs it
    keeps_state: bool  # whether what the module writes to is kept from call to call

    def from_the_start(self) -> contextlib.AbstractContextManager[object]:
        """Run a case inside; what it writes to is put back afterwards."""
        ...

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        """Run one step; return its outputs as the two other methods take them."""
        # args: positional arguments; the side may write to them
        ...

    def compare(self, eager: PyTree, outputs: PyTree, names: Sequence[str], padding: Padding) -> dict[str, float]:
        """Return the largest difference of every output by name."""
        # eager: nested outputs of the module, with zeros where they are padding
        ...

    def feed_back(self, kwargs: Mapping[str, Any], outputs: PyTree) -> Mapping[str, Any]:
        """Return the inputs of the next step with the cache of ``outputs`` in place of the eager one."""
        ...


class Pair(NamedTuple):
    """One step of a case by both sides."""

    eager: PyTree  # what the module returned
    outputs: PyTree  # what the side returned
    names: list[str]  # of the leaves of `eager`
    seconds: float  # duration of the side's call


def side_by_side(
    side: Side, module: torch.nn.Module, case: Case, steps: Sequence[_Step], taken: Collection[str], padding: Padding
) -> Iterator[Pair]:
    """Run by what was exported the steps that the module ran, with its own cache in place of the module's."""
    # taken: names of inputs, see `naming.output_names`
    # padding: gets the inputs of each call
    positional = inspect.signature(module.forward).bind_partial(*case.args).arguments
    outputs: Any = None
    for index, step in enumerate(steps):
        fed = side.feed_back(step.given, outputs) if step.goes_on else step.given
        padding.next_call({**positional, **step.given})
        start = time.perf_counter()
        with seeded(index):
            outputs = side.run(clone(case.args), fed)
        yield Pair(step.outputs, outputs, output_names(step.outputs, taken), time.perf_counter() - start)


def replay(
    side: Side,
    module: torch.nn.Module,
    case: Case,
    *,
    taken: Collection[str] = (),
    written: Collection[str] = (),
    allowed: Mapping[str, float] | None = None,
) -> CaseResult:
    """Run one case eagerly and by what was exported, and compare every output of every step."""
    # taken: names of inputs, see `naming.output_names`; none by default
    # written: parameters that the module writes to, see `undisturbed.undisturbed`; none by default
    # allowed: what outputs may differ by, as far as it was measured; nothing by default
    # all steps of the module first: what it writes to is put back before the other side runs
    expected = eager_steps(module, case, written, twice=side.keeps_state or not written)
    padding, seconds = Padding(), 0.0
    differences: dict[str, float] = {}
    nan: dict[str, list[float]] = {}
    pairs = side_by_side(side, module, case, expected, taken, padding)

    def failed(index: int, reason: str) -> CaseResult:
        return CaseResult(case.name, side.runtime, index, differences, seconds, f"step {index}{reason}")

    with side.from_the_start():
        for index in range(len(expected)):
            # whatever the runtime raises is the result of this case
            pair = result_or(lambda: next(pairs), lambda error: error)
            if isinstance(pair, Exception):
                return failed(index, f": {type(pair).__name__}: {without_cause(pair).strip()[:500]}")
            seconds += pair.seconds
            blank = padding.blank_leaves(pair.eager, pair.names)
            try:
                found = side.compare(blank, pair.outputs, pair.names, padding)
            except ReplayError as error:
                return failed(index, f", {without_cause(error)}")
            for name, difference in found.items():
                differences[name] = max(differences.get(name, 0.0), difference)
            for name, share in shares_of_nan(padding.kept_leaves(pair.eager, pair.names), pair.names).items():
                nan.setdefault(name, []).append(share)
    means = {name: sum(shares) / len(shares) for name, shares in nan.items()}
    how: dict[str, Any] = {"left_out": tuple(padding.left_out), "nan": means, "allowed": allowed or {}}
    return CaseResult(case.name, side.runtime, len(expected), differences, seconds, **how)


def check_cases(cases: Iterable[Any]) -> list[Case]:
    """Check that every case is a :class:`Case`."""
    found = list(cases)
    for number, case in enumerate(found):
        if not isinstance(case, Case):
            raise InvalidArgumentError(
                f"cases[{number}]: expected a Case, found {describe_class(case)}.\n"
                '    cases=[Case("five rows", args, kwargs)]'
            )
    return found


def _following(module: torch.nn.Module) -> Next:
    """What makes the inputs of the next step from the outputs of the last."""
    if isinstance(module, SlidingDecoder):
        return module.next_inputs
    if "transformers" not in sys.modules:
        return lambda kwargs, outputs, seed: None
    from ...huggingface.cases import next_inputs

    return next_inputs
