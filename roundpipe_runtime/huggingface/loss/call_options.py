"""Options that a pipeline passes to its last module in addition to the model's arguments.

One option is label smoothing: the loss of the Trainer's ``label_smoothing_factor``, computed from the logits of a
microbatch. For label smoothing, the model is called without labels, as in the Trainer, so that it computes no loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from yobx_flatten import pytree_dataclass
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ...batch.loss import WeightedLoss
from ...batch.loss_proof import Way
from ...device.transfer import Static
from ...errors import ConfigError, LossError
from ..adapters import model_inside
from .lazy_logits import loss_only, without_logits
from .own_loss import counting, with_loss, with_loss_weight


@dataclasses.dataclass(frozen=True)
class SmoothedLoss(Static):
    """Cross-entropy with label smoothing, as the Trainer computes it; a loss function for ``forward_backward``.

    The loss is ``(1 - factor)`` times the cross-entropy with the labels, plus ``factor`` times the cross-entropy with
    uniform labels. With a Hugging Face model, the loss is computed without storing the logits of all tokens.

    Args:
        factor: ``label_smoothing_factor`` of the Trainer, from 0 to 1.
        shift_labels: whether token i predicts label i + 1. The default is ``True`` for classes that transformers lists
            as causal language models.
        num_items_in_batch: divisor of the sum of losses; by default, the number of labels that are not ignored.
        ignore_index: value of labels that are ignored.
        scale: number by which the loss is multiplied.

    Raises:
        LossError: the factor is not between 0 and 1.

    >>> logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    >>> total, count = SmoothedLoss(0.1, shift_labels=False)((logits,), torch.tensor([1, -100]))
    >>> [round(total.item(), 4), count]
    [0.3633, 1.0]
    """

    factor: float = 0.1
    shift_labels: bool | None = None
    num_items_in_batch: float | torch.Tensor | None = None
    ignore_index: int = -100
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.factor <= 1:
            raise LossError(f"SmoothedLoss: the factor must be from 0 to 1, found {self.factor!r}.")
        if self.num_items_in_batch is not None:
            object.__setattr__(self, "num_items_in_batch", float(self.num_items_in_batch))  # no tensor

    def __call__(self, outputs: PyTree, labels: torch.Tensor) -> WeightedLoss | torch.Tensor:
        """Return the loss of outputs that contain logits.

        Args:
            outputs: a dictionary with ``"logits"``, or a tuple whose first item is the logits.
            labels: labels of the rows in ``outputs``.

        Returns:
            A ``WeightedLoss`` with the sum of the losses and the number of labels that are not ignored; or the loss as
            a tensor, if ``num_items_in_batch`` is given.
        """
        if self.shift_labels is None:
            raise LossError(
                "SmoothedLoss: without a Hugging Face model, pass shift_labels (True: token i predicts label i + 1; "
                "False: token i predicts label i):\n    SmoothedLoss(0.1, shift_labels=True)"
            )
        if self.num_items_in_batch is not None:
            return self.of_logits(_logits(outputs), labels)
        counted = labels[..., 1:] if self.shift_labels else labels
        count = float((counted != self.ignore_index).sum())
        return WeightedLoss(self._cross_entropy(_logits(outputs), labels, "sum") * self.scale, count)

    def of_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss: a mean over labels that are not ignored, or a sum divided by ``num_items_in_batch``.

        Args:
            logits: logits, with the vocabulary on the last axis.
            labels: labels of the rows in ``logits``.

        Returns:
            The loss, a scalar tensor.
        """
        if self.num_items_in_batch is None:
            return self._cross_entropy(logits, labels, "mean") * self.scale
        return self._cross_entropy(logits, labels, "sum") * (self.scale / self.num_items_in_batch)

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        if labels.is_floating_point():
            raise LossError(f"SmoothedLoss: labels must be class indices, found {labels.dtype}.")
        if self.shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        logits = logits.reshape(-1, logits.shape[-1])
        return functional.cross_entropy(
            logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits,
            labels.reshape(-1).to(logits.device),
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.factor,
        )


