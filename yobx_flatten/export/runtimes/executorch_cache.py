"""Make ExecuTorch programs write keys and values into the caller's buffers, and compute attention on the buffers.

ExecuTorch has no views of slices of a tensor. ExecuTorch's operator ``llama::sdpa_with_kv_cache`` updates the cache and
computes attention without a copy. A program with cache buffers accepts only batch size 1, because ExecuTorch's
attention takes one mask for a whole batch. The batch axis of ``llama::sdpa_with_kv_cache`` contains the key heads of
one text instead of a batch.
"""

# before:  past ──> cat ──> present
#           new ─────┘  └──> attention
#
# after:   new tokens ──> buffers of keys and values (heads, room, 1, size) ──> attention, in the same operator

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from ...errors import FlattenError
from ...runners.executorch_runner import Rows, load_attention, room_for
from ...runners.signature import Signature, Size
from ...trace.program import Flat, joined, sizes_of

aten = torch.ops.aten


@functools.cache
def _operator() -> Any:
    """Define an attention operator for traces; it writes no buffers, which ``torch.export`` would make outputs."""
    library = torch.library.Library("yobx_flatten", "FRAGMENT")
    library.define(
        "attend(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, SymInt seen, SymInt new, "
        "Tensor mask, float scale) -> Tensor"
    )
    library.impl("attend", lambda query, *others: torch.empty_like(query), "Meta")
    return library  # the operator is defined as long as this object exists


def with_row_buffers(
    program: ExportedProgram, presents: Mapping[str, str], signature: Signature
) -> tuple[ExportedProgram, Rows]:
    """Return a program for batch size 1 whose growing cache inputs are buffers."""
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
        raise FlattenError("no attention layer reads both a mask and a cache input with new tokens appended.")
    with graph.inserting_after(nodes[inputs[-1]]):
        counter = graph.placeholder("seen")
    with graph.inserting_after(counter):
        past = graph.call_function(aten.sym_size.int, (counter, 0))
    masks: dict[Any, torch.fx.Node] = {}
    for call in calls:
        _attend_in_place(graph, call, nodes[cats[call.key]], nodes[cats[call.value]], past, masks)
    others = [name for name in outputs if name not in {presents[one] for one in kept}]
    last.args = (tuple(returned[name] for name in others),)
    for name in kept:
        for user in list(nodes[name].users):
            if user.target is aten.sym_size.int and user.args[1] in (0, 2):  # one row, whose tokens are counted
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
    """Return the inputs of an attention node if no other node reads its keys and values; ``None`` for other nodes."""
    if node.target is not aten.scaled_dot_product_attention.default:
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
    """Convert a mask to an additive mask as long as the buffer, repeated for all query heads of a key head."""
    # finite, since a padded token that attends to no position would be NaN
    lowest = torch.finfo(torch.float32).min / 2
    added = mask.reshape(mask.shape[2], mask.shape[3])
    is_boolean = mask.dtype == torch.bool
    added = torch.where(added, 0.0, lowest) if is_boolean else added.to(torch.float32).clamp(min=lowest)
    room = torch.nn.functional.pad(added, (0, keys.shape[1] - added.shape[1]), value=lowest)
    return room.repeat(repeats, 1)


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
    """Compute attention for batch size 1; the token axis of the operator has all query heads that share a key head."""
    (_, heads, new, size), shared = query.shape, keys.shape[0]
    query = query.reshape(shared, heads // shared * new, 1, size)
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
