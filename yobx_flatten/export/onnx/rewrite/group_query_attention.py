"""Replace ``Attention`` by onnxruntime's ``GroupQueryAttention``, which writes the KV cache in place.

``GroupQueryAttention`` appends new keys and values to the KV cache without copying the cache. The file computes the
number of tokens in the cache from the length of the mask, since the buffer ``past`` may have room for more tokens.
Layers with a sliding window are not changed, because their cache has fewer tokens than the mask. If the cache is
not empty, ``GroupQueryAttention`` accepts several new tokens only for batch size 1, and else one token per call.
"""

# past (1, 2, 1024, 64), 7 tokens seen ──> GroupQueryAttention ──> present: the same memory, 8 tokens seen

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy

from ....core.files.document import read_onnx
from ....errors import DamagedFileError
from ....runners.onnx_runner import SHARED_CACHE
from ....trace.onnx_repairs import ir, passes
from .attention import SWAP, heads_first, heads_of, match_scores, take_cache, tokens_first, unrepeated
from .graph import Nodes, attribute, copy_type, input_of, number_of, only_reader, producer, replace_value, type_of

_LOWEST = {1: -3.4028234663852886e38, 10: -65504.0}  # by ONNX data type: 1 is float32, 10 is float16


def share_cache(model: ir.Model) -> None:
    """Replace each ``Attention`` node that takes and returns a KV cache by ``GroupQueryAttention``, in place."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    mask = inputs.get("attention_mask")
    # the number of earlier tokens is the length of the mask minus the number of new tokens, so both have to be inputs
    if tokens is None or mask is None or mask.shape is None or len(mask.shape) != 2:
        return
    sinks = fuse_sinks(graph)
    if sinks:
        passes.RemoveUnusedNodesPass()(model)  # unused nodes that repeat keys would count as readers of the cache
    nodes = [node for node in graph if _is_shareable(node)]
    # ONNX's `Attention` has no input for sinks, so a file with such a node would not load
    if not set(sinks) <= set(nodes):
        raise ValueError("an attention with sinks can be written neither as GroupQueryAttention nor as ONNX Attention")
    if not nodes:
        return
    lengths = _Lengths(graph, tokens, mask)
    pasts = [input_of(node, place) for node in nodes for place in (4, 5)]
    for node in nodes:
        _replace(node, lengths)
    for past in pasts:
        # axis 2 of a past may now be longer than the number of earlier tokens
        for reader in {reader for reader, _ in past.uses() if reader.op_type == "Shape"}:
            if _axes(reader) == (2, 3):
                reader.outputs[0].replace_all_uses_with(lengths.past)
    graph.sort()
    # each layer computed its mask from the shape of its own past; these computations are now equal
    passes.CommonSubexpressionEliminationPass()(model)
    simplify_masks(graph, mask, lengths.past)
    passes.RemoveUnusedNodesPass()(model)
    model.opset_imports["com.microsoft"] = 1
    model.metadata_props[SHARED_CACHE] = ",".join(str(past.name) for past in pasts)


def shared_inputs(path: str | os.PathLike[str]) -> list[str]:
    properties = read_onnx(pathlib.Path(path), failure=DamagedFileError).metadata_props
    return next((entry.value.split(",") for entry in properties if entry.key == SHARED_CACHE), [])


def _is_shareable(node: ir.Node) -> bool:
    """Return whether an ``Attention`` node may write new keys and values into the memory of its KV cache input."""
    if node.op_type != "Attention" or node.domain != "" or len(node.inputs) < 6 or len(node.outputs) != 3:
        return False
    query, key, value, mask, past_key, past_value = node.inputs[:6]
    if query is None or mask is None or past_key is None or past_value is None:
        return False
    # 9 is bool; all other masks are added to the scores
    if query.dtype is None or query.dtype not in _LOWEST or mask.dtype not in (9, query.dtype):
        return False
    heads = [found for one in (query, key, value) if (found := heads_of(one)) is not None]
    if len(heads) < 3 or heads[1] != heads[2] or heads[0][1] != heads[1][1]:
        return False
    # GroupQueryAttention has neither attribute
    if any(attribute(node, name, 0) for name in ("is_causal", "qk_matmul_output_mode")):
        return False
    for past, present in zip((past_key, past_value), node.outputs[1:], strict=True):
        # the caller shares the memory of input and output, so no other node may read the values written later
        if not past.is_graph_input() or not present.is_graph_output() or list(present.uses()):
            return False
        for reader, _ in past.uses():
            # nodes may read sizes of the cache, which are computed in another way afterwards
            if reader is not node and (reader.op_type != "Shape" or _axes(reader) not in ((0, 1), (1, 2), (2, 3))):
                return False
    return True


class _Lengths(Nodes):
    """Numbers of tokens and additive masks, computed once for the ``GroupQueryAttention`` nodes of all layers."""

    def __init__(self, graph: ir.Graph, tokens: ir.Value, mask: ir.Value) -> None:
        super().__init__()
        self.graph = graph
        self.biases: dict[ir.Value, ir.Value] = {}
        batch = self.add("Shape", tokens, start=0, end=1)
        new, total = self.add("Shape", tokens, start=1, end=2), self.add("Shape", mask, start=1, end=2)
        self.past = self.add("Sub", total, new)
        # the operator takes the length minus 1, as int32 (6 in ONNX)
        last = self.add("Cast", self.add("Sub", total, self.add("Constant", value_ints=[1])), to=6)
        self.last = self.add("Expand", last, batch)  # place of each row's last token
        self.total = self.add("Squeeze", self.add("Cast", total, to=6))

    def append(self, node: ir.Node) -> None:
        super().append(node)
        self.graph.append(node)

    def bias(self, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return a boolean mask as an additive mask: 0 for ``True``, and the lowest number for ``False``."""
        if mask.dtype == dtype:
            return mask
        if mask not in self.biases:
            scalars = (numpy.array(number, dtype.numpy()) for number in (0.0, _LOWEST[dtype]))
            numbers = [self.add("Constant", value=ir.tensor(scalar)) for scalar in scalars]
            bias = self.add("Where", mask, *numbers)
            bias.dtype, bias.shape = dtype, None if mask.shape is None else ir.Shape(mask.shape)
            self.biases[mask] = bias
        return self.biases[mask]


