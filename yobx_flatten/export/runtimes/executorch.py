"""Write a program as an ExecuTorch file. Its memory is planned for the largest sizes."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch.export import ExportedProgram

from ...errors import DynamicShapesError, FlattenError, InvalidArgumentError
from ...errors.failures import raised_as
from ...errors.messages import first_line
from ...runners.executorch_runner import METHOD, ROWS, SIGNATURE
from ...runners.ports import present_of
from ...runners.signature import Signature
from ..program.flat_program import flat_program, quietly, signature_of
from ..program.traced import Traced
from .executorch_cache import attended_in_place, with_row_buffers
from .executorch_loops import states_of_the_call
from .executorch_operators import missing_kernels, written_out

Backend = Literal["auto", "xnnpack", "portable"]
"""Kernels of ExecuTorch: those of XNNPACK where it has them, or its plain ones; ``"auto"``, the first that replay."""


def check_backend(backend: str) -> None:
    """Refuse kernels that are not known."""
    if backend not in get_args(Backend):
        raise InvalidArgumentError(
            f"backend must be one of {', '.join(map(repr, get_args(Backend)))}, found {backend!r}."
        )


def check_bounds(signature: Signature) -> None:
    """Refuse a program one of whose sizes has no largest value."""
    free = [
        f"{name} axis {axis}"
        for name, _, sizes in signature.inputs
        for axis, size in enumerate(sizes)
        if isinstance(size, dict) and any(part and part not in signature.largest for part in size)
    ]
    if free:
        raise DynamicShapesError(
            f"ExecuTorch plans memory for the largest sizes, and these have none: {', '.join(free)}. Name them:\n"
            '    export_program(..., bounds={"batch": 4, "length": 128})   # or Dim.AUTO(max=128) in dynamic_shapes'
        )


@dataclasses.dataclass(frozen=True)
class Written:
    """A file that was written."""

    planned_bytes: int  # the memory that is planned
    in_place: list[str]  # inputs of the cache that are written in place


def write_pte(traced: Traced, path: pathlib.Path, *, backend: Backend = "xnnpack", in_place: bool = False) -> Written:
    """Lower a program and write the file. The block must be open."""
    # backend: whose kernels are used; XNNPACK's by default
    # in_place: whether a cache that grows is written in place; `False`, the default, where calls take and return it
    signature = signature_of(traced, ("executorch",))
    check_bounds(signature)

    def failure(error: Exception) -> FlattenError:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return FlattenError(f"ExecuTorch cannot lower the program ({reason}){_advice(error, backend)}")

    # loops over weights that can be trained would also be those of a backward pass, which return sizes
    with raised_as(failure), quietly("executorch"), torch.no_grad():
        exir: Any = importlib.import_module("executorch.exir")
        passes: Any = importlib.import_module("executorch.exir.passes")
        program, rows = written_out(flat_program(traced.program)), None
        texts = {SIGNATURE: signature.to_json()}
        if in_place:
            pairs = ((name, present_of(name)) for name in traced.input_names)
            presents = {
                name: present for name, present in pairs if present is not None and present in signature.outputs
            }
            program, rows = with_row_buffers(program, presents, signature)
            texts[ROWS] = rows.to_json()
        edge = exir.to_edge_transform_and_lower(
            {METHOD: program},
            partitioner=_partitioners(backend),
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=texts,
        )
        lowered = edge.exported_program(METHOD)
        _bound_sizes(lowered, program)
        if rows is not None:
            attended_in_place(lowered)
        # inputs that are planned are copied: buffers would not be those of the caller
        planning = passes.MemoryPlanningPass(alloc_graph_input=rows is None)
        with states_of_the_call():
            made = edge.to_executorch(exir.ExecutorchBackendConfig(memory_planning_pass=planning))
    (plan,) = (plan for plan in made.executorch_program.execution_plan if plan.name == METHOD)
    missing = missing_kernels(plan.operators)
    if missing:  # the runtime states a number only
        raise FlattenError(f"ExecuTorch cannot run the program. {_without_kernel(', '.join(missing))}")
    with path.open("wb") as file:
        made.write_to_file(file)
    return Written(int(sum(plan.non_const_buffer_sizes)), [] if rows is None else [*rows.in_place])


def _partitioners(backend: Backend) -> list[Any]:
    """What chooses the operators that others than ExecuTorch's own kernels compute."""
    if backend != "xnnpack":
        return []
    xnnpack: Any = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    return [xnnpack.XnnpackPartitioner()]


def _bound_sizes(lowered: ExportedProgram, program: ExportedProgram) -> None:
    """Bound the sizes of a lowered program as those of the program are.

    ExecuTorch 1.5 lowers some sizes that several inputs share without their largest value, and plans memory for the
    size of the example then: a decoder with windows refused every larger batch.
    """
    known = {str(symbol): found for symbol, found in program.range_constraints.items()}
    values = (node.meta.get("val") for node in lowered.graph.find_nodes(op="placeholder"))
    axes: Iterator[Any] = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    for environment in {size.node.shape_env for size in axes if isinstance(size, torch.SymInt)}:
        for symbol, found in environment.var_to_range.items():
            environment.var_to_range[symbol] = found & known.get(str(symbol), found)


def _advice(error: Exception, backend: Backend) -> str:
    """What can be done: other kernels do not help where an operator has none that writes into planned memory."""
    missing = re.search(r"Missing out variants: \{(.*)\}", str(error))
    if missing is not None:
        return f". {_without_kernel(missing[1])}"
    return '. Try the plain kernels:\n    backend="portable"' if backend == "xnnpack" else ""


def _without_kernel(operators: str) -> str:
    return (
        f"It has no kernel for {operators}, whichever backend is chosen: write the model without it, or take another "
        'runtime:\n    target="openvino" (to_openvino)'
    )
