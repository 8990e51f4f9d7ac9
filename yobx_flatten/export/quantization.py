"""Define quantization options, measure the outputs of a quantized file, and choose the bits of each weight matrix."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch

from ..core.private_names.of_torch import pytree
from ..errors import InvalidArgumentError, MissingDependencyError, ReplayError, describe_class, require
from ..errors.failures import STEP, first_line
from ..huggingface.cache_names import cache_of
from ..huggingface.cases import DecodeSizes, decode_inputs
from ..huggingface.decoders import SlidingDecoder
from ..runners.ports import CacheSlot, Runner
from .example import Example
from .model_facts import ModelFacts
from .proof.eager_runs import Case, Texts, eager_steps
from .proof.quality import SCORES, Distance, Quality, text_losses
from .proof.replay import ByName, Padding, side_by_side
from .source import Source

WeightBits = Literal["int8", "int4", "keep"]
"""``"keep"`` rounds nothing: weights that are integers times scales are stored as integers, all others unchanged."""

Activations = Literal["auto", "float", "int8", "split", "token"]
"""Precision of activations that are multiplied with quantized weights."""

PERPLEXITY_RATIOS: Mapping[str, float] = {"int8": 1.01, "int4": 1.1, "keep": 1.01}
"""Largest allowed perplexity of a file divided by the model's, by weight type; near 1 in small untrained models."""

TOKEN_SHARES: Mapping[str, float] = {"int8": 0.8, "int4": 0.4, "keep": 0.8}
"""By weight type: smallest share of greedy tokens in which an exported folder and the model agree after the same text.

Prompts of random tokens leave scores close to each other: small models without training keep 0.92 and 0.55.
"""

CHAT_SHARES: Mapping[str, float] = {"int8": 0.9, "int4": 0.65, "keep": 0.9}
"""By weight type: smallest share of greedy tokens in which an exported folder and the model agree in conversations."""

_BLOCKS = (16, 32, 64, 128, 256)

_BLOCK = 32
"""Default number of weights that share a scale."""

