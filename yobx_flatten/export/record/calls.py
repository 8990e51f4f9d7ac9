"""Derive example inputs and dynamic shapes for an export from the recorded calls of a model."""

from __future__ import annotations

import bisect
import dataclasses
import inspect
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.export import Dim, ExportedProgram

from ...core.compare import shares_of_nan
from ...diagnose.comparison import Report, compare_outputs, compare_specs
from ...errors import RecordError, SpecMismatchError
from ...errors.failures import result_or, table
from ...huggingface.cache_names import is_cache, name_in
from ...registry.recipe.aliases import TransformersCache
from ...runners.program_runner import ProgramRunner
from ...trees.shapes import dynamic_shapes
from ...trees.walk import output_names
from ..proof.replay import CaseResult
from .axes import Axes, constants_of, read_axes, varying_in
from .call import Call, Callee, call_files, callee_of, libraries_in_use, read_call, same_value


class RecordedCalls(Sequence[Call]):
    """The calls that :func:`~yobx_flatten.record_calls` recorded, in order: all calls, or the calls of one phase.

    ``calls[0]`` is one call, ``calls["decode"]`` contains all decode calls, and ``print(calls)`` lists sizes that vary.

    Attributes:
        failed: calls that raised an error, with their inputs; no phase contains these calls.

    >>> from yobx_flatten import record_calls
    >>> linear = torch.nn.Linear(3, 2)
    >>> with record_calls(linear) as calls:
    ...     _ = linear(torch.zeros(4, 3)), linear(torch.zeros(5, 3))
    >>> len(calls), calls[0], list(calls.phases())
    (2, <call 0 of Linear.forward, forward>, ['forward'])
    """

    def __init__(self, callee: Callee, calls: Sequence[Call] = (), *, of: RecordedCalls | None = None) -> None:
        self._callee, self._calls = callee, list(calls)
        self._of = of  # all calls, of which these are one phase
        self.failed: list[Call] = []

    def _add(self, call: Call) -> None:
        bisect.insort(self._calls, call, key=lambda other: other.index)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: object = None, *, method: str | None = None) -> RecordedCalls:
        """Read the calls that ``record_calls(..., to=folder)`` wrote.

        Args:
            folder: the folder that was passed to ``record_calls`` as ``to``.
            model: the object whose method was recorded; ``None``, the default, if :meth:`module` is not called.
            method: the name of the recorded method, see :func:`~yobx_flatten.record_calls`.

        Returns:
            The recorded calls, in the order in which they began.

        Raises:
            RecordError: when the folder holds no calls, or a file is damaged.
        """
        files = call_files(pathlib.Path(folder))
        if not files:
            raise RecordError(f"{folder} contains no recorded calls.")
        first = read_call(files[0], None if model is None else callee_of(model, method))
        callee = first.callee
        calls = [first, *(read_call(path, callee) for path in files[1:])]
        loaded = cls(callee, [call for call in calls if not call.error])
        loaded.failed += [call for call in calls if call.error]
        return loaded

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._calls))

    @overload
    def __getitem__(self, which: int) -> Call: ...

    @overload
    def __getitem__(self, which: str | slice) -> RecordedCalls: ...

    def __getitem__(self, which: int | str | slice) -> Call | RecordedCalls:
        if isinstance(which, str):
            phases = self.phases()
            if which not in phases:
                raise RecordError(f"No phase {which!r} was recorded. Recorded phases: {_listed(phases) or 'none'}.")
            return phases[which]
        if isinstance(which, slice):
            return RecordedCalls(self._callee, self._calls[which], of=self._of)
        return self._calls[which]

    def phases(self) -> dict[str, RecordedCalls]:
        """Return the recorded calls by phase, such as prefill and decode.

        A phase is ``prefill`` (the KV cache is empty, or created by the call), ``decode`` (the cache has tokens) or
        ``forward`` (no cache). One exported program serves all calls of a phase. Calls with additional arguments form a
        separate phase, such as ``prefill+pixel_values``.
        """
        groups: list[list[Call]] = []
        for call in self._calls:
            alike = next((group for group in groups if _alike(group[0], call)), None)
            if alike is None:
                groups.append([call])
            else:
                alike.append(call)
        named: dict[str, RecordedCalls] = {}
        for calls in groups:
            name = calls[0].kind
            if name in named:
                first, mine = _arguments(named[name][0]), _arguments(calls[0])
                added = [f"+{argument}" for argument in mine if argument not in first]
                name = "".join([name, *added, *(f"-{argument}" for argument in first if argument not in mine)])
                numbered = (f"{name}#{number}" for number in itertools.count(2))
                name = next(unique for unique in itertools.chain([name], numbered) if unique not in named)
            named[name] = RecordedCalls(self._callee, calls, of=self._of or self)
        return named

    def axes(self) -> Axes:
        """Return the axes that vary between recorded calls, with size names and relations such as ``n = 2 * batch``."""
        return read_axes((self._of or self)._calls)

    def report(self) -> str:
        """Return a table of the recorded arguments and of the sizes that vary, with relations between the sizes."""
        phases, axes = self.phases(), self.axes()
        lines = [f"{self._callee.label}: {_counted(self)}"]
        used = [name for name in axes.sizes if name in axes.names.values() or name == "past"]
        if used:
            lines.append("  " + "   ".join(f"{name} {_span(axes.seen(name, self))}" for name in used))
        lines += [f"  {relation}" for relation in axes.relations]
        for name, part in phases.items():
            constants, first = constants_of(part), part[0]
            rows = [("argument", "dtype", "sizes", "varies")]
            own = [row for row in _rows(part, axes) if row[0].partition(".")[0] not in constants]
            # tensors with equal dtypes and sizes, such as the keys of all layers of a cache, are merged into one row
            for (parent, *alike), group in itertools.groupby(own, lambda row: (row[0].rpartition(".")[0], *row[1:])):
                paths = [row[0] for row in group]
                if parent and len(paths) > 1:
                    paths = [f"{paths[0]} ... {paths[-1].removeprefix(f'{parent}.')} ({len(paths)})"]
                rows += [(path, alike[0], alike[1], alike[2]) for path in paths]
            filled = {fact.path.partition(".")[0] for fact in first.facts()}
            empty = [one for one in first.snapshot.spec.context if one not in constants and one not in filled]
            rows += [(one, "-", "holds nothing yet", "") for one in empty]
            lines += ["", f"{name}: {_counted(part)}", *table(rows)]
            if constants:
                lines.append(f"  constant: {', '.join(f'{one}={value!r}' for one, value in constants.items())}")
        if axes.remarks:
            lines += ["", *(f"note: {remark}" for remark in axes.remarks)]
        return "\n".join(lines)

    __str__ = report

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(calls)}" for name, calls in self.phases().items())
        return f"<{len(self)} calls of {self._callee.label}{f' ({sizes})' if sizes else ''}>"

    def constants(self, phase: str | None = None) -> dict[str, Any]:
        """Return the non-tensor arguments that are equal in all calls of a phase, such as ``use_cache=True``.

        Args:
            phase: name of a phase of the recording, such as ``"prefill"``; optional if the recording has one phase.

        Returns:
            The constant arguments by parameter name.

        Raises:
            RecordError: when no recorded call is in ``phase``.
        """
        return constants_of(self._one(phase)._calls)

    def example(self, phase: str | None = None, **sizes: int) -> dict[str, Any]:
        """Return the inputs of one recorded call, without :meth:`constants`, as example inputs for :meth:`module`.

        The chosen call has the fewest dynamic sizes of 0 or 1, because ``torch.export`` treats these sizes as fixed.
        Among several such calls, the call in which the fewest dynamic sizes are equal is chosen, and among several of
        these, the call with the fewest tensor elements. A batch of size 1 is repeated to size 2.

        Args:
            phase: name of a phase of the recording, such as ``"prefill"``; optional if the recording has one phase.
            **sizes: sizes of named axes (see :meth:`axes`). ``batch=3`` repeats or truncates tensors to batch size 3.

        Returns:
            Copies of the keyword arguments, which the caller may change.

        Raises:
            RecordError: when no recorded call is in ``phase``, or a name in ``sizes`` is not the name of an axis.
        """
        calls, axes = self._one(phase)._calls, self.axes()
        varying = varying_in(calls, axes, sizes)
        names = sorted(set(varying.values()))

        def unfit(call: Call) -> tuple[int, int, int]:
            of_call = [axes.sizes[name].get(call.index, 2) for name in names]
            elements = sum(torch.Size(fact.shape).numel() for fact in call.facts() if fact.is_tensor)
            return sum(size < 2 for size in of_call), len(of_call) - len(set(of_call)), elements

        call = min(calls, key=unfit)
        wanted = {**{name: max(2, axes.sizes[name].get(call.index, 2)) for name in names}, **sizes}
        if "past" in sizes:  # a sliding layer keeps at most the tokens seen
            kept = [name for name in wanted if name.startswith("kept")]
            wanted.update({name: min(sizes["past"], max(axes.sizes[name].values())) for name in kept})
        if "total" in wanted and call.past is not None and call.new is not None:
            wanted["total"] = wanted.get("past", call.past) + wanted.get("new", call.new)
        leaves = []
        for leaf, fact in zip(call.snapshot.leaves(), call.facts(), strict=True):
            sizes_of_leaf = {axis: wanted[name] for (path, axis), name in varying.items() if path == fact.path}
            # a varying int is a size
            resized = leaf if isinstance(leaf, torch.Tensor) else sizes_of_leaf.get(None, leaf)
            if isinstance(resized, torch.Tensor):
                for axis, size in sizes_of_leaf.items():
                    if axis is not None and resized.shape[axis] not in (0, size):
                        rows = torch.arange(size, device=resized.device) % resized.shape[axis]
                        resized = resized.index_select(axis, rows)
                resized = resized.to(device=fact.device, copy=True)
            leaves.append(resized)
        constants = constants_of(calls)
        return {name: value for name, value in call.snapshot.restore(leaves).items() if name not in constants}

    def dynamic_shapes(self, phase: str | None = None, **sizes: int) -> dict[str, Any]:
        """Return the ``dynamic_shapes`` of the inputs that :meth:`example` returns, for ``torch.export.export``.

        Args:
            phase: name of a phase of the recording, such as ``"prefill"``; optional if the recording has one phase.
            **sizes: the sizes that were passed to :meth:`example`; the axes with these names become dynamic.

        Returns:
            The specification for ``torch.export``, by parameter name.

        Raises:
            RecordError: when no recorded call is in ``phase``, or a name in ``sizes`` is not the name of an axis.
        """
        calls, axes = self._one(phase)._calls, self.axes()
        varying, constants = varying_in(calls, axes, sizes), constants_of(calls)
        inputs = {name: value for name, value in calls[0].inputs.items() if name not in constants}
        wanted: dict[str, Any] = {}
        for fact in calls[0].facts():
            if fact.path.partition(".")[0] in inputs:
                places = {axis: Dim.AUTO for (path, axis) in varying if path == fact.path}
                wanted[fact.path] = places if fact.is_tensor else places.get(None)
        written: dict[str, Any] = dynamic_shapes(inputs, wanted)
        return written

    def module(self, phase: str | None = None) -> torch.nn.Module:
        """Return a module to export: it passes its inputs (see :meth:`example`) and :meth:`constants` to the model.

        Args:
            phase: name of a phase of the recording, such as ``"prefill"``; optional if the recording has one phase.

        Returns:
            A module that calls the recorded method.

        Raises:
            RecordError: when no recorded call is in ``phase``, or the calls were loaded without ``model``.
        """
        calls = self._one(phase)._calls
        if self._callee.owner is None:
            raise RecordError(
                "The folder stores recorded calls, but not the model that was called. Pass the model:\n"
                f"    RecordedCalls.load(folder, model)  # {self._callee.label}"
            )
        callee, constants = self._callee, constants_of(calls)
        # torch.export has no dynamic shapes for **kwargs, where Hugging Face models receive half of their arguments
        names = [name for name in calls[0].snapshot.spec.context if name not in constants]

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # a copy of the module calls its copy of the owner
            return self._callee.call({**dict(zip(names, args, strict=False)), **kwargs, **self._constants})

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect reads it first
        module: torch.nn.Module = type(type(callee.owner).__name__, (torch.nn.Module,), {"forward": forward})()
        module._callee, module._constants = callee, constants  # type: ignore[assignment] # not a tensor or module
        if isinstance(callee.owner, torch.nn.Module):
            module.recorded = callee.owner
            module.training = callee.owner.training
        return module

    def replay(self, program: Callable[..., Any], phase: str | None = None, *, tolerance: float = 1e-4) -> RecordReplay:
        """Run a program on the recorded calls, and compare its outputs with the recorded outputs.

        Args:
            program: an :class:`~yobx_flatten.ExportedModel`, a ``torch.export.ExportedProgram``, or a callable that
                takes the keyword arguments that :meth:`example` returns.
            phase: name of a phase of the recording, such as ``"prefill"``; optional if the recording has one phase.
            tolerance: largest allowed absolute difference of an output value; 1e-4 by default.

        Returns:
            A report with a table row per recorded call; the report is true if every call is within the tolerance.

        Raises:
            RecordError: when no recorded call is in ``phase``.
        """
        calls = self._one(phase)._calls
        with libraries_in_use(), torch.no_grad():
            constants = constants_of(calls)
            called: Any = getattr(program, "program", program)  # of an ExportedModel
            runner = ProgramRunner(called) if isinstance(called, ExportedProgram) else None

            def run(inputs: dict[str, Any]) -> Any:
                if runner is None:
                    return called(**{name: value for name, value in inputs.items() if name not in constants})
                positional, named = called.call_spec.in_spec.children()
                missing = [name for name in named.context if name not in inputs]
                if missing:
                    raise SpecMismatchError(f"the recorded call lacks inputs of the program: {', '.join(missing)}")
                kwargs = {name: inputs[name] for name in named.context}
                rest = {name: value for name, value in inputs.items() if name not in kwargs and name not in constants}
                count = positional.num_children
                args, unused = tuple(rest.values())[:count], list(rest)[count:]
                if unused:
                    raise SpecMismatchError(f"the recorded call has inputs that the program lacks: {', '.join(unused)}")
                differences = compare_specs(called, (args, kwargs), names=("exported", "recorded"))
                if differences:
                    raise SpecMismatchError(f"the program has inputs of a different structure: {differences[0]}")
                return runner.call(args, kwargs)

            return RecordReplay(tuple(_replay(call, run) for call in calls), tolerance)

    def _one(self, phase: str | None) -> RecordedCalls:
        if phase is not None:
            return self[phase]
        phases = self.phases()
        if len(phases) == 1:
            return next(iter(phases.values()))
        if not phases:
            raise RecordError(f"No call of {self._callee.label} was recorded.")
        name = next(iter(phases))
        raise RecordError(f"Calls of {len(phases)} phases were recorded: {_listed(phases)}. Choose one: phase={name!r}")


