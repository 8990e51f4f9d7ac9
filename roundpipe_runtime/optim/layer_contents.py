"""List the parameters and buffers of each layer, and large embedding and head matrices (tables) to copy in parts.

By default, only the needed rows of a large embedding are copied, which does not change results. Multiplying an output
head slice by slice changes the order of sums, and thus the rounding of results. Therefore an output head is multiplied
in slices only if the whole head does not fit on a device, or if the caller requests slices.
"""

# embedding   copies the rows that occur in a microbatch, and their gradients back
# head        copies slices of the vocabulary one after the other, and their gradients back

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..device.composite import StateSlot, check_gradient, parts_of, states_of
from ..device.transfer import sent_dtype, sent_nbytes
from ..device.worker import free_after_fork
from ..errors import ConfigError, StageError

_SLICES_AT_ONCE = 2  # slices of a table on a device: one is computed with, and one is copied


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSlot:
    """The entry of a parameter in a module of a layer: ``owner._parameters[name]``."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


@dataclasses.dataclass(frozen=True, slots=True)
class BufferSlot:
    """The entry of a buffer in a module of a layer: ``owner._buffers[name]``."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor

    def store(self, value: torch.Tensor) -> None:
        """Store a value in the buffer, in place if possible, so that other references to the tensor see the value."""
        same = value.shape == self.tensor.shape and value.dtype == self.tensor.dtype
        if same and self.owner._buffers.get(self.name) is self.tensor:
            with torch.no_grad():
                self.tensor.copy_(value)
        else:
            self.owner._buffers[self.name] = value


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The rule by which a large embedding or head matrix of a layer is copied to a device in parts."""

    slice_rows: int | None  # rows of a slice; `None` if products are computed with the whole matrix
    is_head: bool = False  # whether the layer computes products with the matrix; otherwise it looks up rows


@dataclasses.dataclass(frozen=True, slots=True)
class LayerContents:
    index: int
    module: nn.Module
    slots: tuple[ParameterSlot, ...]  # a parameter may have several places
    buffers: tuple[BufferSlot, ...]
    states: tuple[StateSlot, ...]  # places of objects that belong to quantized weights
    # lock that is held while device copies are in these places; layers with a common module have the same lock
    lock: threading.RLock = dataclasses.field(repr=False)
    # tables, by the ``id()`` of the parameter
    tables: Mapping[int, Table] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"layer {self.index} ({type(self.module).__name__})"

    def parameters(self) -> list[nn.Parameter]:
        return list({id(slot.parameter): slot.parameter for slot in self.slots}.values())

    @property
    def trains_tables(self) -> bool:
        return any(p.requires_grad for p in self.parameters() if id(p) in self.tables)

    def parts(self) -> list[torch.Tensor]:
        """Return the plain parameters of the layer, and the tensors in its quantized parameters."""
        return parts_of([*self.parameters(), *(state.value for state in self.states)])

    def nbytes(self) -> int:
        buffers = sum(buffer.tensor.element_size() * buffer.tensor.numel() for buffer in self.buffers)
        return sum(map(self.nbytes_of, self.parts())) + buffers

    def nbytes_of(self, part: torch.Tensor) -> int:
        """Return how many bytes of a parameter a device holds at once; 0 for an embedding that is copied row by row."""
        if (table := self.tables.get(id(part))) is None:
            return sent_nbytes(part)
        rows = min(_SLICES_AT_ONCE * (table.slice_rows or 0), part.shape[0]) if table.is_head else 0
        return rows * part.shape[1] * sent_dtype(part).itemsize


# A module may be part of two pipelines, so locks are stored by module.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = free_after_fork(threading.Lock())
if hasattr(os, "register_at_fork"):  # a thread of the parent process may have held a lock
    os.register_at_fork(after_in_child=_LOCKS.clear)


def scan(layers: Sequence[nn.Module]) -> list[LayerContents]:
    """Return the current parameters and buffers of the layers, which may have been replaced since the last call."""
    seen: dict[int, int] = {}  # the first layer of each module that holds tensors, by the ``id()`` of the module
    first = list(range(len(layers)))
    found = []
    for index, layer in enumerate(layers):
        slots, buffers, states = [], [], []
        for module in layer.modules():
            held = [(name, p) for name, p in module._parameters.items() if p is not None]
            buffered = [(name, b) for name, b in module._buffers.items() if b is not None]
            if held or buffered:
                earlier = seen.setdefault(id(module), index)
                first[index] = min(first[index], first[earlier])
            for name, parameter in held:
                if is_lazy(parameter):
                    raise StageError(
                        f"layer {index}: {name!r} of {type(module).__name__} has no shape yet. Run the model once on a "
                        "small batch before it is wrapped, so that lazy layers know their sizes."
                    )
                slots.append(ParameterSlot(module, name, parameter))
            buffers += [BufferSlot(module, name, b) for name, b in buffered]
            states += states_of(module)
        found.append((layer, tuple(slots), tuple(buffers), tuple(states)))
    with _LOCKS_LOCK:
        locks = [_LOCKS.setdefault(layers[number], threading.RLock()) for number in first]
    return [LayerContents(i, *contents, lock) for i, (contents, lock) in enumerate(zip(found, locks, strict=True))]


def check_gradients(layers: Iterable[LayerContents]) -> None:
    for layer in layers:
        for slot in layer.slots:
            check_gradient(f"{layer.title}: {slot.name!r}", slot.parameter)


LargeTables: TypeAlias = Literal["auto", "whole", "slices"]

# A table of at least this many bytes is large. Copying a smaller table takes about as long as finding its rows.
LARGE = 16 * 2**20
_SMALLEST_SLICE, _LARGEST_SLICE = 2**20, 2**28  # bytes of a slice: half of the largest layer, within these bounds
_ROWS = 64  # the number of rows of a slice is a multiple of this number, because kernels are faster then
_HEAD = "_rp_head_weight"  # attribute of a layer that computes logits: the weight from which it computes them
# Attribute of a layer: its compiled code, which does not accept placeholders for parameters.
_TO_COMPILE = "_rp_to_compile"


def check_large_tables(value: Any) -> None:
    if value not in ("auto", "whole", "slices"):
        raise ConfigError(f'large_tables must be "auto", "whole" or "slices", found {value!r}.')


@dataclasses.dataclass(frozen=True, slots=True)
class TableRule:
    """Decides which large parameters of a model, called tables, are copied to devices in parts instead of whole."""

    by_rows: bool = False  # whether embeddings send rows
    by_slices: bool = False  # whether products with tables are computed by slices
    slice_nbytes: int = _SMALLEST_SLICE
    is_compiled: bool = False  # whether torch compiles layers

    def mark(self, contents: Sequence[LayerContents]) -> list[LayerContents]:
        if not self.by_rows:
            return list(contents)
        return [dataclasses.replace(layer, tables=self._tables(layer)) for layer in contents]

    def _tables(self, layer: LayerContents) -> Mapping[int, Table]:
        if self.is_compiled and getattr(layer.module, _TO_COMPILE, layer.module) is not None:
            return {}
        large = [slot for slot in layer.slots if sent_nbytes(slot.parameter) >= LARGE and _is_plain(slot.parameter)]
        head = getattr(layer.module, _HEAD, None)
        found = {}
        for slot in large:
            is_head = slot.parameter is head
            if self.by_slices if is_head else _looks_up(slot):
                of_row = max(1, slot.parameter.shape[1] * sent_dtype(slot.parameter).itemsize)
                rows = max(_ROWS, self.slice_nbytes // of_row // _ROWS * _ROWS)
                found[id(slot.parameter)] = Table(rows if self.by_slices else None, is_head)
        # a parameter used twice in a layer is a table only if both uses are
        others = {id(slot.parameter) for slot in large if slot.parameter is not head and not _looks_up(slot)}
        return {key: table for key, table in found.items() if key not in others}


def _is_plain(parameter: nn.Parameter) -> bool:
    is_matrix = parameter.dim() == 2 and parameter.is_floating_point() and parameter.layout == torch.strided
    return type(parameter) is nn.Parameter and is_matrix and parameter.device.type in ("cpu", "meta")


def _looks_up(slot: ParameterSlot) -> bool:
    if not isinstance(owner := slot.owner, nn.Embedding) or slot.name != "weight":
        return False
    return owner.max_norm is None and not owner.scale_grad_by_freq and not owner.sparse


def rule_for(
    layers: Sequence[nn.Module],
    option: LargeTables,
    stage_nbytes: float | None,
    gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
    *,
    is_compiled: bool = False,
) -> TableRule:
    # stage_nbytes: bytes of parameters and gradients that a stage may have; `None` for no limit
    # gradient_dtype: function that returns the dtype in which gradients of a parameter are summed. Default: its own.
    if option == "whole":
        return TableRule()
    contents = scan(layers)
    sliced = TableRule(by_rows=True, by_slices=True, is_compiled=is_compiled)
    # layers without tables have the same size for all options, so options do not change the size of a slice
    largest = max((layer.nbytes() for layer in sliced.mark(contents) if not layer.tables), default=0)
    nbytes = min(max(largest // 2, _SMALLEST_SLICE), _LARGEST_SLICE)
    sliced = dataclasses.replace(sliced, slice_nbytes=nbytes)
    by_rows = dataclasses.replace(sliced, by_slices=False)
    if option == "slices" or stage_nbytes is None:
        return sliced if option == "slices" else by_rows
    pairs = zip(by_rows.mark(contents), sliced.mark(contents), strict=True)
    heads = [layer for layer, other in pairs if any(table.is_head for table in other.tables.values())]
    is_too_large = any(sum(needed_bytes(layer, gradient_dtype)) > stage_nbytes for layer in heads)
    return sliced if is_too_large else by_rows


def needed_bytes(
    layer: LayerContents, gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype
) -> tuple[int, int]:
    """Return the device memory for the parameters and buffers of a layer, and for its gradients, in bytes."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    summed = [p for p in trained if id(p) not in layer.tables and gradient_dtype(p) != sent_dtype(p)]
    sums = sum(p.numel() * gradient_dtype(p).itemsize for p in summed)
    return layer.nbytes(), sum(map(layer.nbytes_of, trained)) + sums
