"""Report on an export, and measure the rounding errors that an export may have compared with the eager model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ...core.private_names.of_torch import pytree
from ...diagnose.comparison import Report
from ...errors.failures import STEP, result_or, table
from ...trees.walk import output_names
from ..model_facts import memory_available, peak_memory, weight_bytes
from .eager_runs import UNPROVEN, Case, EagerRuns, Left, eager_steps
from .quality import Quality
from .replay import CaseResult


@dataclasses.dataclass
class ExportReport(Report):
    """Durations, sizes and comparison results of one export. ``print(report)`` shows the report as a table.

    Attributes:
        module: name of the exported class.
        input_names: names of the program's inputs, in order.
        output_names: names of the program's outputs, in order.
        seconds: duration of each step of the export, in seconds, by name of the step. Step ``"trace"`` runs
            ``torch.export``. Step ``"replay"`` runs all test calls of the module, the program and the file. An ONNX
            export also has the steps ``"convert"``, ``"save"`` and ``"load"``. The report on the first file of a folder
            also has steps for the whole folder, such as ``"verify"``.
        runtime: ``"onnxruntime"``, ``"executorch"``, ``"openvino"`` or ``"aotinductor"`` for a file of that runtime;
            ``""`` in the reports of ``export_program``, ``prove_program`` and ``export_onnx``.
        file_bytes: size in bytes of the file for ``runtime`` and its weights; ``None`` for ONNX or without a file.
        planned_bytes: memory that ExecuTorch plans for a call with the largest sizes, without the weights, in bytes;
            ``None`` for other libraries.
        onnx_bytes: size of the ONNX file and its external data, in bytes; ``None`` without an ONNX file.
        opset: ONNX opset of the file; ``None`` without an ONNX file.
        operators: number of uses of each attention and normalization operator in the file.
        cases: one :class:`.CaseResult` per test case and runtime.
        tolerance: largest allowed absolute difference of outputs; 1e-4 by default.
        proof: which test cases were compared: ``"full"``, ``"standard"``, ``"sample"``, or ``"none"``.
        processor_seconds: CPU time of each step of the export, in seconds, by name of the step.
        peak_growth: growth of the peak memory of the process in each step, in bytes, by name of the step.
        remarks: notes on what the comparison did not check, with reasons.
        yardstick: an object that measures how much rounding to the weights' dtype changes each output, and allows such
            differences; ``None`` if ``tolerance`` is the limit for all outputs.
        in_place: names of cache inputs that the runtime updates in place; empty if calls return the entire cache.
        quality: differences between the quantized file and the model; ``None`` without quantized weights, or if nothing
            was compared.
        of_adapters: quality of the file with each LoRA adapter that the file was checked with, by name of the adapter.

    >>> import torch
    >>> from yobx_flatten import export_program
    >>> report = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),)).report
    >>> report.module, report.output_names, report.ok
    ('Linear', ['output'], True)
    """

    module: str
    input_names: list[str] = dataclasses.field(default_factory=list)
    output_names: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    onnx_bytes: int | None = None
    opset: int | None = None
    operators: dict[str, int] = dataclasses.field(default_factory=dict)
    cases: list[CaseResult] = dataclasses.field(default_factory=list)
    tolerance: float = 1e-4
    proof: str = "full"
    processor_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_growth: dict[str, int] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)
    quality: Quality | None = None
    of_adapters: dict[str, Quality] = dataclasses.field(default_factory=dict)
    runtime: str = ""
    file_bytes: int | None = None
    planned_bytes: int | None = None
    in_place: list[str] = dataclasses.field(default_factory=list)
    yardstick: Yardstick | None = dataclasses.field(default=None, repr=False)
    # measures rounding errors of a float32 model; used if a case differs by more than the tolerance
    spare: Yardstick | None = dataclasses.field(default=None, repr=False)
    # outputs of the module for the cases; a folder stores some of them
    runs: EagerRuns | None = dataclasses.field(default=None, repr=False)

    @property
    def export_seconds(self) -> float:
        """Duration of ``torch.export``, in seconds."""
        return self.seconds.get("trace", 0.0)

    @property
    def onnx_seconds(self) -> float | None:
        """Duration of the conversion to ONNX, in seconds; ``None`` without a conversion."""
        return self.seconds.get("convert")

    def differences(self) -> Iterator[float]:
        """Yield the largest output difference of every test case; infinite for a test case that ended in an error."""
        return (case.max_difference for case in self.cases)

    def nan_shares(self) -> Iterator[Mapping[str, float]]:
        """Yield, for every test case, the share of NaN values in each output of the eager model."""
        return (case.nan for case in self.cases)

    @property
    def ok(self) -> bool:
        """Whether all differences are within the tolerance, and the quality of a quantized file is sufficient."""
        is_close = self.quality is None or self.quality.ok
        return self._within and is_close and all(quality.ok for quality in self.of_adapters.values())

    @property
    def _within(self) -> bool:
        return not self.failed() and not self.without_number()

    def failed(self) -> list[CaseResult]:
        """Return the test cases that ended in an error, or in which an output differs by more than allowed."""
        return [case for case in self.cases if not case.within(self.tolerance)]

    def failure(self) -> str:
        """Return a sentence with the reason why the export failed."""
        if self.without_number():
            return f"The exported {self.module} could not be checked: {self.nan_notes()[0]}"
        if self.quality is not None and self._within:
            name, worst = next(
                ((name, quality) for name, quality in self.of_adapters.items() if not quality.ok), ("", self.quality)
            )
            of_adapter = f" with the adapter {name!r}" if name and self.quality.ok else ""
            if self.quality.cosine is None:
                remedy = (
                    "Use more bits:\n"
                    '    quantize="int8"  # or Quantization("int4", block_size=16), or another perplexity_ratio of it\n'
                    "    --quantize int8, or --perplexity-ratio RATIO on the command line"
                )
            elif self.quality.block_size == 0:
                remedy = 'Leave activations="token" (--activations token) out: one scale per block is more exact.'
            else:
                remedy = 'Leave quantize= (--quantize) out, or take float16:\n    dtype="float16" (--dtype float16)'
            return (
                f"The exported {self.module}{of_adapter} differs more from the eager model than its quantised weights "
                f"explain ({worst if of_adapter else self.quality}). {remedy}"
            )
        failed = self.failed()
        stopped = next((case for case in failed if case.error is not None), None)
        if stopped is not None:
            found = f"{stopped.case}: {stopped.error}"
        else:
            rows = [case.worst(self.tolerance) for case in failed]
            name, difference, allowed = max(rows, key=lambda row: row[1] / (row[2] or 1.0))
            found = f"largest difference {difference:.1e}, allowed {allowed:.1e}, output {name!r}"
        cause = next((f" {case.cause}" for case in failed if case.cause), "")
        return f"The exported {self.module} differs from the eager model ({found}).{cause}"

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Measure a ``with`` block, and add its duration and growth of peak memory to ``seconds`` and ``peak_growth``.

        Args:
            step: name of the measured step, such as ``"trace"``.
        """
        start, worked, before = time.perf_counter(), time.process_time(), peak_memory()
        try:
            yield
        finally:
            took = time.process_time() - worked
            self.processor_seconds[step] = self.processor_seconds.get(step, 0.0) + took
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
            self.peak_growth[step] = self.peak_growth.get(step, 0) + peak_memory() - before

    def explained(self, case: Case) -> Mapping[str, float] | None:
        """Return the largest difference of each output that rounding can explain; ``None`` without a ``yardstick``.

        Args:
            case: a test case. The rounding errors of a test case are measured only once.
        """
        return None if self.yardstick is None else self.yardstick.allowed(case)

    def explained_by_float64(self, case: Case) -> Mapping[str, float] | None:
        """Measure the rounding error of each output of a float32 model by running the model in float64.

        Args:
            case: the test case. After this call, the model also runs in float64 for each further test case.
        """
        if self.spare is None or self.yardstick is not None:
            return None
        spare = self.spare
        # a model whose code names a dtype may fail in float64
        found = result_or(lambda: spare.allowed(case), lambda error: None)
        if found is not None:
            self.yardstick = spare
        return found

    def by_float64(self, found: CaseResult, case: Case) -> CaseResult:
        """Return a comparison result that also accepts differences that rounding in float32 can explain.

        Args:
            found: the result of a comparison of the test case with the model.
            case: the test case. If outputs exceed the tolerance, the model runs the test case in float64.
        """
        if found.error is not None or found.within(self.tolerance):
            return found
        return dataclasses.replace(found, allowed=self.explained_by_float64(case) or found.allowed)

    def remark(self, *texts: str) -> None:
        """Add notes to the report, unless the report contains them already.

        Args:
            *texts: the notes.
        """
        self.remarks += [text for text in texts if text not in self.remarks]

    def __str__(self) -> str:
        parts = [f"exported in {self.export_seconds:.1f} s"] if "trace" in self.seconds or not self.seconds else []
        if self.onnx_bytes:
            parts += [f"ONNX in {self.onnx_seconds:.1f} s", f"{self.onnx_bytes / 1e6:.2f} MB", f"opset {self.opset}"]
        if self.file_bytes:
            parts += [f"written for {self.runtime} in {self.onnx_seconds:.1f} s", f"{self.file_bytes / 1e6:.2f} MB"]
        if self.planned_bytes is not None:
            parts.append(f"{self.planned_bytes / 1e6:.2f} MB of memory planned for a call")
        lines = [f"{self.module}: {', '.join(parts) or 'replayed'}"]
        if self.proof == "none":
            lines.append(f"  {UNPROVEN}")
        if self.cases:
            header = ["case", "runtime".ljust(12), "steps", "max difference", "worst output"]
            rows = ([case.case, case.runtime, str(case.steps), *case.cells()] for case in self.cases)
            lines += table([header, *rows])
        if self.quality is not None:
            lines.append(f"  {self.quality}")
        lines += [f"  {name}: {quality}" for name, quality in self.of_adapters.items()]
        if self.operators:
            lines.append(f"  operators: {', '.join(f'{count} {name}' for name, count in self.operators.items())}")
        remarks = list(self.remarks)
        if self.yardstick is not None and self.yardstick.costs:
            precise, costs = self.yardstick.precise, self.yardstick.costs
            name = max(costs, key=costs.__getitem__)
            remarks.append(
                f"{precise} weights would change the model's own results by up to {costs[name]:.1e} (output {name!r}); "
                f"in this output the file may differ from the model by {self.yardstick.largest[name]:.1e}."
            )
        outputs = dict.fromkeys(name.split(".")[0] for case in self.cases for name in case.left_out)
        if outputs:
            where = dict.fromkeys(case.case for case in self.cases if case.left_out)
            remarks.append(
                f"positions that the attention mask excludes were not compared in {', '.join(outputs)} "
                f"({'; '.join(where)}): no later step reads them."
            )
        lines += [f"  note: {remark}" for remark in (*remarks, *self.nan_notes())]
        steps = ", ".join(
            f"{step} {took:.1f} s (+{self.peak_growth.get(step, 0) / 1e6:.0f} MB)"
            for step, took in self.seconds.items()
        )
        total = sum(self.processor_seconds.values())
        checks = ("replay", "load", "measure", "store cases", "generate", "verify")  # steps that only check the files
        proof = sum(self.processor_seconds.get(step, 0.0) for step in checks)
        share = f"; the proof took {proof / total:.0%} of {total:.0f} CPU seconds" if total >= 20 else ""
        return "\n".join([*lines, f"  proof: {self.proof}; {steps}{share}"])


