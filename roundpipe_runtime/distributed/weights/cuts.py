"""Cut parameters into the shards that ranks own. No process is involved here.

::

    matrix of 5 rows, 2 ranks      rank 0 owns rows 0, 1, 2; rank 1 rows 3, 4        Shard(0), as DTensor cuts
    vector                         each rank owns all of it

Vectors are not cut: they are small, and torch's fused Adam computes the last few numbers of a tensor with other
instructions than the rest, so a shard of an odd size would have other last bits.
"""

from __future__ import annotations

import torch


def is_cut(tensor: torch.Tensor) -> bool:
    """Report whether a parameter is cut into shards: matrices and tensors of more axes are."""
    return tensor.dim() > 1


def shards(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a tensor along its rows, as ``Shard(0)`` does: views, empty ones at the end.

    >>> [shard.tolist() for shard in shards(torch.arange(5).reshape(5, 1), 2)]
    [[[0], [1], [2]], [[3], [4]]]
    """
    found = list(tensor.chunk(count, 0)) if tensor.shape[0] else []
    return found + [tensor[:0]] * (count - len(found))


def pieces(tensor: torch.Tensor, num_shards: int, num_copies: int = 1) -> list[torch.Tensor]:
    """Return what each rank sums of a tensor that is shaped like a parameter, as views.

    >>> [part.shape[0] for part in pieces(torch.zeros(7, 2), 2, 2)]
    [2, 2, 2, 1]
    """
    # num_copies: number of ranks that hold each shard; each of them sums a part of it
    # returns: A tensor per rank, in the order of the mesh: copy after copy, in each of them shard after shard
    if not is_cut(tensor):
        return [tensor.reshape(1) if tensor.dim() == 0 else tensor] * (num_shards * num_copies)
    parts = [shards(shard, num_copies) for shard in shards(tensor, num_shards)]
    return [parts[shard][copy] for copy in range(num_copies) for shard in range(num_shards)]
