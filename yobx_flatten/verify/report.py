"""The result of verifying files of other exporters."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..export.onnx.compare_nodes import Compared
from ..export.proof.report import ExportReport


@dataclasses.dataclass(frozen=True)
class VerifiedFile:
    """The result of comparing one file with its model.

    Attributes:
        call: the call of the model that the file implements; ``""`` if no such call was found.
        report: the results of all test inputs; ``None`` if no call was found.
        why_not: the reason why nothing was compared; ``""`` if the file was compared.
        names: for each name in the file, the name of this input or output in files of this package.
        not_compared: outputs of the file that the model does not return.
        first: the first node of an ONNX file whose value differs; ``None`` if unknown.
    """

    call: str = ""
    report: ExportReport | None = None
    why_not: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_compared: Sequence[str] = ()
    first: Compared | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the file matches the model for all tested inputs; ``None`` if nothing was compared."""
        return None if self.report is None or self.why_not else self.report.ok

    def joined(self, *others: VerifiedFile) -> VerifiedFile:
        """Return this result together with the comparisons of other results for the same file, as one result."""
        for other in others:
            if self.report is not None and other.report is not None:
                self.report.cases += other.report.cases
                self.report.remark(*other.report.remarks)
        return dataclasses.replace(self, call=", ".join([self.call, *(other.call for other in others)]))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        found: dict[str, Any] = {"ok": self.ok, "call": self.call, "why_not": self.why_not, "names": dict(self.names)}
        if self.report is not None:
            tolerance = self.report.tolerance
            found["cases"] = [{**dataclasses.asdict(case), "ok": case.within(tolerance)} for case in self.report.cases]
            found["remarks"] = self.report.remarks
            found["quality"] = None if self.report.quality is None else self.report.quality.as_dict()
        if self.first is not None and self.first.first is not None:
            found["first_node"] = dataclasses.asdict(self.first.first)
        return found

    def __str__(self) -> str:
        if self.report is None or self.why_not:
            return f"NOT JUDGED: {self.why_not}"
        lines = [f"{'right' if self.ok else 'WRONG'}: {self.call}", str(self.report)]
        if self.not_compared:
            lines.append(f"  note: the model returns no {', '.join(self.not_compared)}.")
        if self.first is not None and self.first.first is not None:
            lines.append(f"  {self.first.first}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class FileReport:
    """Results of all verified files: true if all match the model; ``print(report)`` shows tables.

    Attributes:
        path: the file, or the folder.
        files: the result for each file, by its name.
    """

    path: pathlib.Path
    files: Mapping[str, VerifiedFile]

    @property
    def ok(self) -> bool | None:
        """Whether all files match the model; ``None`` if no file differs but one could not be compared."""
        found = [one.ok for one in self.files.values()]
        return False if False in found else None if None in found or not found else True

    def __bool__(self) -> bool:
        return self.ok is True

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        files = {name: one.as_dict() for name, one in self.files.items()}
        return {"path": str(self.path), "ok": self.ok, "files": files}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {one}" for name, one in self.files.items())
