"""Load a model onto a disk weight by weight, so that memory never holds it whole."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn

from yobx_flatten.model_folder.source.classes import class_for
from yobx_flatten.model_folder.source.find import FoundModel
from yobx_flatten.model_folder.source.stored_weights import UnmatchedWeights
from yobx_flatten.model_folder.source.streamed import NotStreamableError, open_checkpoint, unread_model

from ..device.disk import DiskMemory, keep_with
from ..device.pages import page_out

__all__ = ["loaded_to_disk"]


def loaded_to_disk(
    name: str,
    config: Any,
    folder: pathlib.Path,
    kind: Any,
    dtype: torch.dtype | str,
    unmatched: UnmatchedWeights,
    home: pathlib.Path,
) -> nn.Module | None:
    """Return a model whose parameters live on a disk; ``None`` for one that has to be loaded as a whole."""
    # kind: class that is loaded
    # dtype: dtype of the weights; `"auto"` for that of the configuration
    # home: folder on the disk
    wanted = getattr(config, "dtype", None) if dtype == "auto" else dtype
    wanted = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    checkpoint = open_checkpoint(folder)
    if checkpoint is None or not isinstance(wanted, torch.dtype) or class_for(config) is not kind:
        return None
    try:
        found = FoundModel(name, config, folder, has_weights=True, unmatched_weights=unmatched)
        unread, readers, _ = unread_model(found, checkpoint, wanted)
    except NotStreamableError:
        return None
    model: nn.Module = unread
    memory = DiskMemory(home)
    made: dict[int, nn.Parameter] = {}
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, last = path.rpartition(".")
        if id(parameter) not in made:
            weight = readers[path]()
            place = memory.copy(("weight", path), weight, wanted)
            made[id(parameter)] = nn.Parameter(place, requires_grad=parameter.requires_grad)
            memory.leave([place])
            page_out(weight)  # mapped from its file
        model.get_submodule(owner)._parameters[last] = made[id(parameter)]
    keep_with(model, memory)
    return model
