"""Compare files of any exporter with the model that the files were exported from."""

# file ──> names, fixed sizes ──> the call of the model that the file implements ──> cases ──> replay ──> table
#                                 (the call with the fewest errors, if several fit)

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.compare import tolerance
from ..core.files.document import read_onnx
from ..core.private_names.of_torch import pytree
from ..declare.scopes import register_flattening_functions
from ..errors import DamagedFileError, FlattenError, ForeignFileError, InvalidArgumentError, ReplayError, is_installed
from ..errors.failures import first_line
from ..export.calls import export_onnx
from ..export.onnx.compare_nodes import Compared, compare_nodes
from ..export.proof.eager_runs import Case, EagerRuns, check_cases
from ..export.proof.quality import Distance
from ..export.proof.replay import CaseResult, Padding, replay, side_by_side
from ..export.proof.report import ExportReport, Yardstick
from ..export.quantization import PERPLEXITY_RATIOS
from ..model_folder.source.find import find_model
from ..runners.open import RUNTIMES, open_runner
from ..runners.openvino_runner import read_model
from ..runners.ports import Runner
from ..trees.walk import output_names, plain_names
from .calls import BRANCH, Call, FileSide, calls_of, fitting, matched

_SUFFIXES = tuple(dict.fromkeys(suffixes[0] for suffixes in RUNTIMES.values()))
_BITS = {"MatMulNBits": "int4", "GatherBlockQuantized": "int4", "DequantizeLinear": "int8"}
_BITS |= dict.fromkeys(("MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm", "ConvInteger"), "int8")
_BITS |= dict.fromkeys(("i8", "u8"), "int8") | dict.fromkeys(("i4", "u4", "nf4"), "int4")  # of OpenVINO's constants
_FLOATS = {1: "float32", 10: "float16", 16: "bfloat16", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class VerifiedFile:
    """The results of the comparison of one file with its model.

    Attributes:
        call: the call of the model that the file implements, such as a prefill; ``""`` if no call was found.
        report: the comparisons for all test inputs; ``None`` if no call of the model was found.
        why_not: the reason why nothing was compared; ``""`` if the file was compared.
        names: a dict from each input or output name of the file to the name that ``export_folder`` uses.
        not_compared: outputs of the file that the model does not return.
        first: for an ONNX file with wrong outputs, the first node whose output differs from the output in a correct
            export; ``None`` for other files, or if this node is unknown.
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
        """Merge this result with other results for the same file."""
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
    """Results of all verified files; ``bool(report)`` is true if all files match; ``print(report)`` shows tables.

    Attributes:
        path: the verified file, or the folder of the verified files.
        files: a dict from file names to the results of the files.
    """

    path: pathlib.Path
    files: Mapping[str, VerifiedFile]

    @property
    def ok(self) -> bool | None:
        """``True`` if all files match, ``False`` if a file differs, else ``None``: some file was not compared."""
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


def verify_file(
    path: str | os.PathLike[str],
    model: Any,
    *,
    cases: Iterable[Case] | None = None,
    names: Mapping[str, str] | None = None,
    trust: bool = False,
    explain: bool = True,
    on_file: Callable[[str], None] | None = None,
) -> FileReport:
    """Compare the outputs of a file from any exporter with the outputs of its model.

    The model gets the same inputs as the file, in sizes that the file accepts. The default test inputs cover several
    sizes and, if the file allows, padding, a KV cache and consecutive calls. The file's inputs and outputs are found by
    the names that optimum, onnxruntime-genai, transformers.js, transformers' exporters and ``torch.onnx.export`` use.

    Args:
        path: an ONNX file, an OpenVINO file (``.xml``), a ``.pt2`` or ``.pte`` file, or a folder of such files.
        model: the model from which the file was exported: a module, or any ``model`` that ``export_folder`` accepts.
        cases: test inputs. The first test case has the sizes of the export. Optional only for Hugging Face models.
        names: a dict from unknown names of the file's inputs and outputs to the names that files of this package have.
        trust: whether you trust the file; loading a ``.pt2`` file can run code. ``False`` by default.
        explain: whether to search a wrong ONNX file for the first node with a wrong output; ``True`` by default.
        on_file: a function that is called with the name of each file before the file is opened.

    Returns:
        A report with the results of each file, which is true if all files compute the same outputs as the model.

    Raises:
        ForeignFileError: when none of the files can be opened.
        UntrustedFileError: when loading a file can run code, and ``trust`` is ``False``.
        InvalidArgumentError: when ``names`` contains an unknown name, or ``cases`` is required and missing.

    >>> import tempfile
    >>> linear = torch.nn.Linear(3, 2).eval()
    >>> x = torch.ones(4, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = torch.onnx.export(linear, (x,), f"{folder}/linear.onnx", verbose=False)
    ...     report = verify_file(f"{folder}/linear.onnx", linear, cases=[Case("the example", (x,))])
    >>> report.ok
    True
    """
    place = pathlib.Path(path)
    given = None if cases is None else check_cases(cases)
    base = find_model(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model
    if given is None and isinstance(base, torch.nn.Module) and not hasattr(base, "config"):
        raise InvalidArgumentError(
            f"verify_file: {type(base).__qualname__} is not a Hugging Face model, so its inputs are unknown. Pass "
            'test inputs: cases=[Case("the example", args), Case("another size", other_args)].'
        )
    found: dict[str, VerifiedFile] = {}
    known: set[str] = set()  # inputs and outputs of all files

    @functools.cache
    def loaded(dtype: str) -> torch.nn.Module:
        if not isinstance(base, torch.nn.Module):
            return base.load(dtype=dtype)  # type: ignore[no-any-return] # transformers has no types
        if dtype == "float32" or getattr(base, "dtype", None) == getattr(torch, dtype):
            return base
        return copy.deepcopy(base).to(getattr(torch, dtype))

    folders = (place, *sorted(place.glob("*/"))) if place.is_dir() else ()  # a component may have its own folder
    files = sorted(file for folder in folders for file in folder.glob("*") if file.suffix in _SUFFIXES)
    if not place.exists():
        raise ForeignFileError(f"There is no file and no folder at {place}.")
    if not files and not place.is_file():
        raise ForeignFileError(f"{place} has no file with the suffix {', '.join(_SUFFIXES)}. Pass another folder.")
    for file in files or [place]:
        name = file.name if place.is_file() else file.relative_to(place).as_posix()
        if on_file is not None:
            on_file(name)
        try:
            dtype, bits = _weights_of(file)
        except (ForeignFileError, DamagedFileError) as error:
            if file == place:
                raise
            found[name] = VerifiedFile(why_not=first_line(error))
            continue
        found[name] = _verified(file, bits, dtype, loaded(dtype), given, names or {}, known, trust, explain)
    for unknown in sorted(set(names or ()) - known):
        there = f"Their names are {', '.join(sorted(known))}."
        raise InvalidArgumentError(f"names, --map: no file has an input or output named {unknown}. {there}")
    return FileReport(place, found)


def _weights_of(file: pathlib.Path) -> tuple[str, str]:
    """Return the dtype of a file's weights, and their quantization, such as ``"int4"``, without running the file."""
    held: list[tuple[int | str, Sequence[int]]] = []  # type and shape of each constant
    marks: list[str] = []  # operators or types, some of which show quantized weights
    if file.suffix == ".onnx":
        graph = read_onnx(file, failure=ForeignFileError).graph
        held = [(tensor.data_type, tensor.dims) for tensor in graph.initializer]
        marks = [node.op_type for node in graph.node]
    elif file.suffix == ".xml" and is_installed("openvino"):
        ports = [one.output(0) for one in read_model(file).get_ops() if one.get_type_name() == "Constant"]
        held = [(port.get_element_type().get_type_name(), port.get_shape()) for port in ports]
        marks = [str(kind) for kind, shape in held if len(shape) > 1]
    sizes = {"float32": 0}
    for kind, shape in held:
        if kind in _FLOATS:
            sizes[_FLOATS[kind]] = sizes.get(_FLOATS[kind], 0) + math.prod(shape)
    kinds = {_BITS[mark] for mark in marks if mark in _BITS}
    return max(sizes, key=lambda kind: (sizes[kind], kind)), min(kinds, default="")  # "int4" before "int8"


def _verified(
    file: pathlib.Path,
    bits: str,
    dtype: str,
    model: torch.nn.Module,
    cases: list[Case] | None,
    stated: Mapping[str, str],
    known: set[str],
    trust: bool,
    explain: bool,
) -> VerifiedFile:
    try:
        runner = open_runner(file, trust=trust, caller="verify_file", failure=ReplayError)
    except (ReplayError, ForeignFileError, DamagedFileError) as error:
        return VerifiedFile(why_not=first_line(error))
    known |= {*runner.ports, *runner.outputs}

    def typed(leaf: Any) -> Any:
        is_single = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
        return leaf.to(getattr(torch, dtype)) if is_single else leaf

    best: dict[bool, tuple[VerifiedFile, Call]] = {}  # for each of the two branches of a merged decoder
    merged = BRANCH in runner.ports and cases is None
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        given = [(case, *pytree.tree_map(typed, (tuple(case.args), dict(case.kwargs)))) for case in cases or ()]
        chosen = [dataclasses.replace(case, args=args, kwargs=kwargs) for case, args, kwargs in given]
        own = [fitting("the call", model, chosen, runner, stated)] if chosen else []
        for call in calls_of(model, runner, stated) if cases is None else filter(None, own):
            branch = merged and call.reads_cache
            if branch in best and best[branch][0].ok:
                continue
            one = _compared(call, runner, bits, dtype, stated)
            if branch not in best or _rank(one) > _rank(best[branch][0]):
                best[branch] = one, call
            if one.ok and not merged:
                return one
        if not best:
            none = "and no known call of this model takes these inputs. State names=, or pass cases="
            return VerifiedFile(why_not=f"it takes {', '.join(runner.ports)}, {none}.")
        (worst, of), *others = sorted(best.values(), key=lambda held: (held[0].ok is True, held[0].ok is None))
        if merged and worst.ok and not others:
            return VerifiedFile(why_not=f"only one of its two branches was compared: {of.what}")
        if not worst.ok and explain and file.suffix == ".onnx" and not bits:
            worst = dataclasses.replace(worst, first=_first_node(file, of))
    return worst.joined(*(other for other, _ in others))


def _rank(one: VerifiedFile) -> tuple[int, int]:
    cases = [] if one.report is None else [(case, one.report.tolerance) for case in one.report.cases]
    return sum(case.error is None for case, _ in cases), sum(case.within(allowed) for case, allowed in cases)


def _compared(call: Call, runner: Runner, bits: str, dtype: str, stated: Mapping[str, str]) -> VerifiedFile:
    runs, example = EagerRuns(call.module), call.cases[0]
    report = ExportReport(type(call.module).__qualname__, tolerance=tolerance("file", dtype))
    try:
        eager = runs.steps(example, twice=True)[0].outputs
    except FlattenError as error:
        return VerifiedFile(why_not=first_line(error))
    expected = output_names(eager, call.leaves)
    outputs = matched(list(runner.outputs), expected, plain_names(eager), stated, by_order=True)
    if BRANCH in runner.ports and call.reads_cache:  # this branch returns no valid keys and values of the encoder
        outputs = {theirs: name for theirs, name in outputs.items() if ".encoder." not in name}
    side = FileSide(runner, call, outputs)
    is_half = dtype != "float32"
    yardstick = None if Yardstick.why_not(call.module) else Yardstick(call.module, call.leaves, is_half=is_half)
    report.yardstick, report.spare = (yardstick, None) if is_half else (None, yardstick)
    with report.timed("replay"):
        if bits:
            distance = Distance()
            for case in call.cases:
                padding, steps, reason = Padding(), runs.steps(case, twice=True), None
                try:
                    for pair in side_by_side(side, call.module, case, steps, call.leaves, padding):
                        distance.add(*pair.tensors(padding))
                except (FlattenError, RuntimeError) as error:
                    reason = first_line(error)
                report.cases.append(CaseResult(case.name, side.runtime, case.steps, {}, 0.0, reason))
            report.quality = distance.quality(bits, 0, PERPLEXITY_RATIOS[bits])
        else:
            for case in call.cases:
                found = replay(side, runs, case, taken=call.leaves, allowed=report.explained(case))
                report.cases.append(report.by_float64(found, case))
    report.remark(*call.remarks)
    report.input_names, report.output_names = list(runner.ports), list(runner.outputs)
    for kind in set(side.other_types.values()):
        report.remark(f"the file returns {kind} where the model returns another type.")
    missing = [name for name in expected if name not in outputs.values()]
    if missing:
        report.remark(f"outputs not compared, as the file lacks them or their names are unknown: {', '.join(missing)}.")
    unread = [name for name in runner.outputs if name not in outputs]
    why = "" if side.ran else f"it runs in no case: {report.cases[0].error}"
    return VerifiedFile(call.what, report, why, names={**call.inputs, **outputs}, not_compared=unread)


def _first_node(file: pathlib.Path, call: Call) -> Compared | None:
    """Return the first node whose output differs from the output in a correct export; ``None`` if unknown."""
    if file.stat().st_size > 2**28:  # its nodes would take too long
        return None
    case = call.cases[0]
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    inputs = dict(zip(call.leaves, leaves, strict=True))
    inputs |= {name: inputs[leaf] for name, leaf in call.inputs.items()}
    with tempfile.TemporaryDirectory() as scratch:
        right = pathlib.Path(scratch) / "model.onnx"
        try:
            export_onnx(call.module, case.args, kwargs=case.kwargs, path=right, proof="none")
            return compare_nodes(file, right, inputs)
        except (FlattenError, RuntimeError, KeyError, TypeError):  # not exportable, or the nodes have other names
            return None
