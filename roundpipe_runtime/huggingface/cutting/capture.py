"""Outputs that transformers captures by hooks inside of layers: router logits, attentions, hidden states.

A forward that returns them sets a context variable of its thread, the collector: ``{name: list}``. Hooks append to the
lists. In a pipeline the layers run in other threads, at other times and more than once, so there are two collectors::

    phase       the model's own        a completed call extends it, a recorded call appends a placeholder
    layer       one for each call      hooks append to it; its lists pass to later phases like other outputs
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import nn

from .capture_old import COLLECTOR, hook_layers, is_old

_MODULE = "transformers.utils.output_capturing"
_SELECTION = "_hidden_states_layers"


def _collector() -> Any:
    """The context variable of the collector; ``None`` without transformers."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return COLLECTOR if is_old() else None
    return module._active_collector


def collected_so_far() -> tuple[tuple[str, int], ...]:
    """Return the names of the outputs that the forward of this thread captures, with the number of each so far."""
    collector = _collector()
    held = collector.get() if collector is not None else None
    return tuple((name, len(found)) for name, found in held.items() if name != _SELECTION) if held else ()


def collect_recorded(stand_in: Any) -> None:
    """Append a stand-in for the outputs of a recorded layer to the lists of the forward of this thread.

    Without it, the model would return lists that are too short. With it, code that computes with a captured output ends
    the phase, like code that computes with the output of a layer.
    """
    collector = _collector()
    held = (collector.get() if collector is not None else None) or {}
    for name, found in held.items():
        if name != _SELECTION:  # the first layer adds two hidden states: its input and its output
            found.extend([stand_in] * (2 if name == "hidden_states" and not found else 1))


def extend_collected(captured: Mapping[str, list[Any]]) -> None:
    """Append the outputs that hooks captured in a completed call to the lists of the forward of this thread."""
    collector = _collector()
    held = collector.get() if collector is not None else None
    if not held:
        return
    for name, found in captured.items():
        if name not in held:
            continue
        for value in found:
            # a caller can select hidden states by number; the list keeps its length, with `None` for the others
            wanted = name != "hidden_states" or held.get(_SELECTION) is None or len(held[name]) in held[_SELECTION]
            held[name].append(value if wanted else None)


@contextlib.contextmanager
def collecting(wanted: tuple[tuple[str, int], ...]) -> Iterator[dict[str, list[Any]]]:
    """Give the hooks of a layer their own collector in the block."""
    collector = _collector()
    if not wanted or collector is None:
        yield {}
        return
    found: dict[str, list[Any]] = {name: [] for name, _ in wanted}
    later = dict(wanted).get("hidden_states", 0) > 0
    if later:
        # into an empty list a hook also puts the input of its layer, which is right for the first layer only
        found["hidden_states"].append(None)
    token = collector.set(found)
    try:
        yield found
    finally:
        collector.reset(token)
        if later:
            del found["hidden_states"][0]


def install_hooks(model: nn.Module) -> None:
    """Install the hooks now, on the layers themselves.

    transformers installs them in the first forward that returns such outputs. That forward would be the one of a copy,
    which has stubs instead of layers.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        if is_old():
            hook_layers(model)
        return
    base = sys.modules["transformers"].PreTrainedModel
    done = "_output_capturing_hooks_installed"

    # One call covers all modules inside of a model. If a part has its hooks already, a call for the whole would install
    # them twice there, and outputs would be captured twice; so the search goes on below.
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
    """Return which outputs of layers a call of a model returns."""
    # returns: `"all"` with hidden states; `"extras"` with attentions or router logits only; else `"none"`

    def asked(name: str) -> bool:
        given = kwargs.get(name)
        return bool(getattr(getattr(model, "config", None), name, False) if given is None else given)

    if asked("output_hidden_states"):
        return "all"
    return "extras" if asked("output_attentions") or asked("output_router_logits") else "none"
