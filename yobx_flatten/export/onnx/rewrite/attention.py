"""Replace each attention subgraph by one ``Attention`` operator (opset 23) with the KV cache as input."""

# past ── Concat ── Attention                past ── Attention ── present
#  new ────┘  └─── present                    new ─────┘
#
# MatMul ── Reshape ── Transpose ── RotaryEmbedding ── Attention ── Transpose ── Reshape   (batch, heads, tokens, size)
#
# MatMul ── RotaryEmbedding ── Attention                                                   (batch, tokens, heads * size)

from __future__ import annotations

from ....trace.onnx_repairs import ir, passes
from .graph import Nodes, attribute, copy_type, input_of, insert_before, number_of, only_reader, producer, replace_value

_AHEAD = 64  # largest number of nodes that are searched after a concatenation; sliding layers have fewer


def fuse_attention(model: ir.Model) -> None:
    """Replace the nodes that compute attention by ``Attention`` operators that take the KV cache as input."""
    graph = model.graph
    changed = False
    # first, since this makes `Attention` nodes for the second loop
    for node in list(graph):
        if node.op_type == "Softmax":
            changed |= _fuse_spelled_out(graph, node)
    for node in list(graph):
        if node.op_type != "Attention" or node.domain != "":
            continue
        query, mask = input_of(node, 0), node.inputs[3] if len(node.inputs) > 3 else None
        if mask is not None and (
            mask.shape is None or query.shape is None or not mask.shape[-2] == query.shape[2] != 1
        ):  # onnxruntime requires one row of the mask for each query
            made = Nodes()
            rows = made.add("Shape", query, start=2, end=3)
            shape = made.add("Concat", rows, made.add("Constant", value_ints=[1]), axis=0)
            repeated = made.add("Expand", mask, shape)
            copy_type(repeated, mask)
            graph.insert_before(node, made)
            node.replace_input_with(3, repeated)
        changed |= take_cache(graph, node) is not None
    if changed:
        graph.sort()  # readers of the present may precede the attention that now returns it
        passes.RemoveUnusedNodesPass()(model)


