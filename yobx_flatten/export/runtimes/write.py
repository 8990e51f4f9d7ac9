"""Check options, disk and memory before a trace; write a program as a file for a runtime, and check its outputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from ...core.compare import largest_difference
from ...core.effects import undisturbed
from ...core.files.scratch import scratch_for
from ...core.private_names.of_torch import OpOverload
from ...declare.scopes import options_in_use, register_flattening_functions
from ...errors import (
    DynamicShapesError,
    FlattenError,
    InvalidArgumentError,
    MissingDependencyError,
    NoRoomError,
    ReplayError,
    naming_untried_versions,
    require,
)
from ...errors.failures import STEP, first_line, format_bytes, result_or
from ...huggingface.cache_names import CACHE
from ...huggingface.cases import why_not_resizable
from ...huggingface.decoders import SlidingDecoder, counts_by_itself, why_not_sliding
from ...runners.adapters import Adapter
from ...runners.executorch_runner import require_executorch
from ...runners.in_place import CheckedRunner
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import open_session, without_spinning
from ...runners.open import RUNTIMES, check_runtime, open_runner
from ...runners.ports import check_cache_outputs
from ..example import Example, make_example
from ..model_facts import ModelFacts, memory_available
from ..onnx.attempts import write_proven
from ..onnx.file import UnprovenFile
from ..onnx.quantized import FileQuantizer
from ..proof.eager_runs import Case, clone, written_parameters
from ..proof.quality import Quality
from ..proof.replay import ByName, InPlace, Side
from ..proof.report import ExportReport
from ..quantization import Quantization, WeightBits, choose_quantization, measure
from ..source import Source, replay_file, traced_example
from ..traced import RETURN_THE_CACHE, Traced, trace
from . import openvino
from .aotinductor import write_package
from .executorch import Backend, write_pte

logger = logging.getLogger("yobx_flatten")


CacheForm = Literal["in_place", "returned"]
"""Where the cache of a file is stored: in the runtime's memory, or in the inputs and outputs of each call."""


