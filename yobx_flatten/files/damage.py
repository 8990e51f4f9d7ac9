"""Turn the errors of a damaged file into one that names the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import FlattenError
from ..errors.messages import first_line

__all__ = ["damage_as", "is_failure"]


def is_failure(error: BaseException) -> bool:
    """Whether an error is of a library that reads something, and not Ctrl-C or the end of the process."""
    # error: a panic of a library in Rust is no `Exception`, and its class cannot be imported
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


@contextlib.contextmanager
def damage_as(failure: type[Exception], where: str, *own: type[Exception]) -> Iterator[None]:
    """Turn what readers of other libraries raise, and wrong types, into one error.

    Documents are checked by their form first. This is for the rest: safetensors, protobuf and torch raise
    errors of many classes for data that do not fit together.
    """
    try:
        yield
    except (FlattenError, OSError, MemoryError):  # too little memory is not the fault of a file
        raise
    except own:
        raise
    except BaseException as error:  # also a panic of a library in Rust; all others come out as they are
        if not is_failure(error):
            raise
        raise failure(f"{where} is damaged ({type(error).__name__}: {first_line(error)}).") from error
