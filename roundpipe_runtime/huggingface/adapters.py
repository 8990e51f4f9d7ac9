"""Models that PEFT has put adapters into: the model inside, and what of their calls a pipeline cannot do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError

__all__ = ["is_adapted", "model_inside", "refuse_mixed_adapters"]


def is_adapted(model: nn.Module) -> bool:
    """Tell whether a model is one that PEFT has wrapped."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model of transformers that PEFT has wrapped; any other model is itself.

    Its class tells which module it comes from and what its forward takes, which PEFT's wrapper does not.
    """
    if not is_adapted(model):
        return model
    find = getattr(model, "get_base_model", None)  # which models of mixed adapters lack
    inner: nn.Module = model.base_model.model if find is None else find()  # type: ignore[union-attr,assignment] # attributes of modules have no types
    return inner


def refuse_mixed_adapters(kwargs: Mapping[str, Any]) -> None:
    """Refuse a batch whose rows use different adapters: PEFT sorts them out with hooks on layers, which are elsewhere.

    Args:
        kwargs: of a call of the model.

    Raises:
        ConfigError: there is ``adapter_names`` among them.
    """
    if kwargs.get("adapter_names") is not None:
        raise ConfigError(
            "adapter_names: rows of one batch cannot use different adapters in a pipeline. Call it once for each:\n"
            '    model.set_adapter("name")\n'
            "    model(**rows_of_that_adapter)"
        )