@dataclasses.dataclass(frozen=True)
class FileOptions:
    runtime: str  # one of `open.RUNTIMES`, except `"torch"`
    path: pathlib.Path
    caller: str  # the function that the user called, for messages
    quantize: WeightBits | Quantization | None = None
    opset_version: int | None = None  # version of ONNX's operators; `None` for the newest that passes the replay
    optimize: Literal["onnxruntime"] | None = None  # whether to use operators that only onnxruntime has
    translations: Mapping[Any, Callable[..., Any]] | None = None  # onnxscript functions by operator
    backend: Backend = "auto"  # kernels of ExecuTorch
    cache: CacheForm = "in_place"
    counter_input: bool = False  # whether the token counter of sliding layers is an input
    keep_failed: pathlib.Path | None = None  # a folder for a file that failed; `None` removes the file
    adapters: Sequence[Adapter] = ()  # adapters that the file is also replayed with

    def checked(self, facts: ModelFacts, *, proof: str) -> FileOptions:
        """Raise an error for unsupported options; return options with ``quantize`` as ``Quantization`` or ``None``."""
        if self.path.is_dir():
            raise InvalidArgumentError(f"{self.path} is a folder. Name a file: path={str(self.path / 'model.onnx')!r}")
        if self.optimize not in (None, "onnxruntime"):
            raise InvalidArgumentError(f'optimize must be "onnxruntime" or None, found {self.optimize!r}.')
        folder = self.keep_failed
        if folder is not None and folder.absolute() == self.path.parent.absolute():
            raise InvalidArgumentError(
                f"keep_failed={os.fspath(folder)!r} is the folder of the file itself: a file that fails the checks "
                "would replace a good one. Name another folder."
            )
        if self.backend not in get_args(Backend):
            known = ", ".join(map(repr, get_args(Backend)))
            raise InvalidArgumentError(f"backend must be one of {known}, found {self.backend!r}.")
        if self.quantize is not None and self.backend == "portable":
            # ExecuTorch 1.5 has no portable kernel for the operators of torchao
            raise InvalidArgumentError(
                'backend="portable" contradicts quantize=: only XNNPACK has kernels for quantized weights. Leave '
                'quantize= out, or take\n    backend="xnnpack"'
            )
        quantization = choose_quantization(self.quantize, facts, self.caller, self.runtime)
        is_onnx = self.runtime == "onnxruntime"
        check_opset(self.opset_version)
        for operator, function in (self.translations or {}).items():
            if not isinstance(operator, OpOverload) or not callable(function):
                raise InvalidArgumentError(
                    f"translations: expected a dict from operators to functions, found {function!r} for {operator!r}:\n"
                    "    translations={torch.ops.mine.twice.default: twice}"
                )
        if self.cache not in get_args(CacheForm):
            raise InvalidArgumentError(f'cache must be "in_place" or "returned", found {self.cache!r}.')
        if is_onnx and proof != "none" and folder is None:
            for dtype in itertools.filterfalse(has_kernels, facts.kernel_types):
                raise InvalidArgumentError(
                    f"{self.caller}: onnxruntime has no kernels for weights of {dtype} on the CPU, so the file cannot "
                    "be checked there. Use float32 or float16 (model.half()). If another execution provider will run "
                    'the file, skip the check:\n    proof="none"'
                )
        # for other runtimes, a file in float is written first, also if nothing is replayed
        written = proof if is_onnx else "full"
        check_room(facts, self.path, in_memory=int(proof != "none"), quantization=quantization, proof=written)
        return dataclasses.replace(self, quantize=quantization)

    def check_example(self, example: Example) -> None:
        if example.no_data:
            without = "data, or call export_program, which needs no data." if self.caller == "export_onnx" else "data."
            raise InvalidArgumentError(
                f"{self.caller} writes weights to a file, but {example.no_data}. Use weights and inputs with {without}"
            )
        if self.quantization is None or self.quantization.tokens is None:
            return
        tokens, module = self.quantization.tokens, example.module
        module = module.model if isinstance(module, SlidingDecoder) else module
        reason = why_not_resizable(module, example.kwargs, example.cache_is)
        if reason is None and "encoder_outputs" in example.kwargs:
            reason = "it decodes the outputs of an encoder"
        if reason is None and example.shapes is None:
            reason = "dynamic_shapes=None fixes the length of its inputs"
        if reason is None:
            config: Any = module.config
            vocabulary = config.get_text_config(decoder=True).vocab_size
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocabulary:
                reason = f"its vocabulary has {vocabulary} tokens, and tokens= contains ids {low} to {high}"
        if reason is not None:
            raise InvalidArgumentError(
                f"Quantization: {type(module).__qualname__} cannot be run on the token ids in tokens=, since {reason}. "
                "Leave tokens= out."
            )

    @property
    def quantization(self) -> Quantization | None:
        """The quantization of the weights, as an object; :meth:`checked` must have been called before."""
        assert not isinstance(self.quantize, str)
        return self.quantize


def check_opset(opset_version: int | None) -> None:
    if opset_version is None:
        return
    if type(opset_version) is not int or opset_version < 18:
        raise InvalidArgumentError(
            f"opset_version: expected None or an int of 18 or more, because torch's exporter writes no older versions; "
            f"found {opset_version!r}."
        )
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if opset_version > newest:
        raise InvalidArgumentError(
            f"opset_version={opset_version}: the installed onnx has operators up to version {newest}. Pass None to "
            "let the exporter choose the version."
        )


def check_libraries(runtime: str, caller: str) -> None:
    check_runtime(runtime)
    if runtime == "onnxruntime":
        require("onnx", "onnxscript", "onnxruntime", purpose=caller, extra="onnx")
    elif runtime == "openvino":
        require("openvino", "onnx", "onnxscript", purpose=caller, extra="openvino")
    elif runtime == "executorch":
        require_executorch(caller)
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    if runtime == "aotinductor" and not any(map(shutil.which, compilers)):
        raise MissingDependencyError(
            f"{caller} needs a C++ compiler, but g++, clang++ and cl are not on PATH. Install one, or set its path:\n"
            "    apt install g++\n    export CXX=/path/to/g++"
        )


