"""Convert a program to ONNX with the fastest operators whose outputs in onnxruntime are right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ...core.compare import compare
from ...core.effects import undisturbed
from ...core.private_names.of_torch import pytree
from ...errors import FlattenError, InvalidArgumentError
from ...errors.failures import STEP, first_line, result_or
from ...huggingface.cache_names import CACHE, argument_of
from ...runners.adapters import Adapter, rooms_in
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import has_mapped_weights, mapped_options, open_session
from ...runners.signature import (
    KEY,
    Expression,
    Signature,
    bound_by_sums,
    decides_by_parts,
    format_expression,
    holds,
    is_of_one_size,
    names_in,
    place_of_sizes,
)
from ...trace.onnx_repairs import ir
from ...trees.walk import leaf_names, leaves_of
from ..example import Example
from ..flat_program import names_by_argument, signature_of
from ..proof.eager_runs import REFUSALS, Case, clone, written_parameters
from ..proof.replay import ByName, InSharedMemory, Side, check_last_scores, first_difference
from ..proof.report import ExportReport
from ..quantization import Quantization
from ..source import Source, replay_cases, replay_file
from ..traced import Traced
from ..varied import arguments_with, resized_leaves
from .file import UnprovenFile, convert
from .quantize import check_quantized, quantize_model, remark_quantized
from .rewrite.graph import Nodes, copy_type, text_of_size

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
    # the arguments of `file.convert` with these names
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
    """Convert a program to ONNX and check the file; if that fails, convert again with simpler operators."""
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
        weights: dict[str, Any] = {"readers": traced.readers, "rooms": rooms_in(source.example.module)}
        converted = convert(traced, source.example.axis_names, translations=translations, **weights, **vars(attempt))
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
    """Store relations between input sizes in the metadata of an ONNX file, because ONNX has no assertions."""
    example, traced = source.example, source.traced
    # sizes that the trace fixed without an assertion are declared as fixed
    shapes = {value.name: value.shape for value in model.graph.inputs if value.shape is not None}
    fixed = {str(text_of_size(shapes[name][axis])): size for (name, axis), size in traced.unasserted.items()}
    for value in (*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)):
        if value.shape is not None and any(str(text_of_size(dim)) in fixed for dim in value.shape):
            value.shape = ir.Shape([fixed.get(str(text_of_size(dim)), text_of_size(dim)) for dim in value.shape])
    try:
        signature = signature_of(traced)
    except InvalidArgumentError:  # an input is a number, which has no size
        return []
    if any(dtype.is_complex for _, dtype, _ in signature.inputs):  # the file has another axis for these
        return []
    replayed = [_sizes_in(case, example, signature) for case in source.cases]
    others = _OtherSizes(example, traced, signature)

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
    refused = sorted(_refuse_sizes(model, stated, traced.largest), key=len)
    if not refused:
        return []
    shown = ", ".join([*refused[:_SHOWN], *([f"and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else [])])
    return [f"the model's code fixes sizes; the file refuses other sizes: {shown}."]


# Make a file, which cannot contain assertions, fail for input sizes that its `ExportedProgram` refuses. If an asserted
# relation uses an operator that ONNX lacks, the file declares the sizes of the example as fixed.
#
#     asserted: 14 * (x.shape[2] // 14) == 70
#
#     size = Shape(x)[2]                  not = Not(Equal(14 * (size // 14), 70))
#     one = Gather([1], Cast(not))        fails if `not` is 1: [1] has no second entry
#     x = Reshape(x, Shape(x) * one)      the graph reads this value instead of the input


def _refuse_sizes(model: ir.Model, signature: Signature, largest: Mapping[tuple[str, int], int]) -> list[str]:
    """Make an ONNX graph fail for input sizes that its ``ExportedProgram`` refuses; return the relations as strings."""
    # largest: upper bounds by input and axis, above which the model's code takes another branch
    # without the size of a cache, since cache memory that is shared between calls is longer than its contents
    places = {name: place for name, place in place_of_sizes(signature).items() if not place[0].startswith(CACHE)}
    inputs = {value.name: value for value in model.graph.inputs}
    refused = [
        one
        for one in signature.relations
        if isinstance(one, tuple)
        and names_in(one) <= places.keys()
        # without sums of sizes, which operators that concatenate tokens check
        and not all(
            isinstance(side, str)
            or (isinstance(side, tuple) and side[0] == "+" and all(type(part) in (int, str) for part in side[1:]))
            for side in one[1:]
        )
    ]
    shown = {name: f"{given}.shape[{axis}]" for name, (given, axis) in places.items()}
    texts = [format_expression(one, shown) for one in refused]
    for name, place in places.items():
        if place in largest:
            refused.append(("==", ("min", name, largest[place]), name))
            texts.append(f"{shown[name]} <= {largest[place]}")
        if name in signature.smallest:
            refused.append(("<=", signature.smallest[name], name))
            texts.append(f"{signature.smallest[name]} <= {shown[name]}")
    by_input: dict[str, list[tuple[Expression, str]]] = {}
    for one, text in zip(refused, texts, strict=True):
        by_input.setdefault(places[min(names_in(one))][0], []).append((one, text))
    axes = {size: (inputs[given], axis) for size, (given, axis) in places.items()}
    for name, found in by_input.items():
        _guard(model.graph, inputs[name], found, axes)
    return texts


def _guard(
    graph: ir.Graph, given: ir.Value, relations: list[tuple[Expression, str]], sizes: Mapping[str, tuple[ir.Value, int]]
) -> None:
    """Insert, between an input and its consumers, a ``Reshape`` that fails if the sizes violate a relation."""
    readers = list(given.uses())
    made = Nodes()
    add = made.add

    def number(found: Expression) -> ir.Value:
        """Add nodes that compute a size from sizes of the inputs; return the size, an int64 value of shape (1,)."""
        if isinstance(found, int):
            return add("Constant", value_ints=[found])
        if isinstance(found, str):
            value, axis = sizes[found]
            return add("Shape", value, start=axis, end=axis + 1)
        kind, first, *others = found[0], number(found[1]), *map(number, found[2:])
        for other in others:
            if kind == "//":  # ONNX's Div rounds towards zero
                first = add("Div", add("Sub", first, add("Mod", first, other)), other)
            else:
                first = add(_OPERATORS[kind], first, other)
        return first

    whole = add("Shape", given)
    entry = add("Constant", value_ints=[1])
    for relation, text in relations:
        assert isinstance(relation, tuple)
        kind, first, second = relation
        met = add(_COMPARISONS[kind], number(first), number(second))
        place = add("Cast", met if kind == "!=" else add("Not", met), to=int(ir.DataType.INT64))
        whole = add("Mul", whole, add("Gather", entry, place, name=f"these sizes are refused, expected {text}"))
    same = add("Reshape", given, whole)
    same.shape = given.shape
    copy_type(same, given)
    for reader, index in readers:
        reader.replace_input_with(index, same)
    graph.insert_before(next(iter(graph)), made)


_COMPARISONS = {"==": "Equal", "!=": "Equal", "<=": "LessOrEqual", "<": "Less"}
_OPERATORS = {"+": "Add", "*": "Mul", "%": "Mod", "max": "Max", "min": "Min"}

_TRIES = 3


class _OtherSizes:
    """Compares a program without its assertions with the model, for input sizes that violate the assertions."""

    def __init__(self, example: Example, traced: Traced, signature: Signature) -> None:
        self.example, self.traced, self.signature = example, traced, signature
        self.sizes = {} if example.no_data else _sizes_in(example.case(1), example, signature)

    def are_right_without(self, relation: Expression) -> bool:
        """Return whether the program's outputs are right for input sizes that violate the asserted ``relation``."""
        if not names_in(relation) <= self.sizes.keys():
            return False
        near = (  # each differs in one size from the example inputs
            {**self.sizes, name: size}
            for name in sorted(names_in(relation))
            for step in range(1, 2 * self.sizes[name] + 4)
            for size in (self.sizes[name] - step, self.sizes[name] + step)
            if size > 1
        )
        tried = list(itertools.islice((sizes for sizes in near if not holds(relation, sizes)), _TRIES))
        return bool(tried) and all(map(self._same, tried))

    @functools.cached_property
    def _graph(self) -> torch.nn.Module:
        made = self.traced.program.module(check_guards=False)
        for node in [*made.graph.nodes]:
            if node.target is torch.ops.aten._assert_scalar.default:
                made.graph.erase_node(node)
        made.recompile()
        for key, hook in [*made._forward_pre_hooks.items()]:
            if getattr(hook, "__name__", "") == "_check_input_constraints_pre_hook":  # this hook also checks the sizes
                del made._forward_pre_hooks[key]
        return made

    def _same(self, sizes: Mapping[str, int]) -> bool:
        made, module = resized_leaves(self.example, self.signature, sizes), self.example.module
        if made is None:
            return False
        try:
            written = written_parameters(module, self.traced.written)
            with torch.no_grad(), undisturbed(seed=0, module=module, parameters=written):
                args, kwargs = arguments_with(self.example, made)
                wanted = clone(module(*args, **kwargs))
            with torch.no_grad(), undisturbed(seed=0):
                args, kwargs = arguments_with(self.example, made)
                found = self._graph(*args, **kwargs)
        except REFUSALS:
            return False
        expected, returned = pytree.tree_leaves(wanted), pytree.tree_leaves(found)
        return len(expected) == len(returned) and all(
            compare(one, other, "sums") for one, other in zip(expected, returned, strict=True)
        )


def _sizes_in(case: Case, example: Example, signature: Signature) -> dict[str, int]:
    inputs = example.of_call(case.args, case.kwargs)
    leaves = dict(zip(leaf_names(inputs), leaves_of(inputs), strict=True))
    return {
        name: leaves[given].shape[axis]
        for name, (given, axis) in place_of_sizes(signature).items()
        if isinstance(leaves.get(given), torch.Tensor) and axis < leaves[given].ndim
    }


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
            replay_cases(sides(adapter), dataclasses.replace(source, cases=cases), report)


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
            "Use other operators, or pass a function of onnxscript that implements the operator:\n"
            f"    translations={{torch.ops.{operator}: function}}"
        )
    elif varying:
        advice = "Make the rejected sizes constant:\n    dynamic_shapes=None  # or list only the axes that must vary"
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
