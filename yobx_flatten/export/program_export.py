"""Export a module to a program, and replay it against the eager module.

.. code-block:: text

    inputs --> dynamic shapes --> torch.export --> program --> replay --+
                                                      |                 +--> report
                                     (onnx_export)    +--> ONNX --> replay
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ..declare.scopes import options_in_use, register_flattening_functions
from ..errors import InvalidArgumentError, ReplayError
from ..errors.log import STEP
from ..files.native import file_for_torch
from ..files.scratch import publish_files, scratch_for
from ..recipe.aliases import DynamicShapes
from ..runners.program_runner import ProgramRunner
from ..trees.arguments import check_arguments
from .example.bounds import Bounds
from .example.example import Example, make_example
from .program.fixed_axes import notes_on_fixed_axes
from .program.to_transformers import to_hf_exporter
from .program.traced import Traced, fill, trace
from .proof.exported_call import Nested
from .proof.levels import Proof, choose_proof, sampled
from .proof.module_state import undisturbed
from .proof.replay import Case, CaseResult, check_cases, following, replay
from .proof.report import ExportReport
from .quantization.options import Quantization, WeightBits
from .runtimes.executorch import Backend
from .runtimes.write import Source, write_for
from .tolerance import Allowed, explained_by

__all__ = [
    "ExportedModel",
    "cases_of",
    "export_program",
    "finish",
    "following",
    "left_out",
    "replay_program",
    "shortened",
    "source_of",
    "traced_example",
]

logger = logging.getLogger("yobx_flatten")


@dataclasses.dataclass
class ExportedModel:
    """An exported program that can be called anywhere: it enters the context manager itself.

    Attributes:
        program: the ``torch.export.ExportedProgram``.
        report: the record of the export and of every replay.
        path: the ONNX file, ``None`` without one.

    >>> exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> exported(torch.ones(7, 3)).shape
    torch.Size([7, 2])
    >>> exported.report.input_names, exported.path
    (['input'], None)
    """

    program: ExportedProgram
    report: ExportReport
    path: pathlib.Path | None = None
    _patches: dict[str, bool] = dataclasses.field(default_factory=dict, repr=False)
    _source: Source | None = dataclasses.field(default=None, init=False, repr=False)

    @functools.cached_property
    def _runner(self) -> ProgramRunner:
        return ProgramRunner(self.program, options=self._patches)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program with the arguments of the original module.

        Args:
            *args: positional arguments.
            **kwargs: keyword arguments.

        Returns:
            What the module returns.
        """
        return self._runner.call(args, kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Store the program with ``torch.export.save``.

        Load it with ``torch.export.load`` inside ``register_flattening_functions``; a class of your own must be
        registered before that.

        Args:
            path: the file to write, usually with the suffix ``.pt2``. It appears when it is complete.
        """
        target = pathlib.Path(path)
        with register_flattening_functions(**self._patches), scratch_for(target) as folder:
            with file_for_torch(folder / target.name) as file:
                torch.export.save(self.program, file)
            publish_files(folder, target)

    def to_transformers(self) -> Any:
        """Return the program as ``transformers.exporters`` returns one: called, saved and loaded by its code.

        Use it inside ``register_flattening_functions``: transformers writes and reads caches with the registration that
        it finds, and registers its own for good where there is none.

        Returns:
            A ``transformers.exporters.ExportedModel`` with this program as its only component, ``"model"``, and the
            configuration of the model.

        Raises:
            InvalidArgumentError: when this was made by hand, or the program takes positional arguments.
            MissingDependencyError: when the installed transformers has no such class: 5.23 has.
        """
        return to_hf_exporter(self.program, source_of(self).example)

    def to_onnx(self, path: str | os.PathLike[str], *, opset_version: int | None = None) -> ExportReport:
        """Write the program as an ONNX file, and replay the cases of this export in onnxruntime.

        :func:`export_onnx` has more options: quantised weights, operators of onnxruntime, names of axes.

        Args:
            path: the file to write, with the suffix ``.onnx``. It takes its name when the replay has passed.
            opset_version: see :func:`export_onnx`.

        Returns:
            The report: one result per case.

        Raises:
            InvalidArgumentError: when an argument is invalid.
            MissingDependencyError: when onnx, onnxscript or onnxruntime is not installed.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a case fails or differs by more than the tolerance of this export; nothing is written.
        """
        return write_for("onnxruntime", source_of(self), path, caller="to_onnx", opset_version=opset_version)

    def to_aotinductor(self, path: str | os.PathLike[str]) -> ExportReport:
        """Compile the program with AOTInductor for this machine, and replay the cases of this export.

        The file holds machine code, which runs when it is loaded: load only what you know the author of.

        Args:
            path: the file to write, with the suffix ``.pt2``. It takes its name when the replay has passed.

        Returns:
            The report: one result per case.

        Raises:
            InvalidArgumentError: when the suffix is another one, or an input is a number that varies.
            MissingDependencyError: when there is no C++ compiler.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a case fails or differs by more than the tolerance of this export; nothing is written.
        """
        return write_for("aotinductor", source_of(self), path, caller="to_aotinductor")

    def to_executorch(
        self,
        path: str | os.PathLike[str],
        *,
        backend: Backend = "auto",
        quantize: WeightBits | Quantization | None = None,
    ) -> ExportReport:
        """Lower the program to a file of ExecuTorch, and replay the cases of this export in its runtime.

        ExecuTorch plans memory for the largest sizes, so every size that varies needs a bound: ``bounds=`` of the
        export, or a ``Dim`` with ``max=`` in ``dynamic_shapes``.

        Args:
            path: the file to write, with the suffix ``.pte``. It takes its name when the replay has passed.
            backend: ``"xnnpack"`` for the kernels of XNNPACK where it has them; ``"portable"`` for ExecuTorch's own,
                which are slower. ``"auto"``, the default, takes XNNPACK's where their replay passes; its GELU is an
                approximation, off by 1e-3 in a small Gemma 3.
            quantize: ``"int8"`` or ``"int4"`` to store the weights of projections in so many bits with torchao, for
                kernels of XNNPACK that also round activations to 8 bits; measured as :func:`export_onnx` does it.
                ``None``, the default, stores them as they are.

        Returns:
            The report: one result per case, and the memory that is planned.

        Raises:
            InvalidArgumentError: when an argument is invalid, or an input is a number that varies.
            DynamicShapesError: when a size that varies has no bound.
            MissingDependencyError: when ExecuTorch is not installed, or does not fit the installed torch.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a case fails or differs by more than the tolerance of this export; nothing is written.
        """
        return write_for(
            "executorch", source_of(self), path, caller="to_executorch", quantize=quantize, backend=backend
        )

    def to_openvino(
        self, path: str | os.PathLike[str], *, quantize: WeightBits | Quantization | None = None
    ) -> ExportReport:
        """Write the program as files of OpenVINO, and replay the cases of this export there, in float32.

        OpenVINO itself computes in bfloat16 where the processor has it: compile the file with
        ``{"INFERENCE_PRECISION_HINT": "f32"}``, as the replay does.

        Args:
            path: the file to write, with the suffix ``.xml``; the weights get the suffix ``.bin``. Both take their name
                when the replay has passed.
            quantize: ``"int8"`` or ``"int4"`` to store the weights in so many bits with NNCF, measured as
                :func:`export_onnx` does it. ``None``, the default, stores them as they are.

        Returns:
            The report: one result per case.

        Raises:
            InvalidArgumentError: when an argument is invalid, or an input is a number that varies.
            MissingDependencyError: when openvino, onnx, onnxscript, or NNCF for ``quantize``, is not installed.
            NoRoomError: when disk or memory is too small.
            ReplayError: when a case fails or differs by more than the tolerance of this export; nothing is written.
        """
        return write_for("openvino", source_of(self), path, caller="to_openvino", quantize=quantize)

    def __str__(self) -> str:
        return str(self.report)


def source_of(exported: ExportedModel) -> Source:
    """Return what files for runtimes are made of."""
    if exported._source is None:
        raise InvalidArgumentError("This program was not made by export_program: there is nothing to replay.")
    return exported._source


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
) -> ExportedModel:
    """Export a module with ``torch.export`` and replay the program against the module.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments; none by default.
        kwargs: example keyword arguments, with caches among them; none by default. For a transformers model an
            example that ``torch.export`` would fix at a size of 0 or 1 (one row, one token, an empty cache) is replaced
            by a larger one, and the report states it.
        dynamic_shapes: as for ``torch.export.export``; ``"auto"`` writes them (see
            :func:`~yobx_flatten.dynamic_shapes`); ``None`` keeps every size fixed.
        bounds: the largest sizes of the axes that vary: ``"batch"``, ``"length"`` (tokens in the cache and the mask),
            and ``"new"`` for the tokens of one call, where these are fewer. ``{"batch": 4, "length": 512}`` is what
            ``to_executorch`` needs, which plans memory for them. A file refuses a larger input by name, the program by
            a guard of torch. No bounds by default.
        strict: as for ``torch.export.export``; ``False`` by default.
        cases: what to replay in addition to the example. By default, for a transformers model: other
            batch sizes and lengths below, at and past its window, several tokens at once, a padded row.
        steps: number of calls per case, 3 by default; after the first, each gets the cache that the call before
            returned.
        tolerance: largest absolute difference to the module's own outputs; by default 1e-4. For weights in half
            precision, what the type costs the model itself is measured on every case, next to float32, and each output
            of the program, and of files that are made of it, may differ by five times that. Where the memory is too
            small for that, 6e-2 for float16 and 2e-1 for bfloat16.
        proof: what is replayed: ``"full"``, the example and all cases; ``"sample"``, the example and the largest case,
            two calls each; ``"none"``, nothing, which the report states as unproven. ``"auto"``, the default, is
            ``"full"`` for weights of less than 1 GB, and ``"sample"`` for others.

    Returns:
        The program with a report. It can also be called outside ``register_flattening_functions``.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or another argument is invalid.
        NotRegisteredError: when an input holds an object of a class that is not registered.
        DynamicShapesError: when ``dynamic_shapes`` does not fit the inputs; when the example, or the model's number of
            positions, is on the other side of a bound.
        ReplayError: when a case fails or differs by more than ``tolerance``; ``error.report`` holds all of them.

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
    cases, largest = cases if cases is None else check_cases(cases), Bounds.of(bounds)
    if largest is not None:
        largest.check_positions(module)
    allowed = Allowed.of(module, tolerance)
    report = ExportReport(type(module).__qualname__, tolerance=allowed.tolerance, proof=choose_proof(proof, module))
    with register_flattening_functions(**options_in_use()):
        example = make_example(module, args, dict(kwargs or {}), dynamic_shapes, largest)
        traced = traced_example(example, report, strict=strict)
        fill(traced.program, traced.readers)
        allowed.measure(report, example, traced)
        with report.timed("replay"):
            chosen = cases_of(example, cases, steps, report)
            if chosen:
                report.cases += replay_program(ProgramRunner(traced.program), example, traced, chosen, report)
    source = Source(example, traced, chosen, allowed, report.proof, yardstick=report.yardstick)
    return finish(traced, report, source=source)


def traced_example(example: Example, report: ExportReport, *, strict: bool = False) -> Traced:
    """Trace an example, and put what is known of the program into the report."""
    # strict: as for `torch.export.export`; `False` by default
    report.remark(*example.remarks)
    with report.timed("trace"):
        traced = trace(example, strict=strict)
    report.input_names, report.output_names = traced.input_names, traced.output_names
    report.remark(*traced.remarks())
    calls = report.proof != "none" and not example.no_data and not traced.readers
    report.remark(*notes_on_fixed_axes(example, traced.program, calls=calls))
    return traced


def replay_program(
    runner: ProgramRunner, example: Example, traced: Traced, cases: Sequence[Case], report: ExportReport
) -> list[CaseResult]:
    """Replay cases with a program. The block must be open."""
    results = []
    for case in cases:
        logger.info("replaying %s with torch.export", case.name, extra=STEP)
        with undisturbed(runner.module, traced.written):
            side = Nested(runner, example.cache_is)
            how: dict[str, Any] = {"taken": example.names, "written": traced.written}
            how["allowed"] = explained_by(report, case)
            results.append(replay(side, example.module, case, following(), **how, keeps_state=True))
    return results


def cases_of(example: Example, cases: Iterable[Case] | None, steps: int, report: ExportReport) -> list[Case]:
    """Choose what is replayed: the example, and the cases that were asked for, or those of other sizes."""
    # cases: what was asked for; `None` for other sizes
    # steps: number of calls of each case that is made here
    if report.proof == "none":
        return []
    if example.no_data:
        report.remark(f"nothing was replayed, since {example.no_data}.")
        return []
    is_sample = report.proof == "sample"
    steps = min(steps, 2) if is_sample else steps  # the second call gets the cache of the first
    if cases is None:
        others, remarks = example.other_cases(steps, only_largest=is_sample)
        report.remark(*remarks)
    else:
        others = sampled(list(cases)) if is_sample else list(cases)
    fitting = [case for case in others if example.holds(case, case.steps)]
    report.remark(*left_out(len(others) - len(fitting)))
    chosen = [shortened(example, example.case(steps)), *fitting]
    return [dataclasses.replace(case, steps=min(case.steps, steps)) for case in chosen] if is_sample else chosen


def shortened(example: Example, case: Case) -> Case:
    """Return a case that ends before its cache is larger than the bounds of an example."""
    steps = next((steps for steps in range(case.steps, 1, -1) if example.holds(case, steps)), 1)
    return dataclasses.replace(case, steps=steps)


def left_out(count: int) -> list[str]:
    """Return the note on cases that were not replayed; none where there are none."""
    return [f"{count} cases were left out: they are larger than the bounds."] if count else []


def finish(
    traced: Traced,
    report: ExportReport,
    path: pathlib.Path | None = None,
    otherwise: str = "",
    *,
    source: Source | None = None,
) -> ExportedModel:
    """Return what was proven."""
    if not report.ok:
        raise ReplayError(f"{report.failure()}\n{report}{otherwise}", report)
    exported = ExportedModel(traced.program, report, path, options_in_use())
    exported._source = source
    return exported
