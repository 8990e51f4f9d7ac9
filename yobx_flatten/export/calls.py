"""Export a module to an ONNX file or a ``torch.export`` program, and compare the outputs with the module's outputs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from ..core.effects import undisturbed
from ..core.files.scratch import scratch_for
from ..core.private_names.of_torch import pytree
from ..declare.scopes import options_in_use, register_flattening_functions
from ..diagnose.comparison import compare_specs
from ..diagnose.export_errors import explain_error
from ..errors import FlattenError, InvalidArgumentError, ReplayError, SpecMismatchError, describe_class, require
from ..errors.failures import STEP, first_line, result_or
from ..huggingface.cache_names import name_in
from ..registry.recipe.aliases import DynamicShapes
from ..runners.adapters import Adapter
from ..runners.ports import check_cache_outputs
from ..trace.program import with_members
from ..trees.arguments import check_arguments, has_no_data
from ..trees.shapes import dynamic_shapes
from .example import Bounds, Example, make_example, narrowed, rows_of, sizes_of, varying_axes
from .exported_model import ExportedModel
from .onnx.attempts import ConversionRefusedError
from .proof.eager_runs import Case, Proof, clone
from .proof.report import ExportReport
from .quantization import Quantization, WeightBits
from .runtimes.write import FileOptions, write_file
from .source import Asked, Source, noted, prove, shapes_taken, traced_example
from .traced import RETURN_THE_CACHE, described, fill, write_single_values


def export_onnx(  # noqa: D417 # arguments that belong together are described together
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] = "model.onnx",
    *,
    dynamic_shapes: DynamicShapes = "auto",
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    opset_version: int | None = None,
    keep_failed: str | os.PathLike[str] | None = None,
    counter_input: bool = False,
    proof: Proof = "auto",
    quantize: WeightBits | Quantization | None = None,
    optimize: Literal["onnxruntime"] | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
    adapters: Sequence[Adapter] = (),
    loop: bool = True,
) -> ExportedModel:
    """Export a module to an ONNX file, and compare the file's outputs in onnxruntime with the module's outputs.

    The file's inputs have the names that generation tools expect. See :ref:`all options <options-of-export-onnx>`.

    Args:
        module, args, kwargs: the module in the mode (``eval()``) to export, and example arguments for ``forward``.
        path: the ONNX file to write. The file is created only if its outputs are right.
        keep_failed: folder to which a file with wrong outputs is moved; ``None``, the default, deletes such a file.
        dynamic_shapes, cases, steps, tolerance, proof, loop: same as in :func:`export_program`.
        opset_version: ONNX opset of the file; ``None``, the default, chooses the newest opset with right outputs.
        counter_input: whether the file of a model with only sliding-window layers has an input for the number of cached
            tokens, ``past_key_values.length``; ``False`` by default.
        quantize: ``"int8"``, ``"int4"`` or a :class:`.quantization.Quantization`; weights stay in float by default.
        optimize: ``"onnxruntime"`` for an attention operator that does not copy the KV cache; ``None`` by default.
        translations: a dict from your own operators to onnxscript functions that replace them; none by default.
        adapters: LoRA adapters with which to check the file, see :class:`.adapters.Adapter`; none by default.

    Returns:
        The exported program with the path of the ONNX file and the report of the comparison.

    Raises:
        InvalidArgumentError, NotRegisteredError, DynamicShapesError: when an argument is invalid.
        MissingDependencyError, NoRoomError: when a library, disk space or memory is missing; raised before the trace.
        ReplayError: when a call fails, outputs differ by more than ``tolerance``, or quantization is too inaccurate.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(torch.nn.Linear(3, 2).eval(), (torch.zeros(4, 3),), path=f"{folder}/linear.onnx").report.ok
    True
    """
    require("onnx", "onnxscript", "onnxruntime", purpose="export_onnx", extra="onnx")
    check_arguments(module, args, kwargs)
    asked = Asked.of(module, cases, steps, tolerance, proof)
    options = FileOptions(
        "onnxruntime", pathlib.Path(path), "export_onnx", quantize, opset_version, optimize, translations
    )
    failed = None if keep_failed is None else pathlib.Path(keep_failed)
    options = dataclasses.replace(options, counter_input=counter_input, keep_failed=failed, adapters=adapters)
    options = options.checked(asked.facts, proof=asked.proof)

    def export(example: Example, is_fixed: bool) -> ExportedModel:
        report = asked.report()
        with scratch_for(options.path) as folder:
            traced = traced_example(example, report)
            if example.loop:
                check_cache_outputs(traced.input_names, traced.output_names, asked.facts.name, remedy=RETURN_THE_CACHE)
            if traced.readers and asked.proof == "full":
                report.remark("the file was checked; the program has no weights and was not checked.")
            # of a larger model only the file is replayed, since the file does what the program does
            runs = asked.proof == "full" and not traced.readers
            source = prove(example, traced, asked, report, runs=runs, only_fitting=is_fixed)
            write_file(dataclasses.replace(source, adapters=options.adapters), options, folder, report)
        exported = finish(source, report)
        exported.path = options.path
        return exported

    with register_flattening_functions(**options_in_use()):
        example = make_example(module, args, dict(kwargs or {}), dynamic_shapes, loop=loop)
        options.check_example(example)
        return with_fewer_sizes(export, example, dynamic_shapes)


def export_program(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: DynamicShapes = "auto",
    bounds: Mapping[str, int] | None = None,
    strict: bool = False,
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    proof: Proof = "auto",
    loop: bool = True,
) -> ExportedModel:
    """Export a module with ``torch.export``, and compare the program's outputs with the module's outputs.

    Args:
        module: the module in the mode (``eval()``) to export.
        args: example positional arguments; none by default.
        kwargs: example keyword arguments, including caches; none by default. For a Hugging Face model, axes of size 0
            or 1, which ``torch.export`` would fix, are enlarged, and the report lists these axes.
        dynamic_shapes: as for ``torch.export.export``; ``"auto"`` chooses dynamic axes; ``None`` keeps all sizes fixed.
        bounds: a dict of the largest input sizes, such as ``{"batch": 4, "length": 512}``. ``"batch"`` limits the batch
            size, ``"length"`` the number of tokens in the cache, and ``"new"`` the number of tokens in one call. The
            program refuses inputs above the bounds. ``to_executorch`` needs bounds, or ``max=`` in ``dynamic_shapes``.
        strict: as for ``torch.export.export``; ``False`` by default.
        cases: additional test inputs. By default, a Hugging Face model gets inputs with padding, and with fewer and
            more tokens than its sliding window. Any other module gets inputs with other sizes and values than the
            example, as far as the module accepts them.
        steps: number of calls per test case, 3 by default; each call gets the cache that the previous call returned.
        tolerance: largest absolute difference to the module's outputs; 1e-4 by default. For weights in half precision,
            the default is five times the rounding error of the module, which is measured on the same test case.
        proof: which outputs are compared with the module's outputs. ``proof="full"`` compares the outputs of program
            and file on all test cases. ``proof="standard"`` compares only the outputs of the file, or of the program if
            no file is written. ``proof="sample"`` compares the same outputs as ``"standard"``, but only for two calls
            of the example and two calls of the largest test case. ``proof="none"`` compares no outputs, and writes a
            warning into the report. ``proof="auto"``, the default, means ``"full"`` if the weights have less than 100
            MB, ``"standard"`` if they have less than 1 GB, and ``"sample"`` for larger weights.
        loop: whether each call gets the cache of the previous call; ``True`` by default. With ``loop=True``, the
            program also returns the arguments that ``forward`` changes but does not return, such as an extended cache.
            Like ``forward``, the exported model changes its caller's arguments. Pass ``loop=False`` for a module that
            is called once, such as a module that reads a cache to compute a score.

    Returns:
        The exported program with the report of the comparison; callable outside ``register_flattening_functions``.

    Raises:
        InvalidArgumentError: when ``forward`` does not accept ``args`` and ``kwargs``, or another argument is invalid.
        NotRegisteredError: when an input contains an object of a class that is not registered as a pytree node.
        DynamicShapesError: when ``dynamic_shapes`` or ``bounds`` does not fit the inputs or the model.
        ReplayError: when a call fails, or outputs differ by more than ``tolerance``; ``error.report`` has all results.

    >>> class Scale(torch.nn.Module):
    ...     def forward(self, pair):
    ...         return {"sum": pair[0] + pair[1]}
    >>> pair = (torch.ones(2, 3), torch.ones(2, 3))
    >>> larger = Case("batch 5", ((torch.ones(5, 3), torch.ones(5, 3)),))
    >>> exported = export_program(Scale(), (pair,), cases=[larger])
    >>> [(result.case, result.differences) for result in exported.report.cases]
    [('the example', {'sum': 0.0}), ('batch 5', {'sum': 0.0})]
    """
    check_arguments(module, args, kwargs)
    asked = Asked.of(module, cases, steps, tolerance, proof)
    largest = Bounds.of(bounds)
    if largest is not None:
        largest.check_positions(module)

    def export(example: Example, is_fixed: bool) -> ExportedModel:
        report = asked.report()
        traced = traced_example(example, report, strict=strict)
        fill(traced.program, traced.readers)
        return finish(prove(example, traced, asked, report, only_fitting=is_fixed), report)

    with register_flattening_functions(**options_in_use()):
        example = make_example(module, args, dict(kwargs or {}), dynamic_shapes, largest, loop=loop)
        return with_fewer_sizes(export, example, dynamic_shapes)


def prove_program(
    program: ExportedProgram,
    module: torch.nn.Module,
    *,
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    proof: Proof = "auto",
) -> ExportedModel:
    """Compare a ``torch.export`` program with its module on test inputs, and return the program with a report.

    Create the program with ``torch.export.export`` or ``transformers.exporters`` inside a ``with`` block of
    ``register_flattening_functions``, in which this package flattens all caches. The result of
    ``transformers.exporters`` contains the program as its attribute ``.program``.

    Args:
        program: result of ``torch.export.export``, whose example inputs are the first test case. Buffers that the
            program writes to are replaced in the program by copies, so that the buffers of the module do not change.
        module: the module that the program was exported from, in the same mode (``eval()``).
        cases: additional test inputs. By default, a Hugging Face model gets the test cases of
            :func:`~yobx_flatten.export_program` whose sizes the program accepts. The report lists the cases left out.
        steps: number of calls per test case, 3 by default; each call gets the cache that the previous call returned. A
            program with fixed sizes is called once per test case.
        tolerance: see :func:`~yobx_flatten.export_program`.
        proof: which test cases are compared, see :func:`~yobx_flatten.export_program`; ``"auto"`` by default.

    Returns:
        The program with the report of the comparison. The methods ``to_onnx``, ``to_openvino``, ``to_executorch`` and
        ``to_aotinductor`` of the returned object write files for runtimes from the same program, without a new trace.

    Raises:
        InvalidArgumentError: when ``program`` is not an ``ExportedProgram``, or has no example inputs.
        SpecMismatchError: when a class in the inputs had other flattening functions during the export.
        StaticDataError: when the pytree context of an output contains a dynamic size.
        ReplayError: when a call fails, or outputs differ by more than ``tolerance``; ``error.report`` has all results.

    >>> linear = torch.nn.Linear(3, 2)
    >>> rows = {0: torch.export.Dim.AUTO}
    >>> program = torch.export.export(linear, (), {"input": torch.zeros(4, 3)}, dynamic_shapes={"input": rows})
    >>> checked = prove_program(program, linear, cases=[Case("9 rows", (), {"input": torch.ones(9, 3)})])
    >>> [(result.case, result.differences) for result in checked.report.cases]
    [('the example', {'output': 0.0}), ('9 rows', {'output': 0.0})]
    """
    if not isinstance(program, ExportedProgram):
        raise InvalidArgumentError(
            f"prove_program: expected a torch.export.ExportedProgram, found {describe_class(program)}. The result of "
            "transformers' DynamoExporter contains a program:\n    prove_program(exported.program, model)"
        )
    asked = Asked.of(module, cases, steps, tolerance, proof)
    report = asked.report()
    with register_flattening_functions(**options_in_use()):
        if program.example_inputs is None:
            raise InvalidArgumentError(
                "This program has no example inputs, so its outputs cannot be compared with the module's outputs. "
                "Export again inside register_flattening_functions(...):\n"
                "    program = torch.export.export(module, args, kwargs, dynamic_shapes=...)"
            )
        args, kwargs = program.example_inputs
        check_arguments(module, args, kwargs)
        differences = compare_specs(program, (args, kwargs), names=("program", "here"))
        if differences:
            found = "\n".join(map(str, differences))
            raise SpecMismatchError(
                f"The inputs of this program are flattened differently now than during its export:\n{found}\n"
                "Export the module again inside this with block:\n"
                "    with register_flattening_functions(patch_transformers=True):\n"
                "        exported = DynamoExporter().export(model, inputs, config)"
            )
        args, kwargs = with_members(args, kwargs, getattr(program, "enum_members", {}))
        no_data = has_no_data(module, pytree.tree_leaves((args, kwargs)), {})
        if not no_data:  # a program keeps the counters of all layers of a cache as one tensor; in a copy each has one
            args, kwargs = clone((args, kwargs))
        cache_is = name_in(kwargs) or ""
        why_not, remarks = sizes_of(module, args, kwargs, cache_is)
        varies = any(any(type(size) is not int for size in shape) for shape in shapes_taken(program))
        shapes = dynamic_shapes(kwargs) if varies else None
        example = Example(module, args, kwargs, shapes, {}, cache_is, no_data, no_data or why_not, tuple(remarks))
        write_single_values(program)
        traced = described(program, example)
        noted(example, traced, report)
        if example.shapes is None:
            asked = dataclasses.replace(asked, steps=1)
        source = prove(example, traced, asked, report, only_fitting=True)
        return finish(dataclasses.replace(source, is_given=True), report)


def finish(source: Source, report: ExportReport) -> ExportedModel:
    if not report.ok:
        raise ReplayError(f"{report.failure()}\n{report}", report)
    exported = ExportedModel(source.traced.program, report, None, options_in_use())
    exported._source = source
    return exported


logger = logging.getLogger("yobx_flatten")


# Export with fewer dynamic sizes if torch fails with all of them.
#
#     all sizes vary ──fails──> fix the sizes named in the error ──> only the batch varies ──> none varies
#                    ──passes─> done, at no cost


def with_fewer_sizes(
    export: Callable[[Example, bool], ExportedModel], example: Example, stated: DynamicShapes
) -> ExportedModel:
    """Export a module; if torch fails, export the module again with fewer dynamic sizes."""
    # export: takes an example, and whether this function has fixed sizes of the example
    # stated: the dynamic shapes that the caller passed; sizes are fixed only if the caller passed "auto"
    module = example.module
    # torch raises errors of many classes for sizes that it cannot trace
    first = result_or(lambda: export(example, False), lambda error: error)
    if not isinstance(first, Exception):
        return first
    is_of_torch = not isinstance(first, (FlattenError, OSError, MemoryError))
    if is_of_torch:  # the module itself may fail, without a trace
        with undisturbed(module=module), torch.no_grad():
            own = result_or(lambda: module(*clone(example.args), **clone(dict(example.kwargs))), lambda error: error)
        if isinstance(own, Exception) and (type(own), str(own)) != (type(first), str(first)):
            raise InvalidArgumentError(
                f"{type(module).__qualname__}.forward fails with these args and kwargs, before anything is exported: "
                f"{type(own).__name__}: {first_line(own)}"
            ) from own
    if isinstance(first, ConversionRefusedError):  # most errors of this package name another remedy than fewer sizes
        is_of_torch = first.axes is not None
    if stated == "auto" and example.bounds is None and is_of_torch:
        for fewer in _with_fewer(example, first):
            logger.info("exporting %s with fewer sizes that vary", type(module).__qualname__, extra=STEP)
            found = result_or(functools.partial(export, fewer, True), lambda error: error)
            if not isinstance(found, Exception):
                return found
            if fewer.shapes is None and isinstance(first, ConversionRefusedError) and type(found) is type(first):
                first = found  # this error does not advise to fix sizes, which are fixed already
    if isinstance(first, FlattenError):
        raise first
    # a long error of torch is replaced by a short error; errors of the model's code are unchanged
    *_, (frame, _) = traceback.walk_tb(first.__traceback__)
    explanation = explain_error(first, module)
    is_of_trace = explanation.known and frame.f_globals.get("__name__", "").startswith("torch._export")
    if not (is_of_trace or type(first).__module__.startswith(("torch.", "onnx_ir."))):
        raise first
    raised = f": torch raises {type(first).__name__}: {first_line(first)[:300]}\nFor an explanation:\n"
    text = f". {explanation}" if is_of_trace else f"{raised}    explain_error(error.__cause__, module, args, kwargs)"
    raise InvalidArgumentError(f"{type(module).__qualname__} cannot be exported{text}") from first


def _with_fewer(example: Example, error: Exception) -> Iterator[Example]:
    varying = varying_axes(example)
    batch = rows_of(example) & varying
    if isinstance(error, ConversionRefusedError):
        named = set(error.axes or ())
    else:
        found = re.findall(r"(?:L|inputs)\['([\w.]+)'\]\.(?:size\(\)|shape)\[(\d+)\]", str(error))
        named = {(name, int(axis)) for name, axis in found}
    without_named = varying - (named - batch)
    known = {frozenset(varying)}
    for kept in map(frozenset, (without_named, batch, ())):
        if kept in known:
            continue
        known.add(kept)
        fixed = ", ".join(f"{name}.shape[{axis}]" for name, axis in sorted(varying - kept))
        what, where = (fixed, "it varies") if kept else ("every size of the inputs", "sizes vary")
        raised = f"torch.export raises {type(error).__name__}: {first_line(error).rstrip('.')[:200]}"
        reason = error.reason if isinstance(error, ConversionRefusedError) else raised
        way = "To set which sizes vary, pass dynamic_shapes=."
        remark = f"{what} is fixed as in the example, because if {where}, {reason}. {way}"
        shapes = narrowed(example, kept) if kept else None
        yield dataclasses.replace(example, shapes=shapes, remarks=(*example.remarks, remark))
