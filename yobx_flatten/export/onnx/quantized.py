"""Replace a checked ONNX file by a quantised one, and measure the difference to the model.

.. code-block:: text

    file in float ──> replay: the structure is right ──> weight after weight in fewer bits ──> file
                                                                   model ──> distance <── replay
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import open_session
from ..proof.eager_runs import Texts
from ..proof.quality import Quality
from ..proof.report import ExportReport
from ..quantization.bit_budget import Bits, Budget
from ..quantization.measure import measure
from ..quantization.options import Quantization
from ..quantization.text_cases import reads_once
from ..source import Source
from .by_token import products_by_token
from .file import UnprovenFile
from .quantize import QuantizedWeights, products_of, quantize_model, remark_quantized
from .rounding.error_feedback import RoundedMatrices, round_by_text
from .rounding.input_moments import input_splits
from .split_inputs import InputSplits
from .stored_matrix import Grids

_NOTICED = 3e-4
"""Divergence, in nats, at which about one greedy token in a hundred differs from the model's."""

_NEAR = 0.1
"""Root mean square of the difference of outputs, relative to these, that one scale for each token may cost."""

_CLOSE = 2e-3
"""The same for two tokens, which is what inputs in two parts may cost with the rounding of the weights."""


def quantize_file(
    file: UnprovenFile, quantization: Quantization, source: Source, report: ExportReport
) -> Quality | None:
    """Quantize a file that passed its replay; return how far it is from the model. The block must be open."""
    import onnx_ir as ir

    grids = Grids()
    with report.timed("quantize"):
        model = ir.load(file.path)
        roles = quantize_model(model, quantization, report, grids=grids).roles
    if quantization.activations == "token" or (quantization.may_be_by_token and _is_by_token(file, source, grids)):
        quality, is_enough = _quantize_by_token(file, quantization, source, report, grids)
        if is_enough:
            return quality
    with report.timed("round"):
        model = ir.load(file.path)
        rounded = round_by_text(file, model.graph, products_of(model, quantization), quantization, source, grids)
    known = source.example.runs.texts
    large: RoundedMatrices = {}  # those with rows for large channels of split inputs

    def quantized(bits: Bits, *, rounds_inputs: bool, splits: InputSplits | None) -> tuple[Any, QuantizedWeights]:
        with report.timed("quantize"):
            model = ir.load(file.path)  # large weights stay in their file, which is mapped
            parts = bits, grids, rounded | (large if splits else {})
            how: dict[str, Any] = {"rounds_inputs": rounds_inputs, "splits": splits}
            return model, quantize_model(model, quantization, report, *parts, **how)

    def try_bits(bits: Bits, *, rounds_inputs: bool, splits: InputSplits | None = None) -> Quality:
        model, found = quantized(bits, rounds_inputs=rounds_inputs, splits=splits)
        return _measured(model, found, file, quantization, source, report, known)

    bits: Bits = dict.fromkeys(roles, quantization.bits)
    is_kept, asked, quality = quantization.weights == "keep", quantization.activations, None
    rounds_inputs = asked == "int8" or (asked == "auto" and not is_kept)  # where nothing is rounded, nothing is
    splits: InputSplits = {}
    # rounding inputs costs more than rounding weights to 8 bits, and less than rounding them to 4
    inputs_first = quantization.bits == 8 and not is_kept
    if source.cases:
        measured = functools.partial(try_bits, rounds_inputs=rounds_inputs)
        searched = functools.partial(Budget, roles, quantization.bits)
        bits, quality = (bits, measured(bits)) if is_kept or inputs_first else searched(measured).find()
        if rounds_inputs and asked == "auto" and _loss(quality) > _NOTICED:
            # in 4 bits float inputs are read by their own kernel, which is faster for a prompt
            splits = _splits(file, quantization, source, report) if quantization.bits == 8 else {}
            if splits:  # in other blocks, and by moments of other inputs, than those that are read whole
                with report.timed("round"):
                    model = ir.load(file.path)
                    products = products_of(model, quantization)
                    large = round_by_text(file, model.graph, products, quantization, source, grids, splits)
            as_is = functools.partial(try_bits, bits, rounds_inputs=False)
            quality, rounds_inputs, splits = _choose_inputs(quality, splits, as_is, report)
        if inputs_first and not quality.ok:
            bits, quality = searched(functools.partial(try_bits, rounds_inputs=rounds_inputs, splits=splits)).find()
    if not rounds_inputs and asked == "auto" and not splits:
        report.remark(
            'the activations are not quantized: activations="int8" (--activations int8) is faster, and less exact.'
        )
    model, found = quantized(bits, rounds_inputs=rounds_inputs, splits=splits)
    remark_quantized(found, quantization, report, bits)
    with report.timed("quantize"):
        report.onnx_bytes = file.replace_by(model)
    return quality


