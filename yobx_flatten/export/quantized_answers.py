"""Measure how far a quantized file is from the model, and choose the bits of each matrix by this measurement."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError, ReplayError
from ..errors.failures import STEP
from ..huggingface.cache_names import cache_of
from ..huggingface.cases import DecodeSizes, decode_inputs, why_not_resizable
from ..huggingface.decoders import SlidingDecoder
from ..private_names.of_torch import pytree
from ..runners.ports import CacheSlot, Runner
from .example import Example
from .proof.eager_runs import Case, Texts, eager_steps
from .proof.exported_call import ByName
from .proof.quality import SCORES, Distance, Quality, text_losses
from .proof.replay import Padding, side_by_side
from .quantization import Quantization
from .source import Source

_SCORES = 2**25
"""Largest number of logits that are kept to compute the divergence from the model."""

logger = logging.getLogger("yobx_flatten")


def measure(
    runner: Runner, quantization: Quantization, source: Source, *, block_size: int, known: list[Texts] | None = None
) -> Quality:
    """Return how much a file differs from the module. Needs ``register_flattening_functions``."""
    # known: losses and logits of the model on the text; the first call fills the list, so that later calls reuse it
    example, written, distance = source.example, source.traced.written, Distance()
    side = ByName(runner, example.names)
    for case in source.cases:
        logger.info("comparing %s", case.name, extra=STEP)
        padding, steps = Padding(), example.runs.steps(case, written, source.traced.left, twice=not written)
        for pair in side_by_side(side, example.module, case, steps, example.names, padding):
            distance.add(*pair.tensors(padding))
    known = [] if known is None else known
    if not known and quantization.tokens is not None:
        known += read_by_model(example.module, example.kwargs, quantization.tokens, written)
    for kwargs, read, losses, expected_scores in known:
        found = text_scores(runner, dict(zip(example.names, pytree.tree_leaves(((), kwargs)), strict=True)), read)
        if expected_scores is not None:
            distance.add_text_scores(expected_scores, found)
        distance.add_text(losses, text_losses(found, kwargs["input_ids"]))
        del found  # frees the logits before the next call allocates new ones
    return distance.quality(quantization.weights, block_size, quantization.allowed)


def read_by_model(
    module: torch.nn.Module, kwargs: Mapping[str, Any], tokens: torch.Tensor, written: Collection[str] = ()
) -> list[Texts]:
    """Return losses and scores of the model on a text, read in calls with as many rows as the example ``kwargs``."""
    found: list[Texts] = []
    kept, texts = 0, tokens.split(len(kwargs["input_ids"]))
    for case, read in zip(text_cases(module, kwargs, tokens), texts, strict=True):
        ((kwargs, eager, _),) = eager_steps(module, case, written)
        scores = eager[SCORES] if isinstance(eager, dict) else getattr(eager, SCORES)
        fits = kept + scores.numel() <= _SCORES  # the logits of a long text are larger than the model
        kept += scores.numel() if fits else 0
        found.append((dict(kwargs), read, text_losses(scores, kwargs["input_ids"]), scores.detach() if fits else None))
    return found


def from_the_start(
    feeds: Mapping[str, torch.Tensor], slots: Sequence[CacheSlot], tokens: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Return the inputs of one call with all tokens; ``None`` if the file has other inputs than tokens, mask, cache."""
    # feeds: inputs by name, with the first token in the cache
    if not slots and "input_ids" in feeds and feeds["input_ids"].shape == tokens.shape:  # an encoder reads all at once
        return dict(feeds)
    found = {slot.port.name: slot.port for slot in slots}
    others = {name for name in feeds if name not in found}
    if "input_ids" not in others or not others <= {"input_ids", "attention_mask", "position_ids"}:
        return None
    made = {name: feeds[name] for name in others} | {"input_ids": tokens}
    for name, port in found.items():
        if not name.endswith((".key", ".value")) or name not in feeds:
            return None
        axes = [axis for axis, size in enumerate(port.shape) if axis and size is None]
        if len(axes) != 1 or feeds[name].shape[axes[0]] != 1:
            return None
        made[name] = feeds[name].narrow(axes[0], 0, 0).contiguous()
    if "attention_mask" in made and made["attention_mask"].shape != tokens.shape:
        return None
    if "position_ids" in made:
        positions = made["position_ids"]
        if positions.shape != (len(tokens), tokens.shape[1] - 1):
            return None
        made["position_ids"] = torch.cat([positions[:, :1] - 1, positions], 1)
    return made