def _listed(phases: Mapping[str, RecordedCalls]) -> str:
    return ", ".join(f"{name!r} ({_counted(calls)})" for name, calls in phases.items())


# Show recorded calls as a table: each argument, and the sizes that vary together.
def _counted(calls: Sequence[Call]) -> str:
    return f"{len(calls)} call{'' if len(calls) == 1 else 's'}"


def _rows(calls: Sequence[Call], axes: Axes) -> Iterator[tuple[str, str, str, str]]:
    varying = varying_in(calls, axes, {})
    by_call = [call.facts() for call in calls]
    for number, fact in enumerate(by_call[0]):
        if not fact.is_tensor:
            values = [facts[number].value for facts in by_call]
            name = varying.get((fact.path, None), "")
            shown = list(dict.fromkeys(map(repr, values)))
            text = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
            if all(type(value) is int for value in values):
                text = _span(sorted(set(values)))
            yield fact.path, type(fact.value).__name__, text, name
            continue
        axes_of = range(len(fact.shape))
        spans = [_span(sorted({facts[number].shape[axis] for facts in by_call})) for axis in axes_of]
        sizes = " x ".join(f"({span})" if "," in span else span for span in spans) or "()"
        names = [f"{axis}: {varying[fact.path, axis]}" for axis in axes_of if (fact.path, axis) in varying]
        yield fact.path, str(fact.dtype).removeprefix("torch."), sizes, ", ".join(names)


