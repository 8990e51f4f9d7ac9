"""Pin parameters and buffers in host memory, from which a device copies directly."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, DeviceError
from .accelerator import AcceleratorDevice, is_held_elsewhere
from .composite import all_tensors, is_composite, memory_of, parts_of, plain_numbers, states_of
from .disk import pages_of
from .protocol import Device
from .transfer import sent_dtype


class PinnedModel:
    """Keeps the parameters and buffers of a model in pinned memory if the model runs on an accelerator."""

    # how: `"alloc"` moves tensors into pinned memory, except views of a larger tensor, which stay pageable;
    # `"register"` pins tensors in place (CUDA only); `"off"` pins nothing
    # devices: devices of the pipeline. Virtual devices need no pinned memory.

    def __init__(self, model: nn.Module, how: str, devices: Sequence[Device]) -> None:
        if how not in ("alloc", "register", "off"):
            raise ConfigError(f'pin_model must be "alloc", "register" or "off", found {how!r}.')
        self._model = model
        self._how = how
        self._devices = [device for device in devices if isinstance(device, AcceleratorDevice)]
        # Ids and addresses of tensors that are pinned; other code may replace the tensor or its memory.
        self._seen: set[tuple[int, int]] = set()
        self.update()

    def update(self) -> None:
        if self._how == "off" or not self._devices:
            return
        found = {_key(tensor): tensor for tensor in self._tensors()}
        if found.keys() == self._seen:  # true in nearly every run
            return
        pageable = [tensor for key, tensor in found.items() if key not in self._seen and not tensor.is_pinned()]
        if pageable and self._how == "alloc":
            # tensors of quantized weights that share memory, and share memory again afterwards
            sharing: dict[Any, list[torch.Tensor]] = {}
            for value in self._composites():
                held = [value, vars(value)] if isinstance(value, torch.Tensor) else [value]
                for tensor in all_tensors(held):
                    sharing.setdefault(memory_of(tensor), []).append(tensor)
            _move([tensor for tensor in pageable if not _is_part(tensor)])
            for first, *others in sharing.values():
                for other in others:
                    other.data = plain_numbers(first)
        elif pageable:
            _register(pageable, self._model, self._devices[0])
        self._seen = {_key(tensor) for tensor in self._tensors()}

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            is_sent = sent_dtype(parameter) == parameter.dtype  # otherwise its copy is pinned
            if is_sent and not is_composite(parameter) and _is_on_host(parameter):
                yield parameter
        for part in parts_of(self._composites()):
            if _is_on_host(part):
                yield part
        for buffer in self._model.buffers():
            # a view, for example of a parameter, would no longer share memory with its base
            if _is_on_host(buffer) and type(buffer) is torch.Tensor and not is_held_elsewhere(buffer):
                yield buffer

    def _composites(self) -> list[Any]:
        found: list[Any] = [p for p in self._model.parameters() if is_composite(p)]
        return found + [slot.value for module in self._model.modules() for slot in states_of(module)]


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _is_part(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a view into a larger buffer of an optimizer, from which pinning would detach it."""
    if type(tensor.data) is not torch.Tensor:
        return False
    return tensor.untyped_storage().nbytes() > tensor.nbytes and is_held_elsewhere(tensor)


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        return id(tensor), tensor.data_ptr()
    except RuntimeError:  # a wrapper subclass has no memory
        return id(tensor), 0


def _move(tensors: Sequence[torch.Tensor]) -> None:
    memory = PinnedMemory({number: tensor.nbytes for number, tensor in enumerate(tensors)})
    # in slab order, so that the old memory of tensors is free before the next slab is allocated
    order = [number for number in memory.keys if isinstance(number, int)]
    for number in order:
        tensor = tensors[number]
        data = tensor.data
        # Quantized weights of other libraries store the address of their data.
        place = memory.empty_like(number, data) if type(data) is torch.Tensor else None
        tensor.data = data.pin_memory() if place is None else place.copy_(data)


_ALREADY_REGISTERED = 712  # CUDA's error for memory that is pinned already


def _register(tensors: Sequence[torch.Tensor], model: nn.Module, device: Device) -> None:
    """Pin the memory pages of tensors in place, until the model is deleted."""
    if device.torch_device.type != "cuda":
        raise ConfigError(f'pin_model="register" needs CUDA, found {device.name}. Use pin_model="alloc".')
    library = torch.cuda.cudart()
    registered: list[int] = []

    def unregister() -> None:
        for start in registered:
            library.cudaHostUnregister(start)

    weakref.finalize(model, unregister).atexit = False
    for start, end in pages_of(tensors):
        status = int(library.cudaHostRegister(start, end - start, 0))
        if status == 0:
            registered.append(start)
        elif status != _ALREADY_REGISTERED:
            raise DeviceError(f'pin_model="register" cannot pin {end - start} bytes: CUDA error {status}. Use "alloc".')


