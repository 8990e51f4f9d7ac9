"""Rules of ``generation_config.json`` that change the scores before a token is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ..errors import GenerationError
from ..files.document import damage_as

# what changes the tokens, and is not done here, with the values that mean that it does nothing
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "stop_strings": (None, []),
    "penalty_alpha": (None, 0, 0.0),
    "prompt_lookup_num_tokens": (None, 0),
    "assistant_early_exit": (None, 0),
    "dola_layers": (None, []),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0, 0.0),
    "constraints": (None, []),
    "force_words_ids": (None, []),
    "token_healing": (None, False),
    "max_time": (None,),
}
_UNKNOWN_OF_DRAWS: dict[str, tuple[Any, ...]] = {
    "top_h": (None,),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
}

ScoreProcessor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the tokens so far, of shape (batch, length), and scores of shape (batch, vocabulary); returns scores."""


@dataclasses.dataclass(frozen=True)
class GenerationCall:
    """Facts about a call that a rule may use."""

    start: int = 1  # tokens of a row before the first new one
    longest: int = 1 << 30  # tokens of a row at most, with the new ones
    eos_token_ids: tuple[int, ...] = ()  # a row ends with one of these
    # the mask of the start, 0 where a row is padded; `None` where nothing is known of it
    mask: torch.Tensor | None = None
    # the tokens that an encoder read, or the prompt of a decoder; `None` where there are none
    source: torch.Tensor | None = None
    first: int | None = None  # the token after a single first one, such as a language; `None` for any


@dataclasses.dataclass(frozen=True)
class RuleOfCall:
    """A rule that depends on the call, such as one for the last token."""

    # returns the rule for a call, `None` where it states nothing of it
    make: Callable[[GenerationCall], ScoreProcessor | None]

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as in a call that begins with one token and continues without an end."""
        made = self.make(GenerationCall())
        return scores if made is None else made(tokens, scores)


def score_rules(generation: Mapping[str, Any]) -> tuple[ScoreProcessor, ...]:
    """Return the rules of a configuration, in the order in which transformers applies them, but for forced tokens."""
    _check_known(generation)
    made = (make(generation) for make in _RULES)
    return tuple(rule for rule in made if rule is not None)


def _check_known(generation: Mapping[str, Any]) -> None:
    """Raise where a configuration asks for what generation from files does not do."""
    looked_at = {**_UNKNOWN, **(_UNKNOWN_OF_DRAWS if generation.get("do_sample") else {})}
    unknown = [name for name, plain in looked_at.items() if generation.get(name) not in plain]
    if unknown:
        raise GenerationError(
            f"generation_config.json asks for {', '.join(unknown)}, which the files here cannot do. Remove the entry, "
            "or call model.generate."
        )


def forced_tokens(call: GenerationCall, last: tuple[int, ...]) -> list[ScoreProcessor]:
    """Return the rules that leave no choice, which come after all others."""
    # last: one of these is the last token where the longest row ends; empty for any
    made: list[ScoreProcessor] = []
    first = () if call.first is None else (call.first,)
    if first:
        made.append(_guarded(lambda tokens, scores: _only(first, scores) if tokens.shape[1] == 1 else scores))
    if last:
        at_end = call.longest - 1
        made.append(_guarded(lambda tokens, scores: _only(last, scores) if tokens.shape[1] == at_end else scores))
    return made


def _of_file() -> contextlib.AbstractContextManager[None]:
    """A block in which what does not fit the model, as a token above its vocabulary, is an error of the file."""
    return damage_as(GenerationError, "generation_config.json")


def _guarded(process: ScoreProcessor) -> ScoreProcessor:
    def run(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with _of_file():
            return process(tokens, scores)

    return run


def _only(wanted: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
    left = torch.full_like(scores, -math.inf)
    left[:, list(wanted)] = 0.0
    return left


def _rule(name: str, arguments: Callable[[GenerationCall], tuple[Any, ...] | None]) -> RuleOfCall:
    """A class of transformers whose arguments depend on the call."""
    kind = _library(name)

    def make(call: GenerationCall) -> ScoreProcessor | None:
        given = arguments(call)
        if given is None:
            return None
        with _of_file():
            made: ScoreProcessor = kind(*given)
        return _guarded(made)

    return RuleOfCall(make)


def _encoder_penalty(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    penalty = generation.get("encoder_repetition_penalty")
    if penalty is None or penalty == 1.0:
        return None
    return _rule(
        "EncoderRepetitionPenaltyLogitsProcessor",
        lambda call: None if call.source is None else (float(penalty), call.source),
    )


def _penalty(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    penalty = generation.get("repetition_penalty")
    if penalty is None or penalty == 1.0:
        return None
    name = "RepetitionPenaltyLogitsProcessor"
    ignored = inspect.signature(_library(name)).parameters.get("prompt_ignore_length")
    if ignored is None or "Tensor" not in str(ignored.annotation):
        return _rule(name, lambda call: (float(penalty),))
    # where the class takes one number for each row, `generate` leaves the padding in front of a row out
    return _rule(
        name,
        lambda call: (float(penalty), None if call.mask is None else call.mask.ne(0).int().argmax(dim=1)),
    )


def _ngrams(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    size = generation.get("no_repeat_ngram_size")
    return _rule("NoRepeatNGramLogitsProcessor", lambda call: (size,)) if size else None


def _encoder_ngrams(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    size = generation.get("encoder_no_repeat_ngram_size")
    if not size:
        return None
    return _rule(
        "EncoderNoRepeatNGramLogitsProcessor", lambda call: None if call.source is None else (size, call.source)
    )


def _bad_words(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    words = generation.get("bad_words_ids")
    return _rule("NoBadWordsLogitsProcessor", lambda call: (words, _ends(call))) if words else None


def _least(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    least = generation.get("min_length")
    if not least:
        return None
    return _rule("MinLengthLogitsProcessor", lambda call: (least, _ends(call)) if call.eos_token_ids else None)


def _least_new(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    least = generation.get("min_new_tokens")
    if not least:
        return None
    return _rule(
        "MinNewTokensLengthLogitsProcessor",
        lambda call: (call.start, least, _ends(call)) if call.eos_token_ids else None,
    )


def _finite(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    return _rule("InfNanRemoveLogitsProcessor", lambda call: ()) if generation.get("remove_invalid_values") else None


def _suppressed(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    tokens = generation.get("suppress_tokens")
    return _rule("SuppressTokensLogitsProcessor", lambda call: (tokens,)) if tokens else None


def _suppressed_at_first(generation: Mapping[str, Any]) -> ScoreProcessor | None:
    tokens = generation.get("begin_suppress_tokens")
    if not tokens:
        return None
    return _rule(
        "SuppressTokensAtBeginLogitsProcessor",
        # after a first token that is forced
        lambda call: (tokens, call.start + 1 if call.first is not None and call.start <= 1 else call.start),
    )


_RULES: tuple[Callable[[Mapping[str, Any]], ScoreProcessor | None], ...] = (
    _encoder_penalty,
    _penalty,
    _ngrams,
    _encoder_ngrams,
    _bad_words,
    _least,
    _least_new,
    _finite,
    _suppressed,
    _suppressed_at_first,
)


def _ends(call: GenerationCall) -> list[int] | None:
    return list(call.eos_token_ids) or None


def _library(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise GenerationError(
            f"generation_config.json asks for transformers' {name}:\n    pip install 'yobx-flatten[transformers]'"
        ) from None
    return getattr(transformers, name)
