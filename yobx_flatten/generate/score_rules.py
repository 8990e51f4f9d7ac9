"""Rules of ``generation_config.json`` that change the scores before a token is chosen: those of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ..errors import GenerationError
from ..files.document import damage_as

ScoreProcessor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the tokens so far, of shape (batch, length), and scores of shape (batch, vocabulary); returns scores."""

# entries that change scores, with the value that does nothing; none, an empty list and `False` do nothing either
_OF_SCORES: Mapping[str, float | None] = {
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "remove_invalid_values": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
}
# entries that take another loop than one token after the other
_OF_LOOPS: Mapping[str, float | None] = {
    "stop_strings": None,
    "penalty_alpha": 0,
    "prompt_lookup_num_tokens": 0,
    "assistant_early_exit": 0,
    "dola_layers": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": None,
    "max_time": None,
}
_OF_DRAWS: Mapping[str, float | None] = {"top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}


def changes_scores(generation: Mapping[str, Any]) -> bool:
    """Whether a configuration has rules for scores."""
    return bool(_stated(generation, _OF_SCORES))


def other_loops(generation: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries of a configuration for which transformers has its own loop."""
    return _stated(generation, {**_OF_LOOPS, **(_OF_DRAWS if generation.get("do_sample") else {})})


def _stated(generation: Mapping[str, Any], plain: Mapping[str, float | None]) -> tuple[str, ...]:
    return tuple(name for name, value in plain.items() if generation.get(name) and generation[name] != value)


def score_rules(
    model: Any, prompt: torch.Tensor, longest: int, mask: torch.Tensor | None, source: torch.Tensor | None, first: Any
) -> ScoreProcessor:
    """Return what transformers does with the scores of a call, as one function."""
    # model: a `.FileModel`; longest: tokens of a row at most; source: what an encoder read, or the prompt of a decoder
    # first: the token after a single first one, such as a language
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams, config.max_length, config.forced_bos_token_id = False, 1, longest, first
    ends = config.eos_token_id
    config._eos_token_tensor = None if ends is None else torch.tensor(ends).reshape(-1)
    with damage_as(GenerationError, "generation_config.json"):
        found = model._get_logits_processor(
            config, prompt.shape[1], source, None, [], device="cpu", model_kwargs={"attention_mask": mask}
        )

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # a token above the vocabulary, for example, is an error of the file
        with damage_as(GenerationError, "generation_config.json"):
            changed: torch.Tensor = found(tokens, scores)
        return changed

    return process
