"""Outputs that transformers captures by hooks inside of layers: router logits, attentions, hidden states.

A forward that is to return them makes a list for each, known to its own thread only, and hooks append to it. The layers
of a pipeline run in other threads, so each call has a list of its own, which the replay appends where it belongs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import nn

from .capture_old import COLLECTOR, hook_layers, is_old

__all__ = [
    "asked_for",
    "collect_recorded",
    "collected_so_far",
    "collecting",
    "extend_collected",
    "install_hooks",
    "is_cache",
]

_MODULE = "transformers.utils.output_capturing"
_SELECTION = "_hidden_states_layers"


def _collector() -> Any:
    module = sys.modules.get(_MODULE)
    if module is None:
        return COLLECTOR if is_old() else None
    return module._active_collector


def collected_so_far() -> tuple[tuple[str, int], ...]:
    """Return what the forward of this thread captures, and how many it has of each."""
    collector = _collector()
    held = collector.get() if collector is not None else None
    return tuple((name, len(found)) for name, found in held.items() if name != _SELECTION) if held else ()


def collect_recorded(stand_in: Any) -> None:
    """Let the lists of the forward of this thread have what stands for the outputs of a layer that was recorded.

    Args:
        stand_in: a placeholder of the layer; code that computes with what was captured waits for the layer.
    """
    collector = _collector()
    held = (collector.get() if collector is not None else None) or {}
    for name, found in held.items():
        if name != _SELECTION:  # hidden states begin with the input of the first layer
            found.extend([stand_in] * (2 if name == "hidden_states" and not found else 1))


def extend_collected(captured: Mapping[str, list[Any]]) -> None:
    """Append what a layer's hooks captured to the lists of the forward of this thread."""
    collector = _collector()
    held = collector.get() if collector is not None else None
    if not held:
        return
    for name, found in captured.items():
        if name not in held:
            continue
        for value in found:
            wanted = name != "hidden_states" or held.get(_SELECTION) is None or len(held[name]) in held[_SELECTION]
            held[name].append(value if wanted else None)


@contextlib.contextmanager
def collecting(wanted: tuple[tuple[str, int], ...]) -> Iterator[dict[str, list[Any]]]:
    """Let hooks inside of the block append to lists of its own, which are what it yields.

    Args:
        wanted: result of `collected_so_far` before the layer.
    """
    collector = _collector()
    if not wanted or collector is None:
        yield {}
        return
    found: dict[str, list[Any]] = {name: [] for name, _ in wanted}
    later = dict(wanted).get("hidden_states", 0) > 0
    if later:
        found["hidden_states"].append(None)  # where the list is empty, hooks take the input of the layer as well
    token = collector.set(found)
    try:
        yield found
    finally:
        collector.reset(token)
        if later:
            del found["hidden_states"][0]


def install_hooks(model: nn.Module) -> None:
    """Install those hooks now, on the layers themselves; the library does it when they are first asked for."""
    module = sys.modules.get(_MODULE)
    if module is None:
        if is_old():
            hook_layers(model)
        return
    base = sys.modules["transformers"].PreTrainedModel
    done = "_output_capturing_hooks_installed"

    def descend(part: nn.Module) -> None:
        models = [inner for inner in part.modules() if isinstance(inner, base)]
        if isinstance(part, base) and not any(getattr(inner, done, False) for inner in models):
            module.maybe_install_capturing_hooks(part)
            return
        if not getattr(part, done, False):
            for child in part.children():
                descend(child)

    descend(model)


def asked_for(model: nn.Module, kwargs: Mapping[str, Any]) -> Literal["none", "extras", "all"]:
    """Return which outputs of layers a model called like this hands out: ``"extras"`` are all but hidden states."""

    def asked(name: str) -> bool:
        given = kwargs.get(name)
        return bool(getattr(getattr(model, "config", None), name, False) if given is None else given)

    if asked("output_hidden_states"):
        return "all"
    return "extras" if asked("output_attentions") or asked("output_router_logits") else "none"


def is_cache(value: Any) -> bool:
    """Report whether a value is a cache of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)
