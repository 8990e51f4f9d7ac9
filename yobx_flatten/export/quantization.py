"""The options of quantization, which are checked before anything is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args

import torch

from ..errors import InvalidArgumentError, MissingDependencyError, describe_class
from ..errors.dependencies import require
from ..errors.failures import first_line
from .model_facts import ModelFacts

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
        weights: type of the stored weights: ``"int4"``, the default, or ``"int8"``. Weights that are integers times
            scales already, such as the weights of a GGUF file, are not rounded again if their integers have at most as
            many bits. ``"keep"`` stores only such weights as integers, and all others unchanged.
        block_size: number of weights that share a scale and a zero point: 16, 32 (the default), 64, 128 or 256. With
            larger blocks the file is smaller and faster, and differs more from the model. ExecuTorch has no blocks of
            16; OpenVINO and ExecuTorch store int8 with one scale for each output.
        perplexity_ratio: largest ratio of the file's perplexity to the model's perplexity; ``None``, the default, for
            1.01 with int8 and 1.1 with int4.
        tokens: a text for the perplexity, int64 of shape (texts, length), without padding. ``None``, the default, for
            the text that the model itself would write, see :class:`.quality.Quality`.
        calibration: a text, int64 of shape (texts, length), without padding, for rounding with error feedback (GPTQ):
            each weight compensates the rounding errors of earlier weights whose inputs are correlated in this text.
            ``None``, the default, for ``tokens``; without both texts, weights are rounded to nearest.
        activations: precision of the activations that are multiplied with quantized weights. ``"int8"`` quantizes the
            activations in blocks. ``"split"`` quantizes small values, and multiplies large values separately, in float
            or in a second 8-bit part. ``"float"`` does not quantize activations, and a token takes up to twice as long.
            ``"token"``, for int8 and float32 weights, has one scale for each token and one for each output of a matrix,
            which is the fastest for encoders. ``"auto"``, the default, is ``"int8"``, unless the error of a language
            model would then be larger than the error from its weights; then ``"split"`` if that is accurate enough,
            else ``"float"``. For an encoder with a ``calibration`` text, it is ``"token"`` if that is accurate enough.

    Raises:
        InvalidArgumentError: when an argument has no allowed value.

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
        if self.weights not in get_args(WeightBits):
            raise InvalidArgumentError(
                f'Quantization: weights must be "int8", "int4" or "keep", found {self.weights!r}.'
            )
        if self.block_size not in _BLOCKS:
            raise InvalidArgumentError(
                f"Quantization: block_size must be one of {', '.join(map(str, _BLOCKS))}, found {self.block_size!r}."
            )
        if self.activations not in get_args(Activations):
            raise InvalidArgumentError(
                f'Quantization: activations must be "auto", "float", "int8", "split" or "token", found '
                f"{self.activations!r}."
            )
        if self.activations == "token" and self.weights != "int8":
            raise InvalidArgumentError(
                f'Quantization: activations="token" needs weights="int8", found {self.weights!r}. Leave activations= '
                'out, or take Quantization("int8", activations="token")'
            )
        if self.activations == "token" and self.block_size != _BLOCK:
            raise InvalidArgumentError(
                'Quantization: activations="token" uses one scale for all weights of an output, which contradicts '
                f"block_size={self.block_size}. Leave one argument out."
            )
        ratio: Any = self.perplexity_ratio
        if ratio is not None and not (isinstance(ratio, (int, float)) and ratio > 1):
            raise InvalidArgumentError(f"Quantization: perplexity_ratio must be a number above 1, found {ratio!r}.")
        for name, tokens in (("tokens", self.tokens), ("calibration", self.calibration)):
            if tokens is not None and not _is_text(tokens):
                raise InvalidArgumentError(
                    f"Quantization: {name} must be int64 of shape (texts, length), with 3 tokens or more in each text, "
                    f"found {_describe(tokens)}."
                )

    @property
    def bits(self) -> int:
        """Largest number of bits of a stored weight."""
        return 4 if self.weights == "int4" else 8

    @property
    def may_be_by_token(self) -> bool:
        """Whether activations may be quantized with one scale per token, if that is accurate enough."""
        is_open = self.activations == "auto" and self.weights == "int8" and self.block_size == _BLOCK
        return is_open and self.tokens is None and self.calibration is not None

    def block_for(self, bits: int, rows: int) -> int:
        """Return how many weights of one matrix share a scale.

        Args:
            bits: bits of the matrix, 4 or 8.
            rows: number of inputs of the matrix.
        """
        is_wide = bits == 8 and self.bits == 4 and rows % _WIDE_BLOCK == 0
        return max(_WIDE_BLOCK, self.block_size) if is_wide else self.block_size

    @property
    def allowed(self) -> float:
        """Largest allowed ratio of the quantized file's perplexity to the model's perplexity."""
        return self.perplexity_ratio or PERPLEXITY_RATIOS[self.weights]

    def quantize(self, weight: Any) -> tuple[Any, Any, Any]:
        """Quantize a matrix in blocks along its rows; return the packed bits, the scales and the zero points.

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
    """Return the requested quantization after a check; ``None`` if the weights are not quantized."""
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
            f"{caller}: quantize={chosen.weights!r} quantizes the weights of projections, but {facts.name} has none. "
            "Leave quantize out."
        )
    other = next((dtype for dtype in facts.matrix_types if dtype not in ("float32", "float16")), None)
    if other is not None:
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
    """Check that the quantizer of another runtime is installed."""
    asked = f"quantize={chosen.weights!r}"
    if runtime not in ("openvino", "executorch"):
        raise InvalidArgumentError(
            f"{caller}: {asked} is for files of onnxruntime, OpenVINO and ExecuTorch, not of {runtime}: leave it out, "
            'or take\n    target="onnxruntime"  # or "openvino", "executorch"'
        )
    if chosen.activations != "auto":
        raise InvalidArgumentError(
            f"{caller}: activations={chosen.activations!r} is for onnxruntime files only; {runtime} decides this "
            "itself. Leave activations= out."
        )
    if chosen.weights == "keep":
        if runtime == "executorch":
            raise InvalidArgumentError(
                f"{caller}: {asked} is for files of onnxruntime and OpenVINO; the tools of {runtime} round weights "
                'themselves. Leave quantize= out, or take quantize="int8"'
            )
    elif runtime == "openvino":
        require("nncf", purpose=f"{caller}: {asked} for OpenVINO", extra="nncf")
    else:
        require("torchao", purpose=f"{caller}: {asked} for ExecuTorch", extra="executorch")
        if chosen.bits == 4 and chosen.block_size % 32:
            raise InvalidArgumentError(
                f"{caller}: XNNPACK has blocks of 32, 64, 128 and 256 weights, found {chosen.block_size}:\n"
                '    Quantization("int4", block_size=32)'
            )


