"""Replace a proven ONNX file by a quantised one, and measure the difference to the model.

.. code-block:: text

    file in float ──> replay: the structure is right ──> weight after weight in fewer bits ──> file
                                                                   model ──> distance <── replay
"""

from __future__ import annotations

import functools
import shutil

from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import open_session
from ..proof.quality import Quality
from ..proof.report import ExportReport
from ..quantization.bit_budget import Bits, Budget
from ..quantization.measure import Texts, measure
from ..quantization.options import Quantization
from ..source import Source
from .file import UnprovenFile
from .kept_integers import Grids
from .quantize import products_of, quantize_model, remark_quantized
from .rounded_by_text import round_by_text

__all__ = ["quantize_file"]

_NOTICED = 3e-4
"""Divergence, in nats, at which about one greedy token in a hundred differs from the model's."""


def quantize_file(
    file: UnprovenFile, quantization: Quantization, source: Source, report: ExportReport
) -> Quality | None:
    """Quantize a file that passed its replay; return how far it is from the model. The block must be open."""
    import onnx_ir as ir

    grids = Grids()
    with report.timed("quantize"):
        roles = quantize_model(ir.load(file.path), quantization, report, grids=grids).roles
    with report.timed("round"):
        model = ir.load(file.path)
        rounded = round_by_text(file, model.graph, products_of(model, quantization), quantization, source, grids)
    known: list[Texts] = []

    def try_bits(bits: Bits, *, rounds_inputs: bool) -> Quality:
        trial = UnprovenFile(file.target, file.folder / "trial")
        trial.folder.mkdir()
        try:
            with report.timed("quantize"):
                model = ir.load(file.path)  # large weights stay in their file, which is mapped
                quantize_model(model, quantization, report, bits, grids, rounded, rounds_inputs=rounds_inputs)
                trial.save_model(model)
            with report.timed("measure"):
                runner = OnnxRunner(open_session(trial.path, caller="export_onnx"), file.path.name)
                return measure(runner, quantization, source, known=known)
        finally:
            shutil.rmtree(trial.folder)

    bits: Bits = dict.fromkeys(roles, quantization.bits)
    is_kept, asked, quality = quantization.weights == "keep", quantization.activations, None
    rounds_inputs = asked == "int8" or (asked == "auto" and not is_kept)  # where nothing is rounded, nothing is
    if source.cases:
        measure_bits = functools.partial(try_bits, rounds_inputs=rounds_inputs)
        bits, quality = (bits, measure_bits(bits)) if is_kept else Budget(roles, quantization.bits, measure_bits).find()
        if rounds_inputs and asked == "auto" and _loss(quality) > _NOTICED:
            exact = try_bits(bits, rounds_inputs=False)
            if _loss(quality) > 2 * _loss(exact):
                report.remark(
                    "rounding what is multiplied with these weights to 8 bits would cost more than the rounding of the "
                    f"weights: {_loss(quality):.1e} nats of divergence, not {_loss(exact):.1e}."
                )
                quality, rounds_inputs = exact, False
    if not rounds_inputs and asked == "auto":
        report.remark(
            'what is multiplied with these weights is not rounded: a token takes less time with activations="int8" '
            "(--activations int8), and is further from the model's."
        )
    with report.timed("quantize"):
        model = ir.load(file.path)
        found = quantize_model(model, quantization, report, bits, grids, rounded, rounds_inputs=rounds_inputs)
        remark_quantized(found, quantization, report, bits)
        report.onnx_bytes = file.replace_by(model)
    return quality


def _loss(quality: Quality) -> float:
    """How far the scores are from the model's, in nats; 0 for outputs that are no scores."""
    found = quality.divergence if quality.text_divergence is None else quality.text_divergence
    return found or 0.0
