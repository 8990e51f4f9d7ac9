"""Check that a recomputation gives the same outputs as the forward, and that no gradient is lost.

Runs 1, 2, 4, 8, ... are checked: a later change of a layer is found, at almost no cost over a whole training.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

import torch
from torch import nn

from yobx_flatten.core.compare import tolerance
from yobx_flatten.private_names.of_torch import is_traceable_wrapper_subclass, tensor_use_count

from ..errors import StageError
from ..optim.parameters import LayerContents
from .caller_state import values_of
from .layer_graph import other_leaves

# Weighted sums of a tensor's elements with random signs, and the norm of the tensor.
Digest: TypeAlias = list[torch.Tensor]

_SUMS = 4
# Tensors are multiplied by these factors before they are summed: a mask is filled with the minimum of its dtype, and
# the sum of two minima overflows.
_FACTORS = {torch.float16: 2.0**-10}
_USUAL_FACTOR = 2.0**-40


def is_due(count: int) -> bool:
    """Return whether the next run is checked, given the number of earlier runs with inputs of the same structure.

    >>> [count + 1 for count in range(20) if is_due(count)]
    [1, 2, 4, 8, 16]
    """
    return (count + 1) & count == 0


# -- a recomputation equals its forward ------------------------------------------------------------------------------


def digest(tensors: Sequence[torch.Tensor]) -> Digest:
    """Return digests of a layer's outputs that require a gradient, to compare the outputs with a recomputation.

    The digests stay on the device of the outputs, because a copy to the host would wait for the device.
    """
    found = []
    with torch.no_grad():
        for tensor in tensors:
            if is_digested(tensor):
                rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
                factor = _FACTORS.get(rows.dtype, _USUAL_FACTOR)
                within = rows @ (_signs(rows.shape[1], _SUMS, rows) * factor)
                sums = (within * _signs(rows.shape[0], _SUMS, rows)).sum(0, dtype=torch.float64) / factor
                norm = torch.linalg.vector_norm(rows, dtype=torch.float64).reshape(1)
                found.append(torch.cat([sums, norm]))
    return found


def is_digested(tensor: torch.Tensor) -> bool:
    """Return whether :func:`digest` includes an output: a floating-point tensor that requires a gradient."""
    has_numbers = tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel() > 0
    return tensor.requires_grad and has_numbers


def _signs(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return random signs, always the same for the same sizes; no random generator is used."""
    numbers = torch.arange(rows * columns, device=like.device).reshape(rows, columns)
    mixed = (numbers * 2654435761 + 40503) % 4294967296
    mixed = ((mixed >> 15) ^ mixed) * 2246822519 % 4294967296
    return ((mixed >> 13) % 2 * 2 - 1).to(like.dtype)


def check_repeated(title: str, before: Digest, now: Digest, dtypes: Sequence[torch.dtype]) -> None:
    """Raise an error if a layer's recomputation gave other values than its forward."""
    for one, other, dtype in zip(before, now, dtypes, strict=False):
        norm = float(one[-1])
        # an accelerator may add in a different order
        if norm < float("inf") and not (one - other).abs().max() <= tolerance("rows", dtype) * norm:
            break
    else:
        if len(before) == len(now):
            return
    raise StageError(
        f"{title} computed different values in its recomputation than in its forward, so the gradient would be wrong. "
        "If the layer draws from a random generator, make the generator an attribute of the layer. If it counts calls "
        "or reads a clock, save the value that differs:\n    if doing_recompute():\n        (mask,) = "
        "get_recompute_data()\n    else:\n        mask = ...; save_for_recompute(mask)"
    )


# Attribute of the device copy of a parameter: the original parameter.
HOST_PARAMETER = "_roundpipe_parameter"


# -- leaves of the gradients -----------------------------------------------------------------------------------------


