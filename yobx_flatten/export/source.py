"""Check a program on test cases, and return a ``Source``, from which the files of all runtimes are written."""

# arguments ──> example ──> traced ──> cases ──> replay ──> Source ──> a file for each runtime

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ..core.compare import tolerance
from ..core.private_names.of_torch import pytree
from ..errors import FlattenError, InvalidArgumentError
from ..errors.failures import STEP, first_line
from ..runners.adapters import Adapter
from ..runners.program_runner import ProgramRunner
from ..runners.signature import MISFIT
from ..trace.program import traced_inputs
from ..trees.walk import leaf_names
from .example import Example
from .model_facts import ModelFacts
from .proof.eager_runs import Case, Proof, check_cases, choose_proof, note_on_lost, sampled
from .proof.replay import CaseResult, Nested, Side, replay
from .proof.report import ExportReport, Yardstick
from .traced import Traced, calm, trace
from .varied import INFINITIES, dependence_on_padding, notes_on_fixed_axes, rounding_changes, varied_cases

logger = logging.getLogger("yobx_flatten")


@dataclasses.dataclass(frozen=True)
class Asked:
    facts: ModelFacts  # the module
    cases: Sequence[Case] | None  # cases to check in addition to the example; `None` for generated cases
    steps: int  # number of calls of each generated case
    proof: Proof  # `"full"`, `"standard"`, `"sample"` or `"none"`
    tolerance: float  # largest absolute difference of an output whose rounding error was not measured
    measures: bool  # whether the rounding error of the weights' dtype is measured for each case
    measures_failures: bool  # whether it is measured for cases that differ by more than the tolerance

    @classmethod
    def of(
        cls, module: torch.nn.Module, cases: Iterable[Case] | None, steps: int, stated: float | None, proof: Proof
    ) -> Asked:
        checked, facts = None if cases is None else check_cases(cases), ModelFacts.of(module)
        most: Any = tolerance("file", *facts.types) if stated is None else stated
        if not isinstance(most, int | float) or not most >= 0:
            raise InvalidArgumentError(f"tolerance must be None or a number of 0 or more, found {stated!r}.")
        has_half = stated is None and not {"float16", "bfloat16"}.isdisjoint(facts.types)
        is_single = stated is None and {*facts.kernel_types} <= {"float32"}
        return cls(facts, checked, steps, choose_proof(proof, facts.weight_bytes), most, has_half, is_single)

    def report(self, runtime: str = "") -> ExportReport:
        return ExportReport(self.facts.name, tolerance=self.tolerance, proof=self.proof, runtime=runtime)

    def measure(self, report: ExportReport, example: Example, traced: Traced, known: Yardstick | None = None) -> None:
        # known: earlier measurements, which are reused if they are of the same module
        if report.proof == "none" or example.no_data:
            return
        module = example.module
        made = functools.partial(Yardstick, module, example.names, traced.written, traced.left)
        reason = Yardstick.why_not(module) if self.measures or self.measures_failures else ""
        if self.measures_failures and not reason:
            report.spare = made(is_half=False)
        if self.measures and reason:
            report.remark(
                f"the rounding error of the weights' dtype was not measured, since {reason}: {report.tolerance} is "
                "allowed."
            )
        elif self.measures:
            report.yardstick = known if known is not None and known.module is module else made()


@dataclasses.dataclass(frozen=True)
class Source:
    asked: Asked
    example: Example
    traced: Traced
    cases: Sequence[Case]
    is_given: bool = False  # whether the caller passed the program, so that files are made of it without a new trace
    yardstick: Yardstick | None = None  # measured rounding errors of the module
    adapters: Sequence[Adapter] = ()  # adapters that the file is also replayed with
    varied: Sequence[Case] = ()  # cases of other sizes and values; quantized files are measured without these cases


def traced_example(example: Example, report: ExportReport, *, strict: bool = False) -> Traced:
    with report.timed("trace"):
        traced = trace(example, strict=strict)
    noted(example, traced, report)
    with calm():
        if report.proof != "none" and not example.no_data and not traced.readers:
            report.remark(*notes_on_fixed_axes(example, traced))
    return traced


def noted(example: Example, traced: Traced, report: ExportReport) -> None:
    report.remark(*example.remarks)
    report.input_names, report.output_names = traced.input_names, traced.output_names
    report.remark(*traced.remarks())


def prove(
    example: Example,
    traced: Traced,
    asked: Asked,
    report: ExportReport,
    *,
    only_fitting: bool = False,
    runs: bool = True,
) -> Source:
    """Compare a program with the module on test cases; return a ``Source``, from which files are written."""
    # called inside `register_flattening_functions`
    # only_fitting: whether generated cases whose sizes the program refuses are left out
    # runs: whether the program is replayed, in addition to a file
    report.runs = example.runs
    # before the replay, which compares differences with the measured error of half precision
    asked.measure(report, example, traced)
    with report.timed("replay"), calm():
        cases = _cases_of(example, asked, report)
        if only_fitting and asked.cases is None:
            shapes = shapes_taken(traced.program)
            rows = [(case, _misfit(traced.program, shapes, case)) for case in cases]
            report.remark(*(f"{case.name}: not replayed, since {misfit}." for case, misfit in rows if misfit))
            cases = [case for case, misfit in rows if not misfit]
        varied: list[Case] = []
        if cases and asked.cases is None and example.why_not:  # inputs of a language model are resized by its own rules
            is_free = asked.measures_failures or asked.measures
            found, remarks = varied_cases(example, traced, only_largest=asked.proof == "sample", magnitudes=is_free)
            report.remark(*remarks)
            varied = [case for case in found if example.holds(case, 1)]
            report.remark(*left_out(len(found) - len(varied)))
    # cases that are left out are not kept alive
    source = Source(dataclasses.replace(asked, cases=None), example, traced, cases)
    if cases and runs:
        side = Nested(ProgramRunner(traced.program), example.cache_is, traced.written)
        replay_cases([side], source, report)
        tried, varied = [] if report.failed() else varied, []
        for case in tried:
            result = _result(side, source, case, report, is_varied=True)
            if result.error is None:
                varied.append(case)
                _add(result, report)
            elif case.name != INFINITIES:
                reason = " ".join(result.error.split())[:200]
                report.remark(f"the program refuses inputs that the module accepts ({case.name}; {reason}).")
    return dataclasses.replace(source, yardstick=report.yardstick, varied=varied)


