"""What a name of a model stands for: a folder, a configuration, or a type of model."""

from __future__ import annotations

import pathlib

from yobx_flatten.model_folder.small import small_config
from yobx_flatten.model_folder.source import require_transformers

from ..fine_tune import ModelSource, model_source

__all__ = ["source_of"]


def source_of(name: str) -> ModelSource:
    """Return a model that is not loaded yet.

    Args:
        name: a folder with ``config.json``, with or without weights; such a file; or a type such as ``llama``, for a
            small one with random weights that reads bytes.

    Raises:
        FineTuneError: there is no such folder, or it holds no causal language model.
        InvalidArgumentError: there is no such type, or no small one of it.
    """
    is_type = not pathlib.Path(name).exists() and name.replace("_", "").replace("-", "").isalnum()
    if not is_type:
        return model_source(name)
    require_transformers("a model")
    config = small_config(name)
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))):
        if hasattr(part, "initializer_range"):
            part.initializer_range = 0.02  # as wide as models are trained from
    return ModelSource.of(config, name)
