"""Use onnxruntime's ``GroupQueryAttention``, which writes the cache in place.

.. code-block:: text

    past (1, 2, 1024, 64), 7 tokens seen ──> GroupQueryAttention ──> present: the same memory, 8 tokens seen

``GroupQueryAttention`` of onnxruntime writes the new keys and values after those that were seen, and copies nothing, if
a past and its present are bound to the same memory. The number of tokens seen is then no longer the length of the past,
so a file reads it from the length of its mask. The same file takes a cache that grows.

A layer whose cache holds other tokens than those of the mask (one that slides) stays as it is. The operator takes
several tokens after others for one row only: for several rows, the prompt is read at once, and then token by token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....runners.onnx_buffers import SHARED_CACHE
from .heads import SWAP, heads_first, heads_of, tokens_first
from .masks import simplify_masks
from .repair import attribute, copy_type, input_of, type_of
from .sinks import fuse_sinks

if TYPE_CHECKING:
    import onnx_ir as ir

_LOWEST = {1: -3.4028234663852886e38, 10: -65504.0}  # by ONNX's number of the type: float32, float16


def share_cache(model: ir.Model) -> bool:
    """Replace ``Attention`` that takes and returns a cache by ``GroupQueryAttention``, in place."""
    import onnx_ir.passes.common as passes

    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    mask = inputs.get("attention_mask")
    # the number of tokens seen is the columns of the mask less those of the tokens: both have to be inputs
    if tokens is None or mask is None or mask.shape is None or len(mask.shape) != 2:
        return False
    sinks = fuse_sinks(graph)
    if sinks:
        passes.RemoveUnusedNodesPass()(model)  # the repeated keys read the cache
    nodes = [node for node in graph if _is_shareable(node)]
    # ONNX's operator has no input for sinks: a file with such a node would not load, so this form is given up
    if not set(sinks) <= set(nodes):
        raise ValueError("GroupQueryAttention takes no cache that something else reads, and only it has sinks")
    if not nodes:
        return False
    lengths = _Lengths(graph, tokens, mask)
    # before they are replaced: afterwards their inputs are those of the other operator
    pasts = [input_of(node, place) for node in nodes for place in (4, 5)]
    for node in nodes:
        _replace(node, lengths)
    for past in pasts:
        # the third axis of a past is its memory now, which has room for more tokens than were seen
        for reader in {reader for reader, _ in past.uses() if reader.op_type == "Shape"}:
            if _axes(reader) == (2, 3):
                reader.outputs[0].replace_all_uses_with(lengths.past)
    graph.sort()
    # the layers computed their masks of shapes of their own pasts, which are one value now
    passes.CommonSubexpressionEliminationPass()(model)
    simplify_masks(graph, mask, lengths.past)
    passes.RemoveUnusedNodesPass()(model)
    model.opset_imports["com.microsoft"] = 1
    model.metadata_props[SHARED_CACHE] = ",".join(str(past.name) for past in pasts)
    return True


def shared_inputs(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of a file's inputs whose memory may be that of an output."""
    import onnx

    properties = onnx.load(path, load_external_data=False).metadata_props
    return next((entry.value.split(",") for entry in properties if entry.key == SHARED_CACHE), [])


def _is_shareable(node: ir.Node) -> bool:
    """Whether an attention's cache is that of the file as it is, and read by nothing else than this attention."""
    if node.op_type != "Attention" or node.domain != "" or len(node.inputs) < 6 or len(node.outputs) != 3:
        return False
    query, key, value, mask, past_key, past_value = node.inputs[:6]
    if query is None or mask is None or past_key is None or past_value is None:
        return False
    # 9 is bool; numbers are added to the scores as they are
    if mask.dtype not in (9, query.dtype):
        return False
    if query.dtype is None or query.dtype not in _LOWEST or any(heads_of(one) is None for one in (query, key, value)):
        return False
    if heads_of(key) != heads_of(value) or heads_of(query)[1] != heads_of(key)[1]:  # type: ignore[index] # tested above
        return False
    # the other operator has neither
    if any(attribute(node, name, 0) for name in ("is_causal", "qk_matmul_output_mode")):
        return False
    for past, present in zip((past_key, past_value), node.outputs[1:], strict=True):
        # the caller shares the memory of both ends, and no other node may read what is written later
        if not past.is_graph_input() or not present.is_graph_output() or list(present.uses()):
            return False
        for reader, _ in past.uses():
            # sizes of rows, heads and tokens are computed in another way; the contents are not
            if reader is not node and (reader.op_type != "Shape" or _axes(reader) not in ((0, 1), (1, 2), (2, 3))):
                return False
    return True


