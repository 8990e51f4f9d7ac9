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
        """Export the program, checked in torch."""
        from yobx_flatten import ReplayError, dynamic_shapes, export_program

        kwargs = self.inputs(EXAMPLE)
        with self.way.block(self.model):
            shapes: Any = dynamic_shapes(kwargs, bounds=bounds) if bounds else "auto"
        try:
            return export_program(self.model, (), kwargs, dynamic_shapes=shapes, cases=self.cases, steps=STEPS)
        except ReplayError as error:
            raise DifferenceError(_worst(error.report)) from error

    @functools.cached_property
    def free(self) -> Any:
        """The program without bounds."""
        return self.exported()

    def run_on(self, runtime: str) -> dict[str, Any]:
        """Write the program for a runtime, replay it there, and move its inputs."""
        from yobx_flatten import MissingDependencyError, ReplayError

        file, options = self.folder / _FILES[runtime], {}
        exported = self.exported(BOUNDS) if runtime == "executorch" else self.free
        if runtime == "executorch":
            options["backend"] = "portable"
        try:
            report = getattr(exported, f"to_{runtime}")(file, **options)
        except MissingDependencyError as error:
            raise SkipColumnError(str(error).splitlines()[0]) from error
        except ReplayError as error:
            raise DifferenceError(_worst(error.report)) from error
        except Exception as error:  # a compiler states its command first, which is long
            said = [line for line in str(error).splitlines() if "error:" in line]
            if said:
                raise RuntimeError(f"{type(error).__name__}: {said[0].strip()}") from error
            raise
        library = runtime if runtime != "aotinductor" else "torch"
        return {
            "library": [library, importlib.metadata.version(library)],
            "cases": len(report.cases),
            "max_difference": max(case.max_difference for case in report.cases),
            **self.calls(exported, file, runtime),
            **({"planned_bytes": report.planned_bytes} if report.planned_bytes is not None else {}),
        }

    def calls(self, exported: Any, file: pathlib.Path, runtime: str) -> dict[str, int]:
        """Run each case with slices and transposed tensors, and one with inputs that do not fit; count both."""
        from yobx_flatten.export.exported_model import source_of
        from yobx_flatten.export.proof.report import ExportReport
        from yobx_flatten.export.runtimes.write import without_counter
        from yobx_flatten.runners.open import open_runner

        runner = open_runner(file, runtime=runtime, trust=True)
        with self.way.block(self.model):
            source = without_counter(source_of(exported), ExportReport(self.name))
            moved = sum(_moved(runner, source, case) for case in source.cases)
            return {"moved": moved, "refused": _refused(runner, source, source.cases[-1])}


def _worst(report: Any) -> str:
    """What the first case of a report states that did not pass."""
    failed = next(case for case in report.cases if not case.max_difference <= report.tolerance)
    worst = max(failed.differences, key=failed.differences.__getitem__, default="")
    return f"{failed.case}: {failed.error or f'{worst} differs by {failed.max_difference:.1e}'}"


def _moved(runner: Any, source: Any, case: Any) -> int:
    """Run a case with its inputs in other places of memory; return how many were moved."""
    from yobx_flatten.core.compare import largest_difference

    count, expected = 0, _logits(source, case.kwargs)
    for inputs in strided(_tensors(runner, source, case.kwargs)):
        count += sum(not value.is_contiguous() for value in inputs.values())
        difference = largest_difference(expected, runner.run(inputs)["logits"])
        if not difference <= source.asked.tolerance:
            raise DifferenceError(f"{case.name}, other strides: logits differ by {difference:.1e}")
    return count


def _refused(runner: Any, source: Any, case: Any) -> int:
    """Give each input one entry more, then one less, in each axis, in turn; return how many calls are refused.

    What is not refused has to be what the model returns for it; it may not be numbers for what the model refuses. A
    mask without the column of a token excludes it, as padding: where it sees nothing, it is a softmax over nothing.
    """
    from yobx_flatten import FlattenError
    from yobx_flatten.export.proof.replay import Padding

    leaves, spec = pytree.tree_flatten(dict(case.kwargs))
    count = 0
    for index, leaf in enumerate(leaves):
        for axis in range(leaf.dim() if isinstance(leaf, torch.Tensor) else 0):
            for other in (torch.cat([leaf, leaf.narrow(axis, 0, 1)], axis), leaf.narrow(axis, 1, leaf.shape[axis] - 1)):
                kwargs = pytree.tree_unflatten([*leaves[:index], other, *leaves[index + 1 :]], spec)
                try:
                    found = runner.run(_tensors(runner, source, kwargs))["logits"]
                except FlattenError:
                    count += 1
                    continue
                place = f"{source.example.names[index]} of shape {tuple(other.shape)} after {tuple(leaf.shape)}"
                try:
                    expected = _logits(source, kwargs)
                except Exception as error:  # whatever the model raises for inputs that do not fit
                    raise DifferenceError(f"{place}: numbers, and the model refuses it") from error
                padding = Padding()
                padding.next_call(_with_whole_masks(kwargs, case.kwargs))
                found, expected = padding.blank("logits", found), padding.blank("logits", expected)
                if found.shape != expected.shape or not (found - expected).abs().max() <= source.asked.tolerance:
                    raise DifferenceError(f"{place}: other numbers than the model's")
    return count


def _with_whole_masks(kwargs: Any, whole: Any) -> dict[str, Any]:
    """The inputs, with zeros for the columns that a mask has in the whole inputs alone."""
    made = dict(kwargs)
    for name in ("attention_mask", "decoder_attention_mask"):
        if isinstance(made.get(name), torch.Tensor) and made[name].dim() == 2:
            missing = max(0, whole[name].shape[1] - made[name].shape[1])
            made[name] = torch.nn.functional.pad(made[name], (0, missing))
    return made


def _tensors(runner: Any, source: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """The inputs by name that a file takes."""
    leaves = zip(source.example.names, pytree.tree_leaves(dict(kwargs)), strict=True)
    return {name: leaf for name, leaf in leaves if name in runner.ports}


def _logits(source: Any, kwargs: Any) -> torch.Tensor:
    """What the model itself computes."""
    from yobx_flatten.export.proof.eager_runs import clone

    with torch.no_grad():
        found = source.example.module(**clone(dict(kwargs)))
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
