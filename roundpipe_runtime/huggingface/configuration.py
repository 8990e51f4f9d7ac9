"""The part of a configuration that speaks of text: models of pictures and sounds keep it in a part of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["text_config"]


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the part of a model that reads or writes text; ``None``, if it has none at all."""
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)
