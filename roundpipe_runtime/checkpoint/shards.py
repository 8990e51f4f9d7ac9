"""Write and read tensors that are sharded over processes (``DTensor``), and coordinate the processes of a checkpoint.

Each process (rank) writes its shards to a file in the safetensors format of ``torch.distributed.checkpoint``, without
pickle.
"""

# shards/shard-00001-model-00001-of-00001.safetensors     rows of the first rank, and their positions in the tensors
# shards/shard-00002-model-00001-of-00001.safetensors     rows of the second rank

from __future__ import annotations

import contextlib
import math
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import nn

from ..device.worker import Outcome
from ..errors import CheckpointError, DamagedCheckpointError
from ..pipeline import RoundPipe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

SHARDS = "shards"


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether the tensor is a ``DTensor``, of which a process may have only a shard."""
    library = sys.modules.get("torch.distributed.tensor")  # not imported: without the module there are no DTensors
    return library is not None and isinstance(tensor, library.DTensor)


def own_copies(tensors: Mapping[str, DTensor], *, copy: bool) -> dict[str, DTensor]:
    found = {}
    for name, tensor in tensors.items():
        local = tensor.to_local()
        own = local.cpu()
        found[name] = _with_local(tensor, own.clone() if copy and own is local else own)
    return found


def write_shards(folder: pathlib.Path, tensors: Mapping[str, DTensor], group: Any, file_bytes: int) -> None:
    """Write the ``DTensor`` shards of all processes to a checkpoint; all processes must call this function."""
    # group: group of the processes; `None` for one process
    # file_bytes: largest number of bytes of a file, unless one part is larger; a file is in memory while it is written
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    size, number, files = 0, 1, {}
    for name, tensor in tensors.items():
        part = tensor.to_local().nbytes
        if size and size + part > file_bytes:
            size, number = 0, number + 1
        size += part
        files[name] = number
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), fqn_to_index_mapping=files, save_distributed=True)
    with _alone() if group is None else contextlib.nullcontext():
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def read_shards(
    folder: pathlib.Path, names: Callable[[str], bool], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read the sharded tensors of a checkpoint; any number of processes may have written them."""
    # like: DTensors by name, whose mesh and placements are used for the read tensors; other tensors are read whole
    if not (folder / SHARDS).is_dir():
        return {}
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder / SHARDS))
    found: dict[str, torch.Tensor] = {}
    metadata: Any = reader.read_metadata().state_dict_metadata  # only tensors are stored
    stated = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in metadata.values())
    held = sum(file.stat().st_size for file in (folder / SHARDS).iterdir())
    if stated > held:
        raise DamagedCheckpointError(f"{folder / SHARDS} is damaged: it has {held:,} of {stated:,} bytes of tensors.")
    for name, described in metadata.items():
        if not names(name):
            continue
        dtype, target = described.properties.dtype, like.get(name)
        if is_sharded(target) and target.shape == described.size:
            found[name] = _with_local(target, torch.zeros_like(target.to_local(), dtype=dtype))
        else:
            found[name] = torch.zeros(described.size, dtype=dtype)
    if found:
        with _alone():
            load(found, storage_reader=reader, no_dist=True)
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hide torch.distributed's warning that only a single process reads or writes the tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def cut_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the current process's shard of ``tensor`` if ``target`` is sharded, otherwise the whole tensor."""
    if tensor.numel() == 1 and target.numel() == 1:
        tensor = tensor.reshape(target.shape)  # with several processes, a scalar is a vector of one element
    if not is_sharded(target) or is_sharded(tensor) or tensor.shape != target.shape:
        return tensor
    from yobx_flatten.core.private_names.of_torch import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    return _with_local(target, local.clone())


def _with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


_Result = TypeVar("_Result")

# Groups by ranks in the job. All ranks create a group once; a group writes or reads one checkpoint at a time.
_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}


class CheckpointRanks:
    """The processes that write or read one checkpoint together; by default only the current process."""

    # members: their ranks in the job, in the order of the mesh. Default: this process alone.

    def __init__(self, members: tuple[int, ...] = (), mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size, self.group = 0, 1, None
        if len(members) > 1:
            import torch.distributed as dist

            from ..distributed.ranks.ranks import job_timeout, meet

            self.rank, self.size = members.index(dist.get_rank()), len(members)
            world, group = _GROUPS.get(members, (None, None))
            if world is not dist.group.WORLD:  # no group yet, or the groups of an ended job
                # a separate group: a checkpoint is written in parallel with the exchanges of the training
                if mesh is not None:
                    meet(mesh)
                is_part = members != tuple(range(dist.get_world_size()))
                group = dist.new_group(
                    list(members), timeout=job_timeout(), backend="gloo", use_local_synchronization=is_part
                )
                _GROUPS[members] = dist.group.WORLD, group
            self.group = group

    def exchange(self, value: Any) -> list[Any]:
        """Return the ``value`` arguments of all ranks, in rank order; all ranks must call this method."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        from ..errors import ranks_gone

        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise ranks_gone([], error) from None
        return found

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Call ``work`` in each process; if one process fails, raise an error in all processes."""
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
        """Call ``work`` in the first process only; all processes return its result, or raise its error."""
        first: _Result = self.exchange(self.together(lambda: work() if self.rank == 0 else None))[0]
        return first


def ranks_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> CheckpointRanks:
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