def replay_cases(sides: Sequence[Side], source: Source, report: ExportReport) -> None:
    """Run the test cases on a program or file, and add the results to the report."""
    for case, side in itertools.product(source.cases, sides):
        _add(_result(side, source, case, report, is_varied=False), report)


def _add(found: CaseResult, report: ExportReport) -> None:
    """Add the result of a test case to the report; a difference for infinite inputs becomes only a note."""
    name, difference, _ = found.worst(report.tolerance)
    if found.case != INFINITIES or found.within(report.tolerance):
        report.cases.append(found)
    else:
        reason = found.error or f"{name} differs by {difference:.1e}"
        report.remark(f"with infinite values, {found.runtime} differs from the module ({reason}).")


def _result(side: Side, source: Source, case: Case, report: ExportReport, *, is_varied: bool) -> CaseResult:
    # is_varied: whether the case was generated from the example, so that rounding of its inputs may explain differences
    example, traced = source.example, source.traced
    logger.info("replaying %s with %s", case.name, side.runtime, extra=STEP)
    with report.timed("replay"):
        allowed = report.explained(case)
        found = replay(
            side, example.runs, case, taken=example.names, written=traced.written, left=traced.left, allowed=allowed
        )
        report.remark(*note_on_lost(example.runs.lost))
        found = report.by_float64(found, case)
        if found.within(report.tolerance) or found.error is not None:
            return found
        if is_varied:  # differences that rounded inputs also cause in the module itself are allowed
            changes = rounding_changes(example, case, traced, report.tolerance)
            sizes = {name: max(found.allowed.get(name, 0.0), changes.get(name, 0.0)) for name in found.differences}
            sizes = {name: size for name, size in sizes.items() if size > report.tolerance}
            found = dataclasses.replace(found, allowed={**found.allowed, **sizes})
            if found.within(report.tolerance):
                report.remark(
                    f"{case.name}: rounding errors of the inputs change the module's own outputs by up to "
                    f"{max(sizes.values()):.1e}, so a difference of this size is allowed."
                )
                return found
        if not any(one.cause for one in report.cases):
            cause = dependence_on_padding(example.module, case, traced.written, report.tolerance)
            found = dataclasses.replace(found, cause=cause)
        return found


def replay_file(
    load: Callable[[], Sequence[Side]],
    source: Source,
    report: ExportReport,
    why_not: Callable[[FlattenError], str] = first_line,
) -> None:
    """Load a file and run the test cases with the file; if loading fails, add one result with the error."""
    # why_not: returns the text for the report if `load` raises an error
    if not source.cases:
        return
    try:
        with report.timed("load"):
            sides = load()
    except FlattenError as error:
        report.cases.append(CaseResult("(loading)", report.runtime or "onnxruntime", 0, {}, 0.0, why_not(error)))
        return
    replay_cases(sides, source, report)
    refused: dict[str, str] = {}
    for case, side in itertools.product([] if report.failed() else source.varied, sides):
        found = _result(side, source, case, report, is_varied=True)
        if MISFIT in (found.error or ""):  # the conversion fixed sizes that vary in the program
            refused[case.name] = str(found.error).partition(f"{MISFIT}: ")[2]
        else:
            _add(found, report)
    if refused:
        reason = next(iter(refused.values()))
        report.remark(f"{'; '.join(refused)}: not replayed with the file, which refuses their sizes: {reason}")


def _cases_of(example: Example, asked: Asked, report: ExportReport) -> list[Case]:
    if asked.proof == "none":
        return []
    if example.no_data:
        report.remark(f"nothing was replayed, since {example.no_data}.")
        return []
    is_sample = asked.proof == "sample"
    steps = min(asked.steps, 2) if is_sample else asked.steps  # the second call gets the cache of the first call
    if asked.cases is None:
        others, remarks = example.other_cases(steps, only_largest=is_sample)
        report.remark(*remarks)
    else:
        others = sampled(asked.cases) if is_sample else list(asked.cases)
    fitting = [case for case in others if example.holds(case, case.steps)]
    report.remark(*left_out(len(others) - len(fitting)))
    chosen = [shortened(example, example.case(steps)), *fitting]
    return [dataclasses.replace(case, steps=min(case.steps, steps)) for case in chosen] if is_sample else chosen


def shortened(example: Example, case: Case) -> Case:
    """Reduce the number of calls of a test case so that all inputs stay within the bounds of the example."""
    steps = next((steps for steps in range(case.steps, 1, -1) if example.holds(case, steps)), 1)
    return dataclasses.replace(case, steps=steps)


def left_out(count: int) -> list[str]:
    return [f"{count} cases were left out: they are larger than the bounds."] if count else []


def shapes_taken(program: ExportedProgram) -> list[tuple[Any, ...]]:
    """Return the shape of each input, with symbols for dynamic sizes; ``()`` for an input that is not a tensor."""
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in traced_inputs(program)]


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
