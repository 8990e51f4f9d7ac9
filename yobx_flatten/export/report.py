"""The report of an export: times, sizes, and the difference to the eager model; a dataclass and a table."""

from __future__ import annotations

import dataclasses

import torch

from .replay import CaseResult

__all__ = ["TOLERANCES", "ExportReport", "tolerance_of"]

TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "float16": 6e-2, "bfloat16": 2e-1}
"""By type of the weights: half precision rounds at three digits, and a model does so thousands of times."""


def tolerance_of(module: torch.nn.Module) -> float:
    """Return the largest difference that the coarsest type of a module's weights explains.

    >>> tolerance_of(torch.nn.Linear(2, 3)), tolerance_of(torch.nn.Linear(2, 3).half())
    (0.0001, 0.06)
    """
    weights = (*module.parameters(), *module.buffers())
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in weights}
    return max((TOLERANCES.get(name, 1e-4) for name in types), default=1e-4)


@dataclasses.dataclass
class ExportReport:
    """Times, sizes and replay results of one export. ``print(report)`` shows them as a table.

    Attributes:
        module: name of the exported class.
        input_names: names of the program's inputs, in order.
        output_names: names of its outputs, in order.
        export_seconds: duration of ``torch.export``, in seconds.
        onnx_seconds: duration of the conversion to ONNX, in seconds; ``None`` without one.
        onnx_bytes: size of the ONNX file and its external data, in bytes; ``None`` without one.
        cases: one result per case and runtime.
        tolerance: largest absolute difference allowed; 1e-4 by default.
        remarks: notes on what was not checked, and why.

    >>> import torch
    >>> from yobx_flatten import export_program
    >>> report = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),)).report
    >>> report.module, report.output_names, report.ok
    ('Linear', ['output'], True)
    """

    module: str
    input_names: list[str]
    output_names: list[str]
    export_seconds: float
    onnx_seconds: float | None = None
    onnx_bytes: int | None = None
    cases: list[CaseResult] = dataclasses.field(default_factory=list)
    tolerance: float = 1e-4
    remarks: list[str] = dataclasses.field(default_factory=list)

    @property
    def max_difference(self) -> float:
        """The largest difference of all cases and outputs, infinite when one of them stopped."""
        return max((case.max_difference for case in self.cases), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every case is within the tolerance."""
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        sizes = f", ONNX in {self.onnx_seconds:.1f} s, {self.onnx_bytes / 1e6:.2f} MB" if self.onnx_bytes else ""
        lines = [f"{self.module}: exported in {self.export_seconds:.1f} s{sizes}"]
        width = max((len(case.case) for case in self.cases), default=4)
        lines += [f"  {'case':{width}}  {'runtime':12}  steps  max difference  worst output"] if self.cases else []
        for case in self.cases:
            worst = max(case.differences, key=case.differences.__getitem__, default="-")
            shown = case.error if case.error is not None else f"{case.max_difference:<14.1e}  {worst}"
            lines.append(f"  {case.case:{width}}  {case.runtime:12}  {case.steps:<5}  {shown}")
        lines += [f"  note: {remark}" for remark in (*self.remarks, *_of_padding(self.cases))]
        return "\n".join(lines)


def _of_padding(cases: list[CaseResult]) -> list[str]:
    """The remark on outputs that were left out of the comparison because they are padding."""
    outputs = dict.fromkeys(name.split(".")[0] for case in cases for name in case.left_out)
    if not outputs:
        return []
    where = dict.fromkeys(case.case for case in cases if case.left_out)
    return [
        f"positions that the attention mask excludes were left out of the comparison of {', '.join(outputs)} "
        f"({'; '.join(where)}): what a model computes there is read by nobody."
    ]
