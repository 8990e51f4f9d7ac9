"""Estimate the disk traffic and the optimizer time of a step with its state on a disk.

::

    # run     a stage's parameters are read before its upload, its gradients are written after their download
    # clip    gradients are read once, for their norm
    # step    layer 0: read | update | write      the reads of a layer run next to the update of the one before it,
    #                 layer 1: read | update | write        and to the writes of those before that
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..schedule.simulation import StageLoad
from .hardware import Hardware
from .layer_footprint import LayerFootprint
from .memory_estimate import HostMemory

# Bytes that may wait to be written before the host waits, as in `roundpipe_runtime.device.disk`.
_BACKLOG = 256 * 2**20

# Layers that are in memory at the same time: the one that is used, and the one after it.
_AT_HAND = 2


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUse:
    """The bytes that a step keeps on a disk, and those that it reads and writes there."""

    nbytes: int  # parameters, gradients, master weights and optimizer state, which are on the disk
    resident: int  # what is in the memory of the host instead: a few layers, and activations
    read_in_run: int  # parameters, for the forward and again for the backward
    written_in_run: int  # gradients
    read_for_norm: int  # gradients, for the norm to which they are clipped
    read_in_step: int  # everything of the parameters that train
    written_in_step: int  # the same without gradients


def disk_use(host: HostMemory, layers: Sequence[LayerFootprint], loads: Sequence[StageLoad]) -> DiskUse:
    """Return the bytes that a step stores, reads and writes on a disk."""
    shares = _of_layers(host, layers)
    trained = sum(layer.trained_bytes for layer in layers)
    return DiskUse(
        nbytes=host.total - host.activations,
        resident=_AT_HAND * max((read for read, _ in shares), default=0) + host.activations,
        read_in_run=sum(load.upload for load in loads),
        written_in_run=sum(load.download for load in loads),
        read_for_norm=host.gradients,
        read_in_step=trained + host.masters + host.gradients + host.optimizer,
        written_in_step=trained + host.masters + host.optimizer,
    )


def on_disk(loads: Sequence[StageLoad]) -> list[StageLoad]:
    """Return the loads of stages whose parameters come from a disk, and whose gradients go there."""
    return [dataclasses.replace(load, read=load.upload, written=load.download) for load in loads]


def optimizer_seconds(host: HostMemory, layers: Sequence[LayerFootprint], machine: Hardware, in_memory: float) -> float:
    """Return the seconds of the optimizer on a disk, with the norm of all gradients before it."""
    # in_memory: seconds of all updates, if everything were in memory
    read_rate, write_rate = machine.disk_read or float("inf"), machine.disk_write or float("inf")
    whole = sum(layer.grad_bytes for layer in layers) or 1
    read_end = began = ended = 0.0
    writes: list[tuple[float, int]] = []  # when the write of each layer ends, and its bytes
    for layer, (read, written) in zip(layers, _of_layers(host, layers), strict=True):
        read_end = max(read_end, began) + read / read_rate
        began = max(ended, read_end)
        ended = began + in_memory * layer.grad_bytes / whole
        before = writes[-1][0] if writes else 0.0
        writes.append((max(before, ended) + written / write_rate, written))
        ended = max(ended, _when_room(writes))
    return host.gradients / read_rate + ended


def _when_room(writes: Sequence[tuple[float, int]]) -> float:
    """The second from which on no more bytes wait to be written than may."""
    waiting = 0
    for end, nbytes in reversed(writes):
        waiting += nbytes
        if waiting > _BACKLOG:
            return end
    return 0.0


def _of_layers(host: HostMemory, layers: Sequence[LayerFootprint]) -> list[tuple[int, int]]:
    """Bytes that the step of each layer reads and writes."""
    whole = sum(layer.grad_bytes for layer in layers) or 1
    kept = host.masters + host.optimizer
    found = []
    for layer in layers:
        share = layer.grad_bytes / whole
        written = int(layer.trained_bytes + share * kept)
        found.append((int(written + share * host.gradients), written))
    return found
