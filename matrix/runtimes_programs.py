"""The columns of all causal types in the table of runtimes: is a program right there, for inputs of every size.

A program is exported once, replayed by torch, written for each runtime and replayed there with the same cases, three
calls each that hand on the cache. Then it is called with inputs in other places of memory.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.utils._pytree as pytree

from .cases import EXAMPLE, DifferenceError, SkipColumnError, Trial
from .places import strided
from .runtimes_cases import BOUNDS
from .ways import WAYS
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "LIBRARIES", "NEEDS", "ProgramTrial", "run_type"]

STEPS = 3
LIBRARIES = {"OpenVINO": "openvino", "AOTInductor": "torch", "ExecuTorch": "executorch"}
"""By column: the library that runs the file."""

_FILES = {"openvino": "model.xml", "aotinductor": "model.pt2", "executorch": "model.pte"}


class ProgramTrial(Trial):
    """One type on its way through the columns."""

    def __init__(self, name: str, folder: pathlib.Path) -> None:
        super().__init__(name, WAYS["yobx_flatten"], folder)

    @functools.cached_property
    def cases(self) -> list[Any]:
        """Other batch sizes and lengths, one and several tokens, a padded row, more than the window holds."""
        from yobx_flatten import Case, DecodeSizes

        sizes = [DecodeSizes(3, 6, 3), DecodeSizes(1, 9, 2), DecodeSizes(4, 7, 1), self.past_the_window]
        if {"attention_mask", "decoder_attention_mask"} & set(self.inputs(EXAMPLE)):
            sizes.append(DecodeSizes(3, 6, 3, padding=3))
        return [Case(str(one), (), self.inputs(one), STEPS) for one in sizes]

    def exported(self, bounds: dict[str, int] | None = None) -> Any:
        """Export the program, proven by torch."""
        from yobx_flatten import dynamic_shapes, export_program

        kwargs = self.inputs(EXAMPLE)
        with self.way.block(self.model):
            shapes: Any = dynamic_shapes(kwargs, bounds=bounds) if bounds else "auto"
        return export_program(self.model, (), kwargs, dynamic_shapes=shapes, cases=self.cases, steps=STEPS)

    @functools.cached_property
    def free(self) -> Any:
        """The program without bounds."""
        return self.exported()

    def run_on(self, runtime: str) -> dict[str, Any]:
        """Write the program for a runtime, replay it there, and move its inputs."""
        from yobx_flatten import MissingDependencyError

        file, options = self.folder / _FILES[runtime], {}
        exported = self.exported(BOUNDS) if runtime == "executorch" else self.free
        if runtime == "executorch":
            options["backend"] = "portable"
        try:
            report = getattr(exported, f"to_{runtime}")(file, **options)
        except MissingDependencyError as error:
            raise SkipColumnError(str(error).splitlines()[0]) from error
        library = runtime if runtime != "aotinductor" else "torch"
        return {
            "library": [library, importlib.metadata.version(library)],
            "cases": len(report.cases),
            "max_difference": max(case.max_difference for case in report.cases),
            "moved": self.moved(exported, file, runtime),
            **({"planned_bytes": report.planned_bytes} if report.planned_bytes is not None else {}),
        }

    def moved(self, exported: Any, file: pathlib.Path, runtime: str) -> int:
        """Run every case with slices and transposed tensors; return how many inputs were moved."""
        from yobx_flatten.diagnose.compare import largest_difference
        from yobx_flatten.export.program import source_of
        from yobx_flatten.export.report import ExportReport
        from yobx_flatten.runners.open import open_runner

        runner, count = open_runner(file, runtime=runtime, trust=True), 0
        with self.way.block(self.model):
            source = source_of(exported).feedable(ExportReport(self.name))
            module: Any = source.example.module
            for case in source.cases:
                leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
                names = source.example.names
                tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in runner.ports}
                expected = _logits(module, case.kwargs)
                for inputs in strided(tensors):
                    count += sum(not value.is_contiguous() for value in inputs.values())
                    difference = largest_difference(expected, runner.run(inputs)["logits"])
                    if not difference <= source.tolerance:
                        raise DifferenceError(f"{case.name}, other strides: logits differ by {difference:.1e}")
        return count


def _logits(module: Any, kwargs: Any) -> torch.Tensor:
    """What the model itself computes."""
    from yobx_flatten.export.replay import clone

    with torch.no_grad():
        found = module(**clone(dict(kwargs)))
    logits: torch.Tensor = found["logits"]
    return logits


def program(trial: ProgramTrial) -> dict[str, Any]:
    """Export the program; torch itself replays it."""
    report = trial.free.report
    return {"cases": len(report.cases), "max_difference": max(case.max_difference for case in report.cases)}


COLUMNS: dict[str, Callable[[ProgramTrial], dict[str, Any]]] = {
    "program": program,
    "OpenVINO": functools.partial(ProgramTrial.run_on, runtime="openvino"),
    "AOTInductor": functools.partial(ProgramTrial.run_on, runtime="aotinductor"),
    "ExecuTorch": functools.partial(ProgramTrial.run_on, runtime="executorch"),
}
NEEDS = dict.fromkeys(LIBRARIES, "program")


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run columns of one type in this process; see `worker.run_type`."""
    be_quiet()
    run_columns(ProgramTrial(name, folder), columns, known, events, (COLUMNS, NEEDS))