def check_room(
    facts: ModelFacts,
    path: pathlib.Path,
    *,
    in_memory: int = 1,
    quantization: Quantization | None = None,
    proof: str = "full",
) -> None:
    # in_memory: number of copies of the weights in memory
    # proof: with `"none"`, no file in float is written before a quantized file
    weights, largest = facts.weight_bytes, facts.layer_bytes
    written = weights
    if quantization is not None:
        few = weights - facts.projected_bytes + facts.projected * quantization.bits // 8
        written = few if proof == "none" else weights + few
    there = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < written:
        raise NoRoomError(
            f"The disk of {there} is too small: the weights take {format_bytes(written)}, and {format_bytes(free)} "
            "are free. Free some space, or name a folder on another disk."
        )
    # if the weights are read layer by layer, memory contains copies of the largest layer, and the file is mapped
    needed = (4 * largest if largest else in_memory * weights) + 2**29  # of libraries, graph and activations
    left = memory_available()
    if weights >= 2**28 and left < needed:  # smaller weights need less memory than the libraries
        raise NoRoomError(
            f"The export needs {format_bytes(needed)} of memory in addition to the model, and {format_bytes(left)} "
            "are available. Close other programs, export in float16, or skip the checks, which need the most "
            'memory:\n    proof="none"'
        )


def has_kernels(dtype: str) -> bool:
    """Return whether onnxruntime can multiply tensors of a dtype on the CPU; ``False`` for ``"bfloat16"``."""
    return dtype in ("float32", "float16", "float64")


def write_for(source: Source, options: FileOptions) -> ExportReport:
    suffix = RUNTIMES[options.runtime][0]
    if options.path.suffix != suffix:
        raise InvalidArgumentError(f"{options.caller} writes files with the suffix {suffix}, not {options.path}.")
    check_libraries(options.runtime, options.caller)
    facts = source.asked.facts
    options = options.checked(facts, proof=source.asked.proof if source.cases else "none")
    options.check_example(source.example)
    if options.quantization is not None and options.runtime == "executorch" and source.is_given:
        raise InvalidArgumentError(
            f"{options.caller}: torchao quantizes a module before the trace, but this program is already traced. "
            "Export the module:\n    export_program(module, args, kwargs, bounds=...)"
        )
    if source.example.loop:
        traced = source.traced
        check_cache_outputs(traced.input_names, traced.output_names, facts.name, remedy=RETURN_THE_CACHE)
    report = source.asked.report(options.runtime)
    with register_flattening_functions(**options_in_use()), scratch_for(options.path) as folder:
        write_file(source, options, folder, report)
    return report


@without_spinning()
def write_file(source: Source, options: FileOptions, folder: pathlib.Path, report: ExportReport) -> None:
    """Write a file for a runtime, check its outputs, and move the file to ``options.path`` if they are right."""
    # called inside `register_flattening_functions`, with checked options
    # folder: a hidden folder for the file, see `scratch_for`
    file = UnprovenFile(options.path, folder)
    # no tool passes the token counter, so the file computes the number of earlier tokens from the mask
    fed = source if options.counter_input else without_counter(source, report)
    report.runs = fed.example.runs
    source.asked.measure(report, fed.example, fed.traced, source.yardstick)
    report.input_names, report.output_names = fed.traced.input_names, fed.traced.output_names
    logger.info("writing %s for %s", source.asked.facts.name, options.runtime, extra={**STEP, "share": 0.3})
    with naming_untried_versions():
        job = _Job(fed, options, file, report)
        match options.runtime:
            case "onnxruntime":
                _onnx(job)
            case "executorch":
                _pte(job)
            case "aotinductor":
                job.write(functools.partial(write_package, fed.traced, file.path), "AOTInductor", trust=True)
            case "openvino":
                write = functools.partial(openvino.write_openvino, fed.traced, fed.example, file.path)
                job.write(write, "OpenVINO")
                rewrite = functools.partial(openvino.quantize, file.path, report=report)
                job.quantize(functools.partial(job.measured, rewrite))
            case runtime:
                raise AssertionError(runtime)
    if not report.ok:
        where = f"Nothing was written to {options.path}."
        if options.keep_failed is not None:
            where += f" The file that failed is {file.keep(options.keep_failed)}."
        elif options.caller == "export_onnx":
            where += ' To look at the file, pass keep_failed="a folder".'
        raise ReplayError(f"{report.failure()}\n{report}\n{where}", report)
    if options.runtime == "onnxruntime":
        file.publish()
    else:
        file.keep(options.path.parent)


