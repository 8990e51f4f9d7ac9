"""Models with adapters of PEFT: the wrapped model, and calls that a pipeline cannot run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError


def is_adapted(model: nn.Module) -> bool:
    """Report whether a model is wrapped by PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def model_inside(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside a PEFT model; other models are returned unchanged.

    PEFT's wrapper hides the class of the inner model, and the argument names of its forward.
    """
    if not is_adapted(model):
        return model
    find = getattr(model, "get_base_model", None)  # models with mixed adapters lack it
    inner: nn.Module = model.base_model.model if find is None else find()  # type: ignore[union-attr,assignment] # attributes of modules have no types
    return inner


def check_adapters(kwargs: Mapping[str, Any]) -> None:
    """Check that all rows of a batch use the same adapter, because PEFT selects adapters of rows by hooks on layers."""
    if kwargs.get("adapter_names") is not None:
        raise ConfigError(
            "adapter_names: rows of one batch cannot use different adapters in a pipeline. Call once per adapter:\n"
            '    model.set_adapter("name")\n'
            "    model(**rows_of_that_adapter)"
        )


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the part of a model that reads or writes text; ``None`` if there is none."""
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)