def _replace(node: ir.Node, lengths: _Lengths) -> None:
    """Replace an ``Attention`` node by ``GroupQueryAttention`` with inputs of shape (batch, tokens, heads * size)."""
    query, key, value, mask, *pasts = (input_of(node, place) for place in range(6))
    heads, size = heads_of(query)  # type: ignore[misc] # `_is_shareable` has checked that the heads are known
    settings: Mapping[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": heads_of(key)[0],  # type: ignore[index]
        # 0 means the default in ONNX; the new operator would use the scale 0
        "scale": attribute(node, "scale", 0.0) or size**-0.5,
        "softcap": attribute(node, "softcap", 0.0),
    }
    taken: list[ir.Value | None] = []
    for one in (query, key, value):
        first = tokens_first(one, lengths)  # the value before its transpose, if the graph has one
        if first is None:
            first = lengths.reshape(lengths.add("Transpose", one, perm=SWAP), 0, 0, -1)
        taken.append(first)
    taken += [*pasts, lengths.last, lengths.total, None, None, None, lengths.bias(mask, type_of(query))]
    # from (1, heads, 1, 1) to (heads,)
    taken += [lengths.reshape(sinks, -1) for sinks in node.inputs[6:]]
    new = ir.node("GroupQueryAttention", taken, settings, domain="com.microsoft", num_outputs=3, name=node.name)
    lengths.graph.insert_before(node, new)
    copy_type(new.outputs[0], query)
    if not heads_first(node.outputs[0], new.outputs[0], heads * size):
        swapped = lengths.add("Transpose", lengths.reshape(new.outputs[0], 0, 0, heads, size), perm=SWAP)
        swapped.shape, swapped.type = node.outputs[0].shape, node.outputs[0].type
        node.outputs[0].replace_all_uses_with(swapped)
    for old, present in zip(node.outputs[1:], new.outputs[1:], strict=True):
        replace_value(old, present)


def _axes(shape: ir.Node) -> tuple[int, int]:
    return attribute(shape, "start", 0), attribute(shape, "end", 4)


def fuse_sinks(graph: ir.Graph) -> list[ir.Node]:
    """Replace the nodes that compute attention with sinks (gpt-oss) by ``Attention`` nodes; return the new nodes."""
    # the seventh input of each node, which ONNX's operator does not have, is the sinks, of shape (1, heads, 1, 1)
    found = []
    for softmax in [node for node in graph if node.op_type == "Softmax"]:
        matched = _matched(softmax)
        if matched is None:
            continue
        (query, key, scale, cap), value, mask, sinks, product = matched
        attention = ir.node(
            "Attention", [query, key, value, mask], attributes={"scale": scale, "softcap": cap}, name=softmax.name
        )
        graph.insert_before(product, attention)
        replace_value(product.outputs[0], attention.outputs[0])
        graph.remove(product, safe=True)
        fused = take_cache(graph, attention)
        # ONNX's `Attention` has no sinks: the next attempt keeps the separate nodes
        if fused is None:
            raise ValueError(f"the attention with sinks at {softmax.name} cannot read the KV cache as its input")
        fused.resize_inputs(7)
        fused.replace_input_with(6, sinks)
        found.append(fused)
    return found