def text_scores(runner: Runner, feeds: Mapping[str, torch.Tensor], tokens: torch.Tensor | None) -> torch.Tensor:
    """Return a file's logits for all tokens of a text except the first, which the file also reads if it can."""
    # feeds: inputs by name, with the first token in the cache
    given = {name: feeds[name] for name in runner.ports}
    whole = None
    if tokens is not None and runner.runtime == "onnxruntime":  # files of other runtimes do not accept an empty cache
        whole = from_the_start(given, runner.slots, tokens)
    found: torch.Tensor
    if whole is not None:
        try:
            found = runner.run(whole)[SCORES][:, 1:]
            return found
        except ReplayError:
            logger.debug("%s takes no empty cache", runner.name)
    found = runner.run(given)[SCORES]
    return found


_READ = {"input_ids", "attention_mask", "token_type_ids"}


@dataclasses.dataclass(frozen=True)
class RoundingCalls:
    """Calls of a model that read a calibration text, and the tokens of the text."""

    cases: Sequence[Case]
    tokens: torch.Tensor  # the text, int64 of shape (texts, length)


def reads_once(kwargs: Mapping[str, Any]) -> bool:
    """Return whether inputs are tokens that are read in one call without a cache."""
    return "input_ids" in kwargs and set(kwargs) <= _READ and cache_of(kwargs) is None


def rounding_calls(
    example: Example, quantization: Quantization, at_most: tuple[int | None, int | None] = (None, None)
) -> RoundingCalls | None:
    """Return the model calls that calibrate the rounding of matrices; ``None`` without a calibration text."""
    # at_most: the largest number of texts, and of tokens of each text; `None` for all
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
    """Refuse a calibration text that the module of an example cannot read, before anything is traced."""
    if quantization is None or quantization.tokens is None:
        return
    tokens, module = quantization.tokens, example.module
    module = module.model if isinstance(module, SlidingDecoder) else module
    reason = why_not_resizable(module, example.kwargs, example.cache_is)
    if reason is None and "encoder_outputs" in example.kwargs:
        reason = "it decodes what an encoder has read"
    if reason is None and example.shapes is None:
        reason = "dynamic_shapes=None fixes the length of what it reads"
    if reason is None:
        config: Any = module.config
        vocabulary = config.get_text_config(decoder=True).vocab_size
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            reason = (
                f"its vocabulary has {vocabulary} tokens, and the text contains tokens {int(tokens.min())} to "
                f"{int(tokens.max())}"
            )
    if reason is not None:
        raise InvalidArgumentError(
            f"Quantization: {type(module).__qualname__} cannot read the text of tokens=, since {reason}. Leave tokens "
            "out."
        )


def text_cases(module: torch.nn.Module, kwargs: Mapping[str, Any], tokens: torch.Tensor) -> list[Case]:
    """Return calls that read a text: the first token of the text is in the cache, and all others are new."""
    # kwargs: the example inputs; each call has as many rows
    decoder = module if isinstance(module, SlidingDecoder) else None
    like = None if decoder else kwargs
    rows = kwargs["input_ids"].shape[0]
    cases = []
    for number, read in enumerate(tokens.split(rows)):
        sizes = DecodeSizes(len(read), past=1, new=read.shape[1] - 1)
        given = decode_inputs(decoder.model if decoder else module, sizes, like, tokens=read)
        cases.append(Case(f"text {number}", (), decoder.inputs(given) if decoder else given))
    return cases


Bits = Mapping[str, int]
"""Bits of the weights, by the role of the matrix in the model; 32 means not quantized."""

_WIDER = {4: 8, 8: 32}


# Choose how many bits each matrix gets, so that a quantized file predicts a text nearly as well as the model.
#
#     all in 4 bits ── within the ratio? ── yes ──> done
#           │ no, or less than 19 of 20 greedy tokens equal the model's: the head in 8 bits
#     measure each role alone in 8 bits: how much closer is the file to the model, for each byte?
#           │
#     the head, then the best role, then the next ... ── within the ratio? ── yes ──> done
#           │ all are in 8 bits
#     the same from 8 bits to float, for less than half of the weights
#
# A role is a matrix that each layer has once, such as `model.layers.*.mlp.down_proj`.


