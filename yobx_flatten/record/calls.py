"""Recorded calls of a model, and what an export needs to know of them."""

from __future__ import annotations

import bisect
import inspect
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch

from ..errors import RecordError
from ..files.damage import damage_as
from ..recipe.static_codec import load_static
from .axes import Axes, read_axes
from .call import About, Call
from .callee import Callee, callee_of, module_of
from .example import choose_example, constants_of, shapes_of
from .files import call_files, read_call
from .phases import by_phase
from .replays import RecordReplay, replay_calls
from .table import table_of


class RecordedCalls(Sequence[Call]):
    """The calls that :func:`~yobx_flatten.record_calls` saw, in order: all of them, or those of one phase.

    ``calls[0]`` is a call, ``calls["decode"]`` the calls of a phase, ``print(calls)`` shows what varies.

    Attributes:
        failed: the calls that raised, with their inputs; they are in no phase.

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
            folder: the folder that holds them.
            model: the object that was recorded; only :attr:`module` needs it.
            method: as for :func:`~yobx_flatten.record_calls`.

        Returns:
            The calls, in the order in which they began.

        Raises:
            RecordError: when the folder holds no calls, or a file is damaged.
        """
        files = call_files(pathlib.Path(folder))
        if not files:
            raise RecordError(f"{folder} holds no recorded calls.")
        found = [read_call(path) for path in files]
        callee = _stored_callee(files[0], found[0][1]) if model is None else callee_of(model, method)
        calls = [Call(callee, a.index, a.kind, a.past, a.new, parts, a.error) for parts, a in found]
        loaded = cls(callee, [call for call in calls if not call.error])
        loaded.failed += [call for call in calls if call.error]
        return loaded

    # -- a sequence ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._calls))

    @overload
    def __getitem__(self, which: int) -> Call: ...

    @overload
    def __getitem__(self, which: str) -> RecordedCalls: ...

    @overload
    def __getitem__(self, which: slice) -> RecordedCalls: ...

    def __getitem__(self, which: int | str | slice) -> Call | RecordedCalls:
        if isinstance(which, str):
            phases = self.phases()
            if which not in phases:
                raise RecordError(f"No phase {which!r} was recorded, but {_listed(phases) or 'no call at all'}.")
            return phases[which]
        if isinstance(which, slice):
            return RecordedCalls(self._callee, self._calls[which], of=self._of)
        return self._calls[which]

    # -- what they state
    # -------------------------------------------------------------------------------------------------

    def phases(self) -> dict[str, RecordedCalls]:
        """The calls by phase: calls of one phase have one structure, and one program serves them.

        ``prefill`` has an empty cache or none, ``decode`` one that holds tokens, ``forward`` is a call without cache.
        Where arguments also differ, the name states it: ``prefill+pixel_values``.
        """
        groups = by_phase(self._calls)
        return {name: RecordedCalls(self._callee, calls, of=self._of or self) for name, calls in groups.items()}

    def axes(self) -> Axes:
        """The axes that vary, their names, and how the names are related: read from all calls, of every phase."""
        return read_axes((self._of or self)._calls)

    def report(self) -> str:
        """Return a table of what each argument was, what varies, and what varies together."""
        return table_of(self._callee.label, {name: list(part) for name, part in self.phases().items()}, self.axes())

    __str__ = report

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(calls)}" for name, calls in self.phases().items())
        return f"<{len(self)} calls of {self._callee.label}{f' ({sizes})' if sizes else ''}>"

    # -- what an export needs ------------------------------------------------------------------------------------------

    def constants(self, phase: str | None = None) -> dict[str, Any]:
        """The arguments without tensors that never changed. :attr:`module` passes them; a program has no such inputs.

        Args:
            phase: name of the phase; it can be omitted if there is only one.

        Returns:
            The values by parameter name.

        Raises:
            RecordError: when there is no such phase.
        """
        return constants_of(self._one(phase)._calls)

    def example(self, phase: str | None = None, **sizes: int) -> dict[str, Any]:
        """Inputs to export :meth:`module` with: those of a recorded call, without the constants.

        Of the calls of the phase, the smallest is chosen in which as many of the varying sizes as possible are 2 or
        more, since ``torch.export`` treats 0 and 1 as fixed. A batch of one row is repeated.

        Args:
            phase: name of the phase; it can be omitted if there is only one.
            **sizes: sizes to have instead, by name: ``batch=3``, ``new=4``. Rows, columns and tokens are repeated.

        Returns:
            Keyword arguments. They are copies, which the caller may change.

        Raises:
            RecordError: when there is no such phase, or no such size.
        """
        part = self._one(phase)
        return choose_example(part._calls, self.axes(), sizes)

    def dynamic_shapes(self, phase: str | None = None, **sizes: int) -> dict[str, Any]:
        """The ``dynamic_shapes`` for :meth:`example`, as ``torch.export.export`` takes them.

        Args:
            phase: name of the phase; it can be omitted if there is only one.
            **sizes: as for :meth:`example`; a size that is named there varies.

        Returns:
            The specification by parameter name.

        Raises:
            RecordError: when there is no such phase, or no such size.
        """
        part = self._one(phase)
        return shapes_of(part._calls, self.axes(), sizes)

    def module(self, phase: str | None = None) -> torch.nn.Module:
        """The module to export: it takes what :meth:`example` returns, and passes the constants.

        Args:
            phase: name of the phase; it can be omitted if there is only one.

        Returns:
            The module, which calls the recorded object.

        Raises:
            RecordError: when there is no such phase, or the calls were loaded without ``model``.
        """
        part = self._one(phase)
        if self._callee.owner is None:
            raise RecordError(
                f"Which object was recorded is not stored. Name it:\n"
                f"    RecordedCalls.load(folder, model)  # {self._callee.label}"
            )
        constants = constants_of(part._calls)
        names = [name for name in _names(part._calls[0]) if name not in constants]
        return module_of(self._callee, names, constants)

    def replay(self, program: Callable[..., Any], phase: str | None = None, *, tolerance: float = 1e-4) -> RecordReplay:
        """Run a program over the recorded calls, and compare what it returns with what was recorded.

        Args:
            program: an :class:`~yobx_flatten.ExportedModel`, a ``torch.export.ExportedProgram``, or anything that is
                called with the arguments of :meth:`example`.
            phase: name of the phase; it can be omitted if there is only one.
            tolerance: largest absolute difference allowed; 1e-4 by default.

        Returns:
            A report with one row per call; it is true if every call is within the tolerance.

        Raises:
            RecordError: when there is no such phase.
        """
        part = self._one(phase)
        return replay_calls(part._calls, program, constants_of(part._calls), tolerance)

    def _one(self, phase: str | None) -> RecordedCalls:
        phases = self.phases()
        if phase is not None:
            return self[phase]
        if len(phases) == 1:
            return next(iter(phases.values()))
        if not phases:
            raise RecordError(f"No call of {self._callee.label} was recorded.")
        name = next(iter(phases))
        raise RecordError(f"There are calls of {len(phases)} phases, {_listed(phases)}. Name one: phase={name!r}")


def _names(call: Call) -> list[str]:
    return list(call.snapshot.spec.context)  # the keys of a dict


def _listed(phases: Mapping[str, RecordedCalls]) -> str:
    return ", ".join(f"{name!r} ({len(calls)})" for name, calls in phases.items())


def _stored_callee(path: pathlib.Path, about: About) -> Callee:
    """Return what was called, from the facts in a file."""
    with damage_as(RecordError, str(path)):
        parameters = [inspect.Parameter(name, inspect._ParameterKind(kind)) for name, kind in load_static(about.names)]
        return Callee(about.label, None, about.label.rpartition(".")[2], inspect.Signature(parameters))
