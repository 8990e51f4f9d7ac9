"""Folders exported once per process, and a model of each kind as `save_pretrained` writes it."""

import functools
import pathlib
import tempfile
from typing import Any

import torch

from yobx_flatten import export_folder
from yobx_flatten.model_folder.tiny_models import small_model

__all__ = ["exported", "saved"]

_ROOT = tempfile.TemporaryDirectory(prefix="exported_folders")


@functools.cache
def saved(name: str) -> tuple[Any, pathlib.Path]:
    """Return a small model and the folder that `save_pretrained` wrote."""
    model = small_model(name)
    folder = pathlib.Path(_ROOT.name) / f"{name}-saved"
    model.save_pretrained(folder)
    return model, folder


def exported(name: str, to: str = "onnx", optimize: str | None = None) -> tuple[Any, pathlib.Path]:
    """Return a small model and its exported folder."""
    return _exported(name, to, optimize)


@functools.cache
def _exported(name: str, to: str, optimize: str | None) -> tuple[Any, pathlib.Path]:
    model, _ = saved(name)
    folder = pathlib.Path(_ROOT.name) / f"{name}-{to}-{optimize}"
    with torch.no_grad():
        export_folder(model, folder, to=to, optimize=optimize)
    return model, folder
