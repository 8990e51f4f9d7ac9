"""Estimate costs of layers, and partition layers into stages of similar times, separately for forward and backward.

Times of layers are estimated from the parameters until the layers have been measured.

GPipe (Huang et al., 2019, arXiv 1811.06965) partitions layers into stages of similar costs. PipeDream (Harlap et al.,
2018, arXiv 1806.03377) partitions by measured times. RoundPipe (Luo et al., 2026, arXiv 2604.27085) has different
stages for forward and backward, and one fused stage for forward and backward of the last layers.
"""

# layer       0    1    2    3    4    5   head        a backward with recompute costs three forwards,
# forward   | 1    1    1  | 1    1 |                  so a forward stage holds about three times the layers
# backward  | 3 | 3 | 3 | 3 | 3 | 3    1.5 |           the last one is the fused stage: forward, loss, backward

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from yobx_flatten.errors.failures import format_bytes

from ..device.composite import parts_of
from ..device.transfer import sent_dtype, sent_nbytes
from ..errors import PlanError
from .simulation import makespan, makespan_of_copies

_SMALLEST = 1e3  # work of a layer without parameters, and of a norm, relative to one multiplication per parameter
_RECENT = 8  # recent forwards of a layer whose times are kept
_NEWEST = 0.2  # weight of a new measurement in the running average


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCost:
    """Time and memory of a layer on one microbatch; ``+`` adds the costs of layers.

    Attributes:
        forward: time of a forward, in seconds or in any unit that is the same for all layers of a plan.
        backward: time of a backward with its recomputed forward, in the unit of ``forward``.
        param_bytes: bytes of the parameters and buffers, which are on the device while the layer runs.
        grad_bytes: bytes of the gradients of the parameters, which are on the device during backward. If the sum of the
            gradients of a parameter has another dtype than the parameter on the device, the bytes of the sum are added.

    >>> LayerCost(forward=0.5, param_bytes=400) + LayerCost(forward=0.25, param_bytes=100)
    LayerCost(forward=0.75, backward=0.0, param_bytes=500, grad_bytes=0)
    """

    forward: float = 0.0
    backward: float = 0.0
    param_bytes: int = 0
    grad_bytes: int = 0

    def __add__(self, other: LayerCost) -> LayerCost:
        names = ("forward", "backward", "param_bytes", "grad_bytes")
        return LayerCost(*(getattr(self, name) + getattr(other, name) for name in names))


def layer_costs(model: Any) -> list[LayerCost]:
    """Return the cost (time and memory) of each layer of a model.

    Args:
        model: a list of :class:`LayerCost`, an object with a method ``layer_costs()`` (such as a pipeline), or a
            module. Each child of an ``nn.Sequential`` is a layer; any other module is one layer.

    Returns:
        The cost of each layer.

    Raises:
        PlanError: if ``model`` has another type or has no layers.

    >>> [cost.forward for cost in layer_costs(nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 8, bias=False)))]
    [8192.0, 8192.0]
    """
    if isinstance(model, Sequence) and all(isinstance(cost, LayerCost) for cost in model):
        found = list(model)
    elif callable(getattr(model, "layer_costs", None)):
        found = list(model.layer_costs())
    elif isinstance(model, nn.Sequential):
        found = [analytic_cost(layer) for layer in model]
    elif isinstance(model, nn.Module):
        found = [analytic_cost(model)]
    else:
        raise PlanError(f"Expected a pipeline, an nn.Module or a list of LayerCost, found {type(model).__qualname__}.")
    if not found:
        raise PlanError("A plan needs a model with at least one layer.")
    return found


