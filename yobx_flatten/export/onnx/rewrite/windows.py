"""Copy the last keys of a sliding layer in one piece.

.. code-block:: text

    Gather(keys, Range(0, kept) + (count - kept))         Slice(keys, count - kept, count)

Both are the last ``kept`` of ``count`` keys. The trace has the first form, since a slice of torch asks how long it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .matching import number_of, producer, replace_value
from .repair import attribute, input_of

if TYPE_CHECKING:
    import onnx_ir as ir


def slice_windows(graph: ir.Graph) -> None:
    """Replace each ``Gather`` of the last places of an axis by a ``Slice``, in place."""
    import onnx_ir as ir

    # layers of one window read the same places
    ends: dict[tuple[ir.Value, int], tuple[ir.Value, ir.Value, ir.Value]] = {}
    for node in [node for node in graph if node.op_type == "Gather" and node.domain == ""]:
        places = input_of(node, 1)
        found = _last_places(places)
        if found is None:
            continue
        axis = attribute(node, "axis", 0)
        if (places, axis) not in ends:
            axes = [ir.node("Constant", [], {"value_ints": [number]}) for number in (0, axis)]
            both = [ir.node("Unsqueeze", [one, axes[0].outputs[0]]) for one in found]
            graph.insert_before(node, [*axes, *both])
            ends[places, axis] = both[0].outputs[0], both[1].outputs[0], axes[1].outputs[0]
        sliced = ir.node("Slice", [node.inputs[0], *ends[places, axis]], name=node.name)
        graph.insert_before(node, sliced)
        replace_value(node.outputs[0], sliced.outputs[0])
        graph.remove(node, safe=True)


def _last_places(places: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """First place and end of ``arange(kept) + (count - kept)``, where ``kept`` is ``min(count, most)``."""
    flat = producer(places, "Reshape")  # to as many as there are
    added = producer(places if flat is None else flat.inputs[0], "Add")
    # a sum has its terms in any order
    for place in (0, 1) if added is not None else ():
        counted, less = producer(added.inputs[place], "Range"), producer(added.inputs[1 - place], "Sub")  # type: ignore[union-attr]
        if counted is None or less is None:
            continue
        (first, kept, step), count, taken = counted.inputs, input_of(less, 0), input_of(less, 1)
        least = producer(kept, "Min")
        # only then do the places end with the last one, and none is below 0
        if kept is not taken or least is None or len(least.inputs) != 2 or count not in least.inputs:
            continue
        most = least.inputs[1 - list(least.inputs).index(count)]
        numbers = [number_of(one) for one in (first, step, most)]
        if numbers[:2] == [0, 1] and numbers[2] is not None and numbers[2] >= 0:
            return less.outputs[0], count
    return None
