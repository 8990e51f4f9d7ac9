"""Run a program over recorded calls, and compare its outputs with the recorded ones."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ..core.compare import shares_of_nan
from ..diagnose.report import Report
from ..diagnose.spec_diff import compare_outputs, compare_specs
from ..errors import SpecMismatchError
from ..errors.failures import result_or
from ..errors.messages import table
from ..export.proof.replay import CaseResult
from ..runners.program_runner import ProgramRunner
from ..trees.naming import output_names
from .call import Call
from .snapshot import libraries_in_use


@dataclasses.dataclass(frozen=True)
class RecordReplay(Report):
    """The results of a program on recorded calls. ``print`` shows them as a table; true if every call passes.

    Attributes:
        calls: one result per call.
        tolerance: largest absolute difference allowed.
    """

    calls: tuple[CaseResult, ...]
    tolerance: float

    def differences(self) -> Iterator[float]:
        """Yield the largest difference of every call, infinite for one that failed."""
        return (call.max_difference for call in self.calls)

    def nan_shares(self) -> Iterator[Mapping[str, float]]:
        """Yield how much of each output is NaN in every call."""
        return (call.nan for call in self.calls)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [["call", "max difference", "worst output"], *([call.case, *call.cells()] for call in self.calls)]
        within = sum(call.max_difference <= self.tolerance for call in self.calls)
        verdict = f"{within} of {len(self.calls)} calls within {self.tolerance:.0e}"
        return "\n".join([*table(rows, indent=""), verdict, *self.nan_notes()])


def replay_calls(
    calls: Sequence[Call], program: Callable[..., Any], constants: Mapping[str, Any], tolerance: float
) -> RecordReplay:
    """Run a program over recorded calls."""
    # constants: the arguments that never changed, which the program does not take
    with libraries_in_use(), torch.no_grad():
        run = _call_of(program, constants)
        return RecordReplay(tuple(_replay(call, run) for call in calls), tolerance)


def _replay(call: Call, run: Callable[[dict[str, Any]], Any]) -> CaseResult:
    inputs, expected = call.inputs, call.outputs
    tokens = "" if call.past is None else f", past {call.past}, new {call.new}"
    name = f"{call.index}: {call.kind}{tokens}"

    def compared() -> CaseResult:
        start = time.perf_counter()
        outputs = run(inputs)
        seconds = time.perf_counter() - start
        names = output_names(expected)
        differences = compare_outputs(expected, outputs, names)
        return CaseResult(name, ProgramRunner.runtime, 1, differences, seconds, nan=shares_of_nan(expected, names))

    def stopped(error: Exception) -> CaseResult:
        message = " ".join(str(error).split())
        return CaseResult(name, ProgramRunner.runtime, 0, {}, 0.0, f"{type(error).__name__}: {message[:300]}")

    return result_or(compared, stopped)  # whatever the program raises is the result of this call


def _call_of(program: Callable[..., Any], constants: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """How the program is called with the inputs of a call, by name."""
    program = getattr(program, "program", program)  # of an ExportedModel
    if not isinstance(program, ExportedProgram):
        return lambda inputs: program(**{name: x for name, x in inputs.items() if name not in constants})
    runner = ProgramRunner(program)
    return lambda inputs: runner.call(*_arguments(program, inputs, constants))


def _arguments(
    program: ExportedProgram, inputs: Mapping[str, Any], constants: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a program was exported with, positional ones first, taken from inputs by name."""
    positional, named = program.call_spec.in_spec.children()
    missing = [name for name in named.context if name not in inputs]
    if missing:
        raise SpecMismatchError(f"the call has no {', '.join(missing)}, which the program takes")
    kwargs = {name: inputs[name] for name in named.context}
    rest = {name: value for name, value in inputs.items() if name not in kwargs and name not in constants}
    args, unused = tuple(rest.values())[: positional.num_children], list(rest)[positional.num_children :]
    if unused:
        raise SpecMismatchError(f"the program does not take {', '.join(unused)}")
    differences = compare_specs(program, (args, kwargs), names=("exported", "recorded"))
    if differences:
        raise SpecMismatchError(f"other structure: {differences[0]}")
    return args, kwargs
