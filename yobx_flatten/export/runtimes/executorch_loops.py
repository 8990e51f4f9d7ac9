"""Let loops in ExecuTorch files run over the sizes of the call instead of the largest sizes.

ExecuTorch 1.5 plans what a scan carries and stacks for the largest sizes. It copies into the state with ``copy_``,
which refuses fewer rows, and stacks with ``et_copy_index``, which sets the first size alone and refuses others
(``executorch.exir.emit._emitter._Emitter._emit_scan``). Kernels of the same values that set all sizes:

.. code-block:: text

    state (4 rows)  <── copy_ ── start (2 rows)               error 0x12
    state (4 rows)  <── copy.out ── start (2 rows)            state (2 rows)
    stack (8 tokens, 4 rows)  <── unsqueeze_copy.out ── the first output (2 rows)        stack (1 token, 2 rows)
    stack (1 token, 2 rows)   <── et_copy_index ── all of them, one after the other      stack (n tokens, 2 rows)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from ...registry.patches import AttributePatch


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
    """Let every copy into planned memory, and every stack, set the sizes of what it writes to."""
    # plan: an `ExecutionPlan` before it is serialised; it is changed
    copy = _index(plan, "aten::copy_", "")
    if copy is not None:
        plan.operators[copy].name, plan.operators[copy].overload = "aten::copy", "out"
        for chain in plan.chains:
            for call in _calls(chain, copy):
                target, source, blocking, _ = call.args
                call.args = [source, source, blocking, target, target]
    stack = _index(plan, "executorch_prim::et_copy_index", "tensor")
    if stack is not None:
        for chain in plan.chains:
            _size_stacks(plan, chain, stack)


def _index(plan: Any, name: str, overload: str) -> int | None:
    found = (i for i, operator in enumerate(plan.operators) if (operator.name, operator.overload) == (name, overload))
    return next(found, None)


def _calls(chain: Any, operator: int) -> list[Any]:
    calls = (instruction.instr_args for instruction in chain.instructions)
    return [call for call in calls if getattr(call, "op_index", None) == operator]


def _size_stacks(plan: Any, chain: Any, stack: int) -> None:
    """Insert before each ``et_copy_index``: where it is the first one, the stack becomes what is put into it."""
    schema: Any = importlib.import_module("executorch.exir.schema")
    equal = _index(plan, "executorch_prim::eq", "Scalar")
    plan.operators.append(schema.Operator("aten::unsqueeze_copy", "out"))
    plan.values += [schema.EValue(schema.Int(0)), schema.EValue(schema.Bool(False))]
    zero, is_first = len(plan.values) - 2, len(plan.values) - 1
    jumps = [one.instr_args for one in chain.instructions if isinstance(one.instr_args, schema.JumpFalseCall)]
    made: list[Any] = []
    places: list[int] = []  # of each instruction among those that are made
    for instruction in chain.instructions:
        places.append(len(made))
        call = instruction.instr_args
        if getattr(call, "op_index", None) == stack:
            stacked, entry, count = call.args
            made += map(
                schema.Instruction,
                [
                    schema.KernelCall(equal, [count, zero, is_first]),
                    schema.JumpFalseCall(is_first, len(made) + 3),
                    schema.KernelCall(len(plan.operators) - 1, [entry, zero, stacked, stacked]),
                ],
            )
        made.append(instruction)
    for jump in jumps:
        jump.destination_instruction = places[jump.destination_instruction]
    chain.instructions[:] = made
