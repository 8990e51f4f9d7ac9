"""Turn the errors of a damaged file into one that names the file."""

from __future__ import annotations

import contextlib

from ..errors import FlattenError
from ..errors.failures import raised_as
from ..errors.messages import first_line


def damage_as(failure: type[Exception], where: str, *own: type[Exception]) -> contextlib.AbstractContextManager[None]:
    """Turn what readers of other libraries raise, and wrong types, into one error.

    Documents are checked by their form first. This is for the rest: safetensors, protobuf and torch raise
    errors of many classes for data that do not fit together.
    """

    def damaged(error: BaseException) -> Exception:
        return failure(f"{where} is damaged ({type(error).__name__}: {first_line(error)}).")

    # too little memory is not the fault of a file
    return raised_as(damaged, FlattenError, OSError, MemoryError, *own)
