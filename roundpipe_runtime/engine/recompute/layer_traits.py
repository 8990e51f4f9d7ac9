"""Traits of layers and loss functions that the engine observes, one record each."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from .generators import Generator


@dataclasses.dataclass(slots=True)
class LayerTraits:
    """Observed behaviour of the code of a layer; each entry is missing until a call has shown it."""

    # whether it writes its inputs in place, by mode (`module.training`). Default: nothing known.
    mutates_inputs: dict[bool, bool] = dataclasses.field(default_factory=dict)
    # whether it draws random numbers of the CPU's generator, by mode. Default: nothing known.
    draws: dict[bool, bool] = dataclasses.field(default_factory=dict)
    # generators other than torch's default ones that it draws from, and those it holds, by mode. Default: nothing
    # known.
    generators: dict[bool, tuple[Generator, ...]] = dataclasses.field(default_factory=dict)
    # whether its forward changes its Python attributes, by mode. Default: nothing known.
    changes_attributes: dict[bool, bool] = dataclasses.field(default_factory=dict)
    # whether its backward calls forward code again (activation checkpointing inside the layer), by mode. Default:
    # nothing known.
    reenters: dict[bool, bool] = dataclasses.field(default_factory=dict)


_TRAITS: weakref.WeakKeyDictionary[Any, LayerTraits] = weakref.WeakKeyDictionary()


def traits_of(code: Any) -> LayerTraits:
    """Return the record of a layer or a loss function, the same one at each call.

    An object that cannot be referenced weakly (one with slots, for example) has no lasting record: it is treated with
    every caution at each call.

    >>> from torch import nn
    >>> layer = nn.Linear(1, 1)
    >>> traits_of(layer).draws[True] = False
    >>> traits_of(layer)
    LayerTraits(mutates_inputs={}, draws={True: False}, generators={}, changes_attributes={}, reenters={})
    >>> traits_of(()).reenters
    {True: True, False: True}
    """
    try:
        found = _TRAITS.get(code)
    except TypeError:
        return LayerTraits(reenters={True: True, False: True})
    return _TRAITS.setdefault(code, LayerTraits()) if found is None else found
