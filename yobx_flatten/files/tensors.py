"""Write a file of safetensors, with errors of the system."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping

import torch


def write_tensor_file(
    path: pathlib.Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors that share no memory; raise an OSError where that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:  # "... (os error 28)"
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise OSError(f"{path} could not be written: {error}") from error
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
