"""Auxiliary load-balancing loss of mixtures of experts, which is not a mean over rows.

For each expert, the loss multiplies the expert's share of tokens by its mean probability, both over the batch. This
product cannot be computed from microbatches. So the function of the model's own module computes the loss once, from the
joined router logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.recipe.aliases import PyTree

from ..adapters import model_inside, text_config

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
    """Return the loss of a model's output minus the auxiliary loss that it includes."""
    loss: torch.Tensor = output.loss
    aux = getattr(output, "aux_loss", None)
    return loss if aux is None else loss - _coefficient(model) * aux.to(loss.device)


def batch_auxiliary_loss(model: nn.Module, joined: PyTree, parts: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the auxiliary loss of the whole batch, and its contribution to the model's loss."""
    routers = getattr(joined, "router_logits", None)
    if routers is None or getattr(parts[0], "aux_loss", None) is None:
        return None
    return auxiliary_loss_of(model, tuple(routers), kwargs.get("attention_mask"))


def auxiliary_loss_of(model: nn.Module, routers: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> Any:
    """Return the auxiliary loss of router logits, and its contribution to the model's loss."""
    # routers: one tensor per layer, with a row per token
    # returns: `(loss, contribution to the model's loss)`; `None` if the model has no such loss
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
    """Return a number that the model or its configuration has under one of these names."""
    for holder in (model_inside(model), text_config(model), getattr(model, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)):
                return value
    return None
