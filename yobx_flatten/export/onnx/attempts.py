"""Convert a program to ONNX with the fastest operators whose outputs in onnxruntime are right."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ...core.private_names.of_torch import pytree
from ...errors import FlattenError, InvalidArgumentError
from ...errors.failures import STEP, first_line, result_or
from ...huggingface.cache_names import CACHE, argument_of
from ...runners.adapters import Adapter, rooms_in
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import has_mapped_weights, mapped_options, open_session
from ...runners.signature import KEY, Expression, bound_by_sums, decides_by_parts, holds, is_of_one_size, names_in
from ..flat_program import names_by_argument, signature_of
from ..proof.replay import ByName, InSharedMemory, Side, check_last_scores, first_difference
from ..proof.report import ExportReport
from ..quantization import Quantization
from ..source import Source, replay_cases, replay_file
from ..traced import Traced
from .file import UnprovenFile, convert
from .quantize import check_quantized, quantize_model, remark_quantized
from .sizes import OtherSizes, fix_sizes, refuse_sizes, sizes_in

logger = logging.getLogger("yobx_flatten")


_SHOWN = 4
"""Largest number of size constraints that a note of a report lists; models with image windows have very many."""

_COUNTED = (
    *("Attention", "GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding"),
    *("RMSNormalization", "LayerNormalization", "Softmax"),
)
"""Operators of attention and normalization, which a report counts."""


@dataclasses.dataclass(frozen=True)
class _Attempt:
    opset: int | None  # version of ONNX's operators; `None` for the exporter's own choice
    fuse: bool  # whether attention is one operator that takes the cache
    share: bool = False  # whether it is onnxruntime's attention operator
    by_torch: bool = False  # whether torch decomposes the whole program, as `torch.onnx.export` does

    def __str__(self) -> str:
        opset = "the exporter's own opset" if self.opset is None else f"opset {self.opset}"
        if self.share:
            return f"{opset}, attention of onnxruntime"
        return f"{opset}, {'attention in one operator' if self.fuse else 'decomposed here'}"


def write_proven(
    file: UnprovenFile,
    source: Source,
    report: ExportReport,
    opset_version: int | None,
    *,
    share: bool = False,
    quantization: Quantization | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
) -> None:
    """Convert and check a program inside ``register_flattening_functions``; after a failure, use simpler operators."""
    # report: gets the results of the last attempt, the opset and the operators, and a note on each failed attempt
    # opset_version: the opset to write; `None` for the newest that passes the replay
    # share: whether to try onnxruntime's attention first, which updates the cache in place
    # quantization: how to quantize the weights if nothing is checked
    example = source.example
    attempts = _attempts(opset_version, share)
    done = len(report.cases)
    refused: Exception | None = None  # the first error of a conversion

    for number, attempt in enumerate(attempts, 1):
        last = number == len(attempts)
        logger.info("converting %s to ONNX", source.asked.facts.name, extra=STEP)
        # torch's exporter raises errors of many classes for operators that it cannot convert
        converted = result_or(
            functools.partial(_written, attempt, file, source, report, quantization, translations), lambda error: error
        )
        if isinstance(converted, Exception):
            error = refused_conversion(converted, type(example.module).__qualname__, source.traced)
            refused = refused or error
            if last and (attempt.by_torch or error is converted):
                raise refused
            if last:
                attempts.append(dataclasses.replace(attempt, by_torch=True))
            reason = error.reason if isinstance(error, ConversionRefusedError) else first_line(error)
            report.remark(f"{attempt} was left out: {reason}")
            continue
        report.opset = converted.model.opset_imports.get("")
        counts = Counter(node.op_type for node in converted.model.graph.all_nodes())
        report.operators = {name: counts[name] for name in _COUNTED if counts[name]}
        decomposed = converted.exported_program
        del converted
        replay_onnx(file.path, source, report)
        failed = [case for case in report.cases[done:] if not case.within(report.tolerance)]
        if failed and last and failed[0].error is None and decomposed is not None:
            for case in (*source.cases, *source.varied):
                if case.name == failed[0].case:  # a case of an adapter has a name that no other case has
                    report.remark(*first_difference(file.path, decomposed, case, example.names, report.tolerance))
        if not failed or last:
            if "GroupQueryAttention" in report.operators:
                report.remark(
                    "onnxruntime's GroupQueryAttention can add several tokens to a filled cache for one row only. With "
                    "several rows, pass whole prompts first, then one token per call, as generation loops do."
                )
            return
        result = failed[0]
        name, difference, most = result.worst(report.tolerance)
        reason = result.error or f"{name} differs by {difference:.1e}, allowed {most:.1e}"
        report.remark(f"{attempt} was left out: {result.case}: {reason}")
        del report.cases[done:]


def _written(
    attempt: _Attempt,
    file: UnprovenFile,
    source: Source,
    report: ExportReport,
    quantization: Quantization | None,
    translations: Mapping[Any, Callable[..., Any]] | None,
) -> torch.onnx.ONNXProgram:
    traced = source.traced
    with report.timed("convert"):
        converted = convert(
            traced.program,
            traced.input_names,
            traced.output_names,
            attempt.opset,
            source.example.axis_names,
            fuse=attempt.fuse,
            share=attempt.share,
            by_torch=attempt.by_torch,
            readers=traced.readers,
            translations=translations,
            rooms=rooms_in(source.example.module),
        )
    report.remark(*_state_sizes(converted.model, source, shared=attempt.share))
    with report.timed("save"):
        if quantization is not None:
            found = quantize_model(converted.model, quantization)
            check_quantized(found, quantization, report)
            remark_quantized(found, quantization, report)
        report.onnx_bytes = file.save(converted.model)
    return converted


def _attempts(opset_version: int | None, share: bool) -> list[_Attempt]:
    newest = ATTENTION_OPSET if opset_version is None else opset_version
    fused = [_Attempt(newest, True)] if newest >= ATTENTION_OPSET else []
    shared = [dataclasses.replace(attempt, share=True) for attempt in fused if share]
    return [*shared, *fused, _Attempt(opset_version, False)]


def _state_sizes(model: Any, source: Source, *, shared: bool) -> list[str]:
    """Store relations between input sizes as metadata of an ONNX file, since ONNX has no assertions; return notes."""
    example, traced = source.example, source.traced
    fix_sizes(model, traced.unasserted)
    try:
        signature = signature_of(traced)
    except InvalidArgumentError:  # an input is a number, which has no size
        return []
    if any(dtype.is_complex for _, dtype, _ in signature.inputs):  # the file has another axis for these
        return []
    replayed = [sizes_in(case, example, signature) for case in source.cases]
    others = OtherSizes(example, traced, signature)

    def decides(one: Expression) -> bool:
        # no test case violates the inequality, and the program is wrong for sizes that violate it
        # cases whose sizes are unknown are skipped
        known = (sizes for sizes in replayed if names_in(one) <= sizes.keys())
        return all(holds(one, sizes) for sizes in known) and not others.are_right_without(one)

    # An inequality is kept only if it decides which branch the model's code takes: one about a quotient or a remainder,
    # or about a single size. Other inequalities only exclude sizes of 1, which the file accepts.
    kept = [
        one
        for one in signature.relations
        if isinstance(one, tuple)
        and (one[0] == "==" or ((decides_by_parts(one) or is_of_one_size(one)) and decides(one)))
    ]
    asked = {getattr(leaf, "min", None) for leaf in pytree.tree_leaves(example.shapes)}
    least = {name: size for name, size in signature.smallest.items() if size not in asked}
    # for a mask over past and new tokens, torch requires at least 2 + 2 columns, but one token of each is also correct
    least = {name: size for name, size in least.items() if size > bound_by_sums(name, signature.relations)}
    least = {name: size for name, size in least.items() if decides(("<=", size, name))}
    # without the upper bounds of the caller, since the ONNX file accepts any length
    stated = dataclasses.replace(signature, largest={}, smallest=least, relations=kept)
    if not shared:  # a shared cache has room for more tokens than it contains
        model.metadata_props[KEY] = stated.to_json()
    refused = sorted(refuse_sizes(model, stated, traced.largest), key=len)
    if not refused:
        return []
    shown = ", ".join([*refused[:_SHOWN], *([f"and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else [])])
    return [f"the model's code fixes sizes; the file refuses other sizes: {shown}."]


def replay_onnx(path: pathlib.Path, source: Source, report: ExportReport) -> None:
    # called inside `register_flattening_functions`
    example, traced = source.example, source.traced
    if traced.written:
        report.remark(
            f"an ONNX file keeps no state between calls: {', '.join(traced.written)} always has its value "
            "from the export."
        )
    if traced.drawing:
        report.remark(
            "onnxruntime draws its own random numbers, so outputs cannot be compared: export without random numbers "
            "(module.eval()), or pass them as an input."
        )
    takes = argument_of(example.module.forward) is not None
    can_generate: Any = getattr(example.module, "can_generate", None)
    generates = callable(can_generate) and can_generate()
    if generates and takes and not any(name.startswith(f"{CACHE}.") for name in traced.input_names):
        report.remark(
            "this file has no cache: each call reads all tokens of the text again. For a file with a cache: "
            "export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...), or export_folder(model, folder)."
        )
    runners: list[OnnxRunner] = []

    def sides(adapter: Adapter | None = None) -> Sequence[Side]:
        used = runners if adapter is None else [one.with_adapter(adapter.matrices) for one in runners]
        return [ByName(one, example.names, traced.complex_outputs, traced.constant_outputs) for one in used]

    def load() -> Sequence[Side]:
        # the module is usually in memory, so weights next to the file are mapped instead of read
        options = mapped_options(path) if has_mapped_weights(path) else None
        session = open_session(path, caller="export_onnx", options=options)
        runner = OnnxRunner(session, path.name)
        check_last_scores(runner, example.names, source.cases)
        runners.extend([runner, InSharedMemory(session, path.name)] if runner.shared else [runner])
        return sides()

    replay_file(load, source, report, functools.partial(_why_not_loaded, example.module))
    for adapter in source.adapters if runners else ():
        with adapter.active():  # copies of the cases, since rounding errors and outputs are cached by case
            cases = [dataclasses.replace(case, name=f"{adapter.name}: {case.name}") for case in source.cases]
            replay_cases(sides(adapter), example, traced, cases, report)


def _why_not_loaded(module: torch.nn.Module, failure: FlattenError) -> str:
    error = failure.__cause__ or failure
    reported = f"{type(error).__name__}: {first_line(error)[:300]}"
    weights = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters()}
    half = next((dtype for dtype in ("bfloat16", "float16") if dtype in weights), None)
    if "NOT_IMPLEMENTED" in reported and half is not None:
        reported += (
            f"\nonnxruntime lacks kernels for {half} on the CPU, so the file cannot be checked there. Export in "
            'float32 (or float16), or keep it for another provider:\n    keep_failed="a folder"'
        )
    return reported


# Opset 23 has Attention, RMSNormalization and RotaryEmbedding. With opset 24, torch 2.13's exporter writes only
# Attention, and the file is slower: the rewrite rules for the other two operators require opset 23.
ATTENTION_OPSET = 23
"""Opset in which torch's exporter writes the operators ``Attention``, ``RMSNormalization``, ``RotaryEmbedding``."""

