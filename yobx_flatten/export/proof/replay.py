"""Compare an exported program with the eager model. Every case runs in a loop over its own outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...core.compare import shares_of_nan
from ...core.effects import undisturbed
from ...errors import ReplayError
from ...errors.failures import result_or
from ...errors.tried_versions import without_cause
from ...recipe.aliases import PyTree
from ...trees.naming import output_names
from .case import Case, clone
from .eager_runs import EagerRuns, Step
from .left import Left
from .padding import Padding


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
        cause: why a case differs, where that was found out; ``""`` elsewhere.
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
    cause: str = ""

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
    side: Side, module: torch.nn.Module, case: Case, steps: Sequence[Step], taken: Collection[str], padding: Padding
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
        with undisturbed(seed=index):
            outputs = side.run(clone(case.args), fed)
        yield Pair(step.outputs, outputs, output_names(step.outputs, taken), time.perf_counter() - start)


def replay(
    side: Side,
    runs: EagerRuns,
    case: Case,
    *,
    taken: Collection[str] = (),
    written: Collection[str] = (),
    left: Left | None = None,
    allowed: Mapping[str, float] | None = None,
) -> CaseResult:
    """Run one case eagerly and by what was exported, and compare every output of every step."""
    # taken: names of inputs, see `naming.output_names`; none by default
    # written: parameters that the module writes to; none by default
    # left: what is returned of its arguments, see `left`; nothing by default
    # allowed: what outputs may differ by, as far as it was measured; nothing by default
    # all steps of the module first: what it writes to is put back before the other side runs
    expected = runs.steps(case, written, left, twice=side.keeps_state or not written)
    padding, seconds = Padding(), 0.0
    differences: dict[str, float] = {}
    nan: dict[str, list[float]] = {}
    pairs = side_by_side(side, runs.module, case, expected, taken, padding)

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