@dataclasses.dataclass(frozen=True)
class Role:
    """Matrices with the same function in each layer, such as all query projections."""

    name: str  # the common name of the matrices
    count: int  # number of matrices
    size: int  # number of weights in all matrices
    is_last: bool  # whether the last product of the graph, the head, is one of them
    exact: int = 32  # with this number of bits the matrices lose nothing; 32 if they are not integers times scales


class Budget:
    """Finds how many bits the matrices of each role need for the allowed perplexity ratio."""

    def __init__(self, roles: Mapping[str, Role], bits: int, measure: Callable[[Bits], Quality]) -> None:
        self._roles, self._first, self._measure = roles, bits, measure

    def find(self) -> tuple[Bits, Quality]:
        """Return the first choice of bits within the allowed ratio, else the last choice, and its measurement."""
        bits, width = self.first(self._roles, self._first), self._first
        quality = self._measure(bits)
        wide = bits | self._wide_heads(self._roles, width)
        if width == 4 and bits != wide and quality.is_close and quality.chooses_others:
            bits = wide
            quality = self._measure(bits)
        while not self._is_enough(quality, width) and math.isfinite(quality.max_difference):
            if width not in _WIDER:
                break
            for name in self._order(bits, _WIDER[width], _badness(quality)):
                if bits[name] >= _WIDER[width]:
                    continue
                wider = {**bits, name: _WIDER[width]}
                if self._full(wider) > 0.5:  # a file with most weights in float is not a quantized file
                    continue
                bits = wider
                quality = self._measure(bits)
                if self._is_enough(quality, width):
                    break
            width = _WIDER[width]
        return bits, quality

    @classmethod
    def first(cls, roles: Mapping[str, Role], bits: int) -> dict[str, int]:
        """Return the bits of each role to measure first: more for the LM head if this makes all matrices exact."""
        found = dict.fromkeys(roles, bits)
        wide = found | cls._wide_heads(roles, bits)
        return wide if cls.is_exact(wide, roles) else found

    @staticmethod
    def _wide_heads(roles: Mapping[str, Role], bits: int) -> dict[str, int]:
        heads = [role.name for role in roles.values() if role.is_last and role.exact > bits]
        return {name: _WIDER[bits] for name in heads if bits in _WIDER}

    @staticmethod
    def is_exact(bits: Bits, roles: Mapping[str, Role]) -> bool:
        """Return whether every matrix consists of integers of at most these bits, so that no weight is rounded."""
        return all(role.exact <= bits[name] <= 8 for name, role in roles.items())

    @staticmethod
    def _is_enough(quality: Quality, width: int) -> bool:
        """Return whether a measurement is within the ratio; at 4 bits, also on text that the model generates."""
        return quality.is_close if width == 4 else quality.ok

    def _full(self, bits: Bits) -> float:
        """Return the share of weights that stay in float."""
        sizes = {name: role.size for name, role in self._roles.items()}
        return sum(size for name, size in sizes.items() if bits[name] == 32) / sum(sizes.values())

    def _order(self, bits: Bits, wider: int, before: float) -> Iterator[str]:
        """Yield the head first, then the other roles, those with the largest improvement per byte first."""
        lossy = [role for role in self._roles.values() if role.exact > bits[role.name]]
        rest = [role for role in lossy if not role.is_last]
        yield from (role.name for role in lossy if role.is_last)
        gains = {}
        for role in rest if len(rest) > 1 else ():
            logger.info("measuring %s in %d bits", role.name, wider, extra=STEP)
            gains[role.name] = (before - _badness(self._measure({**bits, role.name: wider}))) / role.size
        yield from sorted((role.name for role in rest), key=lambda name: gains.get(name, 0.0), reverse=True)


def _badness(quality: Quality) -> float:
    if quality.text_divergence is not None:
        return quality.text_divergence
    ratio = quality.perplexity_ratio
    return quality.relative_difference**2 if ratio is None else math.log(ratio)
