"""The columns of folders in the table of runtimes: does one generate there, and what do inputs in other places give.

Models are those of `yobx-flatten export TYPE`: small, with random weights and a window of eight tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
from collections.abc import Callable
from typing import Any, TextIO

from .cases import DifferenceError, SkipColumnError
from .places import strided
from .worker import be_quiet, run_columns

__all__ = ["BOUNDS", "COLUMNS", "LIBRARIES", "NEEDS", "TYPES", "RuntimeTrial", "run_type"]

TYPES = ("llama", "mistral", "gemma3_text", "qwen3", "gpt2", "mixtral", "t5", "whisper")
"""One of each kind of cache and of attention."""

BOUNDS = {"batch": 4, "length": 64}


@dataclasses.dataclass
class RuntimeTrial:
    """One type on its way through the columns."""

    name: str
    place: pathlib.Path

    @functools.cached_property
    def model(self) -> Any:
        """The model, in float32."""
        from yobx_flatten.model_folder.source.configuration import small_model

        return small_model(self.name)

    def exported(self, runtime: str) -> dict[str, Any]:
        """Export the folder; return the largest difference of all cases and the memory that is planned."""
        from yobx_flatten import MissingDependencyError, export_folder

        bounds = BOUNDS if runtime == "executorch" else None
        try:
            done = export_folder(self.model, self.place / runtime, target=runtime, bounds=bounds)
        except MissingDependencyError as error:
            raise SkipColumnError(str(error).splitlines()[0]) from error
        cases = [case for report in done.reports.values() for case in report.cases]
        planned = [report.planned_bytes for report in done.reports.values() if report.planned_bytes is not None]
        largest = max(case.max_difference for case in cases)
        library = runtime if runtime != "aotinductor" else "torch"
        made_by = {"library": [library, importlib.metadata.version(library)]}
        return {
            **made_by,
            "cases": len(cases),
            "max_difference": largest,
            **({"planned_bytes": planned} if planned else {}),
        }

    def moved(self, runtime: str) -> dict[str, Any]:
        """Run the stored cases with slices and transposed tensors; return how many inputs were moved."""
        from yobx_flatten import load_case
        from yobx_flatten.model_folder.manifest import read_manifest
        from yobx_flatten.runners.open import open_runner
        from yobx_flatten.storage.cases import run_case

        folder = self.place / runtime
        if not folder.exists():  # this column alone was asked for
            self.exported(runtime)
        manifest, count = read_manifest(folder), 0
        for name in manifest.files:
            runner = open_runner(folder / name, runtime=runtime, trust=True)
            for path in manifest.cases[name]:
                case = load_case(folder / path)
                for inputs in strided(case.inputs):
                    count += sum(not value.is_contiguous() for value in inputs.values())
                    report = run_case(dataclasses.replace(case, inputs=inputs), runner, tolerance=manifest.tolerance)
                    if not report.ok:
                        raise DifferenceError(f"{name}, {case.name}: {report.max_difference:.1e}")
        return {"moved": count}


_RUNTIMES = {"OpenVINO folder": "openvino", "AOTInductor folder": "aotinductor", "ExecuTorch folder": "executorch"}

COLUMNS: dict[str, Callable[[RuntimeTrial], dict[str, Any]]] = {
    **{shown: functools.partial(RuntimeTrial.exported, runtime=name) for shown, name in _RUNTIMES.items()},
    **{f"{shown} strided": functools.partial(RuntimeTrial.moved, runtime=name) for shown, name in _RUNTIMES.items()},
}
NEEDS = {f"{shown} strided": shown for shown in _RUNTIMES}
LIBRARIES = {
    column: name.replace("aotinductor", "torch")
    for shown, name in _RUNTIMES.items()
    for column in (shown, f"{shown} strided")
}
"""By column: the library that runs the files."""


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run columns of one type in this process; see `worker.run_type`."""
    be_quiet()
    run_columns(RuntimeTrial(name, folder), columns, known, events, (COLUMNS, NEEDS))
