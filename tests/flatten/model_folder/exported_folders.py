"""Folders exported once per run of tests, and a model of each kind as `save_pretrained` writes it."""

import contextlib
import fcntl
import functools
import io
import os
import pathlib
import tempfile
from typing import Any

import torch
from transformers import ByT5Tokenizer

from yobx_flatten import export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.model_folder.source.configuration import small_model

__all__ = ["exported", "saved"]

_ROOT = tempfile.TemporaryDirectory(prefix="exported_folders")


@functools.cache
def saved(name: str) -> tuple[Any, pathlib.Path]:
    model = small_model(name)
    folder = pathlib.Path(_ROOT.name) / f"{name}-saved"
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return model, folder


def exported(name: str, to: str = "onnx", optimize: str | None = None) -> tuple[Any, pathlib.Path]:
    """Return a small model and its exported folder; ONNX files without options are exported by the command line."""
    return _exported(name, to, optimize)


@functools.cache
def _exported(name: str, to: str, optimize: str | None) -> tuple[Any, pathlib.Path]:
    model, source = saved(name)
    shared = pathlib.Path(os.environ.get("TESTS_SHARED_FOLDER", _ROOT.name))
    folder = shared / f"{name}-{to}-{optimize}"
    # the processes of a run have the same models: one exports, the others wait and take what it wrote
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock, torch.no_grad():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists() and (to, optimize) == ("onnx", None):
            with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
                assert main(["export", str(source), "-o", str(folder)]) == 0, shown.getvalue()
        elif not folder.exists():
            export_folder(model, folder, to=to, optimize=optimize)
    return model, folder
