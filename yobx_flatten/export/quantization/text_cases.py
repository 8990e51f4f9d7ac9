"""Make calls in which an exported model reads a text, to measure perplexity and to calibrate the rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import InvalidArgumentError
from ...huggingface.cache_names import cache_of
from ...huggingface.cases import DecodeSizes, decode_inputs, why_not_resizable
from ...huggingface.sliding_decoder import SlidingDecoder
from ..example.example import Example
from ..proof.case import Case
from .options import Quantization

_READ = {"input_ids", "attention_mask", "token_type_ids"}


@dataclasses.dataclass(frozen=True)
class RoundingCalls:
    """Calls that read a text."""

    cases: Sequence[Case]
    tokens: torch.Tensor  # the text, int64 of shape (texts, length)


def reads_once(kwargs: Mapping[str, Any]) -> bool:
    """Return whether inputs are tokens, read in one call that leaves no cache."""
    return "input_ids" in kwargs and set(kwargs) <= _READ and cache_of(kwargs) is None


def rounding_calls(
    example: Example, quantization: Quantization, at_most: tuple[int | None, int | None] = (None, None)
) -> RoundingCalls | None:
    """Return the calls by which the matrices of a file are rounded; ``None`` without a text."""
    # at_most: so many texts and tokens of each; `None`, the default, for all
    tokens = quantization.tokens if quantization.calibration is None else quantization.calibration
    if tokens is None:
        return None
    tokens = tokens[: at_most[0], : at_most[1]]
    if not reads_once(example.kwargs):
        return RoundingCalls(text_cases(example.module, example.kwargs, tokens), tokens)
    cases = []
    for number, read in enumerate(tokens.split(len(example.kwargs["input_ids"]))):
        others = {"input_ids": read, "attention_mask": torch.ones_like(read), "token_type_ids": torch.zeros_like(read)}
        cases.append(Case(f"text {number}", (), {name: others[name] for name in example.kwargs}))
    return RoundingCalls(cases, tokens)


def check_text(example: Example, quantization: Quantization | None) -> None:
    """Check that the module of an example can read the text of a quantization, before anything is traced."""
    if quantization is None or quantization.tokens is None:
        return
    tokens, module = quantization.tokens, example.module
    module = module.model if isinstance(module, SlidingDecoder) else module
    reason = why_not_resizable(module, example.kwargs)
    if reason is None and "encoder_outputs" in example.kwargs:
        reason = "it decodes what an encoder has read"
    if reason is None and example.shapes is None:
        reason = "dynamic_shapes=None fixes the length of what it reads"
    if reason is None:
        config: Any = module.config
        vocabulary = config.get_text_config(decoder=True).vocab_size
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            reason = (
                f"its vocabulary has {vocabulary} tokens, and the text has {int(tokens.min())} to {int(tokens.max())}"
            )
    if reason is not None:
        raise InvalidArgumentError(
            f"Quantization: {type(module).__qualname__} cannot read the text of tokens=, since {reason}. Leave tokens "
            "out."
        )


def text_cases(module: torch.nn.Module, kwargs: Mapping[str, Any], tokens: torch.Tensor) -> list[Case]:
    """Return calls that read a text: its first token is in the cache, and all others are new."""
    # kwargs: its example; each call has as many rows
    # tokens: the text, int64 of shape (texts, length)
    decoder = module if isinstance(module, SlidingDecoder) else None
    like = None if decoder else kwargs
    rows = kwargs["input_ids"].shape[0]
    cases = []
    for number, read in enumerate(tokens.split(rows)):
        sizes = DecodeSizes(len(read), past=1, new=read.shape[1] - 1)
        given = decode_inputs(decoder.model if decoder else module, sizes, like, tokens=read)
        cases.append(Case(f"text {number}", (), decoder.inputs(given) if decoder else given))
    return cases
