"""Replay cases with an ONNX file in onnxruntime, and report sizes that the file cannot run."""

from __future__ import annotations

import itertools
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ReplayError
from ...errors.log import STEP
from ...errors.messages import first_line
from ...huggingface.cache_names import CACHE, argument_of
from ...huggingface.sliding_decoder import SlidingDecoder
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import has_mapped_weights, mapped_options, open_session
from ..example.example import Example
from ..program.traced import Traced
from ..proof.exported_call import ByName
from ..proof.replay import Case, CaseResult, following, replay
from ..proof.report import ExportReport
from ..proof.shared_memory import InSharedMemory
from ..tolerance import explained_by

__all__ = ["replay_file"]

logger = logging.getLogger("yobx_flatten")


def replay_file(
    path: pathlib.Path, example: Example, traced: Traced, cases: Sequence[Case], report: ExportReport
) -> None:
    """Replay cases with a file. The block must be open."""
    # report: gets one result per case, times and notes; where the file cannot be loaded, one result that states why
    report.remark(*_remarks(example, traced))
    if not cases:
        return
    module = example.module
    try:
        with report.timed("load"):
            # the module can also be in memory
            options = mapped_options(path) if has_mapped_weights(path) else None
            session = open_session(path, caller="export_onnx", options=options)
            runner = OnnxRunner(session, path.name)
    except ReplayError as error:
        reason = _why_not_loaded(module, error.__cause__ or error)
        report.cases.append(CaseResult("(loading)", OnnxRunner.runtime, 0, {}, 0.0, reason))
        return
    types = zip(traced.output_names, traced.output_types, strict=True)
    pairs = [name for name, dtype in types if dtype is not None and dtype.is_complex]
    sides = [ByName(runner, example.names, pairs)]
    if runner.shared:
        sides.append(ByName(InSharedMemory(session, path.name), example.names, pairs))
    after = module.next_inputs if isinstance(module, SlidingDecoder) else following()
    for case, side in itertools.product(cases, sides):
        logger.info("replaying %s with %s", case.name, side.runtime, extra=STEP)
        with report.timed("replay"):
            how: dict[str, Any] = {"taken": example.names, "written": traced.written}
            how["allowed"] = explained_by(report, case)
            result = replay(side, module, case, after, **how)
        report.cases.append(result)


def _remarks(example: Example, traced: Traced) -> list[str]:
    """What the file cannot do although the module can."""
    remarks = []
    if traced.written:
        remarks.append(
            f"an ONNX file keeps nothing from call to call: {', '.join(traced.written)} is at every call what it was "
            "at the export."
        )
    if traced.drawing:
        remarks.append(
            "onnxruntime draws random numbers of its own, so that differences to it mean nothing: export what "
            "draws none (module.eval()), or pass them as an input."
        )
    takes = argument_of(example.module.forward) is not None
    can_generate: Any = getattr(example.module, "can_generate", None)
    generates = callable(can_generate) and can_generate()
    if generates and takes and not any(name.startswith(f"{CACHE}.") for name in traced.input_names):
        remarks.append(
            "this file takes no cache: each call reads all tokens from the first on. For one that goes on from a "
            "cache: export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...), or "
            "export_folder(model, folder)."
        )
    return remarks


def _why_not_loaded(module: torch.nn.Module, error: BaseException) -> str:
    """What onnxruntime reports about a file that it does not load, and what to do about it."""
    reported = f"{type(error).__name__}: {first_line(error)[:300]}"
    weights = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters()}
    half = sorted(weights & {"bfloat16", "float16"})
    if "NOT_IMPLEMENTED" in reported and half:
        reported += (
            f"\n    onnxruntime lacks kernels for {half[0]} on the CPU, so nothing can be proven there. Export "
            'in float32 (or float16), or keep it for another provider: keep_failed="a folder"'
        )
    return reported
