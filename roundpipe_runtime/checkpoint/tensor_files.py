"""Read and write safetensors files with the names of transformers: one file, or shards with an index.

::

    model.safetensors                                            everything, if it is not more than a shard
    model-00001-of-00002.safetensors, model-00002-of-..., model.safetensors.index.json
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping

import torch

from yobx_flatten.errors.dependencies import require
from yobx_flatten.files.tensors import opened_tensors, write_tensor_file

from ..device.disk import disk_of, leave
from .errors import DamagedCheckpointError

# Bytes of a file with tensors that live on a disk: so many are in memory while it is written.
_SHARD_OF_DISK = 128 * 2**20


def need_safetensors() -> None:
    """Raise an error if safetensors is not installed."""
    require("safetensors", purpose="a checkpoint", extra="train")


def write_tensors(
    folder: pathlib.Path,
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    shard_bytes: int,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Write tensors to one file, or to several of about ``shard_bytes`` with an index."""
    # tensors: tensors on the host by name; none shares memory with another one
    # shard_bytes: largest number of bytes of a file, unless one tensor alone is larger
    # part: number of the files that this process writes: each `parts`-th one, from this one on; the first also writes
    # the index
    if any(disk_of(tensor) is not None for tensor in tensors.values()):
        shard_bytes = min(shard_bytes, _SHARD_OF_DISK)
    shards = _shards(tensors, shard_bytes)
    where = {}
    for number, names in enumerate(shards, 1):
        of_all = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"{stem}{of_all}.safetensors"
        if (number - 1) % parts == part:
            write_tensor_file(folder / file, {name: tensors[name] for name in names}, metadata={"format": "pt"})
            leave([tensors[name] for name in names])
        where.update(dict.fromkeys(names, file))
    if len(shards) > 1 and part == 0:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


@contextlib.contextmanager
def open_tensors(folder: pathlib.Path, stem: str) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors that :func:`write_tensors` wrote. Each is read from its file when it is accessed."""
    with contextlib.ExitStack() as files:
        found = {}
        for path in [folder / f"{stem}.safetensors", *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))]:
            if path.exists():
                file = files.enter_context(opened_tensors(path, failure=DamagedCheckpointError))
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 # it is not a mapping
        yield found


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
