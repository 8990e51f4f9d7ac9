"""Replace a file that passed its replay by one with quantised weights, and measure how far that one is from the model.

.. code-block:: text

    file in float ──> replay: the structure is right ──> weight after weight in fewer bits ──> file
                                                                   model ──> distance <── replay
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..errors.log import STEP
from ..huggingface.sliding_decoder import SlidingDecoder
from ..runners.onnx_runner import OnnxRunner
from ..runners.onnx_session import open_session
from ..trees.naming import output_names
from .example import Example
from .onnx_file import UnprovenFile
from .padding import Padding
from .program import following
from .quality import SCORES, Distance, Quality, text_losses
from .quantization import Quantization
from .quantize import quantize_model
from .replay import Case, clone, eager_steps
from .report import ExportReport
from .sides import ByName
from .text_cases import text_cases
from .traced import Traced
from .undisturbed import seeded

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
        report.quality = _measure(file, quantization, example, traced, cases)


def _measure(
    file: UnprovenFile, quantization: Quantization, example: Example, traced: Traced, cases: Sequence[Case]
) -> Quality:
    module, distance = example.module, Distance()
    runner = OnnxRunner(open_session(file.path, caller="export_onnx"), file.path.name)
    side = ByName(runner, example.names, example.cache_is)
    after = module.next_inputs if isinstance(module, SlidingDecoder) else following()
    for case in cases:
        logger.info("comparing %s", case.name, extra=STEP)
        outputs: Any = None
        padding = Padding()
        for index, (kwargs, eager) in enumerate(eager_steps(module, case, after, traced.written)):
            padding.next_call(dict(kwargs))
            with seeded(index):
                outputs = side.run(clone(case.args), kwargs if index == 0 else side.feed_back(kwargs, outputs))
            names = output_names(eager, example.names)
            expected = dict(zip(names, pytree.tree_leaves(padding.blank_leaves(eager, names)), strict=True))
            tensors = {n: v for n, v in expected.items() if isinstance(v, torch.Tensor) and n in outputs}
            distance.add(tensors, {name: padding.blank(name, outputs[name]) for name in tensors})
    tokens = quantization.tokens
    for case in [] if tokens is None else text_cases(module, example.kwargs, tokens):
        ((kwargs, eager),) = eager_steps(module, case, after, traced.written)
        read = kwargs["input_ids"]
        scores = eager[SCORES] if isinstance(eager, dict) else getattr(eager, SCORES)
        found = side.run((), kwargs)[SCORES]
        distance.add_text(text_losses(scores, read), text_losses(found, read))
    return distance.quality(quantization)
