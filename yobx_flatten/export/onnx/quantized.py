"""Replace a proven ONNX file by a quantised one, and measure the difference to the model.

.. code-block:: text

    file in float ──> replay: the structure is right ──> weight after weight in fewer bits ──> file
                                                                   model ──> distance <── replay
"""

from __future__ import annotations

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
from .quantize import quantize_model, remark_quantized

__all__ = ["quantize_file"]


def quantize_file(
    file: UnprovenFile, quantization: Quantization, source: Source, report: ExportReport
) -> Quality | None:
    """Quantize a file that passed its replay; return how far it is from the model. The block must be open."""
    import onnx_ir as ir

    grids = Grids()
    with report.timed("quantize"):
        roles = quantize_model(ir.load(file.path), quantization, report, grids=grids).roles
    known: list[Texts] = []

    def try_bits(bits: Bits) -> Quality:
        trial = UnprovenFile(file.target, file.folder / "trial")
        trial.folder.mkdir()
        try:
            with report.timed("quantize"):
                model = ir.load(file.path)  # large weights stay in their file, which is mapped
                quantize_model(model, quantization, report, bits, grids)
                trial.save_model(model)
            with report.timed("measure"):
                runner = OnnxRunner(open_session(trial.path, caller="export_onnx"), file.path.name)
                return measure(runner, quantization, source, known=known)
        finally:
            shutil.rmtree(trial.folder)

    bits: Bits = dict.fromkeys(roles, quantization.bits)
    quality = None
    if source.cases and quantization.weights == "keep":
        quality = try_bits(bits)
    elif source.cases:
        bits, quality = Budget(roles, quantization.bits, try_bits).find()
    with report.timed("quantize"):
        model = ir.load(file.path)
        remark_quantized(quantize_model(model, quantization, report, bits, grids), quantization, report, bits)
        report.onnx_bytes = file.replace_by(model)
    return quality
