"""The text part of a configuration, which models of images and sounds keep in a separate part."""

from __future__ import annotations

from typing import Any

from torch import nn


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the part of a model that reads or writes text; ``None`` if there is none."""
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)
