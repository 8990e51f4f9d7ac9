"""Accumulate gradients locally until a call sends them with its own."""

from __future__ import annotations

import torch
from torch import nn

from ...device.events import NOW
from ...engine.call import Call
from ..ranks.ranks import Ranks
from .groups import groups_of
from .reduction import Reduction, ReductionPlan


class KeptSums:
    """The gradients of calls in ``no_sync()``, by group of this rank and layer."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], dict[nn.Parameter, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def clear(self) -> None:
        """Forget them."""
        self._sums.clear()

    def add(self, call: Call, scale: float) -> None:
        """Add the gradients of each group of a call."""
        # call: call that has succeeded on all ranks; its gradients are taken
        turns = [turn for turn, part in enumerate(call.parts) if part]
        for turn, (run, _) in zip(turns, call.runs, strict=True):
            for layer, gradients in run.collected.gradients.items():
                kept = self._sums.setdefault((turn, layer), {})
                for parameter, (gradient, ready) in gradients.items():
                    ready.result()
                    scaled = gradient if scale == 1.0 else gradient.mul_(scale)
                    kept[parameter] = kept[parameter].add_(scaled) if parameter in kept else scaled
            run.collected.gradients.clear()

    def send(self, plan: ReductionPlan, ranks: Ranks) -> list[dict[nn.Parameter, torch.Tensor]]:
        """Sum them over the groups of all ranks, which all call this, and keep nothing."""
        reduction = Reduction(plan, ranks)
        sums, self._sums = self._sums, {}
        layers = {bucket.layer for bucket in plan.buckets}
        for turn in range(len(groups_of(ranks.rank, ranks.size, plan.replicas))):
            for layer in layers:  # what was not kept has no gradient
                found = sums.get((turn, layer), {})
                reduction.land(turn, layer, {parameter: (gradient, NOW) for parameter, gradient in found.items()})
        reduction.run()
        had: set[tuple[int, int]] = set().union(*ranks.exchange(reduction.had))
        return list(reduction.results(1.0, had))