def take_cache(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """Change an ``Attention`` node so that it takes the KV cache as input, and appends new keys and values itself."""
    # returns: the new node; `None` if the node is unchanged
    inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
    query, key, value, mask, *others = inputs
    # with the cache as an input, is_causal would hide other keys
    if any(other is not None for other in others) or attribute(node, "is_causal", 0) or len(node.outputs) > 1:
        return None
    keys, values = _concatenated(key), _concatenated(value)
    if key is None or value is None or keys is None or values is None:
        return None
    # the attention would need its own present before it is computed
    if key is value or any(_leads_to(read, node) for read in (key, value)):
        return None
    (past_key, new_key), (past_value, new_value) = keys, values
    fused = ir.node(
        "Attention",
        [query, new_key, new_value, mask, past_key, past_value],
        attributes=dict(node.attributes),
        num_outputs=3,
        name=node.name,
    )
    graph.insert_before(node, fused)
    concatenations = [one for one in (key.producer(), value.producer()) if one is not None]
    for old, new in zip((node.outputs[0], key, value), fused.outputs, strict=True):
        replace_value(old, new)
    graph.remove([node, *concatenations], safe=True)
    return fused


def _concatenated(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return the two inputs of a concatenation of keys or values: the cache and the new tokens; else ``None``."""
    node = None if value is None else value.producer()
    if value is None or value.shape is None or node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    axis = attribute(node, "axis", 0)
    return (input_of(node, 0), input_of(node, 1)) if len(value.shape) == 4 and axis in (2, -2) else None


def _leads_to(value: ir.Value, attention: ir.Node) -> bool:
    """Return whether a value affects an attention node in any way other than through the node's keys and values."""
    ahead = [node for node in value.consumers() if node is not attention]
    seen = set(map(id, ahead))
    while ahead:
        # the search ends with the safe answer: the attention is not changed
        if len(seen) > _AHEAD:
            return True
        for output in ahead.pop().outputs:
            for node in output.consumers():
                if node is attention:
                    return True
                if id(node) not in seen:
                    seen.add(id(node))
                    ahead.append(node)
    return value in [attention.inputs[0], *attention.inputs[3:]]


def _fuse_spelled_out(graph: ir.Graph, softmax: ir.Node) -> bool:
    """Replace ``softmax(scores + mask) @ value`` by ``Attention``; return whether the nodes were replaced."""
    # with `attn_implementation="eager"`, or Gemma 2's soft cap
    # models in half precision compute the softmax in float32, between two casts
    cast, cast_back = producer(input_of(softmax, 0), "Cast"), only_reader(softmax.outputs[0], "Cast")
    product = only_reader((softmax if cast_back is None else cast_back).outputs[0], "MatMul")
    if product is None or attribute(softmax, "axis", -1) not in (-1, 3):
        return False
    scores, mask = input_of(softmax, 0) if cast is None else input_of(cast, 0), None
    parts, added = match_scores(scores), producer(scores, "Add")
    # the terms of the sum may have either order
    for terms in () if added is None else (added.inputs, added.inputs[::-1]):
        parts, mask = match_scores(terms[0]), terms[1]
        if parts is not None:
            break
    if parts is None:
        return False
    query, key, scale, cap = parts
    key, value = unrepeated(key), unrepeated(input_of(product, 1))
    shapes = [one.shape for one in (query, key, value) if one.shape is not None and len(one.shape) == 4]
    if len(shapes) < 3:
        return False
    heads, keys, values = (shape[1] for shape in shapes)
    # the operator repeats keys and values, an integer number of times
    if not isinstance(heads, int) or not isinstance(keys, int) or keys != values or heads % keys:
        return False
    # the operator would treat a boolean mask differently from the sum in this graph
    if mask is not None and (mask.shape is None or len(mask.shape) > 4 or mask.dtype != query.dtype):
        return False
    attributes = {"scale": scale, "softcap": cap}
    attention = ir.node("Attention", [query, key, value, mask], attributes=attributes, name=softmax.name)
    graph.insert_before(product, attention)
    replace_value(product.outputs[0], attention.outputs[0])
    graph.remove(product, safe=True)
    return True


def match_scores(value: ir.Value | None) -> tuple[ir.Value, ir.Value, float, float] | None:
    """Match attention scores ``cap * tanh(query @ key.mT * scale / cap)``; return query, key, scale and cap."""
    # the cap is 0 if there is no `tanh`
    if value is None:
        return None
    inner, scale = _scaled(value)
    # in cap * tanh(x * scale / cap), the factor outside is the cap, and the factor inside is scale / cap
    cap, tanh = 0.0, producer(inner, "Tanh")
    if tanh is not None:
        cap = scale
        inner, scale = _scaled(input_of(tanh, 0))
        scale *= cap
    product = producer(inner, "MatMul")
    turned = None if product is None else producer(product.inputs[1], "Transpose")
    if product is None or turned is None or list(attribute(turned, "perm", ())) != [0, 1, 3, 2]:
        return None
    key = turned.inputs[0]
    if key is None:
        return None
    query, first = _scaled(input_of(product, 0))
    return query, key, scale * first, cap


def _scaled(value: ir.Value) -> tuple[ir.Value, float]:
    """Return a value before it was multiplied and divided by constants, and the factor of these operations."""
    factor = 1.0
    while (node := producer(value, "Mul") or producer(value, "Div")) is not None:
        # a constant numerator is not a scale
        for place in (0, 1) if node.op_type == "Mul" else (1,):
            number = number_of(node.inputs[place])
            if number:
                factor = factor * number if node.op_type == "Mul" else factor / number
                value = input_of(node, 1 - place)
                break
        else:
            break
    return value, factor


def unrepeated(value: ir.Value) -> ir.Value:
    """Return keys or values as they were before ``repeat_kv`` repeated them for the query heads."""
    reshaped = producer(value, "Reshape")
    # repeat_kv of transformers adds an axis after the heads, expands this axis, and joins it with the heads
    expanded = None if reshaped is None else producer(reshaped.inputs[0], "Expand")
    unsqueezed = None if expanded is None else producer(expanded.inputs[0], "Unsqueeze")
    if expanded is None or unsqueezed is None:
        return value
    axes = input_of(unsqueezed, 1).const_value
    given, wide, flat = input_of(unsqueezed, 0), expanded.outputs[0].shape, value.shape
    if axes is None or axes.numpy().tolist() != [2] or wide is None or flat is None or given.shape is None:
        return value
    heads = given.shape[1], wide[2], flat[1]
    if len(given.shape) != 4 or len(flat) != 4 or not all(isinstance(size, int) for size in heads):
        return value
    return given if heads[0] * heads[1] == heads[2] else value


SWAP = (0, 2, 1, 3)
"""Permutation of axes from (batch, tokens, heads, size) to (batch, heads, tokens, size), and in reverse."""


def put_tokens_first(model: ir.Model) -> None:
    """Make ``Attention`` nodes take inputs (batch, tokens, heads * size) if this removes transposes around them."""
    changed = False
    for node in list(model.graph):
        if node.op_type != "Attention" or node.domain != "" or "q_num_heads" in node.attributes:
            continue
        made = Nodes()
        sizes = [found for value in node.inputs[:3] if (found := heads_of(value)) is not None]
        if len(sizes) < 3:
            continue
        (heads, _), (keys, _), (_, size) = sizes
        # queries, keys and values must have the same layout
        taken = [first for place in range(3) if (first := tokens_first(input_of(node, place), made)) is not None]
        if len(taken) < 3:
            continue
        settings = {**node.attributes, "q_num_heads": heads, "kv_num_heads": keys}
        inputs = [*taken, *node.inputs[3:]]
        fused = ir.node("Attention", inputs, settings, num_outputs=len(node.outputs), name=node.name)
        # last, since this call changes the readers
        if heads_first(node.outputs[0], fused.outputs[0], heads * size):
            for old, new in zip(node.outputs[1:], fused.outputs[1:], strict=True):
                replace_value(old, new)
            insert_before(node, [*made, fused])
            changed = True
    if changed:
        passes.RemoveUnusedNodesPass()(model)


def heads_of(value: ir.Value | None) -> tuple[int, int] | None:
    """Return number and size of the heads of a value of shape (batch, heads, tokens, size); else ``None``."""
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    heads, size = value.shape[1], value.shape[3]
    return (heads, size) if isinstance(heads, int) and isinstance(size, int) else None


def tokens_first(value: ir.Value, made: Nodes) -> ir.Value | None:
    """Return ``value`` before its transpose, as (batch, tokens, heads * size); ``None`` if it was not transposed."""
    # value: its number of heads is known
    # made: gets the nodes that are needed
    node = value.producer()
    if node is not None and node.op_type == "RotaryEmbedding" and node.domain == "" and not node.inputs[3:]:
        # if the value had a second reader, the rotation would be computed twice
        before, found = _unswapped(input_of(node, 0), made) if len(list(value.uses())) == 1 else None, heads_of(value)
        if before is None or found is None:
            return None
        # an input of three axes needs the attribute num_heads
        settings = {**{one.name: one.value for one in node.attributes.values()}, "num_heads": found[0]}
        turned = made.add("RotaryEmbedding", before, *node.inputs[1:], **settings)
        turned.shape = before.shape
        copy_type(turned, value)
        return turned
    return _unswapped(value, made)


def _unswapped(value: ir.Value, made: Nodes) -> ir.Value | None:
    """Return the input of the transpose that computes ``value``, in the shape (batch, tokens, heads * size)."""
    swap, found = value.producer(), heads_of(value)
    if swap is None or swap.op_type != "Transpose" or tuple(attribute(swap, "perm", ())) != SWAP:
        return None
    if found is None or value.shape is None:
        return None
    apart, width = input_of(swap, 0), found[0] * found[1]
    split = apart.producer()
    if split is not None and split.op_type == "Reshape":
        whole = input_of(split, 0)
        if whole.shape is not None and len(whole.shape) == 3 and whole.shape[2] == width:
            return whole
    flat = made.reshape(apart, 0, 0, width)  # heads are normalized in between
    copy_type(flat, value)
    flat.shape = ir.Shape([value.shape[0], value.shape[2], width])
    return flat


def heads_first(old: ir.Value, new: ir.Value, width: int) -> bool:
    """If the graph transposes ``old`` to (batch, tokens, width), replace the result by ``new`` and return ``True``."""
    place = old
    while (reader := only_reader(place)) is not None:
        if reader.op_type != "Reshape" or place.shape is None or reader.outputs[0].shape != place.shape:
            break
        place = reader.outputs[0]  # a Reshape to the same shape is skipped
    if reader is None or reader.op_type != "Transpose" or tuple(attribute(reader, "perm", ())) != SWAP:
        return False
    joined = only_reader(reader.outputs[0], "Reshape")
    flat = None if joined is None else joined.outputs[0]
    if flat is None or flat.shape is None or flat.is_graph_output() or list(flat.shape)[2:] != [width]:
        return False
    new.shape = flat.shape
    copy_type(new, old)
    flat.replace_all_uses_with(new)
    return True
