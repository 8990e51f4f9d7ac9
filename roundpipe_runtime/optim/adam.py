"""Optimizers for parameters on the host."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError, warn


class Adam(torch.optim.Adam):
    """Adam on the CPU with torch's fused kernel, and with the arguments of ``Adam`` in the RoundPipe package.

    The kernel does not support complex numbers, so torch's loop over parameters steps a group with a complex parameter.

    Args:
        params: parameters or groups, from :meth:`RoundPipe.optim_parameters`.
        lr: learning rate.
        betas: coefficients of the two averages.
        eps: term added to the denominator.
        weight_decay: factor of the L2 penalty, or of the decay of weights if ``decoupled_weight_decay``.
        amsgrad: whether to use the AMSGrad variant.
        foreach: no effect here; if given, it is ignored with a warning.
        maximize: whether to maximize instead of minimize.
        capturable: must be ``False``.
        differentiable: must be ``False``.
        fused: no effect here: the fused kernel is always used.
        decoupled_weight_decay: whether weight decay is decoupled, as in AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if capturable or differentiable:
            raise ConfigError("Adam: capturable and differentiable are not supported here. Use torch.optim.Adam.")
        if foreach is not None or fused is not None:
            warn("Adam: foreach and fused are ignored; a fused kernel is always used.", UserWarning)
        how = {"maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=True, **how)
        self._choose_kernels()
        self.register_step_pre_hook(check_shapes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and choose a kernel that supports them."""
        super().add_param_group(param_group)
        self._choose_kernels()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer state that :meth:`state_dict` of this class or of ``torch.optim.Adam`` returned."""
        super().load_state_dict(state_dict)
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        # torch refuses complex parameters in a group that has `fused=True`
        for group in self.param_groups:
            group["fused"] = not any(parameter.is_complex() for parameter in group["params"])
        # with this attribute, a GradScaler passes its scale to the optimizer, which the loop does not support
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)


def check_shapes(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise an error for a resized parameter: the fused kernel would write outside of the parameter's moments."""
    for one in [one for group in optimizer.param_groups for one in group["params"]]:
        moments = optimizer.state.get(one, {}).get("exp_avg", one)
        gradient = one if one.grad is None else one.grad
        if gradient.shape != one.shape or moments.shape != one.shape:
            shapes = f"{tuple(one.shape)}, unlike gradient {tuple(gradient.shape)} or moments {tuple(moments.shape)}"
            raise ConfigError(f"Adam: a parameter was resized to {shapes}. Create the optimizer again.")
