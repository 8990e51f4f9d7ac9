"""Write a program as an ExecuTorch file, for which ExecuTorch plans memory by the largest input sizes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.export import Dim, ExportedProgram

from ...errors import DynamicShapesError, FlattenError
from ...errors.failures import first_line, raised_as
from ...registry.patches import AttributePatch
from ...runners.executorch_runner import METHOD, ROWS, SIGNATURE, Rows, load_attention, room_for
from ...runners.signature import Signature, Size
from ...trace.onnx_repairs import ERFINV_CENTRE, ERFINV_TAIL
from ...trace.program import Flat, joined, sizes_of
from ..flat_program import decompose_untranslated, flat_program, quietly, signature_of
from ..traced import Traced

_ATEN = torch.ops.aten

Backend = Literal["auto", "xnnpack", "portable"]
"""Kernels of ExecuTorch: ``"auto"`` takes XNNPACK's if the file passes its checks with them, else portable ones."""


def check_bounds(signature: Signature) -> None:
    axes = ((f"{name} axis {axis}", size) for name, _, sizes in signature.inputs for axis, size in enumerate(sizes))
    sums = [(place, size) for place, size in axes if isinstance(size, dict)]
    free = [place for place, size in sums if any(part and part not in signature.largest for part in size)]
    if free:
        raise DynamicShapesError(
            f"ExecuTorch plans memory for the largest size of each axis, but these have no maximum: {', '.join(free)}. "
            'Set one:\n    export_program(..., bounds={"batch": 4, "length": 128})   # or Dim.AUTO(max=128)'
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
    """Return a context manager that applies :func:`with_sizes` to every program that ExecuTorch writes."""
    managers: Any = importlib.import_module("executorch.exir.program._program")
    emit = managers.emit_program

    def emitted(*args: Any, **kwargs: Any) -> Any:
        found = emit(*args, **kwargs)
        for plan in found.program.execution_plan:
            with_sizes(plan)
        return found

    return AttributePatch(managers, "emit_program", emitted)


def with_sizes(plan: Any) -> None:
    """Change an execution plan of ExecuTorch, so that copy and stack operators set the sizes of their outputs."""
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


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply token rows, sorted by expert, with the weights of their experts (a mixture-of-experts layer).

    Every expert multiplies the rows of all experts, and products with the rows of other experts are discarded.
    ExecuTorch requires this, because it plans memory before the number of rows of an expert is known.

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
    products = {} if fallback is None else {fallback.default: grouped_product}
    found = {node.target for node in program.graph.nodes}
    table = {operator: function for operator, function in _ALWAYS.items() if operator in found}
    if found & {_ATEN._grouped_mm.default, *products}:
        table |= {**_OF_EXPERTS, **products}
    if not table:
        return program
    return decompose_untranslated(program, table) or program.run_decompositions(table)


# Make programs write keys and values into the caller's buffers, and compute attention on the buffers.
#
# ExecuTorch has no views of slices of a tensor. ExecuTorch's operator `llama::sdpa_with_kv_cache` updates the cache and
# computes attention without a copy. A program with cache buffers accepts only batch size 1, because ExecuTorch's
# attention takes one mask for a whole batch. The batch axis of `llama::sdpa_with_kv_cache` contains the key heads of
# one text instead of a batch.
#
# before:  past ──> cat ──> present
#           new ─────┘  └──> attention
#
# after:   new tokens ──> buffers of keys and values (heads, room, 1, size) ──> attention, in the same operator


@functools.cache
def _operator() -> Any:
    """Define an operator that represents attention on cache buffers in a trace."""
    library = torch.library.Library("yobx_flatten", "FRAGMENT")
    library.define(
        "attend(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, SymInt seen, SymInt new, "
        "Tensor mask, float scale) -> Tensor"
    )
    library.impl("attend", lambda query, *others: torch.empty_like(query), "Meta")
    return library  # keeps the operator defined; it writes no buffers, which `torch.export` would make outputs


def with_row_buffers(
    program: ExportedProgram, presents: Mapping[str, str], signature: Signature
) -> tuple[ExportedProgram, Rows]:
    """Return a program for batch size 1 that writes keys and values into the caller's buffers."""
    # program: what `flat_program` returned; it is not changed
    # presents: for each cache input, the output that becomes this input of the next call
    # returns: a program with the same inputs and a last input whose length is the number of tokens in the buffers. The
    # buffers have the shape (heads, room, 1, size).
    _operator()
    inputs, outputs = [name for name, *_ in signature.inputs], signature.outputs
    sizes = sizes_of(program, inputs)
    module: Any = program.module(check_guards=False)
    graph = module.graph
    nodes = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
    last = graph.output_node()
    returned = dict(zip(outputs, last.args[0], strict=True))
    cats = {cat: name for name, to in presents.items() if (cat := joined(nodes[name], returned[to])) is not None}
    calls = [call for node in graph.nodes if (call := _attention(node, cats, last)) is not None]
    seen = next((str(sizes[cats[call.key]][2]) for call in calls), None)
    calls = [call for call in calls if str(sizes[cats[call.key]][2]) == str(sizes[cats[call.value]][2]) == seen]
    kept = [name for name in inputs if any(name in (cats[call.key], cats[call.value]) for call in calls)]
    if not calls or not isinstance(sizes[kept[0]][2], torch.SymInt):
        raise FlattenError("no attention layer has one mask for all heads and appends new tokens to its cache.")
    with graph.inserting_after(nodes[inputs[-1]]):
        counter = graph.placeholder("seen")
    with graph.inserting_after(counter):
        past = graph.call_function(_ATEN.sym_size.int, (counter, 0))
    masks: dict[Any, torch.fx.Node] = {}
    for call in calls:
        _attend_in_place(graph, call, nodes[cats[call.key]], nodes[cats[call.value]], past, masks)
    others = [name for name in outputs if name not in {presents[one] for one in kept}]
    last.args = (tuple(returned[name] for name in others),)
    for name in kept:
        for user in list(nodes[name].users):
            if user.target is _ATEN.sym_size.int and user.args[1] in (0, 2):  # one row, whose tokens are counted
                user.replace_all_uses_with(past if user.args[1] == 2 else 1)
                graph.erase_node(user)
    graph.eliminate_dead_code()
    graph.set_codegen(torch.fx.graph.CodeGen())
    flat = torch.fx.GraphModule(module, graph)  # without the input checks of `module`
    # the batch axis of each input that has one, and of each output
    row = str(sizes[kept[0]][0])
    taken = {name: axes.index({row: 1}) for name, _, axes in signature.inputs if {row: 1} in axes}
    shapes_of_outputs = {name: [str(size) for size in returned[name].meta["val"].shape] for name in others}
    alone = [name for name, shape in shapes_of_outputs.items() if row not in shape]
    if alone:
        raise FlattenError(f"these outputs have no batch axis: {', '.join(alone)}.")
    outgoing = {name: shape.index(row) for name, shape in shapes_of_outputs.items()}
    tensors, shapes = _example(program, kept, signature, taken)
    made = torch.export.export(
        Flat(flat), (tensors,), dynamic_shapes=(shapes,), prefer_deferred_runtime_asserts_over_guards=True
    )
    return made, Rows(kept, taken, outgoing)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """An attention operator of a program whose keys and values are a growing KV cache."""

    node: torch.fx.Node
    query: torch.fx.Node
    key: torch.fx.Node  # concatenation of the cache and the new tokens
    value: torch.fx.Node
    mask: torch.fx.Node
    scale: float


def _attention(node: torch.fx.Node, cats: Mapping[torch.fx.Node, str], last: torch.fx.Node) -> _Attention | None:
    """Return the inputs of an attention node that can compute attention on cache buffers; ``None`` for other nodes."""
    if node.target is not _ATEN.scaled_dot_product_attention.default:
        return None
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    parts: list[Any] = [given.get(name) for name in names[:4]]
    query, key, value, mask = parts
    if key not in cats or value not in cats or not isinstance(mask, torch.fx.Node):
        return None
    if any(set(one.users) - {node, last} for one in (key, value)) or given.get("dropout_p") or given.get("is_causal"):
        return None
    shapes = [one.meta["val"].shape for one in parts]
    if len({shape[3] for shape in shapes[:3]}) > 1 or shapes[3][1] != 1 or len(shapes[3]) != 4:
        return None
    scale = given.get("scale")
    return _Attention(node, query, key, value, mask, float(shapes[0][3] ** -0.5 if scale is None else scale))


def _attend_in_place(
    graph: torch.fx.Graph,
    call: _Attention,
    keys: torch.fx.Node,
    values: torch.fx.Node,
    past: torch.fx.Node,
    masks: dict[Any, torch.fx.Node],
) -> None:
    new = [cat.args[0][1] for cat in (call.key, call.value)]  # type: ignore[index] # two parts, see `joined`
    repeats = call.query.meta["val"].shape[1] // call.key.meta["val"].shape[1]
    with graph.inserting_before(call.node):
        mask = masks.get((call.mask, repeats))
        if mask is None:  # all layers share one mask
            mask = masks[call.mask, repeats] = graph.call_function(_mask_of_room, (call.mask, keys, repeats))
        found = graph.call_function(_attend, (call.query, *new, keys, values, past, mask, call.scale))
    call.node.replace_all_uses_with(found)
    graph.erase_node(call.node)


def _mask_of_room(mask: torch.Tensor, keys: torch.Tensor, repeats: int) -> torch.Tensor:
    """Convert an attention mask to an additive mask that has the length of the cache buffers."""
    # finite, since a padded token that attends to no position would be NaN
    lowest = torch.finfo(torch.float32).min / 2
    added = mask.reshape(mask.shape[2], mask.shape[3])
    is_boolean = mask.dtype == torch.bool
    added = torch.where(added, 0.0, lowest) if is_boolean else added.to(torch.float32).clamp(min=lowest)
    room = torch.nn.functional.pad(added, (0, keys.shape[1] - added.shape[1]), value=lowest)
    return room.repeat(repeats, 1)  # for all query heads that share a key head


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: int,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute attention on the cache buffers for batch size 1."""
    (_, heads, new, size), shared = query.shape, keys.shape[0]
    query = query.reshape(shared, heads // shared * new, 1, size)  # heads that share a key head: on the token axis
    key, value = (one.reshape(shared, new, 1, size) for one in (key, value))
    found = torch.ops.yobx_flatten.attend(query, key, value, keys, values, seen, new, mask, scale)
    return found.reshape(1, heads, new, size)  # type: ignore[no-any-return] # operators are untyped


def _example(
    program: ExportedProgram, kept: Sequence[str], signature: Signature, rows: Mapping[str, int]
) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """Return the example tensors for the trace, with batch size 1 and cache buffers, and their dynamic shapes."""
    given = dict(zip((name for name, *_ in signature.inputs), program.example_inputs[0], strict=True))
    sizes = {name: of for name, _, of in signature.inputs}
    seen, most = given[kept[0]].shape[2], _most(sizes[kept[0]][2], signature)
    tokens = [sizes[name] for name in ("input_ids", "inputs_embeds") if name in sizes]
    new = max((_most(of[1], signature) for of in tokens), default=most)
    tensors: list[torch.Tensor] = []
    shapes: list[dict[int, Any]] = []
    for name, tensor in given.items():
        if name in kept:
            _, heads, _, size = tensor.shape
            tensors.append(tensor.new_zeros(heads, 4 * seen + 16, 1, size))
            shapes.append({1: Dim.AUTO(max=room_for(most + new))})
            continue
        axis = rows.get(name)
        tensors.append(tensor if axis is None else tensor.narrow(axis, 0, 1).contiguous())
        varying = {at: size for at, size in enumerate(sizes[name]) if not isinstance(size, int) and at != axis}
        shapes.append({at: Dim.AUTO(max=_most(size, signature)) for at, size in varying.items()})
    return [*tensors, torch.zeros(seen, dtype=torch.uint8)], [*shapes, {0: Dim.AUTO(max=most)}]


def _most(size: Size, signature: Signature) -> int:
    """Return the upper bound of a dynamic size; ``check_bounds`` has checked that the bound exists."""
    if isinstance(size, int):
        return size
    return sum(factor * (signature.largest[name] if name else 1) for name, factor in (size or {}).items())


def attended_in_place(program: ExportedProgram) -> None:
    """Replace the placeholder attention in a lowered program by ExecuTorch's attention operator, in place."""
    load_attention()
    importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")  # registers the operator's output shapes
    edge: Any = importlib.import_module("executorch.exir.dialects._ops").ops.edge
    for node in program.graph.nodes:
        if node.target is edge.yobx_flatten.attend.default:
            query, key, value, keys, values, seen, new, mask, scale = node.args
            node.target = edge.llama.sdpa_with_kv_cache.default
            node.args = (query, key, value, keys, values, seen, new, mask, 0.0, False, scale)
    program.graph_module.recompile()
