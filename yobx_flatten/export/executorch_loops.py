"""Loops in files of ExecuTorch whose state has the size of the call, and not the largest one.

ExecuTorch 1.5 plans the state that a scan carries for the largest sizes, and copies into it with ``copy_``, which
refuses fewer rows (``executorch.exir.emit._emitter._Emitter._emit_scan``). The same copy with ``copy.out`` sets sizes:

.. code-block:: text

    state (4 rows) <── copy_ ── start (2 rows)      error 0x12
    state (4 rows) <── copy.out ── start (2 rows)   state (2 rows)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from ..registry.patches import AttributePatch

__all__ = ["states_of_the_call", "with_sizes"]


@contextlib.contextmanager
def states_of_the_call() -> Iterator[None]:
    """Let ExecuTorch emit loops whose state has the size of the call."""
    patch = _patch()
    patch.acquire()
    try:
        yield
    finally:
        patch.release()


@functools.cache
def _patch() -> AttributePatch:
    managers: Any = importlib.import_module("executorch.exir.program._program")
    emit = managers.emit_program

    def emitted(*args: Any, **kwargs: Any) -> Any:
        found = emit(*args, **kwargs)
        for plan in found.program.execution_plan:
            with_sizes(plan)
        return found

    return AttributePatch(managers, "emit_program", emitted)


def with_sizes(plan: Any) -> None:
    """Let every copy into planned memory set the size of what it writes to.

    Args:
        plan: an ``ExecutionPlan`` before it is serialised; it is changed.
    """
    for index, operator in enumerate(plan.operators):
        if (operator.name, operator.overload) != ("aten::copy_", ""):
            continue
        operator.name, operator.overload = "aten::copy", "out"
        for chain in plan.chains:
            for instruction in chain.instructions:
                call = instruction.instr_args
                if getattr(call, "op_index", None) == index:
                    target, source, blocking, _ = call.args
                    call.args = [source, source, blocking, target, target]
