"""Read the ONNX exporter's tables once per process instead of at each conversion.

torch's ONNX exporter fills a new ``ONNXRegistry`` for every conversion, and parses the source of some 500 functions of
onnxscript for it: half a second, more than the conversion of a small module takes. The decompositions of all other
operators are an eighth of the rest.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..private_names.of_torch import operator_names, operators_with_kernel
from ..registry.locking import LOCK

# what was asked for -> what a table depends on, and the table
_TABLES: dict[Any, tuple[Any, Any]] = {}


def filled_registry(read: classmethod[Any, Any, Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an ``ONNXRegistry`` that the caller may add to."""
    # read: the classmethod `from_torchlib` as it was found
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


def remembering_decompositions(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Return ``create_onnx_friendly_decomposition_table`` that makes a table once for the same operators."""

    @functools.wraps(original)
    def create(onnx_registered_ops: Iterable[Any]) -> dict[Any, Any]:
        asked = original, frozenset(onnx_registered_ops)
        known = _decomposed()
        with LOCK:
            given_for, table = _TABLES.get(asked, (None, None))
        if given_for != known:
            table = original(onnx_registered_ops)
            with LOCK:
                _TABLES[asked] = _decomposed(), table  # reading it imports decompositions
        return dict(table)

    return create


def _decomposed() -> tuple[Any, ...]:
    """Return what decompositions are made of: the operators, those that others are made of, and Python's own."""
    from ..private_names.of_torch import decompositions

    return (
        operator_names(),
        operators_with_kernel("CompositeImplicitAutograd"),
        list(decompositions.items()),
    )


def _known() -> tuple[Any, ...]:
    """Return what a table is made of: the operators that libraries have defined by now, and onnxscript's functions."""
    registration = sys.modules.get("onnxscript.function_libs.torch_lib.registration")
    functions = getattr(registration, "default_registry", {}).items()
    return (
        operator_names(),
        [(name, *entry.overloads, *entry.complex) for name, entry in functions],
    )