_TORCH = os.path.dirname(torch.__file__)


class ConversionRefusedError(InvalidArgumentError):
    def __init__(self, message: str, reason: str, axes: Collection[tuple[str, int]] | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.axes = axes  # axes that vary in the refused operator, by input and axis; `None` if no size is the cause


def refused_conversion(error: Exception, name: str, traced: Traced) -> Exception:
    """Return an error that explains an error of ``torch.onnx.export``; return errors of this package unchanged."""
    if isinstance(error, (FlattenError, OSError, MemoryError)):
        return error
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = "\n".join(map(str, causes))
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", text)
    failed = re.search(r"Error when translating node %\w+ .*?call_function\[target=torch\.ops\.([\w.]+)\]", text, re.S)
    of_sizes = missing is None or missing[1].startswith("aten.sym_")
    raised = f"torch's exporter raises {type(causes[-1]).__name__}: {first_line(causes[-1]).rstrip('.')[:200]}"
    if missing is not None:
        operator, reason = f"{missing[1]}.{missing[2]}", "torch's exporter has no translation for the operator"
    elif failed is not None:
        operator, reason = failed[1], f"{raised} for the operator"
    else:
        operator, reason = "", raised
    reason = f"{reason} {operator}{_place(traced.program, operator)}" if operator else reason
    values = {node.name: node.meta.get("val") for node in traced.program.graph.find_nodes(op="placeholder")}
    varying = {  # symbols of the input axes whose size is a single symbol
        (name, axis): str(size)
        for argument, name in names_by_argument(traced).items()
        for axis, size in enumerate(getattr(values[argument], "shape", ()))
        if re.fullmatch(r"s\d+", str(size))
    }
    numbers = [text for text in traced.constants.values() if re.match(r"-?\d", text)]
    if operator and not (missing is not None and of_sizes):
        advice = (
            "Use other operators, or pass a function of onnxscript that implements it:\n"
            f"    translations={{torch.ops.{operator}: function}}"
        )
    elif varying:
        advice = "Fix the sizes that the exporter rejects:\n    dynamic_shapes=None  # or the axes that vary"
    elif numbers and not traced.input_names:
        advice = f"No input is a tensor. Pass a tensor instead of each number:\n    torch.tensor({numbers[0]})"
    else:
        advice = "Use other operators, or export a program:\n    export_program(module, args, kwargs)"
    axes = {axis for axis, symbol in varying.items() if re.search(rf"\b{symbol}\b", text)} if of_sizes else None
    refused = ConversionRefusedError(f"{name} cannot be exported to ONNX: {reason}. {advice}", reason, axes)
    refused.__cause__ = error
    return refused


def _place(program: ExportedProgram, operator: str) -> str:
    """Return the line of the model's code that calls an operator, such as ``" (model.py:12: x.cummax(1))"``."""
    short = operator.split(".")[1]
    for node in program.graph.nodes:
        own = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
        lines = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.*)', node.meta.get("stack_trace") or "")
        lines = [line for line in lines if not line[0].startswith((_TORCH, "torch/"))]
        if own and own in short and lines:
            file, number, code = lines[-1]
            return f" ({file}:{number}: {code.strip()})"
    return ""
