"""Costs (time and memory) of layers: times are estimated from the parameters until the layers have been measured."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..device.composite import parts_of
from ..device.transfer import sent_dtype, sent_nbytes
from ..errors import PlanError

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
        grad_bytes: bytes of the gradients of the parameters, which are on the device during backward. If gradients are
            summed in a dtype other than the parameter's, the bytes of the sums are included.

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
    """Return the cost of each layer of a model.

    Args:
        model: a list of :class:`LayerCost`, an object with a method ``layer_costs()`` (such as a pipeline), or a
            module. Each child of an ``nn.Sequential`` is a layer; any other module is one layer.

    Returns:
        The cost (time and memory) of each layer.

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
        raise PlanError("A model without layers has no plan.")
    return found


def analytic_cost(
    layer: nn.Module, gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype
) -> LayerCost:
    """Estimate from the parameters of a layer how many multiplications it needs per token, and its memory.

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
    """Measured layer costs: a thread-safe running average per layer and direction.

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
        """Return the share of the total forward time that layers faster than ``seconds`` take."""
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
        """Return the cost of each layer in seconds; a layer without a measurement gets its scaled estimate.

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