def _matched(
    softmax: ir.Node,
) -> tuple[tuple[ir.Value, ir.Value, float, float], ir.Value, ir.Value | None, ir.Value, ir.Node] | None:
    """Match attention with sinks: return scores, values, mask, sinks and the ``MatMul`` of softmax and values."""
    sliced = only_reader(softmax.outputs[0], "Slice")
    product = None if sliced is None else only_reader(sliced.outputs[0], "MatMul")
    # the softmax includes a column for the sinks, which is then cut off, since sinks have no values
    if sliced is None or product is None or [number_of(one) for one in sliced.inputs[1:4]] != [0, -1, 3]:
        return None
    joined = input_of(softmax, 0)
    less = producer(joined, "Sub")  # subtracting the largest score does not change the softmax
    if less is not None:
        of_numbers = producer(less.inputs[1], "Where")  # returns NaN if a score is NaN
        if producer(less.inputs[1] if of_numbers is None else of_numbers.inputs[2], "ReduceMax") is not None:
            joined = input_of(less, 0)
    both = producer(joined, "Concat")
    if both is None or len(both.inputs) != 2:
        return None
    masked, expanded = producer(both.inputs[0], "Add"), producer(both.inputs[1], "Expand")
    if masked is None or expanded is None or attribute(both, "axis", 0) not in (-1, 3):
        return None
    scores, sinks = match_scores(masked.inputs[0]), input_of(expanded, 0)
    if scores is None or sinks.shape is None or len(sinks.shape) != 4:
        return None
    query, key, scale, cap = scores
    key, value = unrepeated(key), unrepeated(input_of(product, 1))
    if query.shape is None or list(sinks.shape) != [1, query.shape[1], 1, 1]:
        return None
    # keys and values have to be cache inputs of the file, concatenated with new tokens
    for one, cat in ((one, producer(one, "Concat")) for one in (key, value)):
        if cat is None or not input_of(cat, 0).is_graph_input() or not one.is_graph_output():
            return None
    return (query, key, scale, cap), value, masked.inputs[1], sinks, product


def simplify_masks(graph: ir.Graph, mask: ir.Value, past: ir.Value) -> None:
    """Simplify the nodes that compute the attention mask in a file with ``GroupQueryAttention`` nodes."""
    # past: the number of earlier tokens, of shape (1,): the length of the mask minus the number of new tokens
    less = past.producer()
    if less is None:
        raise ValueError(f"{past.name} must be the length of the attention mask minus the number of new tokens")
    new = input_of(less, 1)
    for node in list(graph):
        if node.domain != "":
            continue
        found = None
        # the mask is padded, because a cache may be longer than the mask, and then read at each key
        padded = producer(node.inputs[0], "Pad") if node.op_type == "GatherND" else None
        if padded is not None and _reads_each_key(node, padded, mask, new, past):
            # from (batch, keys) to (batch, 1, 1, keys), for all heads and queries
            made = Nodes()
            found = made.add("Unsqueeze", padded.inputs[0], made.add("Constant", value_ints=[1, 2]))
            graph.insert_before(node, made)
            found.shape = node.outputs[0].shape
            copy_type(found, node.outputs[0])
        elif node.op_type == "And":
            # `And` with a condition that is always true returns the other condition
            found = next((node.inputs[1 - place] for place in (0, 1) if number_of(node.inputs[place]) is True), None)
        elif node.op_type == "Expand":
            found = node.inputs[0]  # if it has the same shape, which is tested below
        if found is None or found.shape is None or node.outputs[0].is_graph_output():
            continue
        if found.shape == node.outputs[0].shape:
            node.outputs[0].replace_all_uses_with(found)


def _reads_each_key(node: ir.Node, padded: ir.Node, mask: ir.Value, new: ir.Value, past: ir.Value) -> bool:
    """Return whether a ``GatherND`` node reads complete rows of a padded mask, with all columns in order."""
    places, given = producer(node.inputs[1], "Concat"), producer(padded.inputs[0], "Cast")
    if given is None or given.inputs[0] is not mask or places is None or len(places.inputs) != 2:
        return False
    if attribute(padded, "mode", "constant") != "constant" or attribute(node, "batch_dims", 0):
        return False
    sizes = producer(padded.inputs[1], "Concat")
    # the padding must be after the columns of the mask
    if sizes is None or [number_of(one) for one in sizes.inputs[:3]] != [0, 0, 0]:
        return False
    rows, keys = (_counted(one) for one in places.inputs)
    if rows is None or keys is None or rows[0][1:] != [1, 1, 1]:
        return False
    added = producer(keys[1], "Add")
    if added is None or keys[0][:3] != [1, 1, 1]:
        return False
    squeezed = [(one, producer(one, "Squeeze")) for one in added.inputs]
    # the number of keys must be the sum of earlier and new tokens, which is the length of the mask
    return {one if squeeze is None else squeeze.inputs[0] for one, squeeze in squeezed} == {new, past}


def _counted(value: ir.Value | None) -> tuple[list[int | ir.SymbolicDim], ir.Value] | None:
    """Match ``arange(count)``, reshaped to four axes and then expanded: return the reshaped shape and ``count``."""
    last = producer(value, "Unsqueeze")
    expanded = None if last is None else producer(last.inputs[0], "Expand")
    if last is None or expanded is None:
        return None
    axes = input_of(last, 1).const_value
    if axes is None or axes.numpy().tolist() != [-1]:
        return None
    value = input_of(expanded, 0)
    wide = value.shape
    while (unsqueezed := producer(value, "Unsqueeze")) is not None:
        value = input_of(unsqueezed, 0)
    counted = producer(value, "Range")
    if counted is None or wide is None or len(wide) != 4 or [number_of(one) for one in counted.inputs[::2]] != [0, 1]:
        return None
    return list(wide), input_of(counted, 1)
