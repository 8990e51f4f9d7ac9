"""Estimate the memory of a loss that is computed once for the whole batch, with the last layer.

::

    # the device of the last layer                the host
    #   its parameters, sums of their gradients     its input: by microbatches, joined, and the gradient of it
    #   the batch on its way through, at its highest
"""

from __future__ import annotations

import dataclasses

from ..schedule.round_robin import Stage
from .layer_footprint import LayerFootprint
from .memory_estimate import visit_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedLoss:
    """Memory of a loss that is computed once for the whole batch, in bytes."""

    device: int  # peak memory of the device that runs the last layer for the whole batch
    host: int  # memory of the host in addition to that of a run in microbatches


def joined_loss(last: LayerFootprint) -> JoinedLoss:
    """Return the memory that a loss takes which is computed once for the whole batch."""
    # last: the last layer, measured on the whole batch
    visit = visit_bytes(Stage(0, "backward", range(1)), [last])
    return JoinedLoss(last.param_bytes + last.grad_bytes + visit, 2 * last.inputs + last.grads_in)
