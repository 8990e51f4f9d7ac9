"""Replay cases with an ONNX file in onnxruntime, and report sizes that the file cannot run."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import FlattenError
from ...errors.messages import first_line
from ...huggingface.cache_names import CACHE, argument_of
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import has_mapped_weights, mapped_options, open_session
from ..example.example import Example
from ..program.traced import Traced
from ..proof.exported_call import ByName
from ..proof.last_scores import check_last_scores
from ..proof.replay import Side
from ..proof.report import ExportReport
from ..proof.shared_memory import InSharedMemory
from ..room import Adapter
from ..source import Source, replay_cases, replay_file


def replay_onnx(path: pathlib.Path, source: Source, report: ExportReport) -> None:
    """Replay the cases with a file, and note what it cannot do. The block must be open."""
    example, traced = source.example, source.traced
    report.remark(*_remarks(example, traced))
    runners: list[OnnxRunner] = []

    def sides(adapter: Adapter | None = None) -> Sequence[Side]:
        used = runners if adapter is None else [one.with_adapter(adapter.matrices) for one in runners]
        return [ByName(one, example.names, traced.complex_outputs, traced.constant_outputs) for one in used]

    def load() -> Sequence[Side]:
        # the module can also be in memory
        options = mapped_options(path) if has_mapped_weights(path) else None
        session = open_session(path, caller="export_onnx", options=options)
        runner = OnnxRunner(session, path.name)
        check_last_scores(runner, example.names, source.cases)
        runners.extend([runner, InSharedMemory(session, path.name)] if runner.shared else [runner])
        return sides()

    replay_file(load, source, report, functools.partial(_why_not_loaded, example.module))
    for adapter in source.adapters if runners else ():
        with adapter.active():  # new cases: what a type costs is measured of each
            cases = [dataclasses.replace(case, name=f"{adapter.name}: {case.name}") for case in source.cases]
            replay_cases(sides(adapter), example, traced, cases, report)


def _remarks(example: Example, traced: Traced) -> list[str]:
    """What the file cannot do although the module can."""
    remarks = []
    if traced.written:
        remarks.append(
            f"an ONNX file keeps no state between calls: {', '.join(traced.written)} always has the value of the "
            "export."
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


def _why_not_loaded(module: torch.nn.Module, failure: FlattenError) -> str:
    """What onnxruntime reports about a file that it does not load, and what to do about it."""
    error = failure.__cause__ or failure
    reported = f"{type(error).__name__}: {first_line(error)[:300]}"
    weights = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters()}
    half = sorted(weights & {"bfloat16", "float16"})
    if "NOT_IMPLEMENTED" in reported and half:
        reported += (
            f"\n    onnxruntime lacks kernels for {half[0]} on the CPU, so nothing can be proven there. Export "
            'in float32 (or float16), or keep it for another provider: keep_failed="a folder"'
        )
    return reported
