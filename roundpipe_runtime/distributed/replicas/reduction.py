"""Sum gradients over groups of batch rows, layer by layer, in the same order for any number of ranks.

Each rank runs its groups of batch rows one after the other. For each group and layer, an all-to-all exchange sends the
gradients of each parameter row to the rank that sums this row. The last layer is exchanged first. Each rank adds the
gradients that it receives in ascending order of the groups. A failed rank sends zeros until all ranks have stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...engine.parameters.on_device import Gradients
from ...optim.layer_contents import LayerContents
from ..ranks.ranks import Ranks
from ..weights import RankStore, is_cut, pieces, shards


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """The trainable parameters of a layer whose gradients have the same dtype, and are summed in one exchange."""

    layer: int  # index of the layer
    parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype  # dtype of the sums


class ReductionPlan:
    """The order in which a call sums gradients over all ranks, and the dtype in which the ranks send gradients."""

    def __init__(
        self, contents: Sequence[LayerContents], store: RankStore, replicas: int, reduce_dtype: torch.dtype | None
    ) -> None:
        self.replicas, self.reduce_dtype = replicas, reduce_dtype
        self.buckets: list[Bucket] = []
        for layer in reversed(contents):
            found: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    found.setdefault(store.gradient_dtype(parameter), []).append(parameter)
            self.buckets += [Bucket(layer.index, tuple(parameters), dtype) for dtype, parameters in found.items()]


class Reduction:
    """Sums the gradients of one ``forward_backward``, layer by layer, over the parts of the batch that ranks run."""

    def __init__(self, plan: ReductionPlan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._own = groups_of(ranks.rank, ranks.size, plan.replicas)
        turns = range(-(-plan.replicas // ranks.size))  # groups that a rank runs at most, one after the other
        self._order = [(turn, number) for turn in turns for number in range(len(plan.buckets))]
        self._landed: dict[tuple[int, int], Gradients] = {}
        self._changed = threading.Condition()
        self._totals: dict[int, torch.Tensor] = {}
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._is_stopped = False
        self._limit: int | None = None
        self._begun = 0
        self.had: set[tuple[int, int]] = set()

    def land(self, turn: int, layer: int, gradients: Gradients) -> None:
        """Store the gradients of one layer for one group of batch rows."""
        with self._changed:
            # setdefault: an empty mapping for a layer must not replace gradients that have arrived
            self._landed.setdefault((turn, layer), gradients)  # `run` removes each gradient that it sends
            self._changed.notify_all()

    def stop(self) -> int:
        """Start no gradient exchange until :meth:`finish` is called; return the number of exchanges already started."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            return self._begun

    def finish(self, begun: int) -> None:
        """Let :meth:`run` end as soon as it has made ``begun`` gradient exchanges."""
        with self._changed:
            self._limit = begun  # other ranks may already wait in these exchanges
            self._changed.notify_all()

    def run(self) -> None:
        for step, (turn, number) in enumerate(self._order):
            bucket, is_giver = self._plan.buckets[number], turn < len(self._own)
            if not self._may_begin(step, turn, bucket.layer, is_giver=is_giver):
                return
            self._totals[number] = self._exchanged(turn, number, bucket, is_giver=is_giver)
            # Only after the last turn does the sum contain all groups.
            if turn == self._order[-1][0]:
                self._rows[number] = self._target_rows(bucket, self._totals.pop(number))
        self._memory.clear()

    def _may_begin(self, step: int, turn: int, layer: int, *, is_giver: bool) -> bool:
        """Wait until this rank has computed the layer's gradients; return ``False`` if all ranks have stopped."""

        def may_continue() -> bool:
            is_ready = not is_giver or (turn, layer) in self._landed
            return self._limit is not None or (is_ready and not self._is_stopped)

        with self._changed:
            self._changed.wait_for(may_continue)
            # Up to the limit, some rank waits in this exchange; beyond the limit, no rank waits.
            if self._limit is not None and step >= self._limit:
                return False
            self._begun = step + 1
            return True

    @torch.no_grad()
    def _exchanged(self, turn: int, number: int, bucket: Bucket, *, is_giver: bool) -> torch.Tensor:
        """Exchange the gradients of a bucket between ranks, and return the sum of all gradients received so far."""
        ranks = self._ranks
        cuts = [self._pieces(parameter.detach()) for parameter in bucket.parameters]
        sizes = [sum(cut[rank].numel() for cut in cuts) for rank in range(ranks.size)]
        own = sizes[ranks.rank]
        # a batch of one group does not use `reduce_dtype`
        is_reduced = self._plan.replicas > 1 and bucket.dtype.is_floating_point
        wire = (self._plan.reduce_dtype if is_reduced else None) or bucket.dtype
        out = self._buffer("out", sum(sizes) if is_giver else 0, wire)
        if is_giver:
            self._fill(out, turn, number, cuts)
        if ranks.size == 1:
            into = out
        else:
            # every rank can compute which ranks have a group in this turn
            take = [own if turn * ranks.size + rank < self._plan.replicas else 0 for rank in range(ranks.size)]
            into = self._buffer("into", sum(take), wire)
            ranks.all_to_all(out, sizes if is_giver else [0] * ranks.size, into, take)
        total = self._totals.get(number)
        for part in into.split(own) if own else ():  # within a turn, the order of ranks is the order of groups
            total = part.to(bucket.dtype, copy=True) if total is None else total.add_(part)
        return torch.empty(0, dtype=bucket.dtype) if total is None else total

    def _fill(self, out: torch.Tensor, turn: int, number: int, cuts: Sequence[Sequence[torch.Tensor]]) -> None:
        bucket = self._plan.buckets[number]
        with self._changed:
            stopped = self._is_stopped
            landed = self._landed.get((turn, bucket.layer), {})
        found: list[list[torch.Tensor] | None] = []
        for index, parameter in enumerate(bucket.parameters):
            pair = None if stopped else landed.pop(parameter, None)
            if pair is None:
                found.append(None)
                continue
            gradient, ready = pair
            ready.result()
            self.had.add((number, index))
            found.append(self._pieces(gradient if gradient.layout == torch.strided else gradient.to_dense()))
        at = 0
        for rank in range(self._ranks.size):
            for cut, gradients in zip(cuts, found, strict=True):
                place = out[at : at + cut[rank].numel()]
                at += cut[rank].numel()
                if gradients is None:
                    place.zero_()
                else:
                    place.view(cut[rank].shape).copy_(gradients[rank])

    @torch.no_grad()
    def _target_rows(self, bucket: Bucket, total: torch.Tensor) -> list[torch.Tensor]:
        """Return the summed gradients of the parameter rows that this rank's optimizer updates."""
        ranks = self._ranks
        rows, gathered = [], []
        at = 0
        for parameter in bucket.parameters:
            piece = self._pieces(parameter.detach())[ranks.rank]
            found = total[at : at + piece.numel()].view(piece.shape)
            at += piece.numel()
            if ranks.num_copies > 1 and is_cut(parameter):  # each rank with this shard has summed a part of it
                shard = shards(parameter.detach(), ranks.num_shards)[ranks.rank % ranks.num_shards]
                whole = torch.empty(shard.shape, dtype=total.dtype)
                parts = shards(whole, ranks.num_copies)
                parts[ranks.rank // ranks.num_shards].copy_(found)
                gathered.append(parts)
                found = whole
            rows.append(found)
        same_shard = range(ranks.rank % ranks.num_shards, ranks.size, ranks.num_shards)  # ranks, one for each copy
        ranks.gather(gathered, same_shard, "data")
        return rows

    def _pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return pieces(tensor, self._ranks.num_shards, self._ranks.num_copies)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        found = self._memory.get((name, dtype))
        if found is None or found.numel() < size:
            self._memory[name, dtype] = found = torch.empty(size, dtype=dtype)
        return found[:size]

    def results(self, scale: float, had: set[tuple[int, int]]) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
        """Yield the summed gradients of each layer, last layer first, for the parameter rows that this rank updates."""
        for number, bucket in enumerate(self._plan.buckets):
            found = {}
            for index, (parameter, rows) in enumerate(zip(bucket.parameters, self._rows.pop(number), strict=True)):
                if scale == 0.0:
                    found[parameter] = torch.zeros_like(rows)
                elif (number, index) in had:
                    found[parameter] = rows if scale == 1.0 else rows.mul_(scale)
            yield found


# Split a batch into groups, whatever the number of ranks. No process is involved here.
#
#     batch of 7 rows, 4 groups      rows 0, 1 | 2, 3 | 4, 5 | 6       the sizes of torch.tensor_split
#     2 ranks                      rank 0 runs groups 0 and 2: rows 0, 1, 4, 5; rank 1 runs groups 1 and 3: rows 2, 3, 6
#     3 ranks                        rank 0 runs groups 0 and 3, ranks 1 and 2 one each


def groups_of(rank: int, size: int, replicas: int) -> range:
    """Return the indices of the groups of batch rows that a rank runs, in ascending order.

    >>> list(groups_of(1, 2, 5))
    [1, 3]
    """
    return range(rank, replicas, size)


def rows_of_rank(rows: int, rank: int, size: int, replicas: int) -> list[int]:
    """Return the indices of the rows of a global batch that one rank trains, in the order of its groups of rows.

    ``torch.tensor_split(indices, n)`` returns the rows of each group, if the rank trains ``n`` groups of rows.

    >>> rows_of_rank(7, 1, 2, 4)
    [2, 3, 6]
    """
    sizes = [rows // replicas + (group < rows % replicas) for group in range(replicas)]
    stops = list(itertools.accumulate(sizes, initial=0))
    return [row for group in groups_of(rank, size, replicas) for row in range(stops[group], stops[group + 1])]
