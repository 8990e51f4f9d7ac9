"""Hold parameters in memory that all processes of a machine share, and optimizer state in shards.

::

    step             each rank steps rows of its own, which no layer reads
    before a layer   all ranks wait for each other: none reads the layer any more
    the layer        rows are written once per machine; those of other machines arrive
    after it         all ranks wait for each other: all of it is there, and each lets its runs read it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...errors import DistributedError
from ..ranks.ranks import Ranks
from .cuts import is_cut, shards
from .host_memory import first_of_shards, machines_of, routes, share_memory
from .shards import ShardedStore, Target


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
        """Report whether the optimizer gets numbers of its own: a step must write nothing that others may read."""
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
        """Write what the ranks have stepped into the parameters of a layer."""
        if not held:
            return
        self.ranks.barrier("weights")
        for parameter, shard in held.items():
            if self._writes_shard if is_cut(parameter) else self._writes_whole:
                shard.write(parameter)
        self._pass_on(list(held))
        self.ranks.barrier("weights")

    def _pass_on(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send rows to machines that lack them, and receive those that this one lacks."""
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
            if place is not rows:  # rows that do not lie one after the other
                place.copy_(rows)