def _span(sizes: Sequence[int]) -> str:
    """Return sorted sizes as a short text, with ``..`` between the ends of a range.

    >>> _span([2]), _span([1, 8]), _span([0, 8, 9, 10])
    ('2', '1, 8', '0, 8..10')
    """
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    spelled = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(spelled if len(spelled) < 6 else [*spelled[:2], "...", spelled[-1]])


# Separate prefill from decode, and group calls of one structure: one program serves each group.
def cache_of(values: Mapping[str, Any]) -> TransformersCache | None:
    named = values.get(name_in(values) or "")
    if named is not None and not isinstance(named, torch.Tensor):
        return named
    # a model outside of transformers may use any name
    return next((value for value in values.values() if is_cache(value)), None)


def _alike(one: Call, other: Call) -> bool:
    """Return whether one exported program can run two given calls."""
    if one.kind != other.kind or one.snapshot.spec != other.snapshot.spec:
        return False
    for a, b in zip(one.facts(), other.facts(), strict=True):
        if a.is_tensor or b.is_tensor:
            same = a.dtype is b.dtype and len(a.shape) == len(b.shape)
        elif type(a.value) in (bool, str, float, complex, torch.dtype, torch.device):  # a program follows one branch
            same = same_value(a, b)
        else:
            same = type(a.value) is type(b.value)  # a number that varies is an input
        if not same:
            return False
    return True


