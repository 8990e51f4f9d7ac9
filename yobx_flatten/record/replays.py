"""A program run over recorded calls, its outputs compared with the recorded ones."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ..diagnose.compare import compare_outputs
from ..diagnose.spec_diff import compare_specs
from ..errors import SpecMismatchError
from ..export.replay import CaseResult
from ..trees.naming import output_names
from .call import Call
from .snapshot import libraries_in_use

__all__ = ["RecordReplay", "replay_calls"]


@dataclasses.dataclass(frozen=True)
class RecordReplay:
    """The results of a program on recorded calls. ``print`` shows them as a table; true if every call passes.

    Attributes:
        calls: one result per call.
        tolerance: largest absolute difference allowed.
    """

    calls: tuple[CaseResult, ...]
    tolerance: float

    @property
    def max_difference(self) -> float:
        """The largest difference of all calls and outputs; infinite when one of them failed."""
        return max((call.max_difference for call in self.calls), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every call is within the tolerance."""
        return self.max_difference <= self.tolerance

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max((len(call.case) for call in self.calls), default=4)
        lines = [f"{'call':{width}}  max difference  worst output"]
        for call in self.calls:
            worst = max(call.differences, key=call.differences.__getitem__, default="-")
            shown = call.error if call.error is not None else f"{call.max_difference:<14.1e}  {worst}"
            lines.append(f"{call.case:{width}}  {shown}")
        within = sum(call.max_difference <= self.tolerance for call in self.calls)
        lines.append(f"{within} of {len(self.calls)} calls within {self.tolerance:.0e}")
        return "\n".join(lines)


def replay_calls(calls: Sequence[Call], program: Any, constants: Mapping[str, Any], tolerance: float) -> RecordReplay:
    """Run a program over calls; see :meth:`.calls.RecordedCalls.replay`."""
    with _runner(program, constants) as run, torch.no_grad():
        return RecordReplay(tuple(_replay(call, run) for call in calls), tolerance)


def _replay(call: Call, run: Callable[[dict[str, Any]], Any]) -> CaseResult:
    inputs, expected = call.inputs, call.outputs
    tokens = "" if call.past is None else f", past {call.past}, new {call.new}"
    name = f"{call.index}: {call.kind}{tokens}"
    start = time.perf_counter()
    try:
        outputs = run(inputs)
        seconds = time.perf_counter() - start
        differences = compare_outputs(expected, outputs, output_names(expected))
    except Exception as error:  # whatever the program raises is the result of this call
        message = " ".join(str(error).split())
        return CaseResult(name, "torch.export", 0, {}, 0.0, f"{type(error).__name__}: {message[:300]}")
    return CaseResult(name, "torch.export", 1, differences, seconds)


@contextlib.contextmanager
def _runner(program: Any, constants: Mapping[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """How the program is called with the inputs of a call, by name. The block is open meanwhile."""
    with libraries_in_use():
        program = getattr(program, "program", program)  # of an ExportedModel
        if not isinstance(program, ExportedProgram):
            yield lambda inputs: program(**{name: x for name, x in inputs.items() if name not in constants})
            return
        module = program.module()
        positional, named = program.call_spec.in_spec.children()

        def run(inputs: dict[str, Any]) -> Any:
            missing = [name for name in named.context if name not in inputs]
            if missing:
                raise SpecMismatchError(f"the call has no {', '.join(missing)}, which the program takes")
            kwargs = {name: inputs[name] for name in named.context}
            rest = {name: value for name, value in inputs.items() if name not in kwargs and name not in constants}
            args, unused = list(rest.values())[: positional.num_children], list(rest)[positional.num_children :]
            if unused:
                raise SpecMismatchError(f"the program does not take {', '.join(unused)}")
            differences = compare_specs(program, (tuple(args), kwargs), names=("exported", "recorded"))
            if differences:
                raise SpecMismatchError(f"other structure: {differences[0]}")
            return module(*args, **kwargs)

        yield run
