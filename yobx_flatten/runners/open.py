"""Open an exported file by its suffix."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import FlattenError, GenerationError, InvalidArgumentError
from .onnx_runner import OnnxRunner
from .onnx_session import open_session
from .program_runner import ProgramRunner, open_program
from .runner import Runner

__all__ = ["RUNNERS", "open_runner"]


def _onnx(path: pathlib.Path, caller: str, failure: type[FlattenError], **options: Any) -> Runner:
    return OnnxRunner(open_session(path, caller=caller, failure=failure, **options), path.name)


def _program(path: pathlib.Path, caller: str, failure: type[FlattenError]) -> Runner:
    return ProgramRunner(open_program(path, failure=failure), path.name)


RUNNERS: Mapping[str, Callable[..., Runner]] = {".onnx": _onnx, ".pt2": _program}
"""By suffix: takes the path, ``caller`` and ``failure`` of :func:`open_runner`, and options of the library."""


def open_runner(
    path: str | os.PathLike[str],
    *,
    caller: str = "open_runner",
    failure: type[FlattenError] = GenerationError,
    **options: Any,
) -> Runner:
    """Open an exported file.

    Args:
        path: the file; its suffix decides which library runs it.
        caller: the function that the user called, for the message where the library is missing.
        failure: class of the error where there is no such file, or it cannot be loaded.
        **options: options of the library: for an ONNX file ``options`` and ``providers``, see
            :func:`.onnx_session.open_session`.

    Returns:
        The open file.

    Raises:
        InvalidArgumentError: when no library is known for the suffix.
        MissingDependencyError: when the library is not installed.
        FlattenError: of the class ``failure``.
    """
    file = pathlib.Path(path)
    if file.suffix not in RUNNERS:
        raise InvalidArgumentError(f"{file} has none of the suffixes {', '.join(RUNNERS)} of files that can be run.")
    return RUNNERS[file.suffix](file, caller, failure, **options)
