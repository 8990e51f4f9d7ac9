"""The exporter's table of translations, read once per process instead of at each conversion.

torch's ONNX exporter fills a new ``ONNXRegistry`` for every conversion, and parses the source of some 500 functions of
onnxscript for it: half a second, more than the conversion of a small module takes.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from ..registry.locking import LOCK

__all__ = ["filled_registry"]

# what was asked for -> what a table depends on, and the table
_TABLES: dict[Any, tuple[Any, Any]] = {}


def filled_registry(read: Any, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an ``ONNXRegistry`` that the caller may add to.

    Args:
        read: the classmethod ``from_torchlib`` as it was found.
        cls: the class on which it is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    asked = read, cls, args, tuple(sorted(kwargs.items()))
    with LOCK:
        given_for, table = _TABLES.get(asked, (None, None))
    known = _known()
    if given_for != known:
        table = read.__get__(None, cls)(*args, **kwargs)
        with LOCK:
            _TABLES[asked] = _known(), table  # reading it imports onnxscript's functions
    own = copy.copy(table)
    own.functions = {operator: list(entries) for operator, entries in table.functions.items()}
    return own


def _known() -> tuple[Any, ...]:
    """Return what a table is made of: the operators that libraries have defined by now, and onnxscript's functions."""
    registration = sys.modules.get("onnxscript.function_libs.torch_lib.registration")
    functions = getattr(registration, "default_registry", {}).items()
    return (
        torch._C._dispatch_get_all_op_names(),
        [(name, *entry.overloads, *entry.complex) for name, entry in functions],
    )
