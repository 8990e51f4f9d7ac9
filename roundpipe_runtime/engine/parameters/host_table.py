"""Keep a large embedding or head matrix (a table) on the host, and copy rows or slices when a layer needs them.

A :class:`HostTable` replaces the parameter: a tensor with the parameter's shape and no memory. Operations that need
only some rows or slices of the table copy these rows or slices to the device (`on_tables`). All other operations first
copy the whole embedding or head matrix to the device.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from yobx_flatten.core.private_names.of_torch import DisableTorchFunctionSubclass, make_wrapper_subclass, pytree

from ...device.protocol import Device, Event
from ...device.transfer import as_sent
from ...errors import StageError
from ...optim.layer_contents import Table

# Methods that only query a tensor's metadata.
_FORM = {
    *("size", "dim", "numel", "element_size", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *("get_device", "ndimension", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("__hash__", "__repr__", "__len__"),
}
# Attributes that are tensors with the values of the table.
_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data"}

# Replacements that compute on parts of a table, by the function that the code calls.
_ON_PARTS: dict[Any, Callable[..., Any]] = {}


def on_tables(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that registers a replacement of ``function`` for calls with a :class:`HostTable`."""
    return functools.partial(_ON_PARTS.__setitem__, function)


class HostTable(torch.Tensor):
    """A tensor without data that replaces a large parameter; operations copy needed rows from the host to a device."""

    access: TableAccess

    @staticmethod
    def __new__(cls, access: TableAccess, *, requires_grad: bool) -> HostTable:
        made: HostTable = make_wrapper_subclass(
            cls, access.source.shape, dtype=access.dtype, device=access.torch_device, requires_grad=requires_grad
        )
        made.access = access
        made._is_param = True  # torch recognizes a parameter by this
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):  # of an attribute of the tensor
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            is_about_form = attribute not in _VALUES and (name != "__set__" or attribute in ("grad", "requires_grad"))
        else:
            is_about_form = name in _FORM
        if is_about_form:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ON_PARTS:
            found = _ON_PARTS[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__"):
            raise StageError(
                f"A layer writes a parameter of shape {tuple(args[0].shape)} in its forward ({name}). A layer runs on "
                "copies of its parameters, so values written there are lost. Write parameters between two steps:\n"
                "    model.step(step_fn); model.synchronize(); write(parameter)"
            )
        args, kwargs = pytree.tree_map_only(HostTable, lambda table: table.access.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it as no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise an error for operations that bypass ``__torch_function__``, since autograd would not record them."""
        raise StageError(
            f"{func} cannot read a large embedding or head matrix that stays in host memory. Copy the whole matrix "
            "to the devices:\n"
            '    RoundPipe(model, large_tables="whole")'
        )


class TableAccess:
    """Copies rows or slices of one large parameter to one device, and sums their gradients on the host."""

    # source: values on the host, which do not change while a run reads them
    # new_sum: function that returns a gradient sum of zero
    # count: function that gets the bytes of each uploaded part. Default: not counted.
    # dtype: dtype of the parts on the device. Default: that of the source.

    def __init__(
        self,
        device: Device,
        source: torch.Tensor,
        table: Table,
        *,
        requires_grad: bool,
        new_sum: Callable[[], HostSum],
        count: Callable[[int], None] = lambda nbytes: None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.source, self.table = device, source.detach(), table
        self.requires_grad, self.dtype = requires_grad, dtype or source.dtype
        self.torch_device = device.torch_device
        self._new_sum, self._count = new_sum, count
        self.sum = new_sum()
        self._whole: nn.Parameter | None = None
        self._copy: torch.Tensor | None = None  # memory of `_whole`, which the device counts

    @property
    def size(self) -> int:
        return self.source.shape[0]

    def up(self, part: torch.Tensor) -> torch.Tensor:
        copy = self.device.copy_in(part)
        with self.device.computing():  # later computation waits for the copy
            return copy

    def down(self, part: torch.Tensor) -> torch.Tensor:
        copy, complete = self.device.copy_out(part, last=True)
        complete.result()
        return copy

    def _up_part(self, part: torch.Tensor) -> torch.Tensor:
        part = as_sent(part, self.dtype, self.torch_device)
        self._count(part.nbytes)
        return self.up(part)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.torch_device.type in ("cpu", "meta") or self.dtype != self.source.dtype:
            return self._up_part(self.source.index_select(0, numbers))
        like = torch.empty(len(numbers), self.source.shape[1], dtype=self.source.dtype, pin_memory=True)
        return self._up_part(torch.index_select(self.source, 0, numbers, out=like))

    def slices(self, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the row range and the device copy of each slice of at most ``rows`` rows of the parameter."""
        computed: collections.deque[torch.Event] = collections.deque()
        for start in range(0, self.size, rows):
            while len(computed) > 1:  # otherwise the host runs ahead and fills the device with slices
                computed.popleft().synchronize()
            place = slice(start, min(start + rows, self.size))
            part = self._up_part(self.source[place])
            yield place, part
            self.device.release([part])
            del part
            if self.torch_device.type not in ("cpu", "meta"):
                computed.append(torch.accelerator.current_stream(self.torch_device).record_event())

    def whole(self) -> nn.Parameter:
        """Return a copy of the whole parameter on the device, for functions that cannot compute on rows or slices."""
        if self._whole is None:
            self._copy = self._up_part(self.source)
            self._whole = nn.Parameter(self._copy, requires_grad=self.requires_grad)
        return self._whole

    @property
    def leaves(self) -> list[nn.Parameter]:
        return [] if self._whole is None else [self._whole]

    def add(self, place: torch.Tensor | slice, gradient: torch.Tensor) -> None:
        """Add the gradient of the rows ``place`` of the parameter to the sum of gradients in CPU memory."""
        # place: slice, or distinct row indices on the host
        copy, complete = self.device.copy_out(gradient, last=True, parameter=True)
        # On an accelerator one part is copied while the next one is computed.
        self.sum.add(place, copy, complete, waiting=0 if self.torch_device.type == "cpu" else 1)

    def pop_sum(self) -> HostSum | None:
        """Return the sum of the added gradients, and start a new sum; ``None`` if no gradient was added."""
        if self._whole is not None and self._whole.grad is not None:
            gradient, self._whole.grad = self._whole.grad, None
            self.add(slice(None), gradient if gradient.layout == torch.strided else gradient.to_dense())
        if self.sum.is_empty:
            return None
        found, self.sum = self.sum, self._new_sum()
        return found

    def release(self) -> None:
        if self._copy is not None:
            self.device.release([self._copy])
        self._whole = self._copy = None
        self.sum = self._new_sum()


@on_tables(functional.embedding)
def rows_of_table(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, HostTable) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented  # writes the table, counts indices, or makes a sparse gradient
    return _Rows.apply(weight, input, padding_idx, weight.access)  # type: ignore[no-untyped-call] # torch's


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: HostTable, numbers: torch.Tensor, padding_idx: int | None, access: TableAccess
    ) -> torch.Tensor:
        found, places = _distinct(access, numbers)
        rows = access.rows(found)
        ctx.access, ctx.found, ctx.padding = access, found, -1
        if padding_idx is not None and not found.is_meta:
            padding = padding_idx % access.size
            at = int(torch.searchsorted(found, padding))
            ctx.padding = at if at < len(found) and int(found[at]) == padding else -1
        ctx.save_for_backward(places)
        result = functional.embedding(places, rows)
        access.device.release([rows])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        of_rows = torch.ops.aten.embedding_dense_backward(gradient, places, len(ctx.found), ctx.padding, False)
        ctx.access.add(ctx.found, of_rows)
        return None, None, None, None


def _distinct(access: TableAccess, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct indices in ascending order, and the position of each index among the distinct indices."""
    if numbers.is_meta:  # as many as possible
        return numbers.new_empty(min(numbers.numel(), access.size)), torch.empty_like(numbers)
    found, places = torch.unique(access.down(numbers), return_inverse=True)
    if len(found) and not (int(found[0]) >= 0 and int(found[-1]) < access.size):
        raise IndexError(
            f"index out of range: the indices are {int(found[0])} to {int(found[-1])}, but the embedding has "
            f"{access.size} rows"
        )
    return found, access.up(places.to(numbers.dtype))


@on_tables(functional.linear)
def linear_of_table(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Compute ``functional.linear`` with a weight in CPU memory, which is copied and multiplied slice by slice."""
    if not isinstance(weight, HostTable) or weight.access.table.slice_rows is None:
        return NotImplemented
    access = weight.access
    return _Product.apply(input, weight, bias, access, access.table.slice_rows)  # type: ignore[no-untyped-call] # torch's


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, table: HostTable, bias: torch.Tensor | None, access: TableAccess, rows: int
    ) -> torch.Tensor:
        ctx.access, ctx.rows = access, rows
        ctx.save_for_backward(hidden, bias)
        if not hidden.numel():  # only the shape; under autocast, the dtype differs from the table's
            probe = functional.linear(hidden, hidden.new_empty(1, hidden.shape[-1], dtype=access.dtype))
            return probe.new_empty(*hidden.shape[:-1], access.size)
        found: torch.Tensor | None = None
        for place, part in access.slices(rows):
            product = functional.linear(hidden, part, None if bias is None else bias[place])
            found = product.new_empty(*product.shape[:-1], access.size) if found is None else found
            found[..., place] = product
        assert found is not None
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, bias = ctx.saved_tensors
        access: TableAccess = ctx.access
        slope, flat = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        of_hidden = torch.zeros_like(flat, dtype=wide(flat.dtype)) if ctx.needs_input_grad[0] else None
        for place, part in access.slices(ctx.rows) if any(ctx.needs_input_grad[:2]) else ():
            columns = slope[:, place]
            if of_hidden is not None:
                of_hidden += columns @ part.to(columns.dtype)
            if ctx.needs_input_grad[1]:
                access.add(place, (columns.T @ flat.to(columns.dtype)).to(access.dtype))
        of_bias = slope.sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        result = None if of_hidden is None else of_hidden.to(hidden.dtype).reshape(hidden.shape)
        return result, None, of_bias, None, None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over slices of an embedding or head matrix: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class HostSum:
    """Adds up the gradients of rows or slices of one parameter in CPU memory."""

    # form: shape and dtype of the sum
    # memory: function that returns host memory for the sum. Default: new memory.

    def __init__(
        self, form: torch.Tensor, memory: Callable[[torch.Tensor], torch.Tensor | None] = lambda form: None
    ) -> None:
        self._form, self._memory = form, memory
        self._total: torch.Tensor | None = None
        # Parts that are being copied to the host: their rows, and the event when each is complete.
        self._coming: collections.deque[tuple[torch.Tensor | slice, torch.Tensor, Event]] = collections.deque()
        self._scale = 1.0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return self._total is None

    @property
    def total(self) -> torch.Tensor:
        if self._total is None:
            found = self._memory(self._form)
            self._total = torch.zeros_like(self._form, device="cpu") if found is None else found.zero_()
        return self._total

    def add(self, place: torch.Tensor | slice, gradient: torch.Tensor, arrived: Event, *, waiting: int) -> None:
        """Queue the gradient of some rows of the parameter, which is added to the sum later."""
        # place: slice, or distinct row indices; waiting: number of last gradients that stay in the queue
        assert self.total is not None
        with self._lock:
            self._coming.append((place, gradient, arrived))
            self._land(waiting)

    def scale(self, factor: float) -> None:
        self._scale *= factor

    def done(self) -> bool:
        return not self._coming and self._scale == 1.0

    def result(self) -> None:
        with self._lock:
            self._land(0)
            factor, self._scale = self._scale, 1.0
            if factor != 1.0:
                self.total.mul_(factor)

    @torch.no_grad()
    def _land(self, waiting: int) -> None:
        while len(self._coming) > waiting:
            place, gradient, arrived = self._coming.popleft()
            arrived.result()
            if isinstance(place, slice):
                self.total[place].add_(gradient)
            else:
                self.total.index_add_(0, place, gradient.to(self.total.dtype))


class ParametersOnDemand(dict[str, nn.Parameter | None]):
    """The parameters of a module, some of which are copied to the device when they are read.

    >>> found = ParametersOnDemand({"weight": None, "bias": None}, {"weight": lambda: print("copied")})
    >>> found["bias"], "weight" in found
    (None, True)
    >>> found["weight"]
    copied
    """

    # It replaces `module._parameters`, where every access looks a parameter up: `module.weight`,
    # `module.parameters()`, functions that call a module with other parameters.

    def __init__(self, parameters: Mapping[str, Any], fetch: Mapping[str, Callable[[], None]]) -> None:
        # fetch: functions that copy a parameter, by its name
        super().__init__(parameters)
        self._fetch = dict(fetch)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if name in self._fetch:
            self._fetch[name]()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self[name]
        return super().pop(name, *default)

    def copy(self) -> dict[str, nn.Parameter | None]:
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        # its own iterator makes `dict()` read through `__getitem__`
        return super().__iter__()
