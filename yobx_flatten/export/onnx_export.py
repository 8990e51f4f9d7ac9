"""Export with proof to an ONNX file: the program of :mod:`.program`, converted, and replayed in onnxruntime."""

from __future__ import annotations

import inspect
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind

from ..dependencies import require
from ..diagnose.compare import largest_difference
from ..errors import InvalidArgumentError
from ..huggingface.cases import CACHE_NAMES
from ..huggingface.sliding_decoder import SlidingDecoder, counts_by_itself, why_not_sliding
from ..log import STEP
from ..messages import first_line
from ..trees.arguments import check_arguments
from .onnx_file import UnprovenFile, convert, unproven_file
from .onnx_replay import OnnxSteps
from .program import Export, ExportedModel, following
from .replay import Case, CaseResult, check_cases, clone, replay
from .report import tolerance_of
from .undisturbed import seeded, undisturbed

__all__ = ["OnnxExport", "export_onnx"]

logger = logging.getLogger("yobx_flatten")


def export_onnx(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] = "model.onnx",
    *,
    dynamic_shapes: Any = "auto",
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    opset_version: int | None = None,
    keep_failed: str | os.PathLike[str] | None = None,
    counter_input: bool = False,
) -> ExportedModel:
    """Export a module to an ONNX file and replay it in onnxruntime, as a loop over its own outputs.

    Inputs, outputs and axes have the names that tools for generation know: ``past_key_values.0.key``,
    ``present.0.key``, ``past_sequence_length``. Weights of 2 GB and more are stored in a second file next to it.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments; none by default.
        kwargs: example keyword arguments, with caches among them; none by default. See :func:`export_program`.
        path: the file to write, ``"model.onnx"`` by default. It is replaced only after the replay has passed.
        dynamic_shapes: see :func:`export_program`. Names in it are names of axes in the file.
        cases: see :func:`export_program`.
        steps: see :func:`export_program`; 3 by default.
        tolerance: see :func:`export_program`; by default what the type of the weights explains: 1e-4, for float16 6e-2,
            for bfloat16 2e-1.
        opset_version: as for ``torch.onnx.export``; ``None`` for the exporter's own choice.
        keep_failed: a folder for a file that failed its replay; ``None``, the default, removes such a file.
        counter_input: for a cache of which every layer slides: whether to add an input ``past_key_values.length``, as
            the program has. By default the file has the inputs that tools feed, ``attention_mask`` and ``position_ids``
            among them, and reads from the mask how many tokens were seen.

    Returns:
        The program, the path and a report.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or another argument is invalid.
        NotRegisteredError: when an input holds an object of a class that is not registered.
        DynamicShapesError: when ``dynamic_shapes`` does not fit the inputs.
        MissingDependencyError: when onnx, onnxscript or onnxruntime is not installed.
        ReplayError: when a case fails or differs by more than ``tolerance``, or onnxruntime cannot load the file.

    >>> import tempfile
    >>> linear = torch.nn.Linear(3, 2).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_onnx(linear, (torch.zeros(4, 3),), path=f"{folder}/linear.onnx")
    >>> exported.report.input_names, exported.report.ok
    (['input'], True)
    """
    require("onnx", "onnxscript", "onnxruntime", purpose="export_onnx", extra="onnx")
    check_arguments(module, args, kwargs)
    cases = cases if cases is None else check_cases(cases)
    target = pathlib.Path(path)
    folder = None if keep_failed is None else pathlib.Path(keep_failed)
    if folder is not None and folder.absolute() == target.parent.absolute():
        raise InvalidArgumentError(
            f"keep_failed={os.fspath(folder)!r} is the folder of the file itself, where a file that failed would "
            "replace one that did not. Name another folder."
        )
    tolerance = tolerance_of(module) if tolerance is None else tolerance
    export = OnnxExport(module, args, dict(kwargs or {}), dynamic_shapes, steps, tolerance)
    if export.no_data:
        raise InvalidArgumentError(
            f"export_onnx writes the weights, and {export.no_data}. Load them first; export_program works without."
        )
    with unproven_file(target) as file:
        with export.block():
            program = export.to_program(strict=False)
            cases = export.replay_program(program, cases)
            export.write(program, file, cases, opset_version, counter_input)
        if export.report.ok:
            file.publish()
            return export.finish(program, target)
        if folder is None:
            otherwise = f'Nothing was written to {target}. To look at the file, pass keep_failed="a folder".'
        else:
            otherwise = f"Nothing was written to {target}. The file that failed is {file.keep(folder)}."
        return export.finish(program, target, f"\n{otherwise}")


