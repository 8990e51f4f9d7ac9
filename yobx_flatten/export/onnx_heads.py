"""Queries, keys and values as their products return them, with the heads of a token next to each other.

.. code-block:: text

    MatMul ── Reshape ── Transpose ── RotaryEmbedding ── Attention ── Transpose ── Reshape        heads first

    MatMul ── RotaryEmbedding ── Attention                                                        tokens first

``Attention`` and ``RotaryEmbedding`` of ONNX take both forms; the second one copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .onnx_graph import attribute

__all__ = ["SWAP", "heads_first", "heads_of", "put_tokens_first", "tokens_first"]

SWAP = (0, 2, 1, 3)
"""Order of axes from (batch, tokens, heads, size) to (batch, heads, tokens, size), and back."""


def put_tokens_first(model: Any) -> None:
    """Let each ``Attention`` take and return (batch, tokens, heads * size) where both ends are made so, in place.

    Args:
        model: an ``onnx_ir.Model`` of opset 23.
    """
    import onnx_ir.passes.common as passes

    changed = [_put_tokens_first(node) for node in list(model.graph) if node.op_type == "Attention"]
    if any(changed):
        passes.RemoveUnusedNodesPass()(model)


def _put_tokens_first(node: Any) -> bool:
    import onnx_ir as ir

    sizes = [heads_of(value) for value in node.inputs[:3]]
    if node.domain != "" or None in sizes or "q_num_heads" in node.attributes:
        return False
    (heads, _), (keys, _), (_, size) = sizes  # type: ignore[misc] # tested above
    made: list[Any] = []

    def make(op_type: str, *inputs: Any, **attributes: Any) -> Any:
        made.append(ir.node(op_type, inputs, attributes))
        return made[-1].outputs[0]

    taken = [tokens_first(value, make) for value in node.inputs[:3]]
    if None in taken:
        return False
    settings = {**node.attributes, "q_num_heads": heads, "kv_num_heads": keys}
    inputs = [*taken, *node.inputs[3:]]
    fused = ir.node("Attention", inputs, settings, num_outputs=len(node.outputs), name=node.name)
    if not heads_first(node.outputs[0], fused.outputs[0], heads * size):
        return False
    for old, new in zip(node.outputs[1:], fused.outputs[1:], strict=True):
        new.shape, new.type, name = old.shape, old.type, old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}_before", name
    node.graph.insert_before(node, [*made, fused])
    return True


def heads_of(value: Any) -> tuple[int, int] | None:
    """Return number and size of the heads of a value (batch, heads, tokens, size); ``None`` for another one.

    Args:
        value: an ``onnx_ir.Value``, or ``None``.
    """
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    heads, size = value.shape[1], value.shape[3]
    return (heads, size) if isinstance(heads, int) and isinstance(size, int) else None


def tokens_first(value: Any, make: Callable[..., Any]) -> Any | None:
    """Return (batch, heads, tokens, size) as (batch, tokens, heads * size), if that is how it came to be.

    Args:
        value: an ``onnx_ir.Value`` whose heads are known.
        make: called with an operator, its inputs and attributes; adds a node and returns its output.
    """
    node = value.producer()
    if node is not None and node.op_type == "RotaryEmbedding" and node.domain == "" and not node.inputs[3:]:
        before = _unswapped(node.inputs[0], make) if len(list(value.uses())) == 1 else None
        if before is None:
            return None
        settings = {**{one.name: one.value for one in node.attributes.values()}, "num_heads": value.shape[1]}
        turned = make("RotaryEmbedding", before, *node.inputs[1:], **settings)
        turned.dtype, turned.shape = value.dtype, before.shape
        return turned
    return _unswapped(value, make)


def _unswapped(value: Any, make: Callable[..., Any]) -> Any | None:
    """What ``value`` was before its heads came first, (batch, tokens, heads * size)."""
    import onnx_ir as ir

    swap, found = value.producer(), heads_of(value)
    if swap is None or swap.op_type != "Transpose" or tuple(attribute(swap, "perm", ())) != SWAP or found is None:
        return None
    apart, width = swap.inputs[0], found[0] * found[1]
    split = apart.producer()
    if split is not None and split.op_type == "Reshape" and split.inputs[0].shape is not None:
        shape = split.inputs[0].shape
        if len(shape) == 3 and shape[2] == width:
            return split.inputs[0]
    flat = make("Reshape", apart, make("Constant", value_ints=[0, 0, width]))  # norms of heads are in between
    flat.dtype = value.dtype
    flat.shape = ir.Shape([value.shape[0], value.shape[2], width])
    return flat


def heads_first(old: Any, new: Any, width: int) -> bool:
    """Let the readers of (batch, heads, tokens, size) read (batch, tokens, heads * size), if they swap and join it.

    Args:
        old: the ``onnx_ir.Value`` that is read.
        new: what is to be read.
        width: heads * size.

    Returns:
        Whether they do.
    """
    place = old
    while (reader := _only_reader(place)) is not None:
        found = reader.outputs[0]
        if reader.op_type == "Reshape" and found.shape is not None and found.shape == place.shape:
            place = found
            continue
        if reader.op_type == "Transpose" and tuple(attribute(reader, "perm", ())) == SWAP:
            joined = _only_reader(found)
            flat = None if joined is None or joined.op_type != "Reshape" else joined.outputs[0]
            shape = None if flat is None or flat.is_graph_output() else flat.shape
            if shape is not None and list(shape)[2:] == [width]:
                new.shape, new.dtype = shape, old.dtype
                flat.replace_all_uses_with(new)  # type: ignore[union-attr] # it has a shape
                return True
        return False
    return False


def _only_reader(value: Any) -> Any | None:
    uses = list(value.uses())
    return uses[0][0] if len(uses) == 1 and uses[0][1] == 0 and not value.is_graph_output() else None
