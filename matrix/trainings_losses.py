"""Losses that people write themselves, as functions of logits and labels: of rows, of tokens, between rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.nn import functional

__all__ = ["LOSSES", "OwnLoss"]

Function = Callable[[torch.Tensor, torch.Tensor], Any]
_CLASSES = 4
_WEIGHTS = (0.2, 1.0, 3.0, 0.5)


@dataclasses.dataclass(frozen=True)
class OwnLoss:
    """A loss of logits and labels.

    Attributes:
        function: the loss of a whole batch; ``logits, labels``.
        reduction: what its user states: ``loss_reduction`` of the configuration.
        of: what the labels are of: ``"rows"`` (a class each), ``"tokens"`` (classes, some ignored), ``"numbers"``.
        piece: what the user's ``loss_fn`` returns for a microbatch. Default: the same.
    """

    function: Function
    reduction: Literal["sum", "mean", "joined"] = "mean"
    of: Literal["rows", "tokens", "numbers"] = "rows"
    piece: Function | None = None


def _tokens(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def _weighted(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    from roundpipe_runtime import WeightedLoss

    return WeightedLoss(_tokens(logits, labels, reduction="sum"), (labels != -100).sum())


def _focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    entropy = functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


def _in_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each row is distinguished from all others of the batch."""
    rows = functional.normalize(logits, dim=-1)
    return functional.cross_entropy(rows @ rows.roll(1, -1).T * 5.0, torch.arange(len(rows), device=rows.device))


def _supervised(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Rows of a class are drawn together."""
    rows = functional.normalize(logits, dim=-1)
    near = torch.log_softmax(rows @ rows.T - 9.0 * torch.eye(len(rows), dtype=rows.dtype, device=rows.device), -1)
    alike = (labels[:, None] == labels[None]).to(rows.dtype)
    return -(near * alike).sum() / alike.sum()


def _triplets(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The hardest positive and negative of each row."""
    apart = (logits[:, None] - logits[None]).square().sum(-1)
    alike = labels[:, None] == labels[None]
    far = apart.masked_fill(~alike, -1.0).amax(-1)
    near = apart.masked_fill(alike, 1e6).amin(-1)
    return functional.relu(far - near + 1.0).mean()


def _preferred(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Every row is compared with the one before it."""
    score = logits[:, 0]
    return -functional.logsigmoid(score[1:] - score[:-1]).mean()


def _varied(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The variance over rows, and what features have in common."""
    centred = logits - logits.mean(0)
    shared = centred.T @ centred / max(len(logits) - 1, 1)
    return functional.relu(2.0 - torch.sqrt(logits.var(0, correction=0) + 1e-4)).mean() + shared.square().mean()


def _correlation(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    one, other = logits[:, 0] - logits[:, 0].mean(), labels - labels.mean()
    return 1 - (one * other).sum() / (one.norm() * other.norm() + 1e-6)


def _rows_with_a_class(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the rows of a class, of which a microbatch may have none."""
    chosen = logits[labels == 1]
    return functional.softplus(chosen[:, 1]).mean() if len(chosen) else logits.sum() * 0.0


def _weights() -> torch.Tensor:
    return torch.tensor(_WEIGHTS, dtype=torch.float64)


LOSSES: Mapping[str, OwnLoss] = {
    "cross entropy (sum)": OwnLoss(lambda x, y: functional.cross_entropy(x, y, reduction="sum"), "sum"),
    "cross entropy (mean over rows)": OwnLoss(functional.cross_entropy),
    "cross entropy (a mean stated as a sum)": OwnLoss(functional.cross_entropy, "sum"),
    "class weights": OwnLoss(lambda x, y: functional.cross_entropy(x, y, weight=_weights())),
    "smoothed labels": OwnLoss(lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1)),
    "focal": OwnLoss(_focal),
    "several labels": OwnLoss(
        lambda x, y: functional.binary_cross_entropy_with_logits(
            x, functional.one_hot(y, _CLASSES).to(x.dtype), pos_weight=_weights()
        )
    ),
    "margin of several": OwnLoss(functional.multi_margin_loss),
    "squared error": OwnLoss(lambda x, y: functional.mse_loss(x[:, 0], y), of="numbers"),
    "absolute error": OwnLoss(lambda x, y: functional.l1_loss(x[:, 0], y), of="numbers"),
    "Huber": OwnLoss(lambda x, y: functional.smooth_l1_loss(x[:, 0], y), of="numbers"),
    "root of the squared error": OwnLoss(lambda x, y: functional.mse_loss(x[:, 0], y).sqrt(), of="numbers"),
    "Gaussian with its variance": OwnLoss(
        lambda x, y: functional.gaussian_nll_loss(x[:, 0], y, functional.softplus(x[:, 1])), of="numbers"
    ),
    "correlation": OwnLoss(_correlation, of="numbers"),
    "largest of the rows": OwnLoss(lambda x, y: functional.cross_entropy(x, y, reduction="none").max()),
    "rows of one class": OwnLoss(_rows_with_a_class),
    "rows of one class (joined)": OwnLoss(_rows_with_a_class, "joined"),
    "distillation": OwnLoss(
        lambda x, y: functional.kl_div(
            torch.log_softmax(x / 2, -1), torch.softmax(x.detach().roll(1, -1), -1), reduction="batchmean"
        )
    ),
    "tokens (sum)": OwnLoss(lambda x, y: _tokens(x, y, reduction="sum"), "sum", "tokens"),
    "tokens (their sum and number)": OwnLoss(_tokens, "sum", "tokens", _weighted),
    "tokens (mean over those that count)": OwnLoss(_tokens, "mean", "tokens"),
    "tokens (a mean stated as a sum)": OwnLoss(_tokens, "sum", "tokens"),
    "tokens (mean of each row)": OwnLoss(
        lambda x, y: torch.stack([functional.cross_entropy(a, b) for a, b in zip(x, y, strict=True)]).mean(),
        "mean",
        "tokens",
    ),
    "tokens (class weights)": OwnLoss(lambda x, y: _tokens(x, y, weight=_weights()), "mean", "tokens"),
    "perplexity": OwnLoss(lambda x, y: _tokens(x, y).exp(), "mean", "tokens"),
    "negatives of the batch": OwnLoss(_in_batch),
    "negatives of the batch (joined)": OwnLoss(_in_batch, "joined"),
    "supervised contrast": OwnLoss(_supervised),
    "supervised contrast (joined)": OwnLoss(_supervised, "joined"),
    "hardest triplets": OwnLoss(_triplets),
    "hardest triplets (joined)": OwnLoss(_triplets, "joined"),
    "preferences between rows": OwnLoss(_preferred),
    "preferences between rows (joined)": OwnLoss(_preferred, "joined"),
    "variance and covariance": OwnLoss(_varied),
    "variance and covariance (joined)": OwnLoss(_varied, "joined"),
}
