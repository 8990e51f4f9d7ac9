"""Find the layers of the model that a user wraps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError
from .model_proxy import ModelProxy


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a model as one module; layers in a list become an ``nn.Sequential``."""
    if isinstance(model, ModelProxy):
        raise ConfigError("The model is a RoundPipe already: use it as it is.")
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    layers = list(model) if isinstance(model, (nn.ModuleList, list, tuple)) else []
    if isinstance(model, nn.ModuleList) or (layers and all(isinstance(layer, nn.Module) for layer in layers)):
        return nn.Sequential(*layers)
    raise ConfigError(f"RoundPipe wraps an nn.Module or a list of them, found {type(model).__qualname__}.")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the children of an ``nn.Sequential`` that runs like one, else the model itself."""
    kind = type(model)
    is_plain = "forward" not in vars(model) and (kind.__call__, getattr(kind, "forward", None)) == _SEQUENTIAL
    return list(model) if isinstance(model, nn.Sequential) and is_plain and len(model) else [model]


_SEQUENTIAL = nn.Sequential.__call__, nn.Sequential.forward
