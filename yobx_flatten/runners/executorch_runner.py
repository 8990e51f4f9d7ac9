"""Run an ExecuTorch file with the runtime that phones have."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..errors import DamagedFileError, FlattenError, ForeignFileError, MissingDependencyError
from ..errors.dependencies import require
from ..errors.failures import raised_as
from ..errors.messages import first_line
from .checked_runner import CheckedRunner
from .signature import KEY, Signature

__all__ = ["METHOD", "SIGNATURE", "ExecuTorchRunner", "open_pte", "require_executorch"]

METHOD = "forward"
"""Name of the method that is the model."""

SIGNATURE = KEY.replace(".", "_")
"""Name of the method that returns the signature."""

_FITS = {"2.13": "1.5"}  # minor versions of torch and executorch that were tried together


class ExecuTorchRunner(CheckedRunner):
    """One file, open; a :class:`.runner.Runner`."""

    runtime: ClassVar[str] = "executorch"

    def __init__(self, program: Any, signature: Signature, name: str) -> None:
        super().__init__(signature, name)
        self._program = program  # owns what the method reads
        self._method = program.load_method(METHOD)

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self._method.execute(tensors)  # copies what is in planned memory
        return found


def require_executorch(caller: str) -> None:
    """Import ExecuTorch."""
    require("executorch", purpose=caller, extra="executorch")
    try:
        importlib.import_module("executorch.runtime")
    except (ImportError, OSError, AttributeError) as error:  # its libraries call into those of torch
        found = importlib.metadata.version("executorch")
        fits = ", ".join(f"executorch {theirs} with torch {ours}" for ours, theirs in _FITS.items())
        raise MissingDependencyError(
            f"{caller}: executorch {found} does not load with torch {torch.__version__} ({first_line(error)}). Tried "
            f"together: {fits}:\n    pip install 'executorch=={_FITS['2.13']}.*' 'torch==2.13.*'"
        ) from error


def open_pte(path: pathlib.Path, *, caller: str, failure: type[FlattenError]) -> ExecuTorchRunner:
    """Open a file. It is data: ExecuTorch runs operators of its own, and checks the file before it reads it."""
    # failure: class of the error where there is no such file
    require_executorch(caller)
    from executorch.runtime import Runtime, Verification

    if not path.is_file():
        raise failure(f"There is no file {path}.")
    with path.open("rb") as file:
        head = file.read(8)
    if head[4:6] != b"ET":
        raise ForeignFileError(f"{path} is not a file of ExecuTorch.")
    # the runtime raises RuntimeError with its own code
    with (
        raised_as(lambda error: DamagedFileError(f"{path} is damaged: {first_line(error)}")),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # that its own interface is experimental
        program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
        names = program.method_names
    if not {METHOD, SIGNATURE} <= set(names):
        raise ForeignFileError(f"{path} was not written by to_executorch: it does not state its inputs.")
    (text,) = program.load_method(SIGNATURE).execute([])
    return ExecuTorchRunner(program, Signature.from_json(text, str(path)), path.name)