@dataclasses.dataclass(frozen=True)
class _Job:
    source: Source
    options: FileOptions
    file: UnprovenFile
    report: ExportReport  # gets the results

    def replay(self, *, trust: bool = False, more: Sequence[Case] = ()) -> None:
        # trust: whether to load a file that runs code when it is loaded
        report, source, runtime = self.report, self.source, self.options.runtime
        report.file_bytes = self._bytes()
        written = source.traced.written
        if written and source.cases:
            report.remark(
                f"a file keeps no state between calls: {', '.join(written)} always has its value from the export."
            )

        def load() -> Sequence[Side]:
            runner = open_runner(self.file.path, runtime=runtime, caller="export", failure=ReplayError, trust=trust)
            pairs = source.traced.complex_outputs if runtime == "openvino" else []
            kind = InPlace if isinstance(runner, CheckedRunner) and runner.in_place else ByName
            return [kind(runner, source.example.names, pairs, source.traced.constant_outputs)]

        replay_file(load, dataclasses.replace(source, cases=[*source.cases, *more], varied=()), report)

    def write(self, write: Callable[..., list[str]], library: str, *, trust: bool = False) -> bool:
        """Write a file, check it on the test cases, and return whether the file updates the KV cache in place."""
        # write: takes `in_place=`, and returns the names of the cache inputs that are updated in place
        report, source, done = self.report, self.source, len(self.report.cases)
        returns_cache = any(name.endswith((".key", ".value")) for name in source.traced.presents)
        if self.options.cache == "in_place" and returns_cache:
            with report.timed("convert"):
                # exporters and compilers raise errors of many classes
                made = result_or(functools.partial(write, in_place=True), lambda error: error)
            if isinstance(made, Exception):
                reason = f"{'' if isinstance(made, FlattenError) else f'{type(made).__name__}: '}{first_line(made)}"
            else:
                more: list[Case] = []
                # small cases that proof="sample" leaves out, because retraced code may fail for one token
                if source.asked.proof == "sample" and source.cases:
                    example, known = source.example, {case.name for case in source.cases}
                    others, _ = example.other_cases(2)
                    more = [case for case in others if case.name not in known and example.holds(case, case.steps)]
                self.replay(trust=trust, more=more)
                reason = _first_failure(report)
                if not reason:
                    report.in_place = made
                    report.remark(f"{library} writes the cache in place: calls do not return it.")
                    return True
            report.remark(f"the cache is copied by each call: a file that writes it in place was left out: {reason}")
            del report.cases[done:]
        with report.timed("convert"):
            write(in_place=False)
        self.replay(trust=trust)
        return False

    def quantize(self, rewrite: Callable[[Quantization], Quality | None]) -> None:
        # rewrite: writes the quantized file, and returns its quality if checks run
        asked, report = self.options.quantization, self.report
        if asked is None or not report.ok:
            return
        logger.info("quantizing %s to %s", self.file.path.name, asked.weights, extra=STEP)
        report.quality = rewrite(asked)
        if self.source.cases:
            report.remark("the table shows the file before its weights were quantized.")

    def measured(self, write: Callable[[Quantization], object], asked: Quantization) -> Quality | None:
        report = self.report
        with report.timed("quantize"):
            write(asked)
        report.file_bytes = self._bytes()
        if not self.source.cases:
            return None
        with report.timed("measure"):
            runner = open_runner(self.file.path, runtime=report.runtime, caller="export", failure=ReplayError)
            return measure(runner, asked, self.source, block_size=openvino.blocks_of(asked))

    def _bytes(self) -> int:
        return sum(part.stat().st_size for part in self.file.folder.iterdir() if part.is_file())


def _first_failure(report: ExportReport) -> str:
    texts = (f"{one.case}: {one.error or f'it differs by {one.max_difference:.1e}'}" for one in report.failed())
    return next(texts, "")


