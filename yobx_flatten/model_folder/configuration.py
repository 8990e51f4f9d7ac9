"""Configurations of models, which a stranger may have written: no more layers and no more weights than can be meant."""

from __future__ import annotations

import contextlib
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors.messages import first_line, format_bytes
from ..export.room import memory_available
from ..files.document import read_document

__all__ = ["bounded_weights", "bytes_of_weights", "read_config"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_COUNTS = re.compile(r"(layers?|experts?|depths?|blocks|stages|heads)$")
_MOST = 10_000  # layers or experts; models of today have some hundred
_MOST_PARAMETERS = 300_000  # tensors; a model of 61 layers with 384 experts has 70,000


def read_config(file: pathlib.Path, name: str, *, failure: type[Exception], remedy: str = "") -> Any:
    """Read a ``config.json`` of transformers.

    Args:
        file: the file.
        name: what the user called the model.
        failure: class of the error.
        remedy: the end of the message: what to do.

    Returns:
        The configuration.

    Raises:
        Exception: of the class ``failure``, when it holds no configuration, or states more layers than can be meant.
    """
    import transformers

    stated = read_document(file, dict[str, Any], failure=failure, remedy=remedy, finite=False)
    for key, value in _numbers(stated):
        if value > _MOST and _COUNTS.search(key):
            raise failure(f"{file} states {key} = {value:,}, and {_MOST:,} are the most.{remedy and ' '}{remedy}")
    try:
        return transformers.AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:  # transformers, huggingface_hub and JSON each raise their own
        raise failure(
            f"{name} is not a configuration of transformers: {first_line(error).rstrip('.')}.{remedy and ' '}{remedy}"
        ) from error


def _numbers(stated: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers of a document with their names, those of inner configurations included."""
    for key, value in stated.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        for one in value if isinstance(value, list) else (value,):
            if type(one) is int:
                yield key, one


def bytes_of_weights(folder: pathlib.Path) -> int:
    """Return how many bytes the files of weights in a folder of transformers have; 0 without weights.

    Args:
        folder: the folder.
    """
    return sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern))


@contextlib.contextmanager
def bounded_weights(name: str, *, failure: type[Exception], stored: int = 0) -> Iterator[None]:
    """A block in which a model is made, with no more weights than the memory holds.

    Args:
        name: what the user called the model.
        failure: class of the error.
        stored: bytes of the files that the weights are read from; 0 for random ones.

    Raises:
        Exception: of the class ``failure``, when there are more, or their sizes do not fit each other.
    """
    thread = threading.get_ident()
    most = max(memory_available(), 4 * stored)  # files may be mapped, and their numbers widened
    count = size = 0

    def add(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal count, size
        if parameter is None or threading.get_ident() != thread:
            return
        count, size = count + 1, size + parameter.nbytes
        if size > most:
            raise failure(
                f"The configuration of {name} is of a model that is too large: its first {count} weights take "
                f"{format_bytes(size)} already, and {format_bytes(most)} are available."
            )
        if count > _MOST_PARAMETERS:
            raise failure(f"The configuration of {name} is of a model with more than {_MOST_PARAMETERS:,} weights.")

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(add)
    try:
        yield
    except failure:
        raise
    except Exception as error:  # of sizes that cannot be, each class of model raises its own
        raise failure(f"The model in {name} cannot be loaded: {first_line(error)}") from error
    finally:
        hook.remove()
