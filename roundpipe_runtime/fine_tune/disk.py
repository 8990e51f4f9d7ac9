"""Check before the first step that the disks hold what a training writes."""

from __future__ import annotations

import pathlib
import shutil
from collections import defaultdict

import torch
from torch import nn

from yobx_flatten.errors.messages import format_bytes

from ..device.disk import disk_of
from ..device.disk_folder import disk_folder
from ..huggingface.adapters import is_adapted
from .errors import FineTuneError
from .settings import Settings

__all__ = ["check_disk", "model_bytes"]


def model_bytes(model: nn.Module) -> int:
    """Return the size of a saved model; of one with adapters, only these are saved."""
    parameters = [p for p in model.parameters() if p.requires_grad or not is_adapted(model)]
    return sum(p.nbytes for p in parameters) + (0 if is_adapted(model) else sum(b.nbytes for b in model.buffers()))


def _state_bytes(parameter: nn.Parameter, dtype: torch.dtype) -> int:
    """Two moments, and a master weight where the parameter is not as wide."""
    return parameter.numel() * dtype.itemsize * (2 if dtype == parameter.dtype else 3)


def check_disk(
    model: nn.Module, settings: Settings, output: pathlib.Path, checkpoints: pathlib.Path, kept: int
) -> None:
    """Refuse a training whose results would not fit on the disk.

    Args:
        model: model that is trained.
        settings: settings of the training; checkpoints hold moments and master weights in ``optim_dtype``.
        output: folder in which the model is saved.
        checkpoints: folder of the checkpoints.
        kept: number of checkpoints that are there at the same time.

    Raises:
        FineTuneError: naming the folder, what is needed and what is free.
    """
    of_model = model_bytes(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    of_state = sum(_state_bytes(p, settings.optim_dtype or p.dtype) for p in trained)
    needed: dict[int, int] = defaultdict(int)
    places: dict[int, pathlib.Path] = {}
    written = [(output, of_model), (checkpoints, kept * (of_model + of_state))]
    if (home := disk_folder(settings.host)) is not None:
        here = sum(p.nbytes for p in model.parameters() if disk_of(p) is None)
        gradients = sum(p.numel() * (settings.optim_dtype or p.dtype).itemsize for p in trained)
        written.append((home, here + of_state + gradients))
    for folder, size in written:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        disk = there.stat().st_dev
        needed[disk] += size
        places.setdefault(disk, there)
    for disk, size in needed.items():
        free = shutil.disk_usage(places[disk]).free
        if free < size:
            first = "the model" if home is None else "the training, the model"
            held = f"{first} and {kept} checkpoints take" if kept or home is not None else "the model takes"
            host = "" if home is None else ", --host disk:DIR"
            raise FineTuneError(
                f"The disk of {places[disk]} is too small: {held} {format_bytes(size)} there, and {format_bytes(free)} "
                f"are free. Make room, or name a folder on another disk: --output DIR, --checkpoint DIR{host}"
            )