_HALF = (torch.float16, torch.bfloat16)

logger = logging.getLogger("yobx_flatten")

_TIMES = 5.0
"""Factor by which differences may exceed the model's measured rounding error, since files round in other places."""

_PART = 0.1
"""Largest allowed difference as a share of an output's range, for any dtype."""

PART_OF_FLOAT32 = 1e-5
"""Largest allowed difference as a share of an output's range, for float32 weights."""


# Measure the rounding error of a dtype on a case: half precision against float32, or float32 against float64.
#
#     weights in float16 ──> outputs                          both sides begin with the same numbers,
#             └── as float32 ──> outputs in float32            so the difference is the rounding error
#
# A file rounds in other places than the model, with errors of the same size. Larger differences are no rounding errors.


def explained(stated: float, expected: torch.Tensor, part: float = _PART) -> float:
    """Return the largest output difference that rounding can explain, limited to a share of the output's range.

    >>> explained(100.0, torch.tensor([-1.0, 1.0], dtype=torch.float16))
    0.2
    """
    # stated: `_TIMES` times the rounding error; a folder from an untrusted author can contain any number
    # part: the largest share of the range; results below `least` (1e-4 in float32) are raised to `least`
    finite = expected.float()[expected.isfinite()]
    if not finite.numel():
        return 0.0
    rounding = torch.finfo(expected.dtype).eps * float(finite.abs().max())
    least = _TIMES * rounding if expected.dtype in _HALF else 1e-4
    return max(min(stated, part * float(finite.max() - finite.min())), least)


