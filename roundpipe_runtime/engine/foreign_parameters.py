"""Refuse a layer that trains a parameter of another layer: a penalty in the head on the weight of a layer, for example.

A layer goes back to copies of its own parameters, whose gradients are summed, scaled and committed with those of all
microbatches. What autograd leaves in any other parameter is neither scaled nor committed, and on another device the
layer would not run at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import StageError
from ..optim.parameters import LayerContents
from .layer_graph import LayerGraph, other_leaves
from .resident import LayerOnDevice

__all__ = ["check_trains_own"]


def check_trains_own(resident: LayerOnDevice, graph: LayerGraph, contents: Sequence[LayerContents]) -> None:
    """Check that the graph of a layer ends in its inputs and in its own parameters.

    Args:
        resident: layer.
        graph: call of the layer.
        contents: all layers, to name the parameter.

    Raises:
        StageError: naming the parameter, and the layer that has it.
    """
    exits = [one for one in graph.exits if one.grad_fn is not None]
    leaves = other_leaves(exits, [*graph.entries, *resident.copies()])
    foreign = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    if not foreign:
        return
    held = ((slot, layer) for layer in contents for slot in layer.slots)
    owner = next(((slot.name, layer.title) for slot, layer in held if slot.parameter is foreign[0]), None)
    shape = tuple(foreign[0].shape)
    what = f"a parameter of shape {shape}, which no layer has" if owner is None else f"{owner[0]!r} of {owner[1]}"
    raise StageError(
        f"{resident.title} computes with {what}. Its gradient would be lost or wrong, as a layer goes back into its "
        "own parameters only. Give the layer that parameter:\n"
        "    layer.other = parameter  # the same object may belong to several layers"
    )
