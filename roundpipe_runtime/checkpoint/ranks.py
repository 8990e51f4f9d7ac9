"""The processes that write or read one checkpoint together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..device.outcome import Outcome
from ..pipeline import RoundPipe
from .errors import CheckpointError
from .shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Result = TypeVar("_Result")

# by ranks, with the job: a group is made once, by all of them, and is used for one checkpoint at a time
_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}


class CheckpointRanks:
    """Processes that write or read a checkpoint; one alone by default."""

    # members: their ranks in the job, in the order of the mesh. Default: this process alone.

    def __init__(self, members: tuple[int, ...] = (), mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size, self.group = 0, 1, None
        if len(members) > 1:
            import torch.distributed as dist

            from ..distributed.ranks.ranks import job_timeout, meet

            self.rank, self.size = members.index(dist.get_rank()), len(members)
            world, group = _GROUPS.get(members, (None, None))
            if world is not dist.group.WORLD:  # none yet, or one of a job that has ended
                # their own group: a checkpoint is written next to what the training exchanges
                if mesh is not None:
                    meet(mesh)
                is_part = members != tuple(range(dist.get_world_size()))
                group = dist.new_group(
                    list(members), timeout=job_timeout(), backend="gloo", use_local_synchronization=is_part
                )
                _GROUPS[members] = dist.group.WORLD, group
            self.group = group

    def exchange(self, value: Any) -> list[Any]:
        """Return the values that all of them gave, in the order of ranks; all of them call it."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        from ..distributed.ranks.errors import ranks_gone

        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise ranks_gone([], error) from None
        return found

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Do something in each process, and return its result, or raise in all of them."""
        # work: what this process does; it calls no collective
        if self.group is None:
            return work()
        with Outcome() as outcome:
            result = work()
        failure = outcome.error
        reports = self.exchange(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                raise CheckpointError(f"Rank {rank} of {self.size} failed: {report}")
        return result

    def on_first(self, work: Callable[[], _Result]) -> _Result:
        """Do something in the first process, and return its result in all, or raise in all."""
        found = self.together(lambda: work() if self.rank == 0 else None)
        first: _Result = self.exchange(found)[0]
        return first


def ranks_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> CheckpointRanks:
    """Return the processes that hold a model: those of a pipeline's mesh, or of tensors that are cut into shards."""
    pipelines = [module for module in model.modules() if isinstance(module, RoundPipe)]
    meshes = [pipeline.mesh for pipeline in pipelines if pipeline.mesh is not None]
    meshes += [tensor.device_mesh for tensor in tensors.values() if is_sharded(tensor)]
    members = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if len(members) > 1:
        raise CheckpointError(
            f"Parts of the model are on different ranks, {sorted(members)}, but all ranks that write one checkpoint "
            "must have the same model. Save each part in its own folder."
        )
    return CheckpointRanks(members.pop(), meshes[0]) if members else CheckpointRanks()
