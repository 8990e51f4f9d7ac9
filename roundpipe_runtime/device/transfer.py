"""Flatten nested values, including ``BlockMask`` objects, and copy their tensors to a device and back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from yobx_flatten import find_unregistered
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import PyTree

from ..errors import ConfigError, UnregisteredObjectError
from .protocol import Device, Event


class Static:
    """Base class of objects without tensors, which the pipeline passes to the next layer unchanged."""

    __slots__ = ()


# Types that cannot contain a tensor, so that their objects are not searched.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Static)


@dataclasses.dataclass(frozen=True, slots=True)
class TreeStructure:
    spec: pytree.TreeSpec
    # index of the tensor of each leaf, or `None`; for a flex attention mask, the indices of its tensors
    leaves: tuple[int | tuple[int, ...] | None, ...]
    # leaves that are not tensors; `None` for a tensor; for a mask, the function that rebuilds the mask
    constants: tuple[Any, ...]

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        if self is _ONE_TENSOR:
            return tensors[0]
        leaves = []
        for number, constant in zip(self.leaves, self.constants, strict=True):
            if isinstance(number, tuple):
                leaves.append(constant([tensors[one] for one in number]))
            else:
                leaves.append(constant if number is None else tensors[number])
        return pytree.tree_unflatten(leaves, self.spec)


# A shared object, since most layers take and return one tensor.
_ONE_TENSOR = TreeStructure(pytree.tree_structure(0), (0,), (None,))


def flatten_value(value: PyTree, *, what: str = "value") -> tuple[TreeStructure, list[torch.Tensor]]:
    if type(value) is torch.Tensor:
        return _ONE_TENSOR, [value]
    leaves, spec = pytree.tree_flatten(value, is_leaf=leaf_test())
    return separate(leaves, spec, what=what)


def separate(leaves: Sequence[Any], spec: pytree.TreeSpec, *, what: str) -> tuple[TreeStructure, list[torch.Tensor]]:
    numbers: list[int | tuple[int, ...] | None] = []
    constants: list[Any] = []
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}

    def number(tensor: torch.Tensor) -> int:
        if id(tensor) not in seen:
            seen[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return seen[id(tensor)]

    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            numbers.append(number(leaf))
            constants.append(None)
        elif is_block_mask(leaf):
            inside, together = parts_of_mask(leaf)
            numbers.append(tuple(map(number, inside)))
            constants.append(together)
        else:
            if not isinstance(leaf, _PLAIN):
                found = find_unregistered(leaf)
                if found:
                    raise UnregisteredObjectError(f"{what}: " + "\n".join(str(problem) for problem in found))
            numbers.append(None)
            constants.append(leaf)
    return TreeStructure(spec, tuple(numbers), tuple(constants)), tensors


@dataclasses.dataclass(slots=True)
class HostValue:
    """A nested value with its tensors in host memory, which one pipeline stage passes to the next stage."""

    structure: TreeStructure  # value without its tensors
    tensors: list[torch.Tensor]  # host copies, each once
    needs_grad: list[bool]  # whether a gradient flows back through each tensor
    ready: list[Event | None]  # event of each tensor, after which its copy is complete

    def rebuild(self) -> Any:
        """Return the nested value, whose tensors may be read only after the device that copied them is synchronized."""
        return self.structure.rebuild(self.tensors)


class HostCopies:
    """Stores host copies of device tensors, so that a tensor that several layers pass on is copied only once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor, Event | None]] = {}

    def add(self, tensor: torch.Tensor, copy: torch.Tensor, ready: Event | None) -> None:
        """Remember the host copy of a device tensor, without keeping the device tensor alive."""
        self._known[id(tensor)] = weakref.ref(tensor), tensor._version, copy, ready

    def find(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event | None] | None:
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != tensor._version:
            return None
        return found[2:]


def send(
    device: Device,
    structure: TreeStructure,
    tensors: Sequence[torch.Tensor],
    needs_grad: Sequence[bool],
    *,
    last: bool = False,
    copies: HostCopies | None = None,
) -> HostValue:
    # last: whether the caller no longer writes to the tensors
    # copies: copies that the host already has; new copies are added
    on_host: list[tuple[torch.Tensor, Event | None]] = []
    for tensor in tensors:
        found = None if copies is None else copies.find(tensor)
        if found is None:
            found = device.copy_out(tensor, last=last)
            if copies is not None:
                copies.add(tensor, *found)
        on_host.append(found)
    return HostValue(structure, [copy for copy, _ in on_host], list(needs_grad), [event for _, event in on_host])


def fetch(device: Device, on_host: HostValue) -> list[torch.Tensor]:
    return [device.copy_in(tensor, ready) for tensor, ready in zip(on_host.tensors, on_host.ready, strict=True)]


def shapes_of(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}" for t in tensors) or "no tensors"


# Round parameters when they are copied to devices: on the host they have the dtype of the optimizer.

_SENT_AS = "_roundpipe_sent_as"  # attribute of a parameter: its dtype on devices, if different from the host's


def sent_dtype(parameter: torch.Tensor) -> torch.dtype:
    return cast("torch.dtype", parameter.__dict__.get(_SENT_AS, parameter.dtype))