def nothing_kept(module: str) -> InvalidArgumentError:
    """Return the error for ``quantize="keep"`` of a module without weights that are integers times scales."""
    return InvalidArgumentError(
        f'quantize="keep": no weight of {module} is stored as integers of 4 or 8 bits with scales. To quantize them: '
        'quantize="int4" or quantize="int8" (--quantize int4)'
    )


def remark_of_kept(counts: Mapping[int, int]) -> str:
    """Return a note on how many weights are stored as their original integers, by the bits of these integers."""
    listed = " and ".join(f"{count / 1e6:.3g} million in {bits} bits" for bits, count in sorted(counts.items()))
    return f"already integers with scales, stored without rounding again: {listed}."


def _is_text(tokens: Any) -> bool:
    is_tensor = isinstance(tokens, torch.Tensor) and tokens.dtype is torch.int64
    return is_tensor and tokens.dim() == 2 and tokens.shape[0] >= 1 and tokens.shape[1] >= 3


def _describe(tokens: Any) -> str:
    if isinstance(tokens, torch.Tensor):
        return f"{str(tokens.dtype).removeprefix('torch.')} of shape {tuple(tokens.shape)}"
    return describe_class(tokens)


@functools.cache
def _library() -> Any:
    """Import onnxruntime's quantizer."""
    try:
        with _without_handlers():
            from onnxruntime.quantization import matmul_nbits_quantizer
    except ImportError as error:
        raise MissingDependencyError(
            f"quantize= needs the quantizer of onnxruntime, which cannot be imported ({first_line(error)}):\n"
            "    pip install --upgrade onnxruntime onnx ml_dtypes onnx_ir"
        ) from error
    return matmul_nbits_quantizer


@contextlib.contextmanager
def _without_handlers() -> Iterator[None]:
    """Restore the root logger after the block: the import of the quantizer calls ``logging.basicConfig``."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        # or it prints a line for every weight where the application logs
        logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