def _arguments(call: Call) -> Iterable[str]:
    return dict.fromkeys(
        fact.path.partition(".")[0] for fact in call.facts() if fact.is_tensor or fact.value is not None
    )


# Run a program on recorded calls, and compare its outputs with the recorded ones.
@dataclasses.dataclass(frozen=True)
class RecordReplay(Report):
    """A comparison of a program with recorded calls: ``print`` shows a table; the object is true if all calls pass.

    Attributes:
        calls: for each recorded call, the differences between the outputs of the program and the recorded outputs.
        tolerance: largest allowed absolute difference of an output value.
    """

    calls: tuple[CaseResult, ...]
    tolerance: float

    def differences(self) -> Iterator[float]:
        """Yield for every call the largest difference from the recorded outputs, or infinity if the call failed."""
        return (call.max_difference for call in self.calls)

    def nan_shares(self) -> Iterator[Mapping[str, float]]:
        """Yield for every call the share of NaN values in each recorded output."""
        return (call.nan for call in self.calls)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [["call", "max difference", "worst output"], *([call.case, *call.cells()] for call in self.calls)]
        within = sum(call.max_difference <= self.tolerance for call in self.calls)
        verdict = f"{within} of {len(self.calls)} calls within {self.tolerance:.0e}"
        return "\n".join([*table(rows, indent=""), verdict, *self.nan_notes()])


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

    return result_or(compared, stopped)  # any exception of the program is the result of this call