def sent_nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * sent_dtype(parameter).itemsize


def as_sent(part: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor converted to ``dtype``; a converted tensor for an accelerator is in pinned memory."""
    if part.dtype == dtype:
        return part
    made = torch.empty_like(part, dtype=dtype, requires_grad=False, pin_memory=device.type not in ("cpu", "meta"))
    return made.copy_(part.detach())


def widen(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Convert trainable parameters to another dtype on the host; copies on devices keep the original dtype."""
    for parameter in parameters:
        if not (parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype):
            continue
        if type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
            raise ConfigError(
                f"A trainable {type(parameter.data).__name__} of shape {tuple(parameter.shape)} cannot be converted to "
                "the optimizer's dtype. Freeze it, or use master weights:\n    RoundPipe(model, update='masters')"
            )
        parameter.__dict__.setdefault(_SENT_AS, parameter.dtype)
        parameter.data = parameter.data.to(dtype)


def sent_as(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: p.__dict__[_SENT_AS] for name, p in model.named_parameters() if _SENT_AS in p.__dict__}


def send_as(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Set the dtypes that parameters have on devices, by name; all other parameters keep their host dtype."""
    for name, parameter in model.named_parameters():
        if name in dtypes:
            parameter.__dict__[_SENT_AS] = dtypes[name]
        else:
            parameter.__dict__.pop(_SENT_AS, None)


# A `BlockMask` of flex attention contains tensors with the blocks of each row of the batch, and a function
# `mask_mod(b, h, q, kv)` for the elements. In a microbatch that begins at a later row, an offset must be added to `b`.
# So a mask is one leaf here, even if it is registered with torch, as in `torch.distributed.pipelining`.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldMask:
    """A wrapper around a ``BlockMask``, so that torch's pytree treats the mask as one leaf."""

    mask: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch size and number of heads of the mask; a size is 1 if the mask is the same for all rows or heads."""
        return tuple(self.mask.kv_num_blocks.shape[:-1])


def is_block_mask(value: Any) -> bool:
    """Return whether the value is a ``BlockMask`` of flex attention, without importing flex attention."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def leaf_test() -> Callable[[Any], bool] | None:
    """Return a pytree ``is_leaf`` function that keeps ``BlockMask`` whole; ``None`` if torch keeps it whole already."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return is_block_mask if module is not None and module.BlockMask in pytree.SUPPORTED_NODES else None


def held(tree: PyTree) -> PyTree:
    if "torch.nn.attention.flex_attention" not in sys.modules:
        return tree
    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_block_mask)
    if not any(map(is_block_mask, leaves)):
        return tree
    return pytree.tree_unflatten([HeldMask(leaf) if is_block_mask(leaf) else leaf for leaf in leaves], spec)


def cut_mask(mask: Any, start: int, stop: int) -> Any:
    # mask: a `BlockMask` whose batch size is not 1
    part = mask[start:stop]  # torch splits the blocks, and replaces the function by a function that raises
    mask_mod: Callable[..., torch.Tensor] = mask.mask_mod

    def of_part(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return mask_mod(b + start, h, q_idx, kv_idx)

    part.mask_mod = of_part
    return part


def parts_of_mask(mask: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], Any]]:
    """Return the tensors of a ``BlockMask`` and of its function's closure, and a function that rebuilds the mask."""
    names = [name for name, value in vars(mask).items() if isinstance(value, torch.Tensor)]
    tensors = [getattr(mask, name) for name in names]
    inside: list[torch.Tensor] = []
    mask_mod = _opened(mask.mask_mod, inside)

    def together(moved: Sequence[Any]) -> Any:
        made = copy.copy(mask)
        for name, tensor in zip(names, moved, strict=False):
            setattr(made, name, tensor)
        made.mask_mod = mask_mod(moved[len(names) :])
        return made

    return [*tensors, *inside], together


def _opened(function: Any, tensors: list[torch.Tensor]) -> Callable[[Sequence[Any]], Any]:
    """Append the tensors in a function's closure to ``tensors``; return a maker of the function with other tensors."""
    held_by: tuple[Any, ...] = ()
    if isinstance(function, functools.partial):
        held_by = (function.func, function.args, function.keywords)
    elif isinstance(function, types.FunctionType) and function.__closure__:
        with contextlib.suppress(ValueError):  # the closure has a variable without a value
            held_by = tuple(cell.cell_contents for cell in function.__closure__)
    before = len(tensors)
    leaves, spec = pytree.tree_flatten(held_by)
    makers = [_value(leaf, tensors) for leaf in leaves]
    if len(tensors) == before:
        return lambda moved: function

    def make(moved: Sequence[Any]) -> Any:
        values = pytree.tree_unflatten([maker(moved) for maker in makers], spec)
        if isinstance(function, functools.partial):
            return functools.partial(values[0], *values[1], **values[2])
        cells = tuple(types.CellType(value) for value in values)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    return make


def _value(leaf: Any, tensors: list[torch.Tensor]) -> Callable[[Sequence[Any]], Any]:
    if isinstance(leaf, torch.Tensor):
        number = len(tensors)
        tensors.append(leaf)
        return lambda moved: moved[number]
    return _opened(leaf, tensors)
