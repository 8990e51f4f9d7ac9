"""Export with fewer sizes that vary, where torch fails with all of them.

.. code-block:: text

    all sizes vary ──fails──> those that the error names are fixed ──> only the batch varies ──> none varies
                   ──passes─> done, at no cost
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import torch

from ..errors import FlattenError, InvalidArgumentError
from ..errors.failures import result_or
from ..errors.log import STEP
from ..errors.messages import first_line
from ..recipe.aliases import DynamicShapes
from ..storage.matching import leaves_of, plain_names
from ..trees.shapes import dynamic_shapes, shapes_of_leaves
from .example.example import Example
from .onnx.refused import ConversionRefusedError

logger = logging.getLogger("yobx_flatten")

_T = TypeVar("_T")
_Axis = tuple[str, int]  # name of a leaf of the inputs, axis


def with_fewer_sizes(export: Callable[[Example, bool], _T], example: Example, stated: DynamicShapes) -> _T:
    """Export an example; where torch fails, again with fewer sizes that vary. The report states which, and why."""
    # export: takes an example, and whether sizes of it were fixed here
    # stated: dynamic shapes of the caller, which are never changed
    first = _result(export, example, False)
    if not isinstance(first, Exception):
        return first
    if stated == "auto" and example.bounds is None and _is_of_torch(first):
        for fewer in _with_fewer(example, first):
            logger.info("exporting %s with fewer sizes that vary", type(example.module).__qualname__, extra=STEP)
            found = _result(export, fewer, True)
            if not isinstance(found, Exception):
                return found
    raise _in_our_words(first, example)


def _in_our_words(error: Exception, example: Example) -> Exception:
    """Replace a long error of torch by a short one; errors of the model's code stay."""
    if isinstance(error, FlattenError) or not type(error).__module__.startswith(("torch.", "onnx_ir.")):
        return error
    explained = InvalidArgumentError(
        f"{type(example.module).__qualname__} cannot be exported: torch raises {type(error).__name__}: "
        f"{first_line(error)[:300]}\nFor an explanation:\n    explain_error(error.__cause__, module, args, kwargs)"
    )
    explained.__cause__ = error
    return explained


def _result(export: Callable[[Example, bool], _T], example: Example, is_fixed: bool) -> _T | Exception:
    # whatever torch raises for sizes of this kind; the first error is raised in the end
    return result_or(functools.partial(export, example, is_fixed), lambda error: error)


def _is_of_torch(error: Exception) -> bool:
    """Whether fewer sizes may help: an error of ours, but for that of a conversion, names another remedy."""
    if isinstance(error, ConversionRefusedError):
        return error.axes is not None
    return not isinstance(error, (FlattenError, OSError, MemoryError))


def _with_fewer(example: Example, error: Exception) -> Iterator[Example]:
    """Yield examples with fewer and fewer sizes that vary."""
    varying = _varying(example)
    batch = _batch(example, varying)
    without_named = varying - (_named(error) - batch)
    known = {frozenset(varying)}
    for kept in map(frozenset, (without_named, batch, ())):
        if kept in known:
            continue
        known.add(kept)
        fixed = ", ".join(f"{name}.shape[{axis}]" for name, axis in sorted(varying - kept))
        what, where = (fixed, "it varies") if kept else ("every size of the inputs", "sizes vary")
        raised = f"torch.export raises {type(error).__name__}: {first_line(error).rstrip('.')[:200]}"
        reason = error.reason if isinstance(error, ConversionRefusedError) else raised
        way = "To state which sizes vary, pass dynamic_shapes=."
        remark = f"{what} is fixed as in the example: where {where}, {reason}. {way}"
        shapes = _narrowed(example, kept) if kept else None
        yield dataclasses.replace(example, shapes=shapes, remarks=(*example.remarks, remark))


def _varying(example: Example) -> set[_Axis]:
    """The axes of tensors that may vary."""
    entries = shapes_of_leaves(example.inputs, example.shapes)
    return {
        (name, axis)
        for name, leaf, dims in zip(example.names, leaves_of(example.inputs), entries, strict=True)
        for axis, dim in (dims or {}).items()
        if isinstance(leaf, torch.Tensor) and dim is not None and leaf.shape[axis] > 1
    }


def _batch(example: Example, varying: Collection[_Axis]) -> set[_Axis]:
    """In each tensor, the first axis that is as long as the first axis of the first tensor."""
    leaves = dict(zip(example.names, leaves_of(example.inputs), strict=True))
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.ndim}
    rows = next((leaf.shape[0] for leaf in tensors.values()), None)
    places = [(name, next((i for i, n in enumerate(leaf.shape) if n == rows), -1)) for name, leaf in tensors.items()]
    return {place for place in places if place in varying}


def _named(error: Exception) -> set[_Axis]:
    """The axes that an error names: of a trace in its text, of a conversion by the symbols of the program."""
    if isinstance(error, ConversionRefusedError):
        return set(error.axes or ())
    found = re.findall(r"(?:L|inputs)\['([\w.]+)'\]\.(?:size\(\)|shape)\[(\d+)\]", str(error))
    return {(name, int(axis)) for name, axis in found}


def _narrowed(example: Example, kept: Collection[_Axis]) -> DynamicShapes:
    """The shapes of an example with no other axes than those."""
    inputs = example.inputs
    rows = zip(plain_names(inputs), example.names, shapes_of_leaves(inputs, example.shapes), strict=True)
    return dynamic_shapes(
        inputs,
        {path: {axis: dim for axis, dim in dims.items() if (name, axis) in kept} for path, name, dims in rows if dims},
    )
