"""Auxiliary load-balancing loss of mixtures of experts, for a whole batch: it is not a mean over rows.

For each expert it multiplies the share of tokens by the mean of probabilities, both over the batch. The product for
the batch does not follow from the products for its microbatches; so the loss is computed once, from the joined logits
of the routers, by the function of the model's own module.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.compare import tolerance
from yobx_flatten.recipe.aliases import PyTree

from ...engine.recompute.generators import generators_kept
from ...errors import LossError
from ..adapters import model_inside, text_config
from .weights import loss_of, with_loss

_NAME = "load_balancing_loss_func"


def has_router_logits(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Report whether a call returns an auxiliary loss, computed from the logits of routers."""
    asked = kwargs.get("output_router_logits")
    config = getattr(model, "config", None)
    asked = getattr(config, "output_router_logits", False) if asked is None else asked
    return bool(asked) and _function(model) is not None


def has_auxiliary_loss(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Report whether a call adds an auxiliary loss to the model's loss."""
    return has_router_logits(model, kwargs) and bool(_coefficient(model))


def wants_tuple(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Report whether a call returns a tuple, whose values have no names."""
    asked = kwargs.get("return_dict")
    return (getattr(getattr(model, "config", None), "return_dict", True) if asked is None else asked) is False


def without_auxiliary_loss(model: nn.Module, output: PyTree) -> torch.Tensor:
    """Return the loss of an output without the auxiliary loss."""
    loss: torch.Tensor = output.loss
    aux = getattr(output, "aux_loss", None)
    return loss if aux is None else loss - _coefficient(model) * aux.to(loss.device)


def batch_auxiliary_loss(model: nn.Module, joined: PyTree, parts: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the auxiliary loss of the whole batch, and what it adds to the model's loss."""
    routers = getattr(joined, "router_logits", None)
    if routers is None or getattr(parts[0], "aux_loss", None) is None:
        return None
    return auxiliary_loss_of(model, tuple(routers), kwargs.get("attention_mask"))


def auxiliary_loss_of(model: nn.Module, routers: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> Any:
    """Return the auxiliary loss of router logits, and what it adds to the model's loss."""
    # routers: logits of the routers, one tensor per layer with a row per token
    # returns: `(loss, part of the model's loss)`; `None` if the model has no such loss
    function = _function(model)
    if function is None:
        return None
    aux = function(routers, *_experts(model), mask)
    return aux, _coefficient(model) * aux


def _function(model: nn.Module) -> Callable[..., Any] | None:
    for kind in type(model_inside(model)).__mro__:
        found = getattr(sys.modules.get(kind.__module__), _NAME, None)
        if found is not None:
            function: Callable[..., Any] = found
            return function
    return None


def _coefficient(model: nn.Module) -> float:
    return float(_setting(model, ("router_aux_loss_coef", "aux_loss_coef")) or 0.0)


def _experts(model: nn.Module) -> tuple[Any, Any]:
    count = _setting(model, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    return count, _setting(model, ("num_experts_per_tok", "moe_top_k", "moe_k"))


def _setting(model: nn.Module, names: Sequence[str]) -> Any:
    """A number that the model itself, or its configuration, has under one of these names."""
    for holder in (model_inside(model), text_config(model), getattr(model, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)):
                return value
    return None


# Prove that a loss function returns the model's loss, or a multiple of it, whose weights are checked.


class OwnTerms:
    """Terms that a loss function adds to the model's loss; threads that run copies of the last stage share them."""

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
                "known. Give labels to the loss function only, which is then checked by itself, or compute it once "
                "for all rows:\n    forward_backward(input_kwargs=without_labels, label=labels, loss_fn=loss_fn)\n"
                '    RoundPipeRunConfig(loss_reduction="joined")'
            )

    @staticmethod
    def _value(
        loss_fn: Callable[[Any, Any], Any], output: PyTree, loss: torch.Tensor, labels: Any
    ) -> torch.Tensor | None:
        with torch.no_grad(), generators_kept(loss_fn):
            found = loss_fn(with_loss(copy.copy(output), loss), labels)
        return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None
