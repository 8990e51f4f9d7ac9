"""Keep queries, keys and values as one tensor each, without splitting heads.

.. code-block:: text

    MatMul ── Reshape ── Transpose ── RotaryEmbedding ── Attention ── Transpose ── Reshape        heads first

    MatMul ── RotaryEmbedding ── Attention                                                        tokens first

``Attention`` and ``RotaryEmbedding`` of ONNX accept both forms; the second form copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .repair import attribute, copy_type, input_of, insert_before, only_reader, replace_value

if TYPE_CHECKING:
    import onnx_ir as ir

SWAP = (0, 2, 1, 3)
"""Permutation of axes from (batch, tokens, heads, size) to (batch, heads, tokens, size), and in reverse."""


def put_tokens_first(model: ir.Model) -> None:
    """Make each ``Attention`` take inputs of shape (batch, tokens, heads * size), if its neighbours use this shape."""
    import onnx_ir.passes.common as passes

    changed = [_put_tokens_first(node) for node in list(model.graph) if node.op_type == "Attention"]
    if any(changed):
        passes.RemoveUnusedNodesPass()(model)


def _put_tokens_first(node: ir.Node) -> bool:
    import onnx_ir as ir

    sizes = [found for value in node.inputs[:3] if (found := heads_of(value)) is not None]
    if node.domain != "" or len(sizes) < 3 or "q_num_heads" in node.attributes:
        return False
    (heads, _), (keys, _), (_, size) = sizes
    made: list[ir.Node] = []

    def make(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        made.append(ir.node(op_type, inputs, attributes))
        return made[-1].outputs[0]

    # queries, keys and values must have the same layout
    taken = [first for place in range(3) if (first := tokens_first(input_of(node, place), make)) is not None]
    if len(taken) < 3:
        return False
    settings = {**node.attributes, "q_num_heads": heads, "kv_num_heads": keys}
    inputs = [*taken, *node.inputs[3:]]
    fused = ir.node("Attention", inputs, settings, num_outputs=len(node.outputs), name=node.name)
    # last, since this call changes the readers
    if not heads_first(node.outputs[0], fused.outputs[0], heads * size):
        return False
    for old, new in zip(node.outputs[1:], fused.outputs[1:], strict=True):
        replace_value(old, new)
    insert_before(node, [*made, fused])
    return True


def heads_of(value: ir.Value | None) -> tuple[int, int] | None:
    """Return number and size of the heads of a value of shape (batch, heads, tokens, size); else ``None``."""
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    heads, size = value.shape[1], value.shape[3]
    return (heads, size) if isinstance(heads, int) and isinstance(size, int) else None


def tokens_first(value: ir.Value, make: Callable[..., ir.Value]) -> ir.Value | None:
    """Return a value of shape (batch, tokens, heads * size) that ``value`` was made from; ``None`` if there is none."""
    # value: its number of heads is known
    # make: adds a node with an operator, inputs and attributes, and returns its output
    node = value.producer()
    if node is not None and node.op_type == "RotaryEmbedding" and node.domain == "" and not node.inputs[3:]:
        # if the value had a second reader, the rotation would be computed twice
        before, found = _unswapped(input_of(node, 0), make) if len(list(value.uses())) == 1 else None, heads_of(value)
        if before is None or found is None:
            return None
        # an input of three axes needs the attribute num_heads
        settings = {**{one.name: one.value for one in node.attributes.values()}, "num_heads": found[0]}
        turned = make("RotaryEmbedding", before, *node.inputs[1:], **settings)
        turned.shape = before.shape
        copy_type(turned, value)
        return turned
    return _unswapped(value, make)


def _unswapped(value: ir.Value, make: Callable[..., ir.Value]) -> ir.Value | None:
    """Return ``value`` before its transpose: (batch, tokens, heads * size)."""
    import onnx_ir as ir

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
    flat = make("Reshape", apart, make("Constant", value_ints=[0, 0, width]))  # heads are normalized in between
    copy_type(flat, value)
    flat.shape = ir.Shape([value.shape[0], value.shape[2], width])
    return flat


def heads_first(old: ir.Value, new: ir.Value, width: int) -> bool:
    """Let nodes that transpose and join the heads of ``old`` read ``new``, whose heads are already joined."""
    place = old
    while (reader := only_reader(place)) is not None:
        found = reader.outputs[0]
        # a Reshape to the same shape is skipped
        if reader.op_type == "Reshape" and found.shape is not None and found.shape == place.shape:
            place = found
            continue
        if reader.op_type == "Transpose" and tuple(attribute(reader, "perm", ())) == SWAP:
            joined = only_reader(found)
            flat = None if joined is None or joined.op_type != "Reshape" else joined.outputs[0]
            if flat is None or flat.shape is None or flat.is_graph_output():
                return False
            if list(flat.shape)[2:] == [width]:
                new.shape = flat.shape
                copy_type(new, old)
                flat.replace_all_uses_with(new)
                return True
        return False
    return False
