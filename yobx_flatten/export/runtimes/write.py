"""Write a program for a runtime, replay it there, and publish it if it passes.

.. code-block:: text

    export_program ──> program, example, cases ──┬──> to_onnx         .onnx    onnxruntime
                                                 ├──> to_aotinductor  .pt2     AOTInductor
                                                 ├──> to_executorch   .pte     ExecuTorch
                                                 └──> to_openvino     .xml     OpenVINO
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...declare.scopes import options_in_use, register_flattening_functions
from ...errors import DynamicShapesError, FlattenError, InvalidArgumentError, ReplayError
from ...errors.dependencies import require
from ...errors.log import STEP
from ...errors.messages import first_line
from ...errors.tried_versions import naming_untried_versions
from ...huggingface.sliding_decoder import SlidingDecoder
from ...runners.executorch_runner import require_executorch
from ...runners.open import RUNTIMES, check_runtime, open_runner
from ..example.example import Example
from ..free_space import check_room
from ..onnx.attempts import write_proven
from ..onnx.file import UnprovenFile, check_opset, unproven_file
from ..onnx.kernels import check_kernels
from ..program.traced import Traced, trace
from ..proof.exported_call import ByName
from ..proof.replay import Case, CaseResult, following, replay
from ..proof.report import ExportReport
from ..proof.yardstick import Yardstick
from ..quantization.measure import measure
from ..quantization.options import Quantization, WeightBits, choose_quantization
from ..quantization.runtimes import blocks_of, compress_openvino, quantized_example
from ..quantization.text_cases import check_text
from ..tolerance import Allowed, explained_by
from .aotinductor import check_compiler, write_package
from .executorch import Backend, check_backend, write_pte
from .openvino import write_openvino
from .without_counter import without_counter

__all__ = ["Source", "check_libraries", "write_for"]

logger = logging.getLogger("yobx_flatten")


@dataclasses.dataclass(frozen=True)
class Source:
    """What every file is made of."""

    example: Example  # the module with its arguments
    traced: Traced  # the program
    cases: Sequence[Case]  # what is replayed
    allowed: Allowed  # what outputs may differ by from the module
    proof: str  # what is replayed, for the report
    # whether the program was handed over, so that files are made of it as it is; `False` by default
    is_given: bool = False
    quantization: Quantization | None = None  # weights that are stored in fewer bits; `None`, the default, for none
    yardstick: Yardstick | None = None  # what was measured with the program already; `None`, the default, for nothing

    def feedable(self, report: ExportReport) -> Source:
        """Return it without the counter that no tool feeds, for a model whose layers all slide."""
        fed = None if self.is_given else without_counter(self.example, self.traced, report)
        if fed is None:
            return self
        decoder: Any = fed.module
        with report.timed("trace"):
            traced = dataclasses.replace(trace(fed), kept=decoder.kept)
        cases = [dataclasses.replace(case, kwargs=decoder.inputs(case.kwargs)) for case in self.cases]
        return dataclasses.replace(self, example=fed, traced=traced, cases=cases)


def check_libraries(runtime: str, caller: str) -> None:
    """Check that what writes and runs the files of a runtime is there."""
    check_runtime(runtime)
    if runtime == "onnxruntime":
        require("onnx", "onnxscript", "onnxruntime", purpose=caller, extra="onnx")
    elif runtime == "openvino":
        require("openvino", "onnx", "onnxscript", purpose=caller, extra="openvino")
    elif runtime == "executorch":
        require_executorch(caller)
    elif runtime == "aotinductor":
        check_compiler(caller)


def write_for(
    runtime: str,
    source: Source,
    path: str | os.PathLike[str],
    *,
    caller: str,
    quantize: WeightBits | Quantization | None = None,
    **options: Any,
) -> ExportReport:
    """Write the file of a runtime and replay it there. It takes its name when the replay has passed."""
    # runtime: one of `open.RUNTIMES`, other than `"torch"`
    # quantize: weights in fewer bits, see `quantization.Quantization`; `None` by default
    # options: options of the runtime: `opset_version` (onnxruntime), `backend` (ExecuTorch)
    target = pathlib.Path(path)
    if target.suffix != RUNTIMES[runtime][0]:
        raise InvalidArgumentError(f"{caller} writes files with the suffix {RUNTIMES[runtime][0]}, not {target}.")
    check_libraries(runtime, caller)
    check_options(runtime, options)
    example = source.example
    if example.no_data:
        raise InvalidArgumentError(f"{caller} writes the weights, and {example.no_data}. Load them first.")
    quantization = choose_quantization(quantize, example.module, caller, runtime)
    check_text(example, quantization)
    if quantization is not None and runtime == "executorch" and source.is_given:
        raise InvalidArgumentError(
            f"{caller}: torchao quantises a module before its trace, and this program was traced by other code. Trace "
            "it here:\n    export_program(module, args, kwargs, bounds=...)"
        )
    source = dataclasses.replace(source, quantization=quantization)
    if runtime == "onnxruntime" and source.cases:
        check_kernels(example.module, caller)
    check_room(example.module, target, in_memory=1 if source.cases else 0)
    name = type(example.module).__qualname__
    report = ExportReport(name, tolerance=source.allowed.tolerance, proof=source.proof, runtime=runtime)
    with register_flattening_functions(**options_in_use()):
        fed = source.feedable(report)
        fed.traced.check_cache_outputs(name)
        source.allowed.measure(report, fed.example, fed.traced, source.yardstick)
        report.input_names, report.output_names = fed.traced.input_names, fed.traced.output_names
        with unproven_file(target) as file:
            logger.info("writing %s for %s", name, runtime, extra=STEP)
            with naming_untried_versions():
                _WRITERS[runtime](fed, file, report, options)
            if not report.ok:
                raise ReplayError(f"{report.failure()}\n{report}\nNothing was written to {target}.", report)
            if runtime == "onnxruntime":
                file.publish()
            else:
                file.keep(target.parent)
    return report


def check_options(runtime: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that a runtime does not have, before anything is traced."""
    for name, value in options.items():
        if name not in _OPTIONS.get(runtime, {}):
            raise InvalidArgumentError(f"{name}={value!r} is not an option of {runtime}.")
        _OPTIONS[runtime][name](value)


