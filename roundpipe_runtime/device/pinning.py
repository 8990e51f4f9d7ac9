"""Pin parameters and buffers in host memory, from which a device copies directly."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, DeviceError
from .accelerator import AcceleratorDevice, is_held_elsewhere
from .composite import all_tensors, is_composite, memory_of, parts_of, plain_numbers, states_of
from .protocol import Device
from .slabs import PinnedMemory


class PinnedModel:
    """Keeps the parameters and buffers of a model in pinned memory where one of its devices is an accelerator."""

    # how: `"alloc"` moves them into pinned memory, but for parts of a larger tensor, which stay pageable; `"register"`
    # pins them in place (CUDA only); `"off"`
    # devices: devices of the pipeline. Virtual devices need no pinned memory, so for them nothing is done.

    def __init__(self, model: nn.Module, how: str, devices: Sequence[Device]) -> None:
        if how not in ("alloc", "register", "off"):
            raise ConfigError(f'pin_model must be "alloc", "register" or "off", found {how!r}.')
        self._model = model
        self._how = how
        self._devices = [device for device in devices if isinstance(device, AcceleratorDevice)]
        # What was looked at: an object and its memory. Either may be replaced.
        self._seen: set[tuple[int, int]] = set()
        self.update()

    def update(self) -> None:
        """Pin what is not pinned: all of the model, and later what was replaced, by ``load_state_dict`` for example."""
        if self._how == "off" or not self._devices:
            return
        found = {_key(tensor): tensor for tensor in self._tensors()}
        if found.keys() == self._seen:  # nearly always: each run asks
            return
        pageable = [tensor for key, tensor in found.items() if key not in self._seen and not tensor.is_pinned()]
        if pageable and self._how == "alloc":
            with _together(self._composites()):
                _move([tensor for tensor in pageable if not _is_part(tensor)])
        elif pageable:
            _register(pageable, self._model, self._devices[0])
        self._seen = {_key(tensor) for tensor in self._tensors()}

    def _tensors(self) -> Iterator[torch.Tensor]:
        """What stages copy to devices, as far as it is on the host and in one piece of memory of its own."""
        for parameter in self._model.parameters():
            if not is_composite(parameter) and _is_on_host(parameter):
                yield parameter
        for part in parts_of(self._composites()):
            if _is_on_host(part):
                yield part
        for buffer in self._model.buffers():
            # one that is a view, of a parameter perhaps, would be cut loose from it
            if _is_on_host(buffer) and type(buffer) is torch.Tensor and not is_held_elsewhere(buffer):
                yield buffer

    def _composites(self) -> list[Any]:
        """Weights in few bits, and what their modules keep next to them."""
        found: list[Any] = [p for p in self._model.parameters() if is_composite(p)]
        return found + [slot.value for module in self._model.modules() for slot in states_of(module)]


@contextlib.contextmanager
def _together(composites: Sequence[Any]) -> Iterator[None]:
    """Let tensors of weights in few bits that share memory before the block share it afterwards."""
    sharing: dict[Any, list[torch.Tensor]] = {}
    for value in composites:
        held = [value, vars(value)] if isinstance(value, torch.Tensor) else [value]
        for tensor in all_tensors(held):
            sharing.setdefault(memory_of(tensor), []).append(tensor)
    yield
    for first, *others in sharing.values():
        for other in others:
            other.data = plain_numbers(first)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a part of another one, an optimizer's flat one perhaps, from which it would be cut loose."""
    if type(tensor.data) is not torch.Tensor:
        return False
    return tensor.untyped_storage().nbytes() > tensor.nbytes and is_held_elsewhere(tensor)


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        return id(tensor), tensor.data_ptr()
    except RuntimeError:  # a tensor that is made of others has no memory
        return id(tensor), 0


def _move(tensors: Sequence[torch.Tensor]) -> None:
    """Move tensors into pinned memory; those that share memory afterwards do so no more."""
    memory = PinnedMemory({number: tensor.nbytes for number, tensor in enumerate(tensors)})
    # in the order of the slabs: the memory of a tensor is free before the next slab is allocated
    order = [number for number in memory.keys if isinstance(number, int)]
    for number in order:
        tensor = tensors[number]
        data = tensor.data
        # Classes of other libraries (quantized weights) know themselves where their data is.
        place = memory.empty_like(number, data) if type(data) is torch.Tensor else None
        tensor.data = data.pin_memory() if place is None else place.copy_(data)


# -- in place --------------------------------------------------------------------------------------------------------

# CUDA's error for memory that is pinned already.
_ALREADY_REGISTERED = 712


def _register(tensors: Sequence[torch.Tensor], model: nn.Module, device: Device) -> None:
    """Pin the pages of tensors in place, until the model is gone."""
    if device.torch_device.type != "cuda":
        raise ConfigError(f'pin_model="register" needs CUDA, found {device.name}. Use pin_model="alloc".')
    library = torch.cuda.cudart()
    registered: list[int] = []
    weakref.finalize(model, _unregister, library, registered).atexit = False
    for start, nbytes in _page_ranges([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        status = int(library.cudaHostRegister(start, nbytes, 0))
        if status == 0:
            registered.append(start)
        elif status != _ALREADY_REGISTERED:
            raise DeviceError(f'pin_model="register": CUDA error {status} for parameters of {nbytes} bytes.')


def _unregister(library: Any, starts: Sequence[int]) -> None:
    for start in starts:
        library.cudaHostUnregister(start)


def _page_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Whole pages that contain these ranges of memory, each page once: small tensors share pages.

    >>> _page_ranges([(8192, 10), (100, 50), (4090, 10), (0, 4096)])
    [(0, 12288)]
    """
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(ranges):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][0] + found[-1][1]:
            first, before = found.pop()
            stop = max(stop, first + before)
        found.append((first, stop - first))
    return found
