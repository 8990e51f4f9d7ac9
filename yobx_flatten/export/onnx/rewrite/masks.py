"""Compute the attention mask of a file with a shared cache in fewer operators.

.. code-block:: text

    mask ── Pad ── GatherND (row of the batch, key) ── And ── Expand        mask ── Unsqueeze ── And

In a trace, a mask may be shorter than the keys: it is made longer, and each key is looked up in it. A file that takes
the number of tokens seen from its mask has as many keys as the mask has columns, so this is the mask as it is. (A mask
of more rows than the batch, which a look-up would take, is refused by the attention.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .matching import number_of, producer
from .repair import attribute, copy_type, input_of

if TYPE_CHECKING:
    import onnx_ir as ir


def simplify_masks(graph: ir.Graph, mask: ir.Value, past: ir.Value) -> None:
    """Simplify what is computed of a mask, in place; what is no longer used stays."""
    # past: the number of tokens seen, of shape (1,): the columns of the mask less the number of new tokens
    import onnx_ir as ir

    less = past.producer()
    if less is None:
        raise ValueError(f"{past.name} is not a difference of two numbers of tokens")
    new = input_of(less, 1)
    for node in list(graph):
        if node.domain != "":
            continue
        found = None
        # keys past the mask, of a cache with more room than there are tokens, are looked up in what was added
        padded = producer(node.inputs[0], "Pad") if node.op_type == "GatherND" else None
        if padded is not None and _reads_each_key(node, padded, mask, new, past):
            # (batch, keys) to (batch, heads, queries, keys): one for all heads and queries
            axes = ir.node("Constant", [], {"value_ints": [1, 2]})
            whole = ir.node("Unsqueeze", [padded.inputs[0], axes.outputs[0]])
            graph.insert_before(node, [axes, whole])
            found = whole.outputs[0]
            found.shape = node.outputs[0].shape
            copy_type(found, node.outputs[0])
        elif node.op_type == "And":
            # what is always true adds nothing to the other side
            found = next((node.inputs[1 - place] for place in (0, 1) if _is_true(node.inputs[place])), None)
        # to the same shape, which is tested below: the operators broadcast by themselves
        elif node.op_type == "Expand":
            found = node.inputs[0]
        if found is None or found.shape is None or node.outputs[0].is_graph_output():
            continue
        if found.shape == node.outputs[0].shape:
            node.outputs[0].replace_all_uses_with(found)


def _reads_each_key(node: ir.Node, padded: ir.Node, mask: ir.Value, new: ir.Value, past: ir.Value) -> bool:
    """Whether a ``GatherND`` reads the columns of the mask, made longer, in their order, for each row."""
    places, given = producer(node.inputs[1], "Concat"), producer(padded.inputs[0], "Cast")
    if given is None or given.inputs[0] is not mask or places is None or len(places.inputs) != 2:
        return False
    # only then is what was added never read for a row that is there
    if attribute(padded, "mode", "constant") != "constant" or attribute(node, "batch_dims", 0):
        return False
    before = [number_of(one) for one in _elements(padded.inputs[1])]
    if before[:3] != [0, 0, 0]:  # only columns after those of the mask
        return False
    rows, keys = (_counted(one) for one in places.inputs)
    if rows is None or keys is None or rows[0][1:] != [1, 1, 1]:
        return False
    added = producer(keys[1], "Add")
    counts = [] if added is None else [_unsqueezed(one) for one in added.inputs]
    # as many keys as seen and new tokens: the columns of the mask, in their order
    return keys[0][:3] == [1, 1, 1] and len(counts) == 2 and set(counts) == {new, past}


def _counted(value: ir.Value | None) -> tuple[list[int | ir.SymbolicDim], ir.Value] | None:
    """The shape of an ``arange(count)`` of four axes, and its count; it was expanded and got an axis at the end."""
    last = producer(value, "Unsqueeze")
    expanded = None if last is None else producer(last.inputs[0], "Expand")
    if last is None or expanded is None:
        return None
    axes = input_of(last, 1).const_value
    if axes is None or axes.numpy().tolist() != [-1]:
        return None
    value = input_of(expanded, 0)
    wide = value.shape
    # one axis after the other, as the model's code adds them
    while (unsqueezed := producer(value, "Unsqueeze")) is not None:
        value = input_of(unsqueezed, 0)
    counted = producer(value, "Range")
    if counted is None or wide is None or len(wide) != 4 or [number_of(one) for one in counted.inputs[::2]] != [0, 1]:
        return None
    return list(wide), input_of(counted, 1)


def _unsqueezed(value: ir.Value | None) -> ir.Value | None:
    """A number as it was before it was squeezed."""
    squeezed = producer(value, "Squeeze")
    return value if squeezed is None else squeezed.inputs[0]


def _elements(value: ir.Value | None) -> list[ir.Value | None]:
    joined = producer(value, "Concat")
    return [] if joined is None else list(joined.inputs)


def _is_true(value: ir.Value | None) -> bool:
    constant = None if value is None else value.const_value
    return constant is not None and constant.size == 1 and constant.dtype == 9 and bool(constant.numpy().all())