_ALIGNMENT = 64  # bytes, for vector instructions of the host and transfers of a device
_SMALLEST = 4096  # bytes of the smallest slab, a page
# Bytes of a large slab. Larger slabs are used only if too much memory would stay unused, since a slab is allocated in
# addition to the parameters that are moved into it.
_LARGE = 2**30
_LOST, _LOST_AT_END = 0.01, 0.005  # the share of all bytes that may stay unused, in all slabs and in the last slab


def plan_slabs(sizes: Sequence[int]) -> list[tuple[int, dict[int, int]]]:
    """Plan large memory blocks (slabs) for tensors of the given sizes, with about 1% of the memory unused."""
    # returns: the bytes of each slab, a power of two, and the offsets of the tensors in it by their number
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    total, limit = sum(rounded), _LARGE
    while True:
        slabs = _pack(rounded, limit)
        if limit >= total or sum(size for size, _ in slabs) <= (1 + _LOST) * total:
            return slabs
        limit *= 2


def _pack(sizes: Sequence[int], limit: int) -> list[tuple[int, dict[int, int]]]:
    """Plan memory blocks for tensors; a block has more than ``limit`` bytes only if one of its tensors has more."""
    waiting = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    total = left = sum(sizes)
    slabs = []
    while waiting:
        nbytes = max(_SMALLEST, 1 << max(sizes[waiting[0]] - 1, 0).bit_length())
        tried = []
        while True:
            placed, used = dict[int, int](), 0
            for number in waiting:
                if used + sizes[number] <= nbytes:
                    placed[number] = used
                    used += sizes[number]
            lost = nbytes - used
            # choose the slab with the smallest unused share; with equal shares, the larger slab
            tried.append((0.0 if lost <= _LOST_AT_END * total else lost / nbytes, -nbytes, placed, used))
            if nbytes >= min(left, limit):
                break
            nbytes *= 2
        _, size, placed, used = min(tried, key=lambda one: one[:2])
        slabs.append((-size, placed))
        left -= used
        waiting = [number for number in waiting if number not in placed]
    return slabs


class PinnedMemory:
    """Pinned memory for tensors: large blocks (slabs), each allocated when its first tensor is created."""

    # sizes: bytes of the place of each tensor, by a key

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        keys = [key for key, size in sizes.items() if size]
        self._slabs = plan_slabs([sizes[key] for key in keys])
        self._places = {
            keys[number]: (slab, offset)
            for slab, (_, placed) in enumerate(self._slabs)
            for number, offset in placed.items()
        }
        self._memory: dict[int, memoryview] = {}
        self._holders: dict[Hashable, weakref.ref[memoryview]] = {}
        self._sizes = sizes
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the tensors, in the order of the memory blocks (slabs) that contain the tensors."""
        return list(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, including slabs that are not allocated yet."""
        return sum(size for size, _ in self._slabs)

    @property
    def is_held(self) -> bool:
        return any(holder() is not None for holder in self._holders.values())

    def empty_like(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an uninitialised tensor in the memory reserved for a key; deleting the tensor frees this memory."""
        # tensor: tensor of the same shape, strides and dtype
        # returns: `None` if the place is taken or has another size, or if the strides leave gaps
        if self._sizes.get(key) != tensor.nbytes or not is_dense(tensor):
            return None
        with self._lock:
            found = self._holders.get(key)
            if key not in self._places or (found is not None and found() is not None):
                return None
            slab, offset = self._places[key]
            memory = self._memory.get(slab)
            if memory is None:
                memory = self._memory[slab] = _allocate(self._slabs[slab][0])
            part = memory[offset : offset + tensor.nbytes]
            self._holders[key] = weakref.ref(part)
        # The storage keeps `part` alive as long as a tensor uses the storage.
        flat = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps."""
    if tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _allocate(nbytes: int) -> memoryview:
    slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = (ctypes.c_char * nbytes).from_address(slab.data_ptr())
    memory._slab = slab  # type: ignore[attr-defined]  # keeps the memory alive, of which ctypes stores only the address
    return memoryview(memory).cast("B")
