"""Write a program as an ExecuTorch file, for which ExecuTorch plans memory by the largest input sizes."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from ...errors import DynamicShapesError, FlattenError
from ...errors.failures import first_line, raised_as
from ...registry.patches import AttributePatch
from ...runners.executorch_runner import METHOD, ROWS, SIGNATURE
from ...runners.signature import Signature
from ...trace.onnx_operators import ERFINV_CENTRE, ERFINV_TAIL
from ..flat_program import decompose_untranslated, flat_program, quietly, signature_of
from ..traced import Traced
from .executorch_cache import attended_in_place, with_row_buffers

Backend = Literal["auto", "xnnpack", "portable"]
"""Kernels of ExecuTorch: ``"auto"`` takes XNNPACK's if the file passes its checks with them, else portable ones."""


def check_bounds(signature: Signature) -> None:
    axes = ((f"{name} axis {axis}", size) for name, _, sizes in signature.inputs for axis, size in enumerate(sizes))
    sums = [(place, size) for place, size in axes if isinstance(size, dict)]
    free = [place for place, size in sums if any(part and part not in signature.largest for part in size)]
    if free:
        raise DynamicShapesError(
            f"ExecuTorch plans memory for the largest sizes, but {', '.join(free)} have no maximum. Set one:\n    "
            'export_program(..., bounds={"batch": 4, "length": 128})   # or Dim.AUTO(max=128) in dynamic_shapes'
        )


def write_pte(
    traced: Traced, path: pathlib.Path, *, backend: Backend, in_place: bool, quantized: bool
) -> tuple[int, list[str]]:
    """Lower a program to ExecuTorch and write the file, inside ``register_flattening_functions``."""
    # in_place: whether the file writes a growing cache in place; else calls take and return the cache
    # quantized: whether the export was asked for quantized weights
    # returns: the bytes of planned memory, and the names of the cache inputs that are updated in place
    signature = signature_of(traced, ("executorch",))
    check_bounds(signature)

    def failure(error: Exception) -> FlattenError:
        reason = f"{type(error).__name__}: {first_line(error)}"
        missing = re.search(r"Missing out variants: \{(.*)\}", str(error))
        first = "Leave quantize= out, and try" if quantized else "Try"
        advice = f'. {first} the plain kernels:\n    backend="portable"' if backend == "xnnpack" else ""
        advice = advice if missing is None else f". {_without_kernel(missing[1])}"
        return FlattenError(f"ExecuTorch cannot lower the program ({reason}){advice}")

    # without no_grad, loops over trainable weights would also return values for a backward pass
    with raised_as(failure), quietly("executorch"), torch.no_grad():
        exir: Any = importlib.import_module("executorch.exir")
        passes: Any = importlib.import_module("executorch.exir.passes")
        partitioners = []
        if backend == "xnnpack":
            xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
            partitioners.append(xnnpack.XnnpackPartitioner())
        program, rows = written_out(flat_program(traced.program)), None
        texts = {SIGNATURE: signature.to_json()}
        if in_place:
            program, rows = with_row_buffers(program, traced.presents, signature)
            texts[ROWS] = rows.to_json()
        edge = exir.to_edge_transform_and_lower(
            {METHOD: program},
            partitioner=partitioners,
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
            constant_methods=texts,
        )
        lowered = edge.exported_program(METHOD)
        _bound_sizes(lowered, program)
        if rows is not None:
            attended_in_place(lowered)
        # the runtime copies planned inputs, and would not write into the buffers of the caller
        planning = passes.MemoryPlanningPass(alloc_graph_input=rows is None)
        with states_of_the_call():
            made = edge.to_executorch(exir.ExecutorchBackendConfig(memory_planning_pass=planning))
    (plan,) = (plan for plan in made.executorch_program.execution_plan if plan.name == METHOD)
    runtime: Any = importlib.import_module("executorch.runtime")
    known = set(runtime.Runtime.get().operator_registry.operator_names)
    names = [f"{one.name}.{one.overload}" if one.overload else one.name for one in plan.operators]
    missing = [name for name in names if name not in known]
    if missing:  # the error of the runtime would only contain a number
        raise FlattenError(f"ExecuTorch cannot run the program. {_without_kernel(', '.join(missing))}")
    with path.open("wb") as file:
        made.write_to_file(file)
    return int(sum(plan.non_const_buffer_sizes)), [] if rows is None else [*rows.in_place]


