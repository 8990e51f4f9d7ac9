"""Compute the norm of all gradients, bitwise identical for every number of ranks.

Powers are summed over rows, which no shard cuts, in float64. The sums of all rows are put together on every rank and
added in one order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from ...device.disk import in_groups, passing
from ...errors import ConfigError
from ..ranks.ranks import Ranks
from .shards import is_cut, local_of, shards


@torch.no_grad()
def clip_grad_norm(
    targets: Iterable[torch.Tensor],
    ranks: Ranks,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients such that their norm is at most a number; all ranks call it."""
    # norm_type: exponent of the norm, `inf` for the largest number
    if not norm_type > 0:
        raise ConfigError(f"clip_grad_norm_: norm_type must be positive, like 2.0, found {norm_type!r}.")
    gradients = [target.grad for target in targets if target.grad is not None]
    sums = _row_sums(ranks, gradients, norm_type)
    if math.isinf(norm_type):
        norm = max((float(rows.max()) for rows in sums if rows.numel()), default=0.0)
    else:
        norm = math.fsum(float(rows.sum()) for rows in sums) ** (1 / norm_type) if _finite(sums) else math.nan
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm}, which cannot be clipped.")
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        for gradient in _in_turn(gradients, written=True):
            local_of(gradient).mul_(factor)
    return torch.tensor(norm, dtype=torch.float32)


def _in_turn(gradients: list[torch.Tensor], *, written: bool) -> Iterator[torch.Tensor]:
    """The gradients, each while it is in memory."""
    groups = in_groups(gradients)
    for number in passing(groups, written=written):
        yield from groups[number]


def _finite(sums: list[torch.Tensor]) -> bool:
    return all(bool(rows.isfinite().all()) for rows in sums)


def _row_sums(ranks: Ranks, gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """For each gradient the sums of all its rows, of which this rank has a part."""
    found, parts = [], []
    for gradient in _in_turn(gradients, written=False):
        local = local_of(gradient)
        if not local.is_floating_point() and not local.is_complex():
            continue
        rows = local.flatten(1) if is_cut(gradient) else local.reshape(-1, 1)
        sums = _powers(rows, norm_type)
        if ranks.num_shards > 1 and is_cut(gradient):
            whole = torch.empty(gradient.shape[0], dtype=torch.float64)
            cut = shards(whole, ranks.num_shards)
            cut[ranks.rank % ranks.num_shards].copy_(sums)
            parts.append(cut)
            sums = whole
        found.append(sums)
    ranks.gather(parts, ranks.shard_members(), "step")
    return found


def _powers(rows: torch.Tensor, norm_type: float) -> torch.Tensor:
    values = rows.abs().double() if rows.is_complex() else rows.double()
    if norm_type == 2.0:
        return values.square().sum(1)
    if math.isinf(norm_type):
        return values.abs().amax(1) if values.shape[1] else values.new_zeros(values.shape[0])
    return values.abs().pow(norm_type).sum(1)
