"""Hold parameters in memory that all processes of a machine share, and optimizer state in shards.

::

    step             each rank steps rows of its own, which no layer reads
    before a layer   barrier of all ranks: none reads the layer any more
    the layer        rows are written once per machine; rows of other machines are received
    after it         barrier of all ranks: the layer is complete, and each rank lets its runs read it
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...device.worker import Outcome, on_error
from ...errors import ConfigError, DistributedError
from ..ranks.alarm import this_machine
from ..ranks.ranks import Ranks
from .shards import ShardedStore, Target, is_cut, shards


class SharedStore(ShardedStore):
    """Parameters with one copy per machine.

    Made before :meth:`share`, which is called once all ranks have the same values.
    """

    def __init__(self, model: nn.Module, optim_dtype: torch.dtype | None, ranks: Ranks) -> None:
        super().__init__(model, optim_dtype, ranks)
        self._memory: dict[int, int] = {}

    def share(self) -> None:
        """Move the parameters into the memory of the machine; all ranks call it."""
        machines = machines_of(self.ranks)
        shared = share_memory(self.model, self.ranks, machines)
        self._memory = {id(parameter): parameter.data_ptr() for parameter in shared}
        count, own = self.ranks.num_shards, machines[self.ranks.rank]
        writers = first_of_shards(machines, count)
        self._writes_shard = writers[own, self._number] == self.ranks.rank
        self._writes_whole = machines.index(own) == self.ranks.rank
        self._routes = routes(machines, count)

    def has_own_rows(self, parameter: nn.Parameter) -> bool:
        """Report whether the optimizer gets its own copy, since a step must not write memory that others read."""
        return True

    def check(self) -> None:
        """Check that trainable parameters are still in the memory of the machine."""
        for name, parameter in self._listed():
            if (
                parameter.requires_grad
                and parameter.numel()
                and self._memory.get(id(parameter)) != parameter.data_ptr()
            ):
                raise DistributedError(
                    f"{name!r} was replaced after the processes of this machine began to share the weights, so they "
                    "would not see each other's part of it. Change values in place, or wrap the model again:\n"
                    "    with torch.no_grad():\n"
                    "        parameter.copy_(values)  # in every process, between calls"
                )

    def _update(self, held: Mapping[nn.Parameter, Target]) -> None:
        """Copy the values stepped by the ranks to the parameters of a layer."""
        if not held:
            return
        self.ranks.barrier("weights")
        for parameter, shard in held.items():
            if self._writes_shard if is_cut(parameter) else self._writes_whole:
                shard.write(parameter)
        self._pass_on(list(held))
        self.ranks.barrier("weights")

    def _pass_on(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send rows to machines that lack them, and receive rows that this machine lacks."""
        rank = self.ranks.rank
        out: list[tuple[torch.Tensor, int]] = []
        into: list[tuple[torch.Tensor, int]] = []
        late: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shard, sender, receiver in self._routes:
            for parameter in parameters:
                if not is_cut(parameter) or rank not in (sender, receiver):
                    continue
                place = shards(parameter.detach(), self.ranks.num_shards)[shard]
                rows = place.contiguous()
                if rank == sender:
                    out.append((rows, receiver))
                else:
                    into.append((rows, sender))
                    late.append((place, rows))
        self.ranks.send(out, into, "weights")
        for place, rows in late:
            if place is not rows:  # rows that are not contiguous
                place.copy_(rows)


# Share one copy of the weights between all processes of a machine, in unnamed memory.


_ALIGNMENT = 64  # alignment of tensors; the first bytes hold the token that identifies the memory


def machines_of(ranks: Ranks) -> list[int]:
    """Return the machine number of each rank: ranks that see each other's processes share one."""
    found = ranks.exchange(this_machine())
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(found))}
    return [numbers[machine] for machine in found]


def first_of_shards(machines: Sequence[int], num_shards: int) -> dict[tuple[int, int], int]:
    """Return the rank that writes a shard into the memory of a machine, for each machine and shard that it has."""
    # num_shards: number of shards; rank r has shard r modulo this
    found: dict[tuple[int, int], int] = {}
    for rank, machine in enumerate(machines):
        found.setdefault((machine, rank % num_shards), rank)
    return found