_WIDE_BLOCK = 64
"""Block size of 8-bit weights in a 4-bit file: with any block size, their error is a hundredth of the 4-bit error."""


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How weights of linear layers are quantized, and how much the outputs may differ from the model's outputs.

    Attributes:
        weights: type of the stored weights: ``"int4"``, the default, or ``"int8"``. Weights that are already integers
            times scales, as in a GGUF file, are not rounded again if the integers fit into the bits of ``weights``.
            ``"keep"`` stores weights as integers if they are already integers times scales, and leaves all other
            weights unchanged.
        block_size: number of weights that share a scale and a zero point: 16, 32 (the default), 64, 128 or 256. With
            larger blocks the file is smaller and faster, and differs more from the model. ExecuTorch does not support
            blocks of 16 weights. OpenVINO and ExecuTorch store int8 weights with one scale for each output of a matrix.
        perplexity_ratio: largest ratio of the file's perplexity to the model's perplexity; ``None``, the default, for
            1.01 with int8 and 1.1 with int4.
        tokens: text on which to measure perplexity: token ids, int64 of shape (texts, length), without padding.
            ``tokens=None``, the default, estimates perplexity for text that the model would generate.
        calibration: token ids of a text, int64 of shape (texts, length), without padding. The text is used to round
            with error feedback (GPTQ): each weight compensates the rounding errors of earlier weights. How much it
            compensates depends on how the inputs of the weights correlate in the text. ``calibration=None``, the
            default, uses ``tokens``; without any text, weights are rounded to nearest.
        activations: precision of the activations that are multiplied with quantized weights. ``activations="int8"``
            rounds activations to 8 bits; the activations of a block share a scale. ``"split"`` quantizes small
            activations, and multiplies large activations separately, in float or in 8 bits. ``"float"`` does not
            quantize activations, and needs up to twice the time per token. ``"token"`` is the fastest for encoders. It
            uses one scale for the activations of each token, and one scale for each output of a weight matrix. It
            requires ``weights="int8"``. ``"split"`` and ``"token"`` require a float32 module. ``activations="auto"``,
            the default, tries ``"token"``, ``"int8"``, ``"split"`` and ``"float"`` in this order, and chooses the first
            that is accurate enough. It tries ``"token"`` only for an encoder with a ``calibration`` text.

    Raises:
        InvalidArgumentError: when the value of an argument is not allowed.

    >>> Quantization("int8").bits, Quantization("int8").allowed
    (8, 1.01)
    """

    weights: WeightBits = "int4"
    block_size: int = _BLOCK
    perplexity_ratio: float | None = None
    tokens: torch.Tensor | None = None
    activations: Activations = "auto"
    calibration: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ratio: Any = self.perplexity_ratio
        is_token, blocks, known = self.activations == "token", ", ".join(map(str, _BLOCKS)), get_args(WeightBits)
        refusals = {
            f'weights must be "int8", "int4" or "keep", found {self.weights!r}.': self.weights not in known,
            f"block_size must be one of {blocks}, found {self.block_size!r}.": self.block_size not in _BLOCKS,
            f'activations must be "auto", "float", "int8", "split" or "token", found {self.activations!r}.': (
                self.activations not in get_args(Activations)
            ),
            f'activations="token" needs weights="int8", found {self.weights!r}. Leave activations= out, or take '
            'Quantization("int8", activations="token")': is_token and self.weights != "int8",
            'activations="token" uses one scale for all weights of an output, which contradicts '
            f"block_size={self.block_size}. Leave one argument out.": is_token and self.block_size != _BLOCK,
            f"perplexity_ratio must be a number above 1, found {ratio!r}.": (
                ratio is not None and not (isinstance(ratio, (int, float)) and ratio > 1)
            ),
        }
        for text in (text for text, is_refused in refusals.items() if is_refused):
            raise InvalidArgumentError(f"Quantization: {text}")
        for name, tokens in (("tokens", self.tokens), ("calibration", self.calibration)):
            found = describe_class(tokens)
            if isinstance(tokens, torch.Tensor):
                found = f"{str(tokens.dtype).removeprefix('torch.')} of shape {tuple(tokens.shape)}"
                if tokens.dtype is torch.int64 and tokens.dim() == 2 and len(tokens) and tokens.shape[1] >= 3:
                    continue
            if tokens is not None:
                raise InvalidArgumentError(
                    f"Quantization: {name} must be int64 of shape (texts, length), with 3 tokens or more in each text, "
                    f"found {found}."
                )

    @property
    def bits(self) -> int:
        """Largest number of bits of a stored weight."""
        return 4 if self.weights == "int4" else 8

    @property
    def may_be_by_token(self) -> bool:
        """Whether ``activations="auto"`` may try ``"token"``, which needs int8 weights and a ``calibration`` text."""
        is_open = self.activations == "auto" and self.weights == "int8" and self.block_size == _BLOCK
        return is_open and self.tokens is None and self.calibration is not None

    def block_for(self, bits: int, rows: int) -> int:
        """Return the number of weights that share one scale.

        Args:
            bits: bits per weight of the matrix, 4 or 8.
            rows: number of rows (inputs) of the weight matrix.
        """
        is_wide = bits == 8 and self.bits == 4 and rows % _WIDE_BLOCK == 0
        return max(_WIDE_BLOCK, self.block_size) if is_wide else self.block_size

    @property
    def allowed(self) -> float:
        """Largest allowed ratio of the quantized file's perplexity to the model's perplexity."""
        return self.perplexity_ratio or PERPLEXITY_RATIOS[self.weights]

    def quantize(self, weight: Any) -> tuple[Any, Any, Any]:
        """Quantize a matrix in blocks of input channels; return the packed integers, the scales and the zero points.

        Args:
            weight: a NumPy array of shape (inputs, outputs), float32 or float16.
        """
        quantizer = _library()
        config = quantizer.DefaultWeightOnlyQuantConfig(block_size=self.block_size, is_symmetric=False, bits=self.bits)
        found: tuple[Any, Any, Any] = quantizer.DefaultWeightOnlyQuantizer(config).qbits_block_quant(weight)
        return found


def choose_quantization(
    quantize: WeightBits | Quantization | None, facts: ModelFacts, caller: str, runtime: str = "onnxruntime"
) -> Quantization | None:
    if quantize is None:
        return None
    chosen: Any = quantize
    if isinstance(chosen, str) and chosen in get_args(WeightBits):
        chosen = Quantization(cast("WeightBits", chosen))
    if not isinstance(chosen, Quantization):
        found = repr(chosen) if isinstance(chosen, str) else describe_class(chosen)
        raise InvalidArgumentError(
            f'{caller}: quantize must be None, "int8", "int4", "keep" or a Quantization, found {found}.'
        )
    if not facts.matrix_types:
        raise InvalidArgumentError(
            f"{caller}: quantize={chosen.weights!r} quantizes the weights of linear layers, but {facts.name} has none. "
            "Leave quantize out."
        )
    for other in (dtype for dtype in facts.matrix_types if dtype not in ("float32", "float16")):
        raise InvalidArgumentError(
            f"{caller}: quantize={chosen.weights!r} needs float32 or float16 weights, but {facts.name} has {other} "
            "weights. Convert the weights: model.float()"
        )
    if chosen.activations in ("split", "token") and "float16" in facts.matrix_types:
        raise InvalidArgumentError(
            f'{caller}: activations="{chosen.activations}" needs float32 weights, but {facts.name} has float16 '
            "weights. Leave activations= out, or convert the weights: model.float()"
        )
    if runtime == "onnxruntime":
        _library()
    else:
        _check_tool(chosen, runtime, caller)
    return chosen


def _check_tool(chosen: Quantization, runtime: str, caller: str) -> None:
    asked = f"quantize={chosen.weights!r}"
    if runtime not in ("openvino", "executorch"):
        raise InvalidArgumentError(
            f"{caller}: {asked} is supported for files of onnxruntime, OpenVINO and ExecuTorch, not of {runtime}. "
            'Leave quantize= out, or choose another runtime:\n    target="onnxruntime"  # or "openvino", "executorch"'
        )
    if chosen.activations != "auto":
        raise InvalidArgumentError(
            f"{caller}: activations={chosen.activations!r} is supported for onnxruntime files only. {runtime} chooses "
            "the precision of activations itself: leave activations= out."
        )
    if chosen.weights == "keep":
        if runtime == "executorch":
            raise InvalidArgumentError(
                f"{caller}: {asked} is supported for files of onnxruntime and OpenVINO only, since torchao rounds all "
                f'weights of {runtime} files again. Leave quantize= out, or take quantize="int8"'
            )
    elif runtime == "openvino":
        require("nncf", purpose=f"{caller}: {asked} for OpenVINO", extra="nncf")
    else:
        require("torchao", purpose=f"{caller}: {asked} for ExecuTorch", extra="executorch")
        if chosen.bits == 4 and chosen.block_size % 32:
            raise InvalidArgumentError(
                f"{caller}: XNNPACK needs a block_size of 32, 64, 128 or 256, found {chosen.block_size}. Pass one:\n"
                '    Quantization("int4", block_size=32)'
            )


def nothing_kept(module: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f'quantize="keep": no weight of {module} is stored as integers of 4 or 8 bits with scales. To quantize the '
        'weights: quantize="int4" or quantize="int8" (--quantize int4)'
    )


def remark_of_kept(counts: Mapping[int, int]) -> str:
    listed = " and ".join(f"{count / 1e6:.3g} million in {bits} bits" for bits, count in sorted(counts.items()))
    return f"already integers with scales, stored without rounding again: {listed}."


@functools.cache
def _library() -> Any:
    # the import of onnxruntime's quantizer calls `logging.basicConfig`
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer
    except ImportError as error:
        raise MissingDependencyError(
            f"quantize= needs the quantizer of onnxruntime, which cannot be imported ({first_line(error)}):\n"
            "    pip install --upgrade onnxruntime onnx ml_dtypes onnx_ir"
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        # or it prints a line for every weight where the application logs
        logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    return matmul_nbits_quantizer


logger = logging.getLogger("yobx_flatten")


def measure(
    runner: Runner, quantization: Quantization, source: Source, *, block_size: int, known: list[Texts] | None = None
) -> Quality:
    """Compare the outputs of a quantized file and its module, inside a ``register_flattening_functions`` block."""
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
    """Return the model's losses and logits on a text; calls have the batch size of the example ``kwargs``."""
    found: list[Texts] = []
    kept, texts = 0, tokens.split(len(kwargs["input_ids"]))
    for case, read in zip(text_cases(module, kwargs, tokens), texts, strict=True):
        ((kwargs, eager, _),) = eager_steps(module, case, written)
        scores = eager[SCORES] if isinstance(eager, dict) else getattr(eager, SCORES)
        fits = kept + scores.numel() <= 2**25  # the logits of a long text are larger than the model
        kept += scores.numel() if fits else 0
        found.append((dict(kwargs), read, text_losses(scores, kwargs["input_ids"]), scores.detach() if fits else None))
    return found