class Yardstick:
    """Measures how much each output changes if values are rounded to the dtype of the weights."""

    # is_half: whether half precision is compared with float32; else float32 is compared with float64

    def __init__(
        self,
        module: torch.nn.Module,
        names: Collection[str],
        written: Collection[str] = (),
        left: Left | None = None,
        *,
        is_half: bool = True,
    ) -> None:
        self.module, self._names, self._state = module, names, (written, left)
        self._narrow: tuple[torch.dtype, ...] = _HALF if is_half else (torch.float32,)
        self._wide = torch.float32 if is_half else torch.float64
        self.precise = str(self._wide).removeprefix("torch.")
        self._part = _PART if is_half else PART_OF_FLOAT32
        self._found: dict[int, tuple[Case, dict[str, float]]] = {}
        self.costs: dict[str, float] = {}
        self.largest: dict[str, float] = {}

    @staticmethod
    def why_not(module: torch.nn.Module) -> str:
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return "its weights are not in memory"
        is_small = 2 * weight_bytes(module) < memory_available() // 2
        reason = "a copy of its weights in twice as many bits would need more than half of the free memory"
        return "" if is_small else reason

    def allowed(self, case: Case) -> Mapping[str, float]:
        if id(case) in self._found:
            return self._found[id(case)][1]
        logger.info("measuring what the type of the weights costs: %s", case.name, extra=STEP)
        steps = eager_steps(self.module, case, *self._state, twice=True)

        def widened(leaf: object) -> object:
            return leaf.to(self._wide) if isinstance(leaf, torch.Tensor) and leaf.dtype in self._narrow else leaf

        args, kwargs = pytree.tree_map(widened, (case.args, dict(case.kwargs)))
        wide = dataclasses.replace(case, args=args, kwargs=kwargs)
        with _as_type(self.module, self._narrow, self._wide):
            others = eager_steps(self.module, wide, *self._state, twice=True)
        allowed: dict[str, float] = {}
        for step, other in zip(steps, others, strict=True):
            names = output_names(step.outputs, self._names)
            leaves = zip(names, pytree.tree_leaves(step.outputs), pytree.tree_leaves(other.outputs), strict=True)
            for name, one, precise in leaves:
                if not isinstance(one, torch.Tensor) or not one.is_floating_point() or not one.numel():
                    continue
                apart = (one.double() - precise.double()).abs()
                cost = float(apart[apart.isfinite()].max()) if bool(apart.isfinite().any()) else 0.0
                most = explained(_TIMES * cost, one, self._part)
                allowed[name] = max(allowed.get(name, 0.0), most)
                self.costs[name] = max(self.costs.get(name, 0.0), cost)
                self.largest[name] = max(self.largest.get(name, 0.0), most)
        self._found[id(case)] = case, allowed
        return allowed


@contextlib.contextmanager
def _as_type(module: torch.nn.Module, narrow: tuple[torch.dtype, ...], wide: torch.dtype) -> Iterator[None]:
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    copies: dict[int, torch.Tensor] = {}  # by id, so that tied weights have one copy
    for owner in module.modules():
        places: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
        for held in places:
            mine = {name: one for name, one in held.items() if isinstance(one, torch.Tensor) and one.dtype in narrow}
            found.append((held, mine))
            for name, tensor in mine.items():
                if id(tensor) not in copies:
                    copy = tensor.detach().to(wide)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    copies[id(tensor)] = torch.nn.Parameter(copy, requires_grad=False) if is_weight else copy
                held[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for held, mine in found:
            held.update(mine)
