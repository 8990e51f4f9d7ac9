"""Configuration files that ``from_pretrained`` needs in addition to the weights of a transformers model."""

from __future__ import annotations

import copy
import sys

from torch import nn

from ..pipeline import wrapped_model

__all__ = ["config_files"]


def config_files(model: nn.Module) -> dict[str, str]:
    """Return the texts of ``config.json`` and ``generation_config.json``; nothing for other models."""
    inner = wrapped_model(model)
    library = sys.modules.get("transformers.modeling_utils")  # imported with the model, if there is one of it
    if library is None or not isinstance(inner, library.PreTrainedModel):
        return {}
    config = copy.deepcopy(inner.config)
    config.architectures = [type(inner).__name__]
    config.dtype = str(inner.dtype).removeprefix("torch.")
    files = {"config.json": config.to_json_string()}
    if inner.can_generate() and inner.generation_config is not None:
        files["generation_config.json"] = inner.generation_config.to_json_string()
    return files