def from_the_start(
    feeds: Mapping[str, torch.Tensor], slots: Sequence[CacheSlot], tokens: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Return the inputs of one call that reads a whole text; ``None`` if the file's inputs do not allow it."""
    # feeds: inputs by name, with the first token in the cache
    if not slots and "input_ids" in feeds and feeds["input_ids"].shape == tokens.shape:  # an encoder reads all at once
        return dict(feeds)
    found = {slot.port.name: slot.port for slot in slots}
    made = {name: value for name, value in feeds.items() if name not in found}
    if not {"input_ids"} <= made.keys() <= {"input_ids", "attention_mask", "position_ids"}:
        return None
    made["input_ids"] = tokens
    for name, port in found.items():
        axes = [axis for axis, size in enumerate(port.shape) if axis and size is None]
        is_cache = name.endswith((".key", ".value")) and name in feeds and len(axes) == 1
        if not is_cache or feeds[name].shape[axes[0]] != 1:
            return None
        made[name] = feeds[name].narrow(axes[0], 0, 0).contiguous()
    if "attention_mask" in made and made["attention_mask"].shape != tokens.shape:
        return None
    positions = made.get("position_ids")
    if positions is not None and positions.shape != (len(tokens), tokens.shape[1] - 1):
        return None
    return made if positions is None else {**made, "position_ids": torch.cat([positions[:, :1] - 1, positions], 1)}


def text_scores(runner: Runner, feeds: Mapping[str, torch.Tensor], tokens: torch.Tensor | None) -> torch.Tensor:
    """Return the logits that a file computes for all tokens of a text except the first token."""
    # feeds: inputs by name, with the first token in the cache
    given = {name: feeds[name] for name in runner.ports}
    whole = None
    if tokens is not None and runner.runtime == "onnxruntime":  # files of other runtimes do not accept an empty cache
        whole = from_the_start(given, runner.slots, tokens)
    if whole is not None:
        try:
            return runner.run(whole)[SCORES][:, 1:]  # type: ignore[no-any-return] # a tensor
        except ReplayError:
            logger.debug("%s takes no empty cache", runner.name)
    return runner.run(given)[SCORES]  # type: ignore[no-any-return] # a tensor


def reads_once(kwargs: Mapping[str, Any]) -> bool:
    """Return whether the example inputs are tokens for an encoder, which reads them in one call without a cache."""
    is_text = {"input_ids"} <= kwargs.keys() <= {"input_ids", "attention_mask", "token_type_ids"}
    return is_text and cache_of(kwargs) is None


def rounding_calls(
    example: Example, quantization: Quantization, at_most: tuple[int | None, int | None] = (None, None)
) -> tuple[Sequence[Case], torch.Tensor] | None:
    """Return test cases that read the calibration text, and the tokens of this text; ``None`` without a text."""
    # at_most: the largest number of texts, and of tokens of each text; `None` for all
    tokens = quantization.tokens if quantization.calibration is None else quantization.calibration
    if tokens is None:
        return None
    tokens = tokens[: at_most[0], : at_most[1]]
    if not reads_once(example.kwargs):
        return text_cases(example.module, example.kwargs, tokens), tokens
    cases = []
    for number, read in enumerate(tokens.split(len(example.kwargs["input_ids"]))):
        others = {"input_ids": read, "attention_mask": torch.ones_like(read), "token_type_ids": torch.zeros_like(read)}
        cases.append(Case(f"text {number}", (), {name: others[name] for name in example.kwargs}))
    return cases, tokens


def text_cases(module: torch.nn.Module, kwargs: Mapping[str, Any], tokens: torch.Tensor) -> list[Case]:
    """Return test cases that read a text: the first token is in the cache, all other tokens are ``input_ids``."""
    # kwargs: the example inputs; each call has as many rows
    decoder = module if isinstance(module, SlidingDecoder) else None
    like, cases = None if decoder else kwargs, []
    for number, read in enumerate(tokens.split(len(kwargs["input_ids"]))):
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
    """Weight matrices with the same function in each layer, such as all query projections."""

    name: str  # the common name of the matrices
    count: int  # number of matrices
    size: int  # number of weights in all matrices
    is_last: bool  # whether the last product of the graph, the head, is one of them
    exact: int = 32  # with this number of bits the matrices lose nothing; 32 if they are not integers times scales


def find_bits(roles: Mapping[str, Role], width: int, measured: Callable[[Bits], Quality]) -> tuple[Bits, Quality]:
    """Give weight matrices more bits until the perplexity of the file is close enough to that of the model."""
    # width: the bits of all matrices at the start
    bits: Bits = first_bits(roles, width)
    quality = measured(bits)
    wide = {**bits, **_wide_heads(roles, width)}
    if width == 4 and bits != wide and quality.is_close and quality.chooses_others:
        bits = wide
        quality = measured(bits)
    whole = sum(role.size for role in roles.values())
    while not _is_enough(quality, width) and math.isfinite(quality.max_difference) and width in _WIDER:
        for name in _in_order(roles, bits, _WIDER[width], _badness(quality), measured):
            if bits[name] >= _WIDER[width]:
                continue
            wider = {**bits, name: _WIDER[width]}
            full = sum(role.size for role in roles.values() if wider[role.name] == 32)
            if full / whole > 0.5:  # a file with most weights in float is not a quantized file
                continue
            bits = wider
            quality = measured(bits)
            if _is_enough(quality, width):
                break
        width = _WIDER[width]
    return bits, quality


def first_bits(roles: Mapping[str, Role], bits: int) -> dict[str, int]:
    """Return the number of bits per weight with which :func:`find_bits` begins, by the name of the :class:`Role`."""
    found = dict.fromkeys(roles, bits)
    wide = found | _wide_heads(roles, bits)
    return wide if are_exact(wide, roles) else found  # the LM head gets more bits if no weight is then rounded


def are_exact(bits: Bits, roles: Mapping[str, Role]) -> bool:
    """Return whether no weight is rounded, because every matrix consists of integers of at most ``bits`` bits."""
    return all(role.exact <= bits[name] <= 8 for name, role in roles.items())


def _wide_heads(roles: Mapping[str, Role], bits: int) -> dict[str, int]:
    heads = [role.name for role in roles.values() if role.is_last and role.exact > bits]
    return {name: _WIDER[bits] for name in heads if bits in _WIDER}


def _is_enough(quality: Quality, width: int) -> bool:
    return quality.is_close if width == 4 else quality.ok


def _in_order(
    roles: Mapping[str, Role], bits: Bits, wider: int, before: float, measured: Callable[[Bits], Quality]
) -> Iterator[str]:
    """Yield the names of roles whose matrices may get more bits: first the LM head, then by the gain per weight."""
    lossy = [role for role in roles.values() if role.exact > bits[role.name]]
    rest = [role for role in lossy if not role.is_last]
    yield from (role.name for role in lossy if role.is_last)
    gains = {}
    for role in rest if len(rest) > 1 else ():
        logger.info("measuring %s in %d bits", role.name, wider, extra=STEP)
        gains[role.name] = (before - _badness(measured({**bits, role.name: wider}))) / role.size
    yield from sorted((role.name for role in rest), key=lambda name: gains.get(name, 0.0), reverse=True)


def _badness(quality: Quality) -> float:
    if quality.text_divergence is not None:
        return quality.text_divergence
    ratio = quality.perplexity_ratio
    return quality.relative_difference**2 if ratio is None else math.log(ratio)