def routes(machines: Sequence[int], num_shards: int) -> list[tuple[int, int, int]]:
    """Return the transfers between machines after a step, once per machine and shard: ``(shard, sender, receiver)``.

    >>> routes([0, 0, 1, 1], 4)
    [(2, 2, 0), (3, 3, 1), (0, 0, 2), (1, 1, 3)]
    """
    writers = first_of_shards(machines, num_shards)
    found = []
    for machine in dict.fromkeys(machines):
        members = [rank for rank, other in enumerate(machines) if other == machine]
        for shard in range(num_shards):
            if (machine, shard) not in writers:
                senders = [rank for (_, number), rank in writers.items() if number == shard]
                found.append((shard, senders[machine % len(senders)], members[shard % len(members)]))
    return found


def share_memory(model: nn.Module, ranks: Ranks, machines: Sequence[int]) -> list[nn.Parameter]:
    """Move the parameters of a model into memory that all ranks of a machine have; all have the same values."""
    # returns: the parameters that are there: all but frozen ones of other classes, like quantized ones, and empty ones
    own = machines[ranks.rank]
    first = list(machines).index(own)
    parameters = [parameter for parameter in model.parameters() if _can_be_shared(parameter)]
    places = _places(parameters)
    offered: tuple[int, int, bytes] | None = None
    memory: mmap.mmap | None = None
    with Outcome() as made:
        _check(model)
        if ranks.rank == first:
            memory, offered = _make(places[-1])
    try:
        offers = _agreed(ranks, offered, made.error)
        with Outcome() as opened:
            if memory is None:
                offer = offers[first]
                assert offer is not None  # of a rank that did not fail
                memory = _open(places[-1], *offer)
        _agreed(ranks, None, opened.error)
    finally:
        if offered is not None:
            os.close(offered[1])
    assert memory is not None
    for parameter, at in zip(parameters, places, strict=False):
        place = _view(memory, at, parameter)
        if ranks.rank == first:
            place.copy_(parameter.detach())
        parameter.data = place
    ranks.exchange(None)  # all of it is written
    return parameters


def _can_be_shared(parameter: nn.Parameter) -> bool:
    data = parameter.data
    is_plain = type(data) is torch.Tensor and data.device.type == "cpu" and data.layout == torch.strided
    # strides that leave no gaps: torch keeps such strides only
    return is_plain and data.numel() > 0 and torch.empty_like(data, device="meta").stride() == data.stride()


def _check(model: nn.Module) -> None:
    line = '    RoundPipe(model, mesh=mesh, host_weights="own")'
    if not hasattr(os, "memfd_create"):
        raise ConfigError(f'host_weights="shared" needs Linux. A copy of the weights for each process:\n{line}')
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and not _can_be_shared(parameter):
            raise ConfigError(
                f'host_weights="shared": {name!r} is trained, and is a {type(parameter.data).__name__} '
                f"{tuple(parameter.shape)} of {parameter.device} that cannot be in shared memory as it is.\n{line}"
            )


def _places(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The offset of each parameter, and the end."""
    found = [_ALIGNMENT]
    for parameter in parameters:
        found.append(found[-1] + -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return found


def _make(nbytes: int) -> tuple[mmap.mmap, tuple[int, int, bytes]]:
    """Shared memory, and the information that other processes of the machine need to open it."""
    token = secrets.token_bytes(16)
    file = os.memfd_create("roundpipe")
    with on_error(lambda error: os.close(file)):
        os.posix_fallocate(file, 0, nbytes)  # an error where memory is short, and not a signal later
        memory = mmap.mmap(file, nbytes)
    memory[: len(token)] = token
    return memory, (os.getpid(), file, token)


def _open(nbytes: int, process: int, file: int, token: bytes) -> mmap.mmap:
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        memory = mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)
    if memory[: len(token)] != token:
        raise DistributedError(f"The shared memory of process {process} is not the memory that it announced.")
    return memory


def _view(memory: mmap.mmap, at: int, parameter: nn.Parameter) -> torch.Tensor:
    """The place of a parameter, with its own storage: it is saved alone."""
    data = parameter.data
    flat = torch.frombuffer(memory, dtype=data.dtype, count=data.numel(), offset=at)
    return flat.as_strided(data.shape, data.stride())


def _agreed(
    ranks: Ranks, offer: tuple[int, int, bytes] | None, failure: BaseException | None
) -> list[tuple[int, int, bytes] | None]:
    """Exchange one value per rank, or raise the error of one rank on all."""
    said = ranks.exchange((offer, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(said):
        if text is not None:
            raise DistributedError(f"Rank {rank} could not share the weights of its machine. There:\n    {text}")
    return [one for one, _ in said]