def check_leaves(
    layer: LayerContents,
    exits: Sequence[torch.Tensor],
    entries: Sequence[torch.Tensor | None],
    own: Sequence[torch.Tensor],
    layers: Sequence[LayerContents],
) -> None:
    """Raise an error if gradients of a layer flow to tensors other than its inputs and its own parameters."""
    # exits: outputs of the layer; entries: inputs of the layer, `None` for an input without a gradient
    # own: parameters of the layer on the device
    known = {id(tensor) for tensor in own}
    for leaf in other_leaves(exits, entries):
        # a leaf that nothing else references was created inside the layer, and no code can read its gradient
        if id(leaf) in known or sys.getrefcount(leaf) <= _LOOSE:
            continue
        held = ((slot, other) for other in layers for slot in other.slots)
        parameter = getattr(leaf, HOST_PARAMETER, leaf)  # the other layer may be running, with device copies
        owner = next(((slot.name, other.title) for slot, other in held if slot.parameter is parameter), None)
        if owner is not None:
            raise StageError(
                f"{layer.title} uses {owner[0]!r} of {owner[1]}. The parameter's gradient would be wrong, because the "
                "backward of a layer reaches its own parameters only. Register the parameter in both layers:\n"
                "    layer.other = parameter"
            )
        names = [
            f"{type(part).__name__}.{name}"
            for part in layer.module.modules()
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        what = f"reads {names[0]}, which requires a gradient" if names else "reads a tensor that requires a gradient"
        raise StageError(
            f"{layer.title} {what}, of shape {tuple(leaf.shape)}, which is neither an input nor a parameter of the "
            "layer. The gradient would be wrong, because each layer call has its own backward. Pass the tensor to "
            "the model, or make it a parameter:\n    model(x, delta)\n    layer.delta = torch.nn.Parameter(delta)"
        )


def _references() -> int:
    with torch.inference_mode(False), torch.enable_grad():  # this module may be imported under `torch.no_grad()`
        tensor = torch.ones((), requires_grad=True) * 1
        return max(sys.getrefcount(leaf) for leaf in other_leaves([tensor], []))


# Reference count of a graph leaf, in a loop over the result of `other_leaves`, if nothing else refers to it.
_LOOSE = _references()


def watch_escaped(leaves: Sequence[torch.Tensor | None], title: str) -> None:
    """Make a later backward to these leaves raise an error, because a tensor has left the layer as a non-output."""
    # leaves: inputs or parameters of a call that has ended; only an escaped tensor can still refer to them
    for leaf in leaves:
        if leaf is not None and leaf.requires_grad and tensor_use_count(leaf) > 1:
            leaf.register_hook(partial(_refuse, title))


def _refuse(title: str, gradient: torch.Tensor) -> NoReturn:
    raise StageError(
        f"A tensor left {title} as an attribute or in a hook, not as an output. The gradient would be lost, because "
        "the backward of a layer begins at its outputs. Also return the tensor:\n    return outputs, auxiliary_loss"
    )


# -- parameters ------------------------------------------------------------------------------------------------------


def is_compared(source: torch.Tensor) -> bool:
    """Report whether the values of a parameter can be compared; tensor subclasses that wrap tensors are skipped."""
    return not source.is_inference() and source.layout == torch.strided and not is_traceable_wrapper_subclass(source)


# A check follows each of the first 8 changes, later only the 16th, 32nd, ...: some attributes change in every call.
_CHANGES = 8

_PLAIN = frozenset({bool, int, float, str, type(None)})


class Repeats:
    """Decides which calls are checked: it counts calls by kind, and detects changes of layers and loss functions."""

    def __init__(self) -> None:
        self._calls: collections.Counter[Hashable] = collections.Counter()
        self._changes: collections.Counter[Hashable] = collections.Counter()
        self._states: dict[Hashable, Hashable] = {}
        self._open: dict[Hashable, object] = {}  # code of this call

    def is_due(self, kind: Hashable, code: object = None) -> bool:
        """Count a call, and return whether it must be checked, for its number or because the code has changed."""
        # changes that a call makes itself, such as a counter, are part of the state at its end
        state = state_of(code)
        is_changed = self._states.get(kind, state) != state
        self._open[kind] = code
        self._changes[kind] += is_changed
        self._calls[kind] += 1
        changes = self._changes[kind]
        return is_due(self._calls[kind] - 1) or (is_changed and (changes <= _CHANGES or is_due(changes - 1)))

    def failed(self, kind: Hashable) -> None:
        """Check the next call of this kind again, since the check of this call has failed."""
        self._calls[kind] = 0

    def end(self) -> None:
        """Record the state of the layers and loss functions after a call."""
        self._states |= {kind: state_of(code) for kind, code in self._open.items()}
        self._open.clear()


def state_of(code: object) -> Hashable:
    """Return fingerprints of the numbers, strings and tensors that layers or a loss read, to detect changes."""
    found: list[Hashable] = []
    values, is_read = [*code] if isinstance(code, list) else [code], False
    for value in values:  # grows in the loop
        if isinstance(value, functools.partial):
            values += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            values += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType) and not is_read:
            values += values_of(value)
            is_read = True
        else:
            found.append(_mark(value))
            for one in value.modules() if isinstance(value, nn.Module) else [value]:
                found += _held(one)
    return tuple(found)


def _held(value: object) -> Iterator[Hashable]:
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and not isinstance(value, torch.Tensor):
        for name, one in attributes.items():
            if type(one) in _PLAIN:
                yield name, one
            elif isinstance(one, torch.Tensor):
                yield name, _mark(one)
        for buffer in attributes.get("_buffers", {}).values() if isinstance(value, nn.Module) else ():
            yield _mark(buffer)


def _mark(value: object) -> Hashable:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return id(value), value._version
    return id(value)
