"""Stand in for a large table that stays on the host: its rows or slices travel when a layer's code computes with them.

The stand-in is a tensor with the shape of the parameter and no memory. What is known to need parts of it only is done
with these parts (`on_tables`); anything else is done with all of it, which is copied to the device then, as every other
parameter is.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import DisableTorchFunctionSubclass, make_wrapper_subclass, pytree

from ...device.events import Event
from ...errors import StageError
from ...optim.parameters import Table
from .host_sum import HostSum

# Questions about the form of a tensor, by the names of methods.
_FORM = {
    *("size", "dim", "numel", "element_size", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *("get_device", "ndimension", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("__hash__", "__repr__", "__len__"),
}
# Attributes that are tensors with the numbers of the table.
_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data"}

# What is done with parts of a table, by the function that code calls.
_ON_PARTS: dict[Any, Callable[..., Any]] = {}


def on_tables(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Register what is called instead of a function that gets a table; it may return ``NotImplemented``."""
    return functools.partial(_ON_PARTS.__setitem__, function)


class PartsDevice(Protocol):
    """The part of a device that copies rows and slices."""

    torch_device: torch.device

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor in the memory of the device."""

    def copy_out(self, tensor: torch.Tensor, *, last: bool, parameter: bool = False) -> tuple[torch.Tensor, Event]:
        """Return a copy on the host, and the event after which it is complete."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Compute after the copies given so far."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release tensors that will not be read again."""


class HostTable(torch.Tensor):
    """Stands for a parameter of which parts are copied to the device."""

    access: TableAccess

    @staticmethod
    def __new__(cls, access: TableAccess, *, requires_grad: bool) -> HostTable:
        """Make one without memory."""
        source = access.source
        made: HostTable = make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=access.torch_device, requires_grad=requires_grad
        )
        made.access = access
        made._is_param = True  # by which torch knows a parameter
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about the form, compute with parts of the table, or with all of it."""
        kwargs = kwargs or {}
        if _is_about_form(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ON_PARTS:
            found = _ON_PARTS[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__"):
            raise StageError(
                f"A layer writes a parameter of shape {tuple(args[0].shape)} in its forward ({name}). It runs on "
                "copies of its parameters, so what it writes into them is lost. Write it between two steps:\n"
                "    model.step(step_fn); model.synchronize(); write(parameter)"
            )
        args, kwargs = pytree.tree_map_only(HostTable, lambda table: table.access.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it as no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what reaches the table below torch functions, where no graph would be recorded."""
        raise StageError(
            f"{func} reads a large table that stays on the host, in a way that no stand-in sees. Let it travel whole:\n"
            '    RoundPipe(model, large_tables="whole")'
        )


def _is_about_form(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute not in _VALUES and (name != "__set__" or attribute in ("grad", "requires_grad"))
    return name in _FORM


class TableAccess:
    """The parts of one table on one device, and the sum of their gradients on the host."""

    # source: numbers on the host, which stay as they are while a run reads them
    # new_sum: function that returns a sum of gradients to which nothing was added
    # count: function that is given the bytes of each part that goes up. Default: they are not counted.

    def __init__(
        self,
        device: PartsDevice,
        source: torch.Tensor,
        table: Table,
        *,
        requires_grad: bool,
        new_sum: Callable[[], HostSum],
        count: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.device, self.source, self.table = device, source.detach(), table
        self.requires_grad = requires_grad
        self.torch_device = device.torch_device
        self._new_sum, self._count = new_sum, count
        self.sum = new_sum()
        self._whole: nn.Parameter | None = None
        self._copy: torch.Tensor | None = None  # its memory: a device counts the tensors that it made

    # -- up ----------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of rows of the table."""
        return self.source.shape[0]

    def up(self, part: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, which computes after it has come."""
        copy = self.device.copy_in(part)
        with self.device.computing():  # what is computed from here on waits for the copy
            return copy

    def down(self, part: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, complete."""
        copy, complete = self.device.copy_out(part, last=True)
        complete.result()
        return copy

    def _up_part(self, part: torch.Tensor) -> torch.Tensor:
        self._count(part.nbytes)
        return self.up(part)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return rows, on the device, by their numbers on the host."""
        if self.torch_device.type in ("cpu", "meta"):
            return self._up_part(self.source.index_select(0, numbers))
        like = torch.empty(len(numbers), self.source.shape[1], dtype=self.source.dtype, pin_memory=True)
        return self._up_part(torch.index_select(self.source, 0, numbers, out=like))

    def slices(self, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the table in slices of so many rows, one after the other; a slice is gone when the next one comes."""
        computed: collections.deque[torch.Event] = collections.deque()
        for start in range(0, self.size, rows):
            while len(computed) > 1:  # a host that runs ahead would fill the device with slices
                computed.popleft().synchronize()
            place = slice(start, min(start + rows, self.size))
            part = self._up_part(self.source[place])
            yield place, part
            self.device.release([part])
            del part
            if self.torch_device.type not in ("cpu", "meta"):
                computed.append(torch.accelerator.current_stream(self.torch_device).record_event())

    def whole(self) -> nn.Parameter:
        """Return all of the table on the device, for code that does something else with it."""
        if self._whole is None:
            self._copy = self._up_part(self.source)
            self._whole = nn.Parameter(self._copy, requires_grad=self.requires_grad)
        return self._whole

    @property
    def leaves(self) -> list[nn.Parameter]:
        """What gradients end in on the device, in addition to the stand-in."""
        return [] if self._whole is None else [self._whole]

    # -- down --------------------------------------------------------------------------------------------------------

    def add(self, place: torch.Tensor | slice, gradient: torch.Tensor) -> None:
        """Add the gradient of a part to the sum on the host, after those that were added before."""
        # place: slice, or numbers of rows on the host, each once
        copy, complete = self.device.copy_out(gradient, last=True, parameter=True)
        # On an accelerator one part is on its way while the next one is computed.
        self.sum.add(place, copy, complete, waiting=0 if self.torch_device.type == "cpu" else 1)

    def pop_sum(self) -> HostSum | None:
        """Return the sum of all gradients, and begin a new one; ``None`` if there was none."""
        if self._whole is not None and self._whole.grad is not None:
            gradient, self._whole.grad = self._whole.grad, None
            self.add(slice(None), gradient if gradient.layout == torch.strided else gradient.to_dense())
        if self.sum.is_empty:
            return None
        found, self.sum = self.sum, self._new_sum()
        return found

    def release(self) -> None:
        """Release what is on the device."""
        if self._copy is not None:
            self.device.release([self._copy])
        self._whole = self._copy = None
        self.sum = self._new_sum()