def _is_by_token(file: UnprovenFile, source: Source, grids: Grids) -> bool:
    """Whether a file reads many tokens at once, with weights in float32 that are no integers already."""
    import onnx_ir as ir

    if not source.cases or not reads_once(source.example.kwargs):
        return False
    weights = [weight for _, weight in products_of(ir.load(file.path), Quantization("int8"))]
    are_floats = all(value.const_value.dtype.name == "FLOAT" for value, _ in weights)
    return are_floats and not any(grids.is_exact(value, 8, transposed=turned) for value, turned in weights)


def _quantize_by_token(
    file: UnprovenFile, quantization: Quantization, source: Source, report: ExportReport, grids: Grids
) -> tuple[Quality | None, bool]:
    """Quantize products with a scale for each token and each output, and all others in blocks.

    Return the quality, and whether it is enough; if not, the file is left as it is.
    """
    import onnx_ir as ir

    with report.timed("quantize"):
        model = ir.load(file.path)
        found = products_by_token(file, model, quantization, source)
        found = quantize_model(model, quantization, report, grids=grids, found=found)
    quality = _measured(model, found, file, quantization, source, report, []) if source.cases else None
    is_asked = quantization.activations == "token"
    if quality is not None and not is_asked and not (quality.ok and quality.relative_difference <= _NEAR):
        return quality, False
    remark_quantized(found, quantization, report)
    with report.timed("quantize"):
        report.onnx_bytes = file.replace_by(model)
    return quality, True


def _measured(
    model: Any,
    found: QuantizedWeights,
    file: UnprovenFile,
    quantization: Quantization,
    source: Source,
    report: ExportReport,
    known: list[Texts],
) -> Quality:
    """Write a model to a separate file, and measure that."""
    # found: what was stored in fewer bits
    # known: what the model makes of the text, filled by a first call for others
    trial = UnprovenFile(file.target, file.folder / "trial")
    trial.folder.mkdir()
    try:
        with report.timed("quantize"):
            trial.save_model(model)
        with report.timed("measure"):
            runner = OnnxRunner(open_session(trial.path, caller="export_onnx"), file.path.name)
            return measure(runner, quantization, source, block_size=found.block_size, known=known)
    finally:
        shutil.rmtree(trial.folder)


def _splits(file: UnprovenFile, quantization: Quantization, source: Source, report: ExportReport) -> InputSplits:
    """How inputs of the file are split, found on the file in float."""
    import onnx_ir as ir

    with report.timed("splits"):
        model = ir.load(file.path)
        return input_splits(file, model.graph, products_of(model, quantization), quantization, source)


def _choose_inputs(
    whole: Quality, splits: InputSplits, measured: Callable[..., Quality], report: ExportReport
) -> tuple[Quality, bool, InputSplits]:
    """Choose inputs in two parts, or as they are, where rounding them whole costs more than rounding the weights."""
    # measured: measures the file with inputs that are split so, or with none as they are
    # returned: the quality, whether inputs are rounded whole, and how they are split
    parted = measured(splits=splits) if splits else None
    if parted is None or _loss(parted) > min(_CLOSE, _loss(whole) / 2):
        exact = measured(splits={})
        if _loss(whole) <= 2 * _loss(exact):
            return whole, True, {}
        if parted is None or _loss(parted) > 2 * _loss(exact):
            report.remark(
                "quantizing the activations to 8 bits would cost more than quantizing the weights: "
                f"{_loss(whole):.1e} nats of divergence, not {_loss(exact):.1e}."
            )
            return exact, False, {}
    report.remark(
        "the activations are quantized to 8 bits in two parts, small values and the rest of large ones: "
        f"{_loss(parted):.1e} nats of divergence, in one part {_loss(whole):.1e}. "
        'activations="float" (--activations float) keeps them, and is slower.'
    )
    return parted, False, splits


def _loss(quality: Quality) -> float:
    """How far the scores are from the model's, in nats; 0 for outputs that are no scores."""
    found = quality.divergence if quality.text_divergence is None else quality.text_divergence
    return found or 0.0
