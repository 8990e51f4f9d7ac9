"""Exchange data between the processes (ranks) that train one model, over four gloo process groups.

Only this file, `long_rows` (tokens of long rows) and `checkpoint` call collectives of ``torch.distributed``. Only one
thread at a time uses a process group, so that all ranks call its collectives in the same order.
"""

# process group
# control         arguments, losses and errors of a call; used by the caller's thread
# data            gradients; used by the thread that sums gradients, in parallel with the backward
# weights         weights after an optimizer step; used by a background thread, in parallel with the next forward
# step            gradient norms, and whether a step has succeeded; used by the thread that runs the optimizer step

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from yobx_flatten.core.private_names.of_torch import backend_options, default_store

from ...errors import ConfigError, rank_failed_in_step, ranks_gone
from .alarm import Alarm

Channel: TypeAlias = Literal["control", "data", "weights", "step"]

_CHANNELS: tuple[Channel, ...] = ("control", "data", "weights", "step")


class Ranks:
    """The processes (ranks) that train one model and exchange values; this base class is for a single process."""

    mesh: DeviceMesh | None = None  # mesh of the ranks; `None` for a process alone

    def __init__(self, rank: int = 0, num_shards: int = 1, num_copies: int = 1) -> None:
        self.rank = rank
        self.num_shards, self.num_copies = num_shards, num_copies
        self.size = num_shards * num_copies
        self.alarm = Alarm(None, rank, 1)
        self.sent: dict[Channel, int] = dict.fromkeys(_CHANNELS, 0)  # bytes
        self.calls: dict[Channel, int] = dict.fromkeys(_CHANNELS, 0)

    def exchange(self, value: Any, channel: Channel = "control") -> list[Any]:
        return [value]

    def fail_step(self, text: str) -> None:
        """Notify the other ranks, which may wait in their optimizer step, that the step of this rank has failed."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with its values on rank 0."""

    def all_to_all(self, out: torch.Tensor, give: Sequence[int], into: torch.Tensor, take: Sequence[int]) -> None:
        """Send each rank its part of ``out``, and receive a part from each rank in ``into`` (all-to-all)."""
        into.copy_(out)

    def gather(self, parts: Sequence[Sequence[torch.Tensor]], members: Sequence[int], channel: Channel) -> None:
        """Send this rank's slices of tensors to the ranks ``members``, and receive their slices (all-gather)."""
        # parts: for each tensor one contiguous part per member; the part of this rank is sent

    def shard_members(self) -> list[int]:
        """Return the ranks that hold the shards of this rank's copy of the model, in the order of the shards."""
        first = self.rank - self.rank % self.num_shards
        return list(range(first, first + self.num_shards))

    def close(self) -> None: ...