class _Lengths:
    """What the operators of all layers take: the number of tokens, and masks as numbers that are added."""

    def __init__(self, graph: ir.Graph, tokens: ir.Value, mask: ir.Value) -> None:
        self.graph = graph
        self.biases: dict[ir.Value, ir.Value] = {}
        batch = self.make("Shape", tokens, start=0, end=1)
        new, total = self.make("Shape", tokens, start=1, end=2), self.make("Shape", mask, start=1, end=2)
        self.past = self.make("Sub", total, new)
        # the operator takes int32 (6 in ONNX), and the length less one
        last = self.make("Cast", self.make("Sub", total, self.constant([1])), to=6)
        self.last = self.make("Expand", last, batch)  # place of each row's last token
        self.total = self.make("Squeeze", self.make("Cast", total, to=6))

    def make(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add an operator; return its output."""
        import onnx_ir as ir

        node = ir.node(op_type, inputs, attributes)
        self.graph.append(node)
        return node.outputs[0]

    def constant(self, numbers: list[int]) -> ir.Value:
        """Return a constant of integers."""
        return self.make("Constant", value_ints=numbers)

    def bias(self, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return a mask as numbers that are added to the scores."""
        import onnx_ir as ir

        if mask.dtype == dtype:
            return mask
        # layers of one kind have one mask
        if mask not in self.biases:
            numbers = [self.make("Constant", value=_scalar(number, dtype)) for number in (0.0, _LOWEST[dtype])]
            bias = self.make("Where", mask, *numbers)
            bias.dtype, bias.shape = dtype, None if mask.shape is None else ir.Shape(mask.shape)
            self.biases[mask] = bias
        return self.biases[mask]


def _scalar(number: float, dtype: ir.DataType) -> ir.TensorProtocol:
    import numpy
    import onnx_ir as ir

    return ir.tensor(numpy.array(number, dtype.numpy()))


def _replace(node: ir.Node, lengths: _Lengths) -> None:
    """Put the other operator in the place of an attention, with tokens before heads."""
    import onnx_ir as ir

    query, key, value, mask, *pasts = (input_of(node, place) for place in range(6))
    heads, size = heads_of(query)  # type: ignore[misc] # that of an attention that is shareable
    settings: Mapping[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": heads_of(key)[0],  # type: ignore[index]
        # 0 stands for the default in ONNX, and for 0 here
        "scale": attribute(node, "scale", 0.0) or size**-0.5,
        "softcap": attribute(node, "softcap", 0.0),
    }
    taken: list[ir.Value | None] = []
    # as the product made it where that is still to be had; else it is swapped back
    taken += [tokens_first(one, lengths.make) or _swapped(one, lengths) for one in (query, key, value)]
    taken += [*pasts, lengths.last, lengths.total, None, None, None, lengths.bias(mask, type_of(query))]
    # (1, heads, 1, 1) in the model, (heads,) here
    taken += [lengths.make("Reshape", sinks, lengths.constant([-1])) for sinks in node.inputs[6:]]
    new = ir.node("GroupQueryAttention", taken, settings, domain="com.microsoft", num_outputs=3, name=node.name)
    lengths.graph.insert_before(node, new)
    copy_type(new.outputs[0], query)
    if not heads_first(node.outputs[0], new.outputs[0], heads * size):
        split = lengths.make("Reshape", new.outputs[0], lengths.constant([0, 0, heads, size]))
        swapped = lengths.make("Transpose", split, perm=SWAP)
        swapped.shape, swapped.type = node.outputs[0].shape, node.outputs[0].type
        node.outputs[0].replace_all_uses_with(swapped)
    for old, present in zip(node.outputs[1:], new.outputs[1:], strict=True):
        # tools feed the cache by the names of outputs
        present.shape, present.type, name = old.shape, old.type, old.name
        old.replace_all_uses_with(present, replace_graph_outputs=True)
        old.name, present.name = f"{name}_before", name


def _swapped(value: ir.Value, lengths: _Lengths) -> ir.Value:
    """(batch, heads, tokens, size) as (batch, tokens, heads * size)."""
    swapped = lengths.make("Transpose", value, perm=SWAP)
    return lengths.make("Reshape", swapped, lengths.constant([0, 0, -1]))


def _axes(shape: ir.Node) -> tuple[int, int]:
    return attribute(shape, "start", 0), attribute(shape, "end", 4)