def _onnx(job: _Job) -> None:
    source, options, file, report = job.source, job.options, job.file, job.report
    asked = options.quantization
    how: dict[str, Any] = {"share": options.optimize is not None, "translations": options.translations}
    if source.cases:
        write_proven(file, source, report, options.opset_version, **how)
        job.quantize(lambda asked: FileQuantizer(file, asked, source, report).run())
        if asked is None or report.quality is None:
            return
        for adapter in source.adapters:
            with adapter.active(), report.timed("measure"):
                runner = OnnxRunner(open_session(file.path, caller="export_onnx"), file.path.name)
                # copies of the cases, since the outputs of the model are kept by case
                own = dataclasses.replace(source, cases=list(map(dataclasses.replace, source.cases)))
                with_adapter, blocks = runner.with_adapter(adapter.matrices), report.quality.block_size
                report.of_adapters[adapter.name] = measure(with_adapter, asked, own, block_size=blocks)
    else:  # without checks, no file in float is needed
        write_proven(file, source, report, options.opset_version, quantization=asked, **how)


def _pte(job: _Job) -> None:
    asked, report = job.options.backend, job.report
    attempts: Sequence[Backend] = ("xnnpack", "portable") if asked == "auto" else (asked,)  # the faster first
    for backend in attempts:
        last, remarks = backend == attempts[-1], list(report.remarks)
        try:
            _pte_of(job, backend)
        except FlattenError as error:
            if last or isinstance(error, (DynamicShapesError, InvalidArgumentError)):
                raise
            reason = first_line(error)
        else:
            reason = _first_failure(report)
            if not reason or last:
                return
        report.remarks = remarks
        which = "" if job.options.quantization is None else " of the file before its weights were quantized"
        report.remark(f"kernels of {backend} were left out{which}: {reason}")
        report.cases.clear()


def _pte_of(job: _Job, backend: Backend) -> None:
    """Write an ExecuTorch file with the kernels of one backend, and check the file."""

    def write(traced: Traced = job.source.traced, kernels: Backend = backend, *, in_place: bool = False) -> list[str]:
        asked = job.options.quantization is not None
        path, report = job.file.path, job.report
        report.planned_bytes, kept = write_pte(traced, path, backend=kernels, in_place=in_place, quantized=asked)
        return kept

    in_place = job.write(write, "ExecuTorch")

    def quantized(asked: Quantization) -> None:
        write(trace(openvino.quantized_example(job.source.example, asked, job.report)), "xnnpack", in_place=in_place)

    # after the replay in float, which shows errors that quantization does not cause
    job.quantize(functools.partial(job.measured, quantized))


def without_counter(source: Source, report: ExportReport) -> Source:
    """Remove the cache's token counter from the inputs of a model with only sliding-window layers, if possible."""
    example, traced = source.example, source.traced
    module, kwargs = example.module, example.kwargs
    # `SlidingDecoder` does not return changed arguments
    if source.is_given or traced.left is not None or not counts_by_itself(kwargs.get(example.cache_is)):
        return source
    why_not = "there are positional arguments" if example.args else why_not_sliding(module, kwargs, example.cache_is)
    if why_not is None:
        decoder = SlidingDecoder(module, kwargs, example.cache_is)
        inputs = decoder.inputs(kwargs)
        written = written_parameters(module, traced.written)
        with torch.no_grad(), undisturbed(seed=0, module=module, kwargs=kwargs, parameters=written):
            found = decoder(**clone(inputs))
            expected = module(**kwargs)
        if largest_difference(expected["logits"], found["logits"]) <= report.tolerance:
            del found, expected  # frees the logits before the trace
            fed = make_example(decoder, (), inputs, decoder.shapes(example.shapes), example.bounds)
            fed = dataclasses.replace(fed, axis_names=example.axis_names, relations=example.relations)
            traced = dataclasses.replace(traced_example(fed, report), kept=decoder.kept)
            cases = [Case(case.name, (), decoder.inputs(case.kwargs), case.steps) for case in source.cases]
            return dataclasses.replace(source, example=fed, traced=traced, cases=cases)
        why_not = "the model also uses the length of the mask outside of its attention"
    report.remark(f"{CACHE}.length, the number of tokens seen, is an input that other tools do not pass: {why_not}.")
    return source