class MeshRanks(Ranks):
    """The processes (ranks) of a ``DeviceMesh`` that train one model and exchange values over gloo."""

    # mesh: mesh of host devices: `(N,)` for shards over all ranks; `(M, K)` for M copies of K shards

    def __init__(self, mesh: DeviceMesh) -> None:
        self._members: list[int] = mesh.mesh.flatten().tolist()
        copies, count = (1, mesh.size()) if mesh.ndim == 1 else (mesh.size(0), mesh.size(1))
        super().__init__(self._members.index(dist.get_rank()), count, copies)
        self.mesh = mesh
        meet(mesh)
        timeout = job_timeout()
        # torch never reuses the name of a group of all processes, so no rank reads old addresses in the store.
        is_part = len(self._members) < dist.get_world_size()
        how: dict[str, Any] = {"timeout": timeout, "backend": "gloo", "use_local_synchronization": is_part}
        self._new_group = partial(dist.new_group, self._members, **how)
        self._groups: dict[Channel, Any] = {channel: self._new_group() for channel in _CHANNELS}
        self.alarm = Alarm(default_store(), self.rank, self.size, prefix=self._groups["control"].group_name)
        self._lock = threading.Lock()

    def exchange(self, value: Any, channel: Channel = "control") -> list[Any]:
        found: list[Any] = [None] * self.size
        with self._watched(channel):
            dist.all_gather_object(found, value, group=self._group(channel))
        return found

    def fail_step(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: other ranks notice it at their next exchange
            self.alarm.send({"step": text})
        self._close("step")

    def broadcast(self, tensor: torch.Tensor) -> None:
        with self._watched("control"):
            dist.broadcast(tensor, src=self._members[0], group=self._group("control"))

    def all_to_all(self, out: torch.Tensor, give: Sequence[int], into: torch.Tensor, take: Sequence[int]) -> None:
        with self._watched("data"):
            dist.all_to_all_single(into, out, list(take), list(give), group=self._group("data"))
        self.sent["data"] += (sum(give) - give[self.rank]) * out.element_size()

    def gather(self, parts: Sequence[Sequence[torch.Tensor]], members: Sequence[int], channel: Channel) -> None:
        count, own, group = len(members), members.index(self.rank), self._group(channel)
        ops = []
        for distance in range(1, count):
            to, source = (own + distance) % count, (own - distance) % count
            ways: list[tuple[Callable[..., Any], torch.Tensor, int]] = [(dist.isend, part[own], to) for part in parts]
            ways += [(dist.irecv, part[source], source) for part in parts]
            sent = [(way, tensor, self._members[members[other]]) for way, tensor, other in ways if tensor.numel()]
            ops += [dist.P2POp(*each, group) for each in sent]
        self.sent[channel] += (count - 1) * sum(part[own].nbytes for part in parts)
        if ops:
            with self._watched(channel):
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

    def close(self) -> None:
        self.alarm.close()

    @contextlib.contextmanager
    def _watched(self, channel: Channel) -> Iterator[None]:
        """If a collective in the with block fails, wake waiting threads, and raise an error that names ended ranks."""
        self.calls[channel] += 1
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and channel in self._groups:
                raise  # a ValueError is expected only if another thread has closed the group
            error.__traceback__ = None  # its frames would keep the group alive
            if channel == "step" and (failure := self.alarm.take_step_failure()):
                self._close("step")
                raise rank_failed_in_step(*failure) from None
            with self._lock:
                gone = self.alarm.find_gone()
                for other in _CHANNELS:  # wake the threads and ranks that wait for the ranks that are gone
                    self._close(other)
            raise ranks_gone(gone, error, max(map(self.alarm.seconds_stopped, gone), default=0.0)) from None

    def _group(self, channel: Channel) -> Any:
        if channel not in self._groups:
            if channel != "step":
                raise RuntimeError("the connection was closed")
            self._groups[channel] = self._new_group()  # all ranks have closed the group, and make a new one together
        return self._groups[channel]

    def _close(self, channel: Channel) -> None:
        """Close a process group, so that waiting ranks get an error."""
        group = self._groups.pop(channel, None)
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)  # `abort` of gloo does not reach waiting ranks


def meet(mesh: DeviceMesh) -> None:
    """Wait until all ranks of a mesh call this function; raise an error if a process has ended."""
    try:
        for group in reversed(mesh.get_all_groups()):
            if dist.get_world_size(group) > 1:
                dist.barrier(group)
    except RuntimeError as error:
        raise ranks_gone([], error) from None


def ranks_of(mesh: DeviceMesh | None) -> Ranks:
    if mesh is None:
        return Ranks()
    check_mesh(mesh)
    return MeshRanks(mesh) if mesh.size() > 1 else Ranks()


def check_mesh(mesh: Any) -> None:
    line = '\n    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))'
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a DeviceMesh of torch.distributed, found {type(mesh).__qualname__}:{line}")
    if mesh.device_type != "cpu":
        raise ConfigError(
            f"mesh is for {mesh.device_type!r} devices, but gradients and master weights are exchanged in CPU memory. "
            f"Make a CPU mesh:{line}"
        )
    if mesh.ndim > 2:
        raise ConfigError(
            f"mesh has {mesh.ndim} axes. Use one axis for shards of the optimizer state, or two axes: the first for "
            f"copies of the optimizer state, and the second for the shards of each copy:{line}"
        )
    if dist.get_rank() not in mesh.mesh.flatten().tolist():
        raise ConfigError(f"The mesh {mesh.mesh.tolist()} lacks this rank, {dist.get_rank()}. Use all ranks:{line}")


def job_timeout() -> datetime.timedelta | None:
    """Return the timeout of the default process group, which the user gave to ``init_process_group``."""
    with contextlib.suppress(RuntimeError, AttributeError):  # the group may have no CPU backend
        found: datetime.timedelta = backend_options(torch.device("cpu"))._timeout
        return found
    return None