def is_causal(model: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model_inside(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def smoothed_call(
    model: nn.Module, loss: SmoothedLoss, kwargs: Mapping[str, Any], label: Any
) -> tuple[Kwargs, SmoothedLoss, torch.Tensor]:
    """Separate the labels from the model's arguments, so that the model itself computes no loss."""
    # label: labels; `None` if they are among the arguments
    # returns: the keyword arguments of the model, with the decoder inputs that an encoder-decoder computes from labels;
    # the loss, with `shift_labels` set; and the labels
    made = dict(kwargs)
    among = made.pop("labels", None)
    labels = among if label is None else label
    if not isinstance(labels, torch.Tensor):
        raise LossError('SmoothedLoss needs labels:\n    forward_backward(input_kwargs={**batch, "labels": labels})')
    prepare = getattr(model_inside(model), "prepare_decoder_input_ids_from_labels", None)
    has_inputs = any(made.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    if label is None and prepare is not None and not has_inputs:
        made["decoder_input_ids"] = prepare(labels=labels)
    if loss.shift_labels is None:
        loss = dataclasses.replace(loss, shift_labels=is_causal(model))
    return made, loss, labels


def _logits(output: PyTree) -> torch.Tensor:
    found = output.get("logits") if isinstance(output, dict) else output[0]
    if not isinstance(found, torch.Tensor):
        raise LossError(f"SmoothedLoss: {type(output).__name__} contains no logits.")
    return found


# Name of the keyword argument with the options. The model never gets it; the engine splits it, because it has labels.
CALL_OPTIONS = "roundpipe_call_options"


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """How the last module of a pipeline computes and returns the loss of a microbatch.

    With options, the last module returns the output of a microbatch, the weight of its loss, and its number of rows.
    """

    loss_only: bool = False  # whether only the loss of the output is used, so that logits are not needed
    smoothed_loss: SmoothedLoss | None = None  # loss that the last piece computes from the logits
    labels: torch.Tensor | None = None  # labels of the smoothed loss, with the rows of the batch
    weight_by: Way | None = None  # checked weights of the losses of microbatches; `None` before a check


pytree_dataclass(CallOptions, backends="torch")


def split_options(kwargs: Mapping[str, Any]) -> tuple[Kwargs, CallOptions | None]:
    """Separate the :class:`CallOptions` of a pipeline call from the keyword arguments of the model.

    >>> split_options({"input_ids": [1], CALL_OPTIONS: CallOptions(loss_only=True)})
    ({'input_ids': [1]}, CallOptions(loss_only=True, smoothed_loss=None, labels=None, weight_by=None))
    """
    given = dict(kwargs)
    options = given.pop(CALL_OPTIONS, None)
    if options is not None and not isinstance(options, CallOptions):
        raise ConfigError(
            f"kwargs[{CALL_OPTIONS!r}]: expected CallOptions, found {type(options).__qualname__}. Leave this argument "
            "out: the pipeline sets it."
        )
    return given, options


def gives_share(kwargs: Mapping[str, Any]) -> bool:
    """Return whether microbatch losses are shares of the batch loss, which are added without weights."""
    options = split_options(kwargs)[1] or CallOptions()
    smoothed = options.smoothed_loss
    given = kwargs.get("num_items_in_batch") if smoothed is None else smoothed.num_items_in_batch
    return options.weight_by == "sum" or given is not None


def is_proven(kwargs: Mapping[str, Any]) -> bool:
    return (split_options(kwargs)[1] or CallOptions()).weight_by is not None


def run_with_options(model: nn.Module, run: Callable[[], Any], options: CallOptions | None, rows: int) -> PyTree:
    """Run the last module by calling ``run``, and return the model's output in the form that ``options`` requests."""
    if options is None:
        return run()
    loss, labels = options.smoothed_loss, options.labels

    def complete() -> Any:
        output = run()
        if loss is None or labels is None:
            return output
        value = loss.of_logits(_logits(output), labels)
        return (value, *output) if isinstance(output, tuple) else with_loss(output, value)

    with counting() as items:
        output = loss_only(model, complete) if options.loss_only else complete()
    output, count, rows = with_loss_weight(output, items, rows, options.weight_by)
    return (without_logits(model, output) if options.loss_only else output), count, rows
