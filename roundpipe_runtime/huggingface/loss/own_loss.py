"""The model's own loss: weights of microbatch losses, and the auxiliary loss of mixtures of experts.

The loss of a model may be a mean over rows, over all tokens, or over labels that are not ignored. To find out, torch's
averaging functions are intercepted during a forward, and the averaged values are counted. The loss of a batch is the
mean of its microbatch losses, weighted by numbers of labels or rows. The module `loss_proof` checks the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ...batch.loss_proof import Items, Way, count_items
from ...errors import LossError
from ..adapters import model_inside, text_config
from .sliced import chunked_cross_entropy


def counting() -> contextlib.AbstractContextManager[Items]:
    return count_items({chunked_cross_entropy: "labels"})


def with_loss_weight(
    output: PyTree, items: Items, rows: int, weight_by: Way | None = None
) -> tuple[PyTree, float, int]:
    """Return the output of a microbatch, the weight of its loss, and its number of rows."""
    # weight_by: weights of the losses. Default: the items, if they are known.
    # returns: `(output, items, rows)`. A sum has -1 items, and is a share of the batch's loss if the model got
    # `num_items_in_batch`. Means over different numbers of items have infinity, because they cannot be weighted.
    # An unknown loss has NaN. A loss over no items is zero.
    if weight_by in ("rows", "sum"):
        return output, float(rows) if weight_by == "rows" else -1.0, rows
    counts = set(items.counts)
    if items.others or bool(counts) is bool(items.sums):  # both, or neither
        count = math.nan
    elif len(counts) > 1:
        count = math.inf
    else:
        count = counts.pop() if counts else -1.0
    if count == 0 and (loss := loss_of(output)) is not None:
        held = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        first = next((t for t in held if t.dim() and t.is_floating_point()), None)
        zero = torch.zeros_like(loss)
        if first is not None:  # otherwise the logits are lazy
            zero = torch.where(first.isfinite(), first, 0.0).float().sum() * 0.0  # with a graph
        output = with_loss(output, zero)
    return output, count, rows


def check_weights(items: Sequence[float], *, is_share: bool, is_proven: bool) -> None:
    """Raise an error unless the loss of the batch is known to be a weighted sum of the microbatch losses."""
    is_known = all(math.isfinite(count) and (count >= 0 or is_share) for count in items)
    if len(items) > 1 and not (is_proven and is_known):
        raise UnprovenLossError


def loss_of_batch(losses: Sequence[torch.Tensor], items: Sequence[float]) -> torch.Tensor:
    """Return the mean of microbatch losses with the weights ``items``; a loss whose weight is -1 is added unchanged."""
    total = math.fsum(items)
    shares = [1.0 if count < 0 or len(items) == 1 else count / total if total else 0.0 for count in items]
    return torch.stack([loss * share for loss, share in zip(losses, shares, strict=True)]).sum()


class UnprovenLossError(LossError):
    """It is not known how the losses of microbatches add up to the loss of the batch."""

    def __init__(self) -> None:
        super().__init__(
            "The model's loss is not known to be a mean over rows or labels, so microbatches would change it. Compute "
            "the loss from the whole batch, in one process:\n    RoundPipeRunConfig(num_microbatch=1)\n"
            "With several processes and a Trainer that computes its own loss per process (TRL's):\n"
            "    RoundPipeTrainer(..., microbatches=1)"
        )


def loss_of(output: PyTree) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        loss = output[0]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def with_loss(output: PyTree, loss: torch.Tensor) -> PyTree:
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def label_names(model: nn.Module) -> set[str]:
    generic = sys.modules.get("transformers.utils.generic")
    return {"labels", *(generic.find_labels(type(model)) if generic is not None else [])}


def with_labels(model: nn.Module, kwargs: Kwargs) -> Kwargs:
    """Return an example with labels that give a finite loss, so that the check of a split covers the training loss."""
    # returns: the example, unchanged if no labels give a finite loss
    taken = inspect.signature(model_inside(model).forward).parameters
    names = sorted(label_names(model) & set(taken))
    if not names or any(kwargs.get(name) is not None for name in names):
        return kwargs
    with torch.no_grad():
        outputs = model(**kwargs)
        for labels in _possible_labels(names, kwargs, outputs):
            try:
                loss = loss_of(model(**kwargs, **labels))
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError, AssertionError):
                continue  # labels of the wrong shape or dtype
            if loss is not None and bool(loss.isfinite()):
                return {**kwargs, **labels}
    return kwargs


def _possible_labels(names: list[str], kwargs: Kwargs, outputs: PyTree) -> Iterator[dict[str, torch.Tensor]]:
    tokens = [value for name in ("decoder_input_ids", "input_ids", "inputs") if (value := kwargs.get(name)) is not None]
    if not tokens:
        return
    rows = len(tokens[0])
    places = {name: torch.arange(rows) + 1 for name in names if name in ("start_positions", "end_positions")}
    others = {name: torch.arange(rows) % 2 for name in names if name == "next_sentence_label"}
    logits = getattr(outputs, "logits", None)
    logits = getattr(outputs, "prediction_logits", None) if logits is None else logits
    found = logits if isinstance(logits, torch.Tensor) else None
    of_rows = [torch.arange(rows) % 2, torch.linspace(-1, 1, rows)]
    of_tokens = [value for value in tokens if found is not None and found.shape[:2] == value.shape]
    if found is not None and found.dim() == 3:
        of_tokens = [value.remainder(found.shape[-1]) for value in of_tokens]
    for labels in [*of_tokens, *of_rows]:
        own = {"labels": labels} if "labels" in names else {}
        yield {**own, **places, **others}
        if own and (places or others):
            yield own
        if not own:
            return


def has_labels(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in label_names(model))


def rows_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    first = map(kwargs.get, ("labels", "input_ids", "inputs_embeds", "decoder_input_ids"))
    values = (*first, *args, *kwargs.values())
    return next((value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()), 1)


@dataclasses.dataclass(frozen=True)
class ShareOfOwnLoss:
    share: float

    def __call__(self, outputs: PyTree, labels: Any) -> Any:
        return own_loss(outputs, labels) / self.share


def own_loss(outputs: PyTree, labels: Any) -> Any:
    if (loss := loss_of(outputs)) is None:
        raise LossError(
            "The model returned no loss. Give the model labels, or give forward_backward a loss_fn:\n"
            '    forward_backward(input_kwargs={**batch, "labels": labels})'
        )
    return loss


# The auxiliary loss of experts multiplies each expert's share of tokens by its mean probability, both over the batch.
# This product cannot be computed from microbatches, so the function of the model's own module computes the loss once,
# from the joined router logits.


def has_router_logits(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    asked = kwargs.get("output_router_logits")
    config = getattr(model, "config", None)
    asked = getattr(config, "output_router_logits", False) if asked is None else asked
    return bool(asked) and _balancing_function(model) is not None


def has_auxiliary_loss(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    return has_router_logits(model, kwargs) and bool(_coefficient(model))


def wants_tuple(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    asked = kwargs.get("return_dict")
    return (getattr(getattr(model, "config", None), "return_dict", True) if asked is None else asked) is False


def without_auxiliary_loss(model: nn.Module, output: PyTree) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    aux = getattr(output, "aux_loss", None)
    return loss if aux is None else loss - _coefficient(model) * aux.to(loss.device)


def auxiliary_loss_of(model: nn.Module, routers: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> Any:
    """Return the auxiliary loss of a mixture of experts, and the amount that it adds to the model's loss."""
    # routers: one tensor per layer, with a row per token. Returns `None` if the model has no auxiliary loss.
    if (function := _balancing_function(model)) is None:
        return None
    count = _setting(model, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    aux = function(routers, count, _setting(model, ("num_experts_per_tok", "moe_top_k", "moe_k")), mask)
    return aux, _coefficient(model) * aux


def _balancing_function(model: nn.Module) -> Callable[..., Any] | None:
    modules = (sys.modules.get(kind.__module__) for kind in type(model_inside(model)).__mro__)
    functions = (getattr(module, "load_balancing_loss_func", None) for module in modules)
    return next((function for function in functions if function is not None), None)


def _coefficient(model: nn.Module) -> float:
    return float(_setting(model, ("router_aux_loss_coef", "aux_loss_coef")) or 0.0)


def _setting(model: nn.Module, names: Sequence[str]) -> Any:
    holders = (model_inside(model), text_config(model), getattr(model, "config", None))
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, (int, float))), None)