def _bound_sizes(lowered: ExportedProgram, program: ExportedProgram) -> None:
    # ExecuTorch 1.5 loses the upper bound of some sizes that several inputs share, and then plans memory for the size
    # of the example: a decoder with windows refused every larger batch.
    known = {str(symbol): found for symbol, found in program.range_constraints.items()}
    values = (node.meta.get("val") for node in lowered.graph.find_nodes(op="placeholder"))
    axes: Iterator[Any] = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    for environment in {size.node.shape_env for size in axes if isinstance(size, torch.SymInt)}:
        for symbol, found in environment.var_to_range.items():
            environment.var_to_range[symbol] = found & known.get(str(symbol), found)


def _without_kernel(operators: str) -> str:
    return (
        f"ExecuTorch has no kernel for {operators} in any backend. Change the model, or choose another runtime:\n    "
        'target="openvino" (to_openvino)'
    )


@functools.cache
def states_of_the_call() -> AttributePatch:
    """Return a context manager in which ExecuTorch writes programs whose copy and stack operators set output sizes."""
    managers: Any = importlib.import_module("executorch.exir.program._program")
    emit = managers.emit_program

    def emitted(*args: Any, **kwargs: Any) -> Any:
        found = emit(*args, **kwargs)
        for plan in found.program.execution_plan:
            with_sizes(plan)
        return found

    return AttributePatch(managers, "emit_program", emitted)


def with_sizes(plan: Any) -> None:
    """Make every copy and stack operator of an execution plan set the sizes of its output; change the plan in place."""
    copy = _index(plan, "aten::copy_", "")
    if copy is not None:
        plan.operators[copy].name, plan.operators[copy].overload = "aten::copy", "out"
        for chain in plan.chains:
            for call in (instruction.instr_args for instruction in chain.instructions):
                if getattr(call, "op_index", None) == copy:
                    target, source, blocking, _ = call.args
                    call.args = [source, source, blocking, target, target]
    stack = _index(plan, "executorch_prim::et_copy_index", "tensor")
    for chain in () if stack is None else plan.chains:  # resize a tensor before the first `et_copy_index` into it
        schema: Any = importlib.import_module("executorch.exir.schema")
        equal = _index(plan, "executorch_prim::eq", "Scalar")
        plan.operators.append(schema.Operator("aten::unsqueeze_copy", "out"))
        plan.values += [schema.EValue(schema.Int(0)), schema.EValue(schema.Bool(False))]
        zero, is_first = len(plan.values) - 2, len(plan.values) - 1
        jumps = [one.instr_args for one in chain.instructions if isinstance(one.instr_args, schema.JumpFalseCall)]
        made: list[Any] = []
        places: list[int] = []  # new index of each instruction
        for instruction in chain.instructions:
            places.append(len(made))
            call = instruction.instr_args
            if getattr(call, "op_index", None) == stack:
                stacked, entry, count = call.args
                check, after = schema.KernelCall(equal, [count, zero, is_first]), len(made) + 3
                resize = schema.KernelCall(len(plan.operators) - 1, [entry, zero, stacked, stacked])
                made += map(schema.Instruction, [check, schema.JumpFalseCall(is_first, after), resize])
            made.append(instruction)
        for jump in jumps:
            jump.destination_instruction = places[jump.destination_instruction]
        chain.instructions[:] = made


def _index(plan: Any, name: str, overload: str) -> int | None:
    found = (i for i, operator in enumerate(plan.operators) if (operator.name, operator.overload) == (name, overload))
    return next(found, None)


