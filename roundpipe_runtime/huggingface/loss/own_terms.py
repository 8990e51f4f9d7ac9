"""Prove that a loss function returns the model's loss, or a multiple of it, whose weights are proven.

::

    loss of the model    loss_fn returns        what follows
    2.0                  6.0                    3 * loss + c
    0.0                  0.0                    c = 0: its weights are those of the model's loss
                         0.5, 0.5               c is the same for all microbatches, like a penalty: its weights are too
                         0.5, 0.7               it is a loss of its own, of which nothing is known
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch

from yobx_flatten.core.compare import tolerance
from yobx_flatten.recipe.aliases import PyTree

from ...engine.recompute.generators import generators_kept
from ...errors import LossError
from .weights import loss_of, with_loss


class OwnTerms:
    """What a loss function of a call adds to the model's loss; threads that run copies of the last stage share it."""

    def __init__(self) -> None:
        self._constant: torch.Tensor | None = None
        self._lock = threading.Lock()

    def check(self, loss_fn: Callable[[Any, Any], Any], output: PyTree, labels: Any, *, is_share: bool) -> None:
        """Check one microbatch."""
        loss = loss_of(output)
        if loss is None or not bool(loss.isfinite()):
            return
        loss = loss.detach()
        found = [self._value(loss_fn, output, loss * scale, labels) for scale in (0.0, 1.0, 2.0)]
        if any(one is None for one in found):
            return  # several losses, or a sum and its weight
        none, once, twice = [one.double().cpu() for one in found if one is not None]
        limit = tolerance("sums", loss.dtype)
        scale = max(float(once.abs()), float(none.abs()), float(loss.abs()))
        is_linear = abs(float(twice - 2 * once + none)) <= limit * scale
        with self._lock:
            self._constant = none if self._constant is None else self._constant
            is_constant = abs(float(none - self._constant)) <= limit * scale
        if not is_linear or not is_constant or (is_share and float(none.abs()) > limit * scale):
            raise LossError(
                "loss_fn returns more than a multiple of the loss that the model computed, for labels among its "
                f"arguments: {float(none):.4g} where the model's loss is 0. How that adds up over microbatches is not "
                "known. Give labels to the loss function only, which is then checked by itself, or compute it once of "
                "all rows:\n    forward_backward(input_kwargs=without_labels, label=labels, loss_fn=loss_fn)\n"
                '    RoundPipeRunConfig(loss_reduction="joined")'
            )

    @staticmethod
    def _value(
        loss_fn: Callable[[Any, Any], Any], output: PyTree, loss: torch.Tensor, labels: Any
    ) -> torch.Tensor | None:
        with torch.no_grad(), generators_kept(loss_fn):
            found = loss_fn(with_loss(copy.copy(output), loss), labels)
        return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None
