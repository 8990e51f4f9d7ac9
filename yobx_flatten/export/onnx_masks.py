"""The mask of a file whose cache is shared, in fewer operators.

.. code-block:: text

    mask ── Pad ── GatherND (row of the batch, key) ── And ── Expand        mask ── Unsqueeze ── And

In a trace, a mask may be shorter than the keys: it is made longer, and each key is looked up in it. A file that takes
the number of tokens seen from its mask has as many keys as the mask has columns, so this is the mask as it is. (A mask
of more rows than the batch, which a look-up would take, is refused by the attention.)
"""

from __future__ import annotations

from typing import Any

from .onnx_attention import producer
from .onnx_graph import attribute

__all__ = ["simplify_masks"]


def simplify_masks(graph: Any, mask: Any, past: Any) -> None:
    """Simplify what is computed of a mask, in place; what is no longer used stays.

    Args:
        graph: an ``onnx_ir.Graph``.
        mask: its input (batch, tokens seen + new tokens).
        past: the number of tokens seen, of shape (1,): the columns of the mask less the number of new tokens.
    """
    import onnx_ir as ir

    _, new = past.producer().inputs
    for node in list(graph):
        if node.domain != "":
            continue
        found = None
        if node.op_type == "GatherND" and _reads_each_key(node, mask, new, past):
            axes = ir.node("Constant", [], {"value_ints": [1, 2]})
            whole = ir.node("Unsqueeze", [node.inputs[0].producer().inputs[0], axes.outputs[0]])
            graph.insert_before(node, [axes, whole])
            found = whole.outputs[0]
            found.shape, found.dtype = node.outputs[0].shape, node.outputs[0].dtype
        elif node.op_type == "And":
            found = next((node.inputs[1 - place] for place in (0, 1) if _is_true(node.inputs[place])), None)
        elif node.op_type == "Expand":
            found = node.inputs[0]
        if found is None or found.shape is None or node.outputs[0].is_graph_output():
            continue
        if found.shape == node.outputs[0].shape:
            node.outputs[0].replace_all_uses_with(found)


def _reads_each_key(node: Any, mask: Any, new: Any, past: Any) -> bool:
    """Whether a ``GatherND`` reads the columns of the mask, made longer, in their order, for each row."""
    padded, places = producer(node.inputs[0], "Pad"), producer(node.inputs[1], "Concat")
    given = None if padded is None else producer(padded.inputs[0], "Cast")
    if given is None or given.inputs[0] is not mask or places is None or len(places.inputs) != 2:
        return False
    if attribute(padded, "mode", "constant") != "constant" or attribute(node, "batch_dims", 0):
        return False
    before = [_number(one) for one in _elements(padded.inputs[1])]  # type: ignore[union-attr] # given is None otherwise
    if before[:3] != [0, 0, 0]:  # only columns after those of the mask
        return False
    rows, keys = (_counted(one) for one in places.inputs)
    if rows is None or keys is None or list(rows[0].shape)[1:] != [1, 1, 1]:
        return False
    added = producer(keys[1], "Add")
    counts = [] if added is None else [_unsqueezed(one) for one in added.inputs]
    return list(keys[0].shape)[:3] == [1, 1, 1] and len(counts) == 2 and set(counts) == {new, past}


def _counted(value: Any) -> tuple[Any, Any] | None:
    """``arange(count)`` of four axes, and its count, where it was expanded and got an axis at the end."""
    last = producer(value, "Unsqueeze")
    expanded = None if last is None else producer(last.inputs[0], "Expand")
    if last is None or expanded is None or expanded.inputs[0].shape is None:
        return None
    axes = last.inputs[1].const_value
    if axes is None or axes.numpy().tolist() != [-1]:
        return None
    wide = node = expanded.inputs[0]
    while (unsqueezed := producer(node, "Unsqueeze")) is not None:
        node = unsqueezed.inputs[0]
    counted = producer(node, "Range")
    if counted is None or len(wide.shape) != 4 or [_number(one) for one in counted.inputs[::2]] != [0, 1]:
        return None
    return wide, counted.inputs[1]


def _unsqueezed(value: Any) -> Any:
    """A number as it was before it was squeezed."""
    squeezed = producer(value, "Squeeze")
    return value if squeezed is None else squeezed.inputs[0]


def _elements(value: Any) -> list[Any]:
    joined = producer(value, "Concat")
    return [] if joined is None else list(joined.inputs)


def _number(value: Any) -> int | None:
    constant = value.const_value
    return int(constant.numpy().reshape(())) if constant is not None and constant.size == 1 else None


def _is_true(value: Any) -> bool:
    constant = value.const_value
    return constant is not None and constant.size == 1 and constant.dtype == 9 and bool(constant.numpy().all())
