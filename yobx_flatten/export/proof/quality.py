"""Measure the quality of a quantized file: differences of logits, greedy tokens, and perplexity on a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

SCORES = "logits"
"""The only output that is compared, if a file has an output of this name; otherwise all outputs are compared."""

EMBEDDING = "sentence_embedding"
"""The output that sentence-transformers reads; its rows are compared with the model's by cosine similarity."""

_COSINES = {"int4": 0.97}
_COSINE = 0.995
"""Smallest cosine of embeddings with 8-bit weights and the model's; the best known rounding to 4 bits reaches 0.98."""

_TOGETHER = 64
"""Number of tokens whose logits are computed at once: 1,000 tokens take 200 MB with a vocabulary of 50,000."""


@dataclasses.dataclass(frozen=True)
class Quality:
    """The difference between the outputs of a file with quantized weights and the outputs of the model.

    Attributes:
        weights: type of the stored weights: ``"int8"`` or ``"int4"``.
        block_size: number of weights that share a scale and a zero point in most matrices. If it is 0, each output of a
            matrix has one scale.
        positions: number of tokens, in all calls, whose logits were compared.
        max_difference: largest absolute difference of the logits, or of all outputs for a module without logits.
        mean_difference: mean absolute difference of the logits.
        relative_difference: root mean square difference of the logits, divided by the standard deviation of the logits.
        agreement: share of the tokens for which file and model choose the same next token; ``None`` without logits.
        divergence: mean Kullback-Leibler divergence of the distributions of the next token, in nats; ``None`` without
            logits.
        text_tokens: number of tokens of the text on which perplexity was measured; 0 without a text.
        model_perplexity: perplexity of the model on the text; ``None`` without a text.
        perplexity: perplexity of the file on the text; ``None`` without a text.
        allowed: largest allowed ratio of the file's perplexity to the model's perplexity.
        text_divergence: mean Kullback-Leibler divergence on the text; ``None`` if it was not measured.
        cosine: smallest cosine similarity of sentence embeddings of file and model; ``None`` without embeddings.
    """

    weights: str
    block_size: int
    positions: int
    max_difference: float
    mean_difference: float
    relative_difference: float
    agreement: float | None
    divergence: float | None
    text_tokens: int
    model_perplexity: float | None
    perplexity: float | None
    allowed: float
    text_divergence: float | None = None
    cosine: float | None = None

    @property
    def perplexity_ratio(self) -> float | None:
        """Perplexity of the file, divided by the perplexity of the model; ``None`` if the file returns no logits.

        Without a text, the ratio is estimated as the exponential of ``divergence``. This estimate is for text that the
        model generates itself.
        """
        if self.perplexity is not None and self.model_perplexity is not None:
            return self.perplexity / self.model_perplexity
        return None if self.divergence is None else math.exp(min(self.divergence, 700))

    @property
    def allowed_cosine(self) -> float:
        """The smallest accepted cosine similarity of the embeddings that the file and the model compute."""
        return _COSINES.get(self.weights, _COSINE)

    @property
    def ok(self) -> bool:
        """Whether the perplexity ratio (or, without logits, the relative difference) is within its limit."""
        if not math.isfinite(self.max_difference):
            return False
        if self.cosine is not None and not self.cosine >= self.allowed_cosine:
            return False
        ratio = self.perplexity_ratio
        # relative differences of outputs that are not logits; two unrelated outputs differ by 1.4
        return self.relative_difference <= 0.5 if ratio is None else ratio <= self.allowed

    @property
    def is_close(self) -> bool:
        """Whether ``ok`` is true and, if measured, the exponential of ``text_divergence`` is at most ``allowed``."""
        return self.ok and (self.text_divergence is None or math.exp(min(self.text_divergence, 700)) <= self.allowed)

    @property
    def chooses_others(self) -> bool:
        """Whether the file chooses a different greedy token than the model for more than 1 of 20 tokens of a text."""
        return bool(self.text_tokens) and self.agreement is not None and self.agreement < 0.95

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes and properties as a dict that JSON can store."""
        return {**dataclasses.asdict(self), "perplexity_ratio": self.perplexity_ratio, "ok": self.ok}

    def __str__(self) -> str:
        of = "outputs" if self.agreement is None else "scores"
        shown = [
            f"max difference {self.max_difference:.1e}",
            f"mean {self.mean_difference:.1e}, {self.relative_difference:.1%} of the {of}",
        ]
        if self.agreement is not None:
            shown.append(f"{self.agreement:.1%} of {self.positions} greedy tokens agree")
        if self.cosine is not None:
            shown.append(f"embeddings with a cosine of {self.cosine:.5f} or more, allowed {self.allowed_cosine:g}")
        ratio = self.perplexity_ratio
        if self.perplexity is not None:
            shown.append(f"perplexity {self.perplexity:.4g}, of the model {self.model_perplexity:.4g}")
        if ratio is not None:
            shown.append(f"perplexity ratio {ratio:.4f}, allowed {self.allowed:g}")
        blocks = f"blocks of {self.block_size}" if self.block_size else "one scale per output"
        return f"{self.weights}, {blocks}: {'; '.join(shown)}"


class Distance:
    """Sums of the differences between a quantized file and the model, over all compared calls."""

    def __init__(self) -> None:
        self._largest = 0.0
        self._cosine: float | None = None
        self._sums = dict.fromkeys(("difference", "square", "size", "divergence", "text divergence"), 0.0)
        self._numbers = self._positions = self._agreed = self._text = self._scored = 0
        self._losses = {"model": 0.0, "file": 0.0}

    def add(self, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
        if SCORES in expected:
            one, other = (side[SCORES].detach().float() for side in (expected, found))
            read = one.reshape(-1, one.shape[-1]).any(1)  # logits of padding were replaced by zeros
            one, other = (scores.reshape(-1, scores.shape[-1])[read] for scores in (one, other))
            self._compare(one, other)
            self._choose(one.argmax(-1), other.argmax(-1))
            self._sums["divergence"] += _divergence(one, other)
            return
        if EMBEDDING in expected:
            one, other = (side[EMBEDDING].detach().double() for side in (expected, found))
            least = float(torch.nn.functional.cosine_similarity(one, other, dim=-1).min())
            self._cosine = least if self._cosine is None else min(self._cosine, least)
        for name, tensor in expected.items():
            if tensor.is_floating_point() and tensor.numel():
                self._compare(tensor.detach().float().flatten(), found[name].detach().float().flatten())

    def add_text(self, model: Mapping[str, torch.Tensor], file: Mapping[str, torch.Tensor]) -> None:
        """Add losses and greedy tokens of a text, from :func:`text_losses`, to the totals of the model and the file."""
        self._text += model["losses"].numel()
        self._losses["model"] += float(model["losses"].double().sum())
        self._losses["file"] += float(file["losses"].double().sum())
        self._choose(model["greedy"], file["greedy"])

    def add_text_scores(self, model: torch.Tensor, file: torch.Tensor) -> None:
        """Add the divergence between the logits of the model and the file for some texts to the sum of divergences."""
        self._scored += model[..., 0].numel()  # logits have the shape (texts, length, vocabulary)
        self._sums["text divergence"] += _divergence(model.detach(), file.detach())

    def quality(self, weights: str, block_size: int, allowed: float) -> Quality:
        numbers, scored = max(self._numbers, 1), self._positions > 0
        losses = self._losses if self._text else {}
        perplexities = {side: math.exp(min(loss / self._text, 700)) for side, loss in losses.items()}
        size = self._sums["size"]
        relative = math.sqrt(self._sums["square"] / size) if size else (math.inf if self._sums["square"] else 0.0)
        compared = self._positions - self._text
        return Quality(
            weights=weights,
            block_size=block_size,
            positions=self._positions,
            max_difference=self._largest,
            mean_difference=self._sums["difference"] / numbers,
            relative_difference=relative,
            agreement=self._agreed / self._positions if scored else None,
            divergence=self._sums["divergence"] / compared if compared else None,
            text_tokens=self._text,
            model_perplexity=perplexities.get("model"),
            perplexity=perplexities.get("file"),
            allowed=allowed,
            text_divergence=self._sums["text divergence"] / self._scored if self._scored else None,
            cosine=self._cosine,
        )

    def _compare(self, one: torch.Tensor, other: torch.Tensor) -> None:
        if not one.numel():
            return
        apart = (one - other).abs()
        worst = float(apart.max())
        self._largest = math.inf if worst != worst else max(self._largest, worst)
        self._numbers += apart.numel()
        self._sums["difference"] += float(apart.double().sum())
        self._sums["square"] += float(apart.double().square().sum())
        self._sums["size"] += float((one - one.mean(-1, keepdim=True)).double().square().sum())

    def _choose(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self._positions += one.numel()
        self._agreed += int((one == other).sum())


def _divergence(model: torch.Tensor, file: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of two distributions of the next token, summed over all tokens."""
    total = 0.0
    for one, other in zip(*(side.flatten(0, -2).split(_TOGETHER) for side in (model, file)), strict=True):
        chances = one.float().log_softmax(-1), other.float().log_softmax(-1)
        apart = torch.nn.functional.kl_div(chances[1], chances[0], log_target=True, reduction="none").sum(-1)
        total += float(apart.clamp(min=0).sum())
    return total


def text_losses(scores: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return ``losses`` (in nats) and ``greedy`` (most likely tokens) for each position of a text except the first."""
    # scores: logits of shape (texts, length, vocabulary)
    scores, following = scores[:, :-1].detach(), tokens[:, 1:]
    parts = zip(scores.flatten(0, 1).split(_TOGETHER), following.flatten().split(_TOGETHER), strict=True)
    losses = [torch.nn.functional.cross_entropy(one.float(), token, reduction="none") for one, token in parts]
    return {"losses": torch.cat(losses).view_as(following), "greedy": scores.argmax(-1)}
