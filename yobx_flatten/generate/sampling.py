"""Choose the next token, greedily or by sampling, after logits processors have changed the logits."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ..core.files.document import damage_as
from ..errors import GenerationError, InvalidArgumentError, describe_class

_TOP_K = 50  # transformers' default for a generation_config.json without top_k


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options for the choice of each new token; by default, the likeliest token is chosen.

    Attributes:
        do_sample: whether to draw tokens at random instead of taking the likeliest token; ``False`` by default.
        temperature: positive divisor of the logits, 1.0 by default; below 1, likely tokens become likelier.
        top_k: number of likeliest tokens to draw from; ``None`` for all tokens.
        top_p: probability in (0, 1] of nucleus sampling: tokens are drawn from the smallest set of likeliest tokens
            whose probabilities add up to ``top_p``; ``None`` for all tokens.
        seed: seed of the random draws; ``None`` for torch's global random generator.
        min_p: smallest probability of a drawn token relative to the likeliest token, in [0, 1]; ``None`` for no limit.
        typical_p: total probability, in (0, 1], of the tokens to draw from in locally typical sampling. These are the
            tokens whose information content is closest to the entropy. ``None`` for all tokens.

    Raises:
        InvalidArgumentError: when a value is out of its range.

    >>> Sampling(do_sample=True, temperature=0.8, top_k=20, seed=0).top_k
    20
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None
    typical_p: float | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 < self.temperature < math.inf):
            raise InvalidArgumentError(
                f"temperature must be a number above 0, found {describe_class(self.temperature)}. "
                "To choose the likeliest token, pass do_sample=False."
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise InvalidArgumentError(
                f"top_k must be an int of 1 or more, or None; found {describe_class(self.top_k)}."
            )
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= 1):
                raise InvalidArgumentError(
                    f"{name} must be above 0 and at most 1, or None; found {describe_class(value)}."
                )
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise InvalidArgumentError(f"min_p must be from 0 to 1, or None; found {describe_class(self.min_p)}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def sampling_of(generation: Mapping[str, Any]) -> Sampling:
    if not generation.get("do_sample"):
        return Sampling()
    top_k = generation.get("top_k")
    named = {name: generation.get(name) for name in ("temperature", "top_p", "min_p", "typical_p")}
    given = {name: value for name, value in named.items() if value is not None}
    for name in ("top_p", "typical_p"):
        if given.get(name, 0) >= 1:  # all tokens
            del given[name]
    try:
        return Sampling(do_sample=True, top_k=_TOP_K if top_k is None else top_k or None, **given)
    except InvalidArgumentError as error:
        raise GenerationError(f"generation_config.json: {error}") from error


def choose(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """Return the next token of each row, of shape (batch,), for scores of shape (batch, vocabulary).

    >>> sampling, seeded = Sampling(do_sample=True, top_k=2), torch.Generator().manual_seed(0)
    >>> sorted({int(choose(torch.tensor([[0.0, 5.0, 5.0]]), sampling, seeded)) for _ in range(20)})
    [1, 2]
    """
    # generator: `None` for torch's global generator
    if not sampling.do_sample:
        return scores.argmax(-1)
    return torch.multinomial(probabilities(scores, sampling), 1, generator=generator)[:, 0]


def probabilities(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return next-token probabilities after ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``typical_p``.

    >>> probabilities(torch.tensor([[0.0, 0.0, 0.0, -50.0]]).log_softmax(-1), Sampling(top_p=0.5))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    scores = scores.float() / sampling.temperature
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[:, sampling.top_k :] = -math.inf
    shares = ordered.softmax(-1)
    if sampling.top_p is not None:
        # leave a token out if the likelier tokens already reach top_p; the likeliest token always stays
        shares = shares.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, 0.0)
        shares = shares / shares.sum(-1, keepdim=True)
    if sampling.min_p is not None:
        shares = shares.masked_fill(shares < sampling.min_p * shares[:, :1], 0.0)
        shares = shares / shares.sum(-1, keepdim=True)
    if sampling.typical_p is not None:
        # locally typical sampling (Meister et al., 2022, arXiv 2202.00666)
        surprise = -shares.log()
        expected = (shares * surprise).nansum(-1, keepdim=True)
        distance = (surprise - expected).abs()
        nearest, by_distance = distance.sort(dim=-1)
        before = shares.gather(-1, by_distance).cumsum(-1) < sampling.typical_p
        last = before.sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
        shares = shares.masked_fill(distance > nearest.gather(-1, last), 0.0)
    shares = shares / shares.sum(-1, keepdim=True)
    return torch.zeros_like(shares).scatter(-1, order, shares)


ScoreProcessor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of the tokens so far, of shape (batch, length), and of logits (batch, vocabulary); it returns new logits."""

# entries that change scores, each with a value that has no effect; `None`, `[]` and `False` never have an effect
OF_SCORES: Mapping[str, float | None] = {
    **dict.fromkeys(("guidance_scale", "repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("sequence_bias", "bad_words_ids", "remove_invalid_values", "exponential_decay_length_penalty")),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "watermarking_config")),
}
# entries for which transformers runs another generation loop
_OF_LOOPS: Mapping[str, float | None] = {
    **dict.fromkeys(("stop_strings", "dola_layers", "constraints", "force_words_ids", "token_healing", "max_time")),
    **dict.fromkeys(("penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "diversity_penalty"), 0),
    "num_beam_groups": 1,
}
_OF_DRAWS: Mapping[str, float | None] = {"top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}


def other_loops(generation: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options, such as ``penalty_alpha``, that are set and that only transformers' ``generate`` supports."""
    return entries_with_effect(generation, {**_OF_LOOPS, **(_OF_DRAWS if generation.get("do_sample") else {})})


def plain_loop_entries(generation: Mapping[str, Any]) -> dict[str, float | None]:
    """Return, for each option that :func:`other_loops` finds, the value with which the option has no effect."""
    plain = {**_OF_LOOPS, **_OF_DRAWS}
    return {name: plain[name] or None for name in other_loops(generation)}  # 0 drafted tokens would still be drafts


def entries_with_effect(generation: Mapping[str, Any], plain: Mapping[str, float | None]) -> tuple[str, ...]:
    return tuple(name for name, value in plain.items() if generation.get(name) and generation[name] != value)


def score_rules(
    model: Any, prompt: torch.Tensor, longest: int, mask: torch.Tensor | None, source: torch.Tensor | None, first: Any
) -> ScoreProcessor:
    """Return a function that changes logits as all logits processors of a transformers ``generate`` call do."""
    # model: a `.FileModel`; longest: largest number of tokens in a row
    # source: tokens of the encoder, or the prompt of a decoder-only model; first: forced_bos_token_id of the call
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams, config.max_length, config.forced_bos_token_id = False, 1, longest, first
    ends = config.eos_token_id
    config._eos_token_tensor = None if ends is None else torch.tensor(ends).reshape(-1)
    with damage_as(GenerationError, "generation_config.json"):
        found = model._get_logits_processor(
            config, prompt.shape[1], source, None, [], device="cpu", model_kwargs={"attention_mask": mask}
        )

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # a token outside the vocabulary, for example, is an error in the file
        with damage_as(GenerationError, "generation_config.json"):
            changed: torch.Tensor = found(tokens, scores)
        return changed

    return process
