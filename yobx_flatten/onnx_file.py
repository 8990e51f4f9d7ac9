"""A program into an ONNX file, which appears when it is complete."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch.export import ExportedProgram

from .errors import FlattenError

__all__ = ["write_onnx"]


def write_onnx(
    program: ExportedProgram,
    path: pathlib.Path,
    input_names: Sequence[str],
    output_names: Sequence[str],
    opset_version: int | None,
) -> int:
    """Convert a program and store it; return the bytes written, those of weights beside the file included.

    Args:
        program: the program; its classes must be registered.
        path: the file. Its folder is made if it is not there.
        input_names: one for each input of the graph.
        output_names: one for each output of the graph.
        opset_version: of ONNX; ``None`` for the exporter's own choice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # external data is stored under the file's own name, so the file is made in a folder of its own, then moved
    folder = path.parent / f".{path.name}.partial"
    folder.mkdir(exist_ok=True)
    try:
        with _without_noise():
            converted = torch.onnx.export(
                program,
                input_names=list(input_names),
                output_names=list(output_names),
                opset_version=opset_version,
                dynamo=True,
                verbose=False,
            )
        if converted is None:  # typed as optional, for the other exporter
            raise FlattenError("torch.onnx.export returned nothing.")
        converted.save(folder / path.name)
        files = sorted(folder.iterdir())
        size = sum(file.stat().st_size for file in files)
        for file in files:
            os.replace(file, path.parent / file.name)
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return size


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Keep two messages off the terminal that are about the insides of torch; all others come through."""
    # The ONNX exporter translates four operators of torchvision, and says of each that torchvision is not installed,
    # also for models that use none.
    log = logging.getLogger("torch.onnx._internal.exporter._registration")

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("torchvision is not installed")

    log.addFilter(is_news)
    try:
        with warnings.catch_warnings():
            # torch 2.13 copies its own TreeSpec through its own deprecated LeafSpec; nothing of ours names that class
            warnings.filterwarnings("ignore", r".isinstance\(treespec, LeafSpec\). is deprecated", FutureWarning)
            yield
    finally:
        log.removeFilter(is_news)