class OnnxExport(Export):
    """An export that goes on to a file."""

    def write(
        self,
        program: ExportedProgram,
        file: UnprovenFile,
        cases: Sequence[Case],
        opset_version: int | None,
        counter_input: bool,
    ) -> None:
        """Convert and replay: the program, or one with the inputs that tools feed."""
        fed = None if counter_input else self.without_counter()
        if fed is None:
            self.to_onnx(program, file, opset_version)
            self.replay_onnx(program, file.path, cases)
            return
        decoder: Any = fed.module
        program = fed.to_program(strict=False)
        fed.to_onnx(program, file, opset_version)
        fed.replay_onnx(
            program, file.path, [Case(case.name, (), decoder.inputs(case.kwargs), case.steps) for case in cases]
        )
        found = fed.report
        self.report.cases += found.cases
        self.report.input_names, self.report.output_names = found.input_names, found.output_names
        self.report.onnx_bytes, self.report.onnx_seconds = found.onnx_bytes, found.onnx_seconds
        self.report.remarks += [remark for remark in found.remarks if remark not in self.report.remarks]

    def without_counter(self) -> OnnxExport | None:
        """The export of a model whose layers all slide, without the counter that no tool feeds; ``None`` for others."""
        if not counts_by_itself(self.kwargs.get("past_key_values")):
            return None
        why_not = "there are positional arguments" if self.args else why_not_sliding(self.module, self.kwargs)
        if why_not is None:
            decoder = SlidingDecoder(self.module, self.kwargs)
            inputs = decoder.inputs(self.kwargs)
            with torch.no_grad(), undisturbed(self.module, self.written), seeded(0):
                expected = self.module(**clone(self.kwargs))
                found = decoder(**clone(inputs))
            if largest_difference(expected.logits, found["logits"]) <= self.report.tolerance:
                shapes, tolerance = decoder.shapes(self.shapes), self.report.tolerance
                fed = OnnxExport(decoder, (), inputs, shapes, self.steps, tolerance)
                fed.axis_names = self.axis_names
                return fed
            why_not = "the model computes something else from the length of the mask"
        self.report.remarks.append(
            f"past_key_values.length, how many tokens were seen, is an input that other tools do not feed: {why_not}."
        )
        return None

    def to_onnx(self, program: ExportedProgram, file: UnprovenFile, opset_version: int | None) -> None:
        """Convert the program."""
        logger.info("converting %s to ONNX", self.report.module, extra=STEP)
        start = time.perf_counter()
        names = self.report.input_names, self.report.output_names
        self.report.onnx_bytes = file.save(convert(program, *names, opset_version, self.axis_names))
        self.report.onnx_seconds = time.perf_counter() - start

    def replay_onnx(self, program: ExportedProgram, path: pathlib.Path, cases: Sequence[Case]) -> None:
        """Replay the cases with the file."""
        self.remark_on_file()
        types = zip(self.report.output_names, _output_types(program), strict=True)
        pairs = [name for name, dtype in types if dtype is not None and dtype.is_complex]
        try:
            steps = OnnxSteps(path, self.input_leaves, self.cache_is, pairs)
        except Exception as error:  # onnxruntime has no base class for its errors
            self.report.cases.append(CaseResult("(loading)", "onnxruntime", 0, {}, 0.0, self.why_not_loaded(error)))
            return
        after = self.module.next_inputs if isinstance(self.module, SlidingDecoder) else following()
        for case in cases:
            logger.info("replaying %s with onnxruntime", case.name, extra=STEP)
            self.report.cases.append(
                replay(
                    "onnxruntime",
                    steps.run,
                    self.module,
                    case,
                    after,
                    steps.feed_back,
                    taken=self.input_leaves,
                    written=self.written,
                )
            )

    def remark_on_file(self) -> None:
        """Remark what the file cannot do although the module can."""
        if self.written:
            self.report.remarks.append(
                f"an ONNX file keeps nothing from call to call: {', '.join(self.written)} is at every call what it was "
                "at the export."
            )
        if self.drawing:
            self.report.remarks.append(
                "onnxruntime draws random numbers of its own, so that differences to it mean nothing: export what "
                "draws none (module.eval()), or pass them as an input."
            )
        takes = set(inspect.signature(self.module.forward).parameters) & set(CACHE_NAMES)
        can_generate: Any = getattr(self.module, "can_generate", None)
        generates = callable(can_generate) and can_generate()
        fed = tuple(f"{name}." for name in takes)
        if generates and takes and not any(name.startswith(fed) for name in self.report.input_names):
            self.report.remarks.append(
                "this file takes no cache: each call reads all tokens from the first on. For one that goes on from a "
                "cache: export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...), or "
                "export_folder(model, folder)."
            )

    def why_not_loaded(self, error: Exception) -> str:
        """What onnxruntime says of a file that it does not load, and what to do about it."""
        said = f"{type(error).__name__}: {first_line(error)[:300]}"
        weights = {str(tensor.dtype).removeprefix("torch.") for tensor in self.module.parameters()}
        half = sorted(weights & {"bfloat16", "float16"})
        if "NOT_IMPLEMENTED" in said and half:
            said += (
                f"\n    onnxruntime lacks kernels for {half[0]} on the CPU, so nothing can be proven there. Export "
                'in float32 (or float16), or keep it for another provider: keep_failed="a folder"'
            )
        return said


def _output_types(program: ExportedProgram) -> list[torch.dtype | None]:
    """The type of the elements of every output of the graph."""
    names = [
        spec.arg.name
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT and not isinstance(spec.arg, ConstantArgument)
    ]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [getattr(values.get(name), "dtype", None) for name in names]