def analytic_cost(
    layer: nn.Module, gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype
) -> LayerCost:
    """Estimate a layer's multiplications per token and its memory from the layer's parameters.

    A matrix costs one multiplication per element; an embedding costs almost nothing. The estimate does not include work
    without parameters, such as attention over a long sequence.

    Args:
        layer: layer whose cost is estimated.
        gradient_dtype: function that returns the dtype of a parameter's summed gradients (default: its own dtype).

    Returns:
        The cost, in multiplications and bytes.

    >>> analytic_cost(nn.Embedding(50_000, 64)).forward < analytic_cost(nn.Linear(64, 64)).forward
    True
    """
    tables = [m for m in layer.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    embedded = {id(table._parameters.get("weight")) for table in tables}
    params = list(layer.parameters())
    work = max(float(sum(p.numel() for p in params if p.dim() >= 2 and id(p) not in embedded)), _SMALLEST)
    trained = [p for p in params if p.requires_grad]
    grad_bytes = sum(map(sent_nbytes, trained))
    for p in trained:
        dtype = gradient_dtype(p)
        if dtype != sent_dtype(p):  # the sum is stored next to the gradient; otherwise gradients are added in place
            grad_bytes += p.numel() * dtype.itemsize
    return LayerCost(
        forward=work,
        # the recomputed forward, the gradients of the inputs and, if trained, the gradients of the weights
        backward=work * (3.0 if trained else 2.0),
        param_bytes=sum(map(sent_nbytes, [*parts_of(params), *layer.buffers()])),
        grad_bytes=grad_bytes,
    )


class MeasuredCosts:
    """Measured layer costs: a thread-safe running average for the forward and the backward of each layer.

    Args:
        analytic: estimated cost of each layer.

    >>> costs = MeasuredCosts([LayerCost(1.0, 3.0), LayerCost(1.0, 3.0)])
    >>> costs.record(0, "forward", 0.5)
    >>> [cost.forward for cost in costs.costs()], [cost.backward for cost in costs.costs()]
    ([0.5, 0.5], [1.5, 1.5])
    """

    def __init__(self, analytic: Sequence[LayerCost]) -> None:
        self._analytic = list(analytic)
        self._measured: dict[tuple[str, int], float] = {}
        self._recent: dict[int, collections.deque[float]] = {}  # seconds of the last forwards
        self._lock = threading.Lock()

    @property
    def is_measured(self) -> bool:
        """Whether at least one layer was measured."""
        return bool(self._measured)

    def share_below(self, seconds: float) -> float:
        """Return which share of the total forward time is spent in layers that take less than ``seconds`` each."""
        # the minimum of recent times, as threads may have waited for each other in slower forwards
        with self._lock:
            least = [min(recent) for recent in self._recent.values()]
        total = sum(least)
        return sum(taken for taken in least if taken < seconds) / total if total else 0.0

    def record(self, layer: int, direction: Literal["forward", "backward"], seconds: float) -> None:
        """Record the time that a layer took for one microbatch; a backward includes its recomputed forward.

        Args:
            layer: index of the layer.
            direction: ``"forward"`` or ``"backward"``.
            seconds: measured time of the layer.
        """
        with self._lock:
            before = self._measured.get((direction, layer), seconds)
            self._measured[direction, layer] = before + _NEWEST * (seconds - before)
            if direction == "forward":
                self._recent.setdefault(layer, collections.deque(maxlen=_RECENT)).append(seconds)

    def costs(self) -> list[LayerCost]:
        """Return the cost of each layer in seconds; a layer without a measurement gets its estimate, scaled to seconds.

        Before the first measurement, the estimated costs are returned unchanged.
        """
        with self._lock:
            measured = dict(self._measured)
        if not measured:
            return list(self._analytic)
        guessed = sum(getattr(self._analytic[layer], direction) for direction, layer in measured)
        unit = sum(measured.values()) / guessed if guessed else 1.0
        found = []
        for layer, cost in enumerate(self._analytic):
            forward = measured.get(("forward", layer), cost.forward * unit)
            backward = measured.get(("backward", layer), cost.backward * unit)
            found.append(dataclasses.replace(cost, forward=forward, backward=backward))
        return found


Stages: TypeAlias = tuple[list[range], list[range]]  # forward stages and backward stages, as in a plan

_MOST_CAPS = 64  # simulated caps: more caps differ too little
# Every stage copies activations, which the simulated time does not include, so a smaller gain does not justify a stage.
_WORTH_A_STAGE = 0.02
CLEAR_GAIN = 0.03  # share by which a new plan must be faster; more than the noise of measured times


def partition(
    run_type: str,
    models: Sequence[Sequence[LayerCost]],
    *,
    min_stages: int = 1,
    upper_threshold: float = 1.1,
    bytes_per_stage: float | None = None,
    previous: Sequence[Stages] | None = None,
) -> list[Stages]:
    """Partition the layers of one or more models, which run one after the other, into stages of similar times.

    Args:
        run_type: ``"infer"``, ``"train"`` or ``"fused"``. With ``"fused"``, only the last of ``models`` gets a stage
            that runs forward and backward together; the models before it are partitioned for ``"train"``.
        models: the costs of the layers of each model.
        min_stages: number of devices, which is also the smallest number of stages of all models together. A
            model with fewer layers gets fewer stages.
        upper_threshold: largest ratio of the time of a stage to the time of the slowest layer; at least 1.
        bytes_per_stage: largest number of bytes of parameters and gradients in a stage (default: no limit).
        previous: stages in use, which are kept unless the new stages are faster by more than 3 %.

    Returns:
        Forward and backward stages of each model.

    Raises:
        PlanError: if a single layer is too large, ``run_type`` is unknown, or ``upper_threshold`` or ``min_stages`` is
            below 1.

    >>> layers = [LayerCost(1.0, 3.0)] * 6
    >>> partition("fused", [layers])
    [([range(0, 2), range(2, 5)], [range(5, 6), range(4, 5), range(3, 4), range(2, 3), range(1, 2), range(0, 1)])]
    """
    return partition_and_copy(run_type, models, min_stages, upper_threshold, bytes_per_stage, previous)[0]


def partition_and_copy(
    run_type: str,
    models: Sequence[Sequence[LayerCost]],
    min_stages: int = 1,
    upper_threshold: float = 1.1,
    bytes_per_stage: float | None = None,
    previous: Sequence[Stages] | None = None,
    *,
    copies_before: int = 1,
    copies: int | Literal["auto"] = 1,
    num_microbatch: int | None = None,
) -> tuple[list[Stages], int]:
    """Partition layers as :func:`partition` does, and choose how many devices run the last stage.

    >>> layers = [*[LayerCost(1.0, 3.0)] * 3, LayerCost(3.0, 9.0)]
    >>> partition_and_copy("fused", [layers], min_stages=3, copies="auto", num_microbatch=6)
    ([([range(0, 1), range(1, 2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(0, 1)])], 3)
    """
    # copies_before: number of copies of the fused stage in `previous`
    # copies: number of devices that run the fused stage, which has only the last layer if there are several. `"auto"`:
    # as many as make the simulated run clearly faster.
    # num_microbatch: number of microbatches that plans are compared for. Default: `min_stages` + 1.
    if run_type not in ("infer", "train", "fused"):
        raise PlanError(f'run_type must be "infer", "train" or "fused", found {run_type!r}.')
    if not upper_threshold >= 1:
        raise PlanError(f"upper_threshold must be at least 1, found {upper_threshold!r}.")
    if min_stages < 1:
        raise PlanError(f"min_stages must be at least 1, found {min_stages!r}.")
    limit = float("inf") if bytes_per_stage is None else bytes_per_stage
    for model, costs in enumerate(models):
        for index, cost in enumerate(costs):
            needed = cost.param_bytes + (cost.grad_bytes if run_type != "infer" else 0)
            if needed > limit:
                where = f"layer {index}" if len(models) == 1 else f"layer {index} of model {model}"
                raise PlanError(
                    f"{where} has {format_bytes(needed)} of parameters and gradients, but a stage may have "
                    f"{format_bytes(limit)} (half of model_memory_limit, because the next stage is loaded at the same "
                    "time). Split the layer in two, or raise the limit:\n"
                    f"    ModelExecutePlan.auto({run_type!r}, model, model_memory_limit={2.2 * needed / 1e9:.3g})"
                )
    microbatches = num_microbatch or min_stages + 1
    most = min(min_stages, microbatches) if run_type == "fused" else 1
    numbers = range(1, most + 1) if copies == "auto" else [min(copies, most)]
    types = ["train" if run_type == "fused" else run_type] * (len(models) - 1) + [run_type]
    fastest = [_fastest(types, models, n, upper_threshold, limit, min_stages, microbatches) for n in numbers]
    # `_time` does not include the transfers of copies, so the fewest copies are chosen among plans of similar time.
    least = min(time for time, _ in fastest)
    close = [number for number, (time, _) in enumerate(fastest) if time * (1 - CLEAR_GAIN) <= least]
    (time, best), number = fastest[close[0]], numbers[close[0]]
    if previous is not None and _fits(types, models, previous, limit) and copies in ("auto", copies_before):
        before = _time(types, models, previous, min_stages, microbatches, min(copies_before, most))
        if time > before * (1 - CLEAR_GAIN):
            return list(previous), copies_before
    return best, number


def _fastest(
    types: Sequence[str],
    models: Sequence[Sequence[LayerCost]],
    copies: int,
    upper_threshold: float,
    limit: float,
    devices: int,
    microbatches: int,
) -> tuple[float, list[Stages]]:
    shared = list(models)
    if copies > 1:  # each copy runs a share of the microbatches, so the other stages may only be as long as this share
        head = shared[-1][-1]
        shares = dataclasses.replace(head, forward=head.forward / copies, backward=head.backward / copies)
        shared[-1] = [*shared[-1][:-1], shares]
    # Caps are sums of the times of neighbouring layers; forward and backward stages have the same cap.
    rows = [[cost.forward for cost in costs] for costs in shared]
    if types[-1] != "infer":
        rows += [[cost.backward for cost in costs] for costs in shared]
    slowest = max(map(max, rows))
    sums = sorted({slowest, *(window for row in rows for window in _windows(row, slowest * upper_threshold))})
    above = _thin_out([window for window in sums if window >= slowest * (1 - 1e-9)])
    below = _thin_out([window for window in sums if window < slowest * (1 - 1e-9)])
    found = [
        [_stages(kind, costs, cap, limit, alone=copies > 1) for kind, costs in zip(types, shared, strict=True)]
        for cap in (*above, *below)
    ]
    # With fewer stages than devices, some devices would have nothing to do. A short model has no more stages.
    enough = [plan for plan in found if _count(plan) >= devices] or [max(found, key=_count)]
    times = [_time(types, models, plan, devices, microbatches, copies) for plan in enough]
    # `_time` does not include copies of activations, so the fewest stages are chosen among plans of similar time.
    close = [
        (time, plan) for plan, time in zip(enough, times, strict=True) if time <= min(times) * (1 + _WORTH_A_STAGE)
    ]
    return min(close, key=lambda one: _count(one[1]))


# The result of `_pack` changes only if one more layer fits under the cap, so all useful caps are sums of neighbours.
def _windows(times: Sequence[float], largest: float) -> Iterator[float]:
    for first in range(len(times)):
        total = 0.0
        for time in times[first:]:
            total += time
            if total > largest * (1 + 1e-9):  # the order of additions changes the last bits of a sum
                break
            yield total


def _thin_out(sums: list[float]) -> list[float]:
    """Drop values that differ only by rounding, and select at most 64 of the remaining values evenly."""
    distinct = [value for index, value in enumerate(sums) if not index or value > sums[index - 1] * (1 + 1e-6)]
    if len(distinct) <= _MOST_CAPS:
        return distinct
    step = (len(distinct) - 1) / (_MOST_CAPS - 1)
    return [distinct[round(index * step)] for index in range(_MOST_CAPS)]


def _stages(run_type: str, costs: Sequence[LayerCost], cap: float, limit: float, *, alone: bool) -> Stages:
    # cap: longest time of a stage of several layers. alone: the last layer alone is the fused stage.
    forward = [(cost.forward, float(cost.param_bytes)) for cost in costs]
    backward = [(cost.backward, float(cost.param_bytes + cost.grad_bytes)) for cost in costs]
    if run_type == "infer":
        return _pack_from_the_end(forward, cap, limit), []
    if run_type == "train":
        return _pack_from_the_end(forward, cap, limit), _pack(backward, cap, limit)[::-1]
    # the fused stage includes its forward, so it costs as much as a backward stage with recomputation
    fused = range(len(costs) - 1, len(costs)) if alone else _pack_from_the_end(backward, cap, limit)[-1]
    before = _pack(backward[: fused.start], cap, limit)[::-1]
    return _pack_from_the_end(forward[: fused.start], cap, limit), [fused, *before]


def _pack(layers: Sequence[tuple[float, float]], cap: float, limit: float) -> list[range]:
    stages: list[range] = []
    time = size = 0.0
    for index, (seconds, nbytes) in enumerate(layers):
        if stages and time + seconds <= cap * (1 + 1e-9) and size + nbytes <= limit:
            stages[-1] = range(stages[-1].start, index + 1)
            time, size = time + seconds, size + nbytes
        else:
            stages.append(range(index, index + 1))
            time, size = seconds, nbytes
    return stages


def _pack_from_the_end(layers: Sequence[tuple[float, float]], cap: float, limit: float) -> list[range]:
    # The first stage, not the last, gets the layers that are left over.
    mirrored = _pack(layers[::-1], cap, limit)
    return [range(len(layers) - stage.stop, len(layers) - stage.start) for stage in mirrored[::-1]]


def _count(plan: Sequence[Stages]) -> int:
    return sum(len(forward) + len(backward) for forward, backward in plan)


def _time(
    types: Sequence[str],
    models: Sequence[Sequence[LayerCost]],
    plan: Sequence[Stages],
    devices: int,
    microbatches: int,
    copies: int,
) -> float:
    pairs = list(zip(models, plan, strict=True))
    there = [sum(costs[i].forward for i in stage) for costs, (forward, _) in pairs for stage in forward]
    back = [sum(costs[i].backward for i in stage) for costs, (_, backward) in reversed(pairs) for stage in backward]
    if types[-1] == "train":
        # the loss is computed outside of the pipeline, between forward and backward
        return makespan(there, devices, microbatches) + makespan(back, devices, microbatches)
    stages = [(time, 1) for time in there]
    stages += [(time, 1 if number else copies) for number, time in enumerate(back)]
    return makespan_of_copies(stages, devices, microbatches)


def _fits(types: Sequence[str], models: Sequence[Sequence[LayerCost]], plan: Sequence[Stages], limit: float) -> bool:
    if len(plan) != len(models):
        return False
    for kind, costs, (forward, backward) in zip(types, models, plan, strict=True):
        layers = list(range(len(costs)))
        there = [i for stage in forward for i in stage]
        back = [i for stage in backward[::-1] for i in stage]
        end = backward[0].start if kind == "fused" and backward else len(costs)
        if there != layers[:end] or (kind != "infer" and back != layers):
            return False
        if any(sum(costs[i].param_bytes for i in stage) > limit for stage in forward):
            return False
        if any(sum(costs[i].param_bytes + costs[i].grad_bytes for i in stage) > limit for stage in backward):
            return False
    return True
