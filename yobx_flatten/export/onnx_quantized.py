"""Replace a file that passed its replay by one with quantised weights, and measure how far that one is from the model.

.. code-block:: text

    file in float ──> replay: the structure is right ──> weight after weight in fewer bits ──> file
                                                                   model ──> distance <── replay
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors.log import STEP
from ..runners.onnx_runner import OnnxRunner
from ..runners.onnx_session import open_session
from .example import Example
from .measured import measure
from .onnx_file import UnprovenFile
from .quantization import Quantization
from .quantize import quantize_model
from .replay import Case
from .report import ExportReport
from .traced import Traced

__all__ = ["quantize_file"]

logger = logging.getLogger("yobx_flatten")


def quantize_file(
    file: UnprovenFile,
    quantization: Quantization,
    example: Example,
    traced: Traced,
    cases: Sequence[Case],
    report: ExportReport,
) -> None:
    """Quantize a file that passed its replay, and compare it with the model. The block must be open.

    Args:
        file: the file; its weights are replaced.
        quantization: how.
        example: what the program was traced from.
        traced: the program that was converted.
        cases: what the file was replayed with.
        report: gets the quality, the new size, times and notes.

    Raises:
        InvalidArgumentError: when the file multiplies with no weights.
    """
    logger.info("quantizing %s to %s", file.path.name, quantization.weights, extra=STEP)
    with report.timed("quantize"):
        import onnx_ir as ir

        model = ir.load(file.path)  # large weights stay in their file, which is mapped
        quantize_model(model, quantization, report)
        report.onnx_bytes = file.replace_by(model)
    if not cases:
        return
    report.remark("the table is of the file before its weights were quantised.")
    with report.timed("measure"):
        runner = OnnxRunner(open_session(file.path, caller="export_onnx"), file.path.name)
        report.quality = measure(runner, quantization, example, traced, cases)
