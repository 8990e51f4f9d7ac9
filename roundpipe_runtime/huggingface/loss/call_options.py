"""Options of one call of a pipeline, passed to its last piece in addition to the model's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten import pytree_dataclass
from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ...batch.loss_proof import Way
from ...errors import ConfigError
from .label_smoothing import SmoothedLoss, with_smoothed_loss
from .lazy_logits import loss_only, without_logits
from .weights import counting, with_loss_weight

# Name of the keyword argument with the options. The model never gets it; the engine splits it, because it has labels.
CALL_OPTIONS = "roundpipe_call_options"


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """How the last piece computes and returns the loss of a microbatch.

    With options, the last piece returns ``(output, items, rows)``; see `with_loss_weight`.
    """

    loss_only: bool = False  # whether only the loss of the output is used, so that logits are not needed
    smoothed_loss: SmoothedLoss | None = None  # loss that the last piece computes from the logits
    labels: torch.Tensor | None = None  # labels of the smoothed loss, with the rows of the batch
    weight_by: Way | None = None  # checked weights of the losses of microbatches; `None` before a check


pytree_dataclass(CallOptions, backends="torch")


def split_options(kwargs: Mapping[str, Any]) -> tuple[Kwargs, CallOptions | None]:
    """Return the keyword arguments of the model, and the options of the call.

    >>> split_options({"input_ids": [1], CALL_OPTIONS: CallOptions(loss_only=True)})
    ({'input_ids': [1]}, CallOptions(loss_only=True, smoothed_loss=None, labels=None, weight_by=None))
    """
    given = dict(kwargs)
    options = given.pop(CALL_OPTIONS, None)
    if options is not None and not isinstance(options, CallOptions):
        raise ConfigError(
            f"kwargs[{CALL_OPTIONS!r}]: expected CallOptions, found {type(options).__qualname__}. The pipeline sets "
            "this argument itself: leave it out."
        )
    return given, options


def gives_share(kwargs: Mapping[str, Any]) -> bool:
    """Report whether the summed loss of a microbatch is its share of the loss of the whole batch.

    The loss was divided by the number of items of the batch, or a check has found that losses are added.
    """
    options = kwargs.get(CALL_OPTIONS)
    if isinstance(options, CallOptions) and options.weight_by == "sum":
        return True
    smoothed = options.smoothed_loss if isinstance(options, CallOptions) else None
    given = kwargs.get("num_items_in_batch") if smoothed is None else smoothed.num_items_in_batch
    return given is not None


def is_proven(kwargs: Mapping[str, Any]) -> bool:
    """Report whether the weights of the losses of microbatches were checked for this kind of call."""
    options = kwargs.get(CALL_OPTIONS)
    return isinstance(options, CallOptions) and options.weight_by is not None


def run_with_options(model: nn.Module, run: Callable[[], Any], options: CallOptions | None, rows: int) -> PyTree:
    """Run a forward that returns the output of a model, and return the output as the options request."""
    # options: options of the call; without options, the output alone is returned
    if options is None:
        return run()
    loss, labels = options.smoothed_loss, options.labels

    def complete() -> Any:
        output = run()
        return output if loss is None or labels is None else with_smoothed_loss(output, loss, labels)

    with counting() as items:
        output = loss_only(model, complete) if options.loss_only else complete()
    output, count, rows = with_loss_weight(output, items, rows, options.weight_by)
    return (without_logits(model, output) if options.loss_only else output), count, rows
