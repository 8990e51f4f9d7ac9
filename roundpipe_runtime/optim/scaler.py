"""Gradient scaling for half precision training."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler as _GradScaler

from .step import wait_for_updates

__all__ = ["GradScaler"]


class GradScaler(_GradScaler):
    """torch's gradient scaler, for gradients on the host and losses on any device.

    The loss function scales, the step function steps, and the loop updates::

        loss_fn=lambda outputs, labels: scaler.scale(criterion(outputs, labels))
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        scaler.update()

    ``update`` waits for a step that runs in the background, since it needs to know what that step found.

    Args:
        init_scale: initial scale.
        growth_factor: factor after ``growth_interval`` steps without infinities.
        backoff_factor: factor after a step with infinities.
        growth_interval: number of steps between two growths.
        enabled: whether to scale; ``False`` makes everything except ``step`` do nothing.

    >>> scaler = GradScaler(init_scale=4.0)
    >>> scaler.scale(torch.tensor(2.0)), scaler.get_scale()
    (tensor(8.), 4.0)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if enabled:
            # Two devices may scale their first losses at the same time, so the tensor must be there before.
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def scale(self, outputs: Any) -> Any:
        """Return losses times the scale. A scale that a step in the background sets for this run is waited for."""
        wait_for_updates(lambda runner: runner.is_exact)
        return super().scale(outputs)

    def update(self, new_scale: float | torch.Tensor | None = None, is_async: bool = True) -> None:
        """Set the scale for the next step, from the overflows of the last step or to ``new_scale``.

        Args:
            new_scale: scale to set, instead of the one that follows from the last step.
            is_async: no effect here: the new scale is always set when this returns.
        """
        wait_for_updates()
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._scale = torch.full((), state_dict["scale"], dtype=torch.float32)

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """Return the growth factor; it is always up to date."""
        return super().get_growth_factor()

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """Return the backoff factor; it is always up to date."""
        return super().get_backoff_factor()

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """Return the growth interval; it is always up to date."""
        return super().get_growth_interval()
