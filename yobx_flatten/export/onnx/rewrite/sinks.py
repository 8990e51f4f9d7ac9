"""Replace attention with sinks (gpt-oss) by one operator. A sink takes weight and adds no value.

.. code-block:: text

    Concat(scores + mask, sinks) ── Softmax ── Slice ── MatMul        Attention, and the sinks of its heads

The operator of ONNX has no input for them, ``GroupQueryAttention`` of onnxruntime does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from .attention import match_scores, take_cache, unrepeated
from .matching import only_reader, producer, replace_value
from .repair import attribute, input_of

if TYPE_CHECKING:
    import onnx_ir as ir

    # (query, key, scale, soft cap), values, mask, sinks, the last product
    _Matched: TypeAlias = tuple[tuple[ir.Value, ir.Value, float, float], ir.Value, ir.Value | None, ir.Value, ir.Node]


def fuse_sinks(graph: ir.Graph) -> list[ir.Node]:
    """Replace spelled-out attention with sinks, whose keys and values are those of the file's cache, in place."""
    # returns: the nodes: `Attention` whose seventh input, which ONNX's operator does not have, is the sinks, of shape
    # (1, heads, 1, 1)
    import onnx_ir as ir

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
        # a sink without the cache would be left to ONNX's operator, which has none: the next attempt spells it out
        if fused is None:
            raise ValueError(f"the attention with sinks of {softmax.name} shares its cache with something else")
        fused.resize_inputs(7)
        fused.replace_input_with(6, sinks)
        found.append(fused)
    return found


def _matched(softmax: ir.Node) -> _Matched | None:
    """Scores, values, mask, sinks and the last product; ``None`` for another softmax."""
    sliced = only_reader(softmax.outputs[0], "Slice")
    product = None if sliced is None else only_reader(sliced.outputs[0], "MatMul")
    # the column of the sinks is cut off: it took its part of the sum, and has no value
    if sliced is None or product is None or [_numbers(one) for one in sliced.inputs[1:4]] != [[0], [-1], [3]]:
        return None
    joined = input_of(softmax, 0)
    less = producer(joined, "Sub")  # the largest score: for the range of numbers, the softmax is the same
    if less is not None:
        of_numbers = producer(less.inputs[1], "Where")  # NaN where one of them is
        if producer(less.inputs[1] if of_numbers is None else of_numbers.inputs[2], "ReduceMax") is not None:
            joined = input_of(less, 0)
    both = producer(joined, "Concat")
    if both is None or len(both.inputs) != 2:
        return None
    # one number for each head, for all rows and queries
    masked, expanded = producer(both.inputs[0], "Add"), producer(both.inputs[1], "Expand")
    if masked is None or expanded is None or attribute(both, "axis", 0) not in (-1, 3):
        return None
    scores, sinks = match_scores(masked.inputs[0]), input_of(expanded, 0)
    if scores is None or sinks.shape is None or len(sinks.shape) != 4:
        return None
    query, key, scale, cap = scores
    key, value = unrepeated(key), unrepeated(input_of(product, 1))
    if (
        query.shape is None
        or list(sinks.shape) != [1, query.shape[1], 1, 1]
        or not (_is_cache(key) and _is_cache(value))
    ):
        return None
    return (query, key, scale, cap), value, masked.inputs[1], sinks, product


def _is_cache(value: ir.Value) -> bool:
    """Whether keys or values are the file's cache with new ones after it."""
    joined = producer(value, "Concat")
    return joined is not None and input_of(joined, 0).is_graph_input() and value.is_graph_output()


def _numbers(value: ir.Value | None) -> list[int] | None:
    constant = None if value is None else value.const_value
    return None if constant is None else constant.numpy().reshape(-1).tolist()
