"""The keywords that people pass to `model.generate`, and a comparison of two models with each of them."""

from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

__all__ = ["KEYWORDS", "Kept", "same_tokens"]


class Kept:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append("end")


def _drawn(**options: Any) -> Any:
    return lambda first: {"do_sample": True, "max_new_tokens": 14, **options}


def _ten(**options: Any) -> Any:
    return lambda first: {"max_new_tokens": 14, **options}


def _processor(first: list[int]) -> dict[str, Any]:
    suppress = SuppressTokensLogitsProcessor(first)
    return {"logits_processor": LogitsProcessorList([suppress]), "max_new_tokens": 14}


def _criteria(first: list[int]) -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)]), "max_new_tokens": 14}


# by name: takes five tokens that the model generates, and returns the keywords
KEYWORDS: dict[str, Any] = {
    "do_sample": _ten(do_sample=False),
    "temperature": _drawn(temperature=0.7),
    "top_p": _drawn(top_p=0.8),
    "top_k": _drawn(top_k=9),
    "min_p": _drawn(min_p=0.1),
    "max_length": lambda first: {"max_length": 24},
    "eos_token_id": lambda first: {"eos_token_id": first[2], "max_new_tokens": 14},
    "streamer": _ten(streamer=Kept),
    "logits_processor": _processor,
    "stopping_criteria": _criteria,
    "generation_config": lambda first: {"generation_config": {"max_new_tokens": 7, "do_sample": True, "top_k": 5}},
    "num_return_sequences": _drawn(num_return_sequences=3),
    "repetition_penalty": _ten(repetition_penalty=1.5),
    "num_beams": _ten(num_beams=3, num_return_sequences=2),
    "beams that are drawn": _drawn(num_beams=3),
    "prompt_lookup_num_tokens": lambda first: {"prompt_lookup_num_tokens": 3, "max_new_tokens": 24},
    "assistant_model": lambda first: {"assistant_model": True, "max_new_tokens": 24},
    "return_dict_in_generate": _ten(return_dict_in_generate=True, output_scores=True),
    "use_cache": _ten(use_cache=False),
    "guidance_scale": _ten(guidance_scale=1.5),
    "prefix_allowed_tokens_fn": _ten(prefix_allowed_tokens_fn=lambda row, tokens: [5, 6, 7, 8 + row]),
}
# of one row only
ONE_ROW = ("streamer", "prompt_lookup_num_tokens", "assistant_model", "guidance_scale")


def same_tokens(name: str, doors: tuple[Any, Any], given: dict[str, Any], assistant: Any) -> tuple[Any, Any]:
    """Return what both models generate with a keyword: tokens, and what a streamer was given.

    Args:
        name: one of `KEYWORDS`.
        doors: the model, and the files.
        given: the inputs.
        assistant: a model that proposes tokens.
    """
    model = doors[0]
    first = model.generate(**given, do_sample=False, max_new_tokens=14)[0, -5:].tolist()
    results = []
    for door in doors:
        options = KEYWORDS[name](first)
        if "streamer" in options:
            options["streamer"] = Kept()
        if "assistant_model" in options:
            options["assistant_model"] = assistant
        if "generation_config" in options:
            stated = {**model.generation_config.to_dict(), **options["generation_config"]}
            options["generation_config"] = GenerationConfig.from_dict(stated)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            found = door.generate(**given, **options)
        tokens = found if isinstance(found, torch.Tensor) else found["sequences"]
        results.append((tokens.tolist(), options["streamer"].seen if "streamer" in options else None))
    return results[0], results[1]
