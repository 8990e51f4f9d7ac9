"""Resolve the name of a model on the command line: a folder, a hub name, a configuration, or a model type."""

from __future__ import annotations

import copy
import dataclasses
import pathlib

from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.terminal.running import UserError

from ..fine_tune import ModelSource, Tokenizer, model_source


def source_of(name: str, *, weights: bool = True) -> ModelSource:
    """Find the model that a name on the command line means, without loading its weights."""
    # name: a folder with `config.json`, with or without weights; such a file, or a GGUF file; an id of the hub; or a
    # type such as `llama`, for a small one with random weights that reads bytes
    if pathlib.Path(name).exists():
        return model_source(name)
    found = find_model(name, weights=weights)
    if found.folder is not None:
        return dataclasses.replace(model_source(found.folder), name=name)
    config = found.config
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))):
        if hasattr(part, "initializer_range"):
            part.initializer_range = 0.02  # the usual standard deviation of random weights
    return ModelSource.of(config, name)


def read_by(source: ModelSource, tokenizer: Tokenizer) -> ModelSource:
    """Adapt a model with random weights to the vocabulary of its tokenizer; other models are unchanged."""
    is_of_type = not source.has_weights and source.folder is None and not pathlib.Path(source.name).exists()
    if not is_of_type or tokenizer.vocab_size == source.vocab_size:
        return source
    config = copy.deepcopy(source.config)
    part = config.get_text_config(decoder=True)
    part.vocab_size = tokenizer.vocab_size
    # the vocabulary is that of bytes, without a row for a padding token, which would never be trained
    part.pad_token_id = part.bos_token_id = None
    part.eos_token_id = tokenizer.eos_token_id
    return dataclasses.replace(source, config=config)


def row_length(source: ModelSource, length: int | None) -> int:
    """Return the number of tokens per row: ``length``, or by default the model's maximum, but at most 512."""
    longest = source.longest
    if length is not None and longest is not None and length > longest:
        raise UserError(f"{source.name} accepts rows of at most {longest} tokens: --length {longest}")
    return length or min(512, longest or 512)
