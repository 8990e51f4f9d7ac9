"""What a name of a model stands for, as in the other command line: a folder, the hub, a configuration, or a type."""

from __future__ import annotations

import dataclasses
import pathlib

from yobx_flatten.model_folder.source import find_model

from ..fine_tune import ModelSource, model_source

__all__ = ["source_of"]


def source_of(name: str, *, weights: bool = True) -> ModelSource:
    """Return a model that is not loaded yet.

    Args:
        name: a folder with ``config.json``, with or without weights; such a file; an id of the hub; or a type such as
            ``llama``, for a small one with random weights that reads bytes.
        weights: whether the weights of the hub are also needed.

    Raises:
        FineTuneError: the folder holds no causal language model.
        ModelSourceError: there is no such folder, and the hub does not give it.
        InvalidArgumentError: there is no such type, or no small one of it.
    """
    if pathlib.Path(name).exists():
        return model_source(name)
    found = find_model(name, weights=weights)
    if found.folder is not None:
        return dataclasses.replace(model_source(found.folder), name=name)
    config = found.config
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))):
        if hasattr(part, "initializer_range"):
            part.initializer_range = 0.02  # as wide as models are trained from
    return ModelSource.of(config, name)
