"""Keep copies of parameters on a device, and reuse the copies in later pipeline stages and training steps.

Frozen parameters are kept with priority, because trained parameters are copied again after each optimizer step. Copies
are not evicted in least-recently-used order, because the layer that a device ran longest ago is the one it runs next.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from ...device.pinning import PinnedMemory
from ...device.protocol import Device
from ...device.transfer import sent_nbytes
from ...errors import DeviceMemoryError
from ...optim.layer_contents import LayerContents
from ...optim.parts import Mark, is_plain
from ...optim.torch_steps import number_of_steps
from .partial_table import bytes_present


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterTraffic:
    """Bytes of parameters that a pipeline has copied to devices since the pipeline was created.

    Attributes:
        uploaded: bytes of parameters that were copied.
        reused: bytes that were not copied, because the device still had the copy.
        kept: bytes of copies that stay on each device now, by device name.
        skipped: bytes that were not copied, because no layer read them, such as experts without tokens.

    >>> before, after = ParameterTraffic(100, 0, {}), ParameterTraffic(130, 70, {"virtual:0": 70})
    >>> after.uploaded - before.uploaded, after.reused - before.reused
    (30, 70)
    """

    uploaded: int
    reused: int
    kept: dict[str, int]
    skipped: int = 0


@dataclasses.dataclass(slots=True)
class _Copy:
    tensor: torch.Tensor
    own_version: int
    mark: Mark
    # Steps of optimizers before the copy, and the version that its run read. Fused steps count no version of a tensor.
    steps: int
    run_version: int
    was_trained: bool

    def is_of(self, parameter: torch.Tensor, source: torch.Tensor, run_version: int) -> bool:
        # The parameter may be frozen again after a step, when this is called next.
        self.was_trained |= parameter.requires_grad
        return (
            not self.mark.is_counted(source)
            and self.mark.address == source.data_ptr()
            and self.own_version == self.tensor._version
            and not (self.was_trained and (self.steps, self.run_version) != (number_of_steps(), run_version))
        )


class KeptParameters:
    def __init__(self, devices: Sequence[Device]) -> None:
        # By device and parameter identity. A copy that is removed here is freed when no layer uses it any more.
        self._copies: dict[str, dict[int, _Copy]] = {device.name: {} for device in devices}
        self._chosen: frozenset[int] = frozenset()  # parameters whose next uploaded copy will stay
        self._uploaded = self._reused = self._skipped = 0
        self._lock = threading.Lock()  # each device uploads in its own thread

    @property
    def traffic(self) -> ParameterTraffic:
        with self._lock:
            here = {name: [copy.tensor for copy in list(found.values())] for name, found in self._copies.items()}
            kept = {name: sum(map(bytes_present, tensors)) for name, tensors in here.items()}
            return ParameterTraffic(self._uploaded, self._reused, kept, self._skipped)

    def choose(
        self,
        contents: Sequence[LayerContents],
        source: Callable[[torch.Tensor], torch.Tensor],
        version: int,
        nbytes: float,
    ) -> None:
        """Choose the parameters whose copies stay on devices, and release copies that are outdated or not chosen."""
        if nbytes <= 0:
            self._chosen = frozenset()
            self.drop()
            return
        # parts of tables are copied on demand
        found = {id(part): part for layer in contents for part in layer.parts() if id(part) not in layer.tables}
        chosen, left = set(), nbytes
        for parameter in sorted(found.values(), key=lambda one: one.requires_grad):  # otherwise the order of layers
            if sent_nbytes(parameter) <= left and is_plain(parameter):
                chosen.add(id(parameter))
                left -= sent_nbytes(parameter)
        self._chosen = frozenset(chosen)
        for copies in self._copies.values():
            for key in list(copies):
                if key in chosen:
                    copy, now = copies[key], source(found[key])
                    # torch does not count writes through `tensor.data`, as PEFT does when an adapter is merged.
                    if copy.is_of(found[key], now, version) and copy.mark.has_numbers(now):
                        continue
                del copies[key]

    def upload(
        self,
        device: Device,
        parameter: torch.Tensor,
        source: torch.Tensor,
        version: int,
        copy: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, bool]:
        """Return the copy of a parameter on a device, and whether the copy stays there for later stages."""
        key, copies = id(parameter), self._copies[device.name]
        here = copies.get(key)
        if here is not None:
            if here.is_of(parameter, source, version):
                with self._lock:
                    self._reused += bytes_present(here.tensor)
                return here.tensor, True
            del copies[key], here
        try:
            tensor = copy(source)
        except (DeviceMemoryError, torch.OutOfMemoryError):
            if not copies:
                raise
            self._chosen = frozenset()  # until the next run
            copies.clear()
            tensor = copy(source)
        stays = key in self._chosen
        with self._lock:
            self._uploaded += bytes_present(tensor)
            if stays:
                trained = parameter.requires_grad
                copies[key] = _Copy(tensor, tensor._version, Mark.of(source), number_of_steps(), version, trained)
        return tensor, stays

    def count(self, uploaded: int = 0, skipped: int = 0) -> None:
        with self._lock:
            self._uploaded += uploaded
            self._skipped += skipped

    def drop(self) -> None:
        for copies in self._copies.values():
            copies.clear()


class GradientMemory:
    """Pinned memory with an address range for the gradient of each parameter of each layer."""

    # A gradient becomes the parameter's `grad`, so its address range is in use until the gradient is cleared. If
    # gradients are kept for several backwards, each of these backwards writes its gradients to other addresses of
    # pinned memory.

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}
        self._sets: list[PinnedMemory] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(places.nbytes for places in self._sets)

    def prepare(self, contents: Sequence[LayerContents], dtype: Callable[[nn.Parameter], torch.dtype]) -> None:
        """Set the sizes of pinned memory for the gradients of the next backward."""
        trained = [(layer.index, p) for layer in contents for p in layer.parameters() if p.requires_grad]
        sizes: dict[Hashable, int] = {(index, id(p)): p.numel() * dtype(p).itemsize for index, p in trained}
        if sizes != self._sizes:
            self._sizes, self._sets = sizes, []
        else:
            self._sets = [places for number, places in enumerate(self._sets) if number == 0 or places.is_held]

    def take(self, layer: int, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return pinned memory for a gradient, or ``None`` if the gradient is sparse or has an unexpected size."""
        key = layer, id(parameter)
        if gradient.layout != torch.strided or self._sizes.get(key) != gradient.nbytes:
            return None
        with self._lock:
            for places in self._sets:
                found = places.empty_like(key, gradient)
                if found is not None:
                    return found
            self._sets.append(PinnedMemory(self._sizes))
            return self._sets[-1].empty_like(key, gradient)