# Replace operators without a kernel in ExecuTorch by other operators.

_ATEN = torch.ops.aten


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply token rows, sorted by expert, with the weights of their experts (a mixture-of-experts layer).

    Every expert multiplies all rows, and products with rows of other experts are discarded, because ExecuTorch plans
    memory before the number of rows of an expert is known.

    >>> rows = torch.tensor([[1.0], [2.0], [3.0]])
    >>> grouped_product(rows, torch.tensor([[[10.0]], [[100.0]]]), torch.tensor([1, 3])).tolist()
    [[10.0], [200.0], [300.0]]
    """
    # weight: weights of shape (experts, inputs, outputs)
    # ends: index of the row after the last row of each expert, of shape (experts,)
    places = torch.arange(rows.shape[0], device=rows.device)[:, None]
    found = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert in range(weight.shape[0] - 1, -1, -1):
        found = torch.where(places < ends[expert], rows @ weight[expert], found)
    return found


def _grouped_mm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if offs is None or weight.dim() != 3 or rows.dim() != 2 or bias is not None or out_dtype is not None:
        return NotImplemented
    return grouped_product(rows, weight, offs)


def _sort(
    values: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    # `topk` is not stable, but the order of the rows of one expert does not matter
    return torch.topk(values, values.shape[dim], dim, descending, True)


def _argsort(values: torch.Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None) -> torch.Tensor:
    return _sort(values, dim, descending)[1]


def _histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    if (min, max) != (0, bins - 1):
        return NotImplemented
    return (values.reshape(-1, 1) == torch.arange(bins, device=values.device)).sum(0).to(values.dtype)


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    w = -torch.log((1 - x) * (1 + x))
    centre, tail = _polynomial(w - 2.5, ERFINV_CENTRE), _polynomial(torch.sqrt(w) - 3, ERFINV_TAIL)
    # at 1, w is infinite, and its polynomial is NaN
    return torch.where(x.abs() == 1, x * torch.inf, torch.where(w < 5, centre, tail) * x)


def _polynomial(at: Any, coefficients: tuple[float, ...]) -> Any:
    return functools.reduce(lambda value, coefficient: value * at + coefficient, coefficients)


# ExecuTorch 1.5 writes uninitialized memory as `dim_order_ops::_empty_dim_order`, whose sizes are ints: each symbol in
# a size becomes the number of the example, also in the sizes of inputs
_ALWAYS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.erfinv.default: _erfinv,
    _ATEN.empty.memory_format: lambda size, **options: torch.zeros(size, dtype=options.get("dtype")),
    _ATEN.new_empty.default: lambda like, size, **options: torch.zeros(size, dtype=options.get("dtype") or like.dtype),
}
_OF_EXPERTS: Mapping[Any, Callable[..., Any]] = {
    _ATEN._grouped_mm.default: _grouped_mm,
    _ATEN.histc.default: _histc,
    _ATEN.argsort.default: _argsort,
    _ATEN.argsort.stable: _argsort,
    _ATEN.sort.default: _sort,
    _ATEN.sort.stable: _sort,
    _ATEN.empty_like.default: lambda like, **options: torch.zeros_like(like, dtype=options.get("dtype")),
}


def written_out(program: ExportedProgram) -> ExportedProgram:
    """Replace operators that ExecuTorch lacks: grouped matrix products, ``erfinv`` and uninitialized memory."""
    fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
    products: dict[Any, Callable[..., Any]] = {_ATEN._grouped_mm.default: _grouped_mm}
    if fallback is not None:
        products[fallback.default] = grouped_product
    found = {node.target for node in program.graph.nodes}
    table = {operator: function for operator, function in _ALWAYS.items() if operator in found}
    if found & products.keys():
        table |= {**_OF_EXPERTS, **products}
    if not table:
        return program
    return decompose_untranslated(program, table) or program.run_decompositions(table)