_OPTIONS: Mapping[str, Mapping[str, Callable[[Any], None]]] = {
    "onnxruntime": {"opset_version": check_opset},
    "executorch": {"backend": check_backend},
}


def _quantized(source: Source, file: UnprovenFile, report: ExportReport, write: Callable[[], None]) -> None:
    """Replace a file that passed its replay by one with quantised weights, and measure that one."""
    asked = source.quantization
    if asked is None or not report.ok:
        return
    logger.info("quantizing %s to %s", file.path.name, asked.weights, extra=STEP)
    with report.timed("quantize"):
        write()
    report.file_bytes = _bytes(file)
    if not source.cases:
        return
    report.remark("the table is of the file before its weights were quantised.")
    with report.timed("measure"):
        runner = open_runner(file.path, runtime=report.runtime, caller="export", failure=ReplayError)
        block = blocks_of(asked)
        report.quality = measure(runner, asked, source.example, source.traced, source.cases, block_size=block)


def _onnx(source: Source, file: UnprovenFile, report: ExportReport, options: Mapping[str, Any]) -> None:
    write_proven(file, source.example, source.traced, source.cases, report, options.get("opset_version"))


def _package(source: Source, file: UnprovenFile, report: ExportReport, options: Mapping[str, Any]) -> None:
    with report.timed("convert"):
        write_package(source.traced, file.path)
    _replay(source, file, report, trust=True)


def _pte(source: Source, file: UnprovenFile, report: ExportReport, options: Mapping[str, Any]) -> None:
    asked: Backend = options.get("backend", "auto")
    attempts = _KERNELS if asked == "auto" else (asked,)
    for backend in attempts:
        last = backend == attempts[-1]
        try:
            with report.timed("convert"):
                report.planned_bytes = write_pte(source.traced, file.path, backend=backend)
        except FlattenError as error:
            if last or isinstance(error, (DynamicShapesError, InvalidArgumentError)):
                raise
            report.remark(f"kernels of {backend} were left out: {first_line(error)}")
            continue
        _replay(source, file, report)
        if report.ok:
            _quantized(source, file, report, functools.partial(_quantized_pte, source, file, report))
        failed = report.failed()
        if not failed or last:
            return
        reason = failed[0].error or f"it differs by {failed[0].max_difference:.1e}"
        report.remark(f"kernels of {backend} were left out: {failed[0].case}: {reason}")
        report.cases.clear()


def _quantized_pte(source: Source, file: UnprovenFile, report: ExportReport) -> None:
    assert source.quantization is not None
    traced = trace(quantized_example(source.example, source.quantization, report))
    report.planned_bytes = write_pte(traced, file.path)


_KERNELS: tuple[Backend, ...] = ("xnnpack", "portable")  # the faster first


def _openvino(source: Source, file: UnprovenFile, report: ExportReport, options: Mapping[str, Any]) -> None:
    with report.timed("convert"):
        write_openvino(source.traced, source.example, file.path)
    _replay(source, file, report)
    if source.quantization is not None:
        compress = functools.partial(compress_openvino, file.path, source.quantization, report)
        _quantized(source, file, report, compress)


_WRITERS: Mapping[str, Callable[[Source, UnprovenFile, ExportReport, Mapping[str, Any]], None]] = {
    "onnxruntime": _onnx,
    "aotinductor": _package,
    "executorch": _pte,
    "openvino": _openvino,
}


def _bytes(file: UnprovenFile) -> int:
    return sum(part.stat().st_size for part in file.folder.iterdir() if part.is_file())


def _replay(source: Source, file: UnprovenFile, report: ExportReport, **options: Any) -> None:
    """Replay the cases with a file that was written."""
    report.file_bytes = _bytes(file)
    if not source.cases:
        return
    runtime, example, traced = report.runtime, source.example, source.traced
    if traced.written:
        report.remark(f"a file keeps nothing from call to call: {', '.join(traced.written)} is as at the export.")
    try:
        with report.timed("load"):
            runner = open_runner(file.path, runtime=runtime, caller="export", failure=ReplayError, **options)
    except FlattenError as error:
        report.cases.append(CaseResult("(loading)", runtime, 0, {}, 0.0, first_line(error)))
        return
    types = zip(traced.output_names, traced.output_types, strict=True)
    pairs = [] if runtime != "openvino" else [name for name, dtype in types if dtype is not None and dtype.is_complex]
    module: torch.nn.Module = example.module
    after = module.next_inputs if isinstance(module, SlidingDecoder) else following()
    side = ByName(runner, example.names, pairs)
    for case in source.cases:
        logger.info("replaying %s with %s", case.name, runtime, extra=STEP)
        with report.timed("replay"):
            how: dict[str, Any] = {"taken": example.names, "written": traced.written}
            result = replay(side, module, case, after, **how, allowed=explained_by(report, case))
        report.cases.append(result)
