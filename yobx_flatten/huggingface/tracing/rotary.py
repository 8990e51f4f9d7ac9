"""Trace rotary embeddings whose frequencies depend on the length (``"dynamic"``, ``"longrope"``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..loaded import ModelClasses
from ..position_switch import switch_of_kind
from .replacement import Function, Replacement, replacement

_DECORATOR = "dynamic_rope_update."


def rotary_replacements() -> Iterator[Replacement]:
    """Yield owner, attribute and replacement, for the embeddings of models that are imported."""
    for cls in _CLASSES():
        yield cls, "forward", _by_length


def _plain(forward: Function | None) -> Function | None:
    """What transformers decorated with the update of the frequencies; ``None`` for another function."""
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and code.co_qualname.startswith(_DECORATOR):
            return getattr(forward, "__wrapped__", None)
        forward = getattr(forward, "__wrapped__", None)
    return None


_CLASSES = ModelClasses(lambda cls: _plain(vars(cls).get("forward")) is not None)


@replacement
def _by_length(original: Function) -> Function:
    # The original asks whether this call is longer than any before, and remembers the answer. The lengths of a text
    # only grow, so the frequencies are those of the length of this call, or the first ones up to the switch.
    plain = _plain(original)
    if plain is None:
        return original

    def forward(
        again: Function,
        self: Any,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None = None,
        **others: Any,
    ) -> Any:
        kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
        if kind not in ("dynamic", "longrope"):
            return again()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix, of_layer = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
        config = self.config.to_dict()
        stated = config.get("rope_parameters") or config["rope_scaling"]
        switch = switch_of_kind(stated if layer_type is None else stated[layer_type], config)
        length = torch.max(position_ids) + 1
        # the long frequencies of `longrope` are the same for all lengths above
        above = switch + 1 if kind == "longrope" else length
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](self.config, x.device, seq_len=above, **of_layer)
        first = getattr(self, f"{prefix}original_inv_freq").to(x.device)
        getattr(self, f"{prefix}inv_freq").copy_(torch.where(length > switch, scaled, first))
        return plain(self, x, position_ids, **of_layer)

    return forward
