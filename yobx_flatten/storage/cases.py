"""Store test cases (inputs and expected outputs) in files, and compare model files with test cases in onnxruntime."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.compare import is_data, largest_difference, share_of_nan
from ..diagnose.comparison import Report
from ..errors import DamagedFileError, InvalidArgumentError, ReplayError, describe_class, without_cause
from ..errors.failures import table
from ..huggingface.cache_names import spellings_of
from ..registry.recipe.aliases import Device, PyTree
from ..runners.onnx_runner import OnnxRunner
from ..runners.onnx_session import open_session, require_onnxruntime
from ..runners.ports import Runner, check_cache_outputs, is_present
from ..trees.walk import leaf_names, leaves_of, match, output_names, plain_names
from .nested import read, save
from .structure import flatten_tree


@dataclasses.dataclass(frozen=True)
class StoredCase:
    """A test case that :func:`load_case` returns: inputs of a model, and the expected outputs.

    Attributes:
        inputs: nested inputs: a dict of keyword arguments, or a tuple of positional arguments.
        outputs: nested outputs that are expected for the inputs.
        name: short description of the test case; empty by default.
    """

    inputs: Any
    outputs: Any
    name: str = ""


def save_case(
    path: str | os.PathLike[str], inputs: PyTree, outputs: PyTree, *, name: str = "", external_data: bool | None = None
) -> int:
    """Store a test case (inputs and expected outputs) in a file, in the format of :func:`save_nested`.

    Args:
        path: the file to write.
        inputs: nested inputs: a tuple, or a dict of keyword arguments, which are matched with model inputs by name.
        outputs: the outputs of the model for ``inputs``, which later runs are compared with.
        name: short description of the test case; empty by default.
        external_data: see :func:`save_nested`.

    Returns:
        The number of bytes written.

    Raises:
        FlattenError: see :func:`save_nested`.

    >>> import tempfile
    >>> import torch
    >>> linear = torch.nn.Linear(3, 2)
    >>> x = torch.ones(4, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nbytes = save_case(f"{folder}/case.onnx", {"input": x}, linear(x).detach(), name="four rows")
    ...     load_case(f"{folder}/case.onnx").name
    'four rows'
    """
    case = {"inputs": inputs, "outputs": outputs, "name": name}
    return save(path, flatten_tree(case), function="save_case", content="case", external_data=external_data)


def load_case(path: str | os.PathLike[str], *, device: Device = "cpu") -> StoredCase:
    """Read a test case that :func:`save_case` stored.

    Args:
        path: the file.
        device: device of the tensors; ``"cpu"`` by default.

    Returns:
        The inputs, the expected outputs and the name of the test case.

    Raises:
        FlattenError: see :func:`load_nested`.

    >>> import tempfile
    >>> import torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nbytes = save_case(f"{folder}/case.onnx", {"x": torch.arange(3)}, torch.arange(3) * 2, name="doubled")
    ...     case = load_case(f"{folder}/case.onnx")
    >>> case.inputs, case.outputs
    ({'x': tensor([0, 1, 2])}, tensor([0, 2, 4]))
    """
    found = read(path, "load_case", device=device, content="case")
    if not isinstance(found, dict) or set(found) != {"inputs", "outputs", "name"}:
        raise DamagedFileError(f"{os.fspath(path)} is damaged: it contains no inputs and outputs.")
    if not isinstance(found["name"], str):
        kind = describe_class(found["name"])
        raise DamagedFileError(f"{os.fspath(path)} is damaged: the name of the test case is {kind} instead of text.")
    return StoredCase(**found)


@dataclasses.dataclass(frozen=True)
class OutputDifference:
    """The difference between one output of a model file and the stored output.

    Attributes:
        name: name of the stored output, such as ``present.0.key``.
        output: name of the model's output; ``None`` if the model has no output that matches the stored output.
        difference: largest absolute difference; infinite if the outputs cannot be compared.
        error: reason why the outputs cannot be compared; ``None`` if the outputs were compared.
        nan: share of NaN elements in the stored output; ``None`` if the output has no elements.
    """

    name: str
    output: str | None
    difference: float
    error: str | None = None
    nan: float | None = None

    def __str__(self) -> str:
        other = f" ({self.output})" if self.output not in (None, self.name) else ""
        return f"{self.name}{other}"


@dataclasses.dataclass(frozen=True)
class CaseReport(Report):
    """The differences from stored outputs that :func:`replay_case` found. ``print(report)`` shows a table.

    Attributes:
        case: name of the test case.
        model: the file.
        outputs: the differences, one :class:`OutputDifference` for each stored output.
        unused: names of inputs in the test case that the model does not have.
        seconds: duration of the model's run in seconds.
        tolerance: largest allowed absolute difference of an output value.
    """

    case: str
    model: str
    outputs: Sequence[OutputDifference]
    unused: Sequence[str]
    seconds: float
    tolerance: float

    def differences(self) -> Iterator[float]:
        """Yield, for each output, the largest absolute difference between computed and stored values."""
        return (output.difference for output in self.outputs)

    def nan_shares(self) -> Iterator[Mapping[str, float]]:
        """Yield one dict: the share of NaN elements in each stored output, by output name."""
        yield {output.name: output.nan for output in self.outputs if output.nan is not None}

    def __str__(self) -> str:
        verdict = "as expected" if self.ok else "NOT as expected"
        lines = [f"{self.case or 'case'} in {self.model}: {verdict}, {self.seconds:.3f} s"]
        lines += table([[str(output), output.error or f"{output.difference:.1e}"] for output in self.outputs])
        if self.unused:
            lines.append(f"  note: the model takes no {', '.join(self.unused)}")
        lines += [f"  note: {note}" for note in self.nan_notes()]
        return "\n".join(lines)


def replay_case(
    case: StoredCase, model: object, *, tolerance: float = 1e-4, providers: Sequence[str] = ("CPUExecutionProvider",)
) -> CaseReport:
    """Run a model file on the inputs of a test case, and compare the model's outputs with the stored outputs.

    Inputs and outputs are matched by the names of :func:`export_onnx` (``past_key_values.0.key``) or
    ``torch.onnx.export`` (``cache_key_0``), or by order if the inputs or outputs have no names.

    Args:
        case: a test case from :func:`load_case`, or a new :class:`StoredCase`.
        model: the path of an ONNX file, or an ``onnxruntime.InferenceSession``.
        tolerance: largest allowed absolute difference of an output value; 1e-4 by default.
        providers: execution providers of onnxruntime if ``model`` is a path; ``("CPUExecutionProvider",)`` by default.

    Returns:
        The difference of every output, the duration of the run, and the inputs that the model does not have.

    Raises:
        ReplayError: when an input of the model is missing in ``case`` or has another type, or when the model fails.
        MissingDependencyError: when onnxruntime is not installed.

    >>> import tempfile
    >>> import torch
    >>> from yobx_flatten import export_onnx
    >>> linear = torch.nn.Linear(3, 2).eval()
    >>> x = torch.ones(5, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_onnx(linear, (torch.zeros(4, 3),), path=f"{folder}/linear.onnx")
    ...     report = replay_case(StoredCase({"input": x}, linear(x).detach()), f"{folder}/linear.onnx")
    >>> report.ok
    True
    """
    if not isinstance(case, StoredCase):
        raise InvalidArgumentError(
            f"replay_case: expected a test case that load_case returns, found {describe_class(case)}.\n"
            "    replay_case(load_case(path), model)"
        )
    if isinstance(model, (str, os.PathLike)):
        require_onnxruntime("replay_case")
        if not os.path.isfile(model):
            raise FileNotFoundError(f"replay_case: there is no file {os.fspath(model)}")
        shown = os.fspath(model)
        session = open_session(model, caller="replay_case", providers=providers)
    else:
        shown, session = "the session", model
    runner = OnnxRunner(session, shown)
    if any(map(is_present, output_names(case.outputs))):  # outputs of other names would be compared by their order
        check_cache_outputs(runner.ports, runner.outputs, shown)
    return run_case(case, runner, tolerance=tolerance)


def run_case(case: StoredCase, runner: Runner, *, tolerance: float) -> CaseReport:
    named = zip(leaf_names(case.inputs), plain_names(case.inputs), leaves_of(case.inputs), strict=True)
    given = [row for row in named if is_data(row[2]) or isinstance(row[2], str)]
    wanted = list(runner.ports)
    places = match(wanted, [(name, *spellings_of(plain), plain) for name, plain, _ in given])
    missing = [name for name in wanted if name not in places]
    if missing:
        raise ReplayError(
            f"The model takes {', '.join(missing)}, which the test case does not contain. Inputs of the test case: "
            f"{', '.join(name for name, _, _ in given) or 'none'}. Inputs of the model: {', '.join(wanted)}."
        )
    used = set(places.values())
    unused = [name for place, (name, _, _) in enumerate(given) if place not in used]
    inputs = {name: given[places[name]][2] for name in wanted}
    start = time.perf_counter()
    results = runner.run(inputs)
    seconds = time.perf_counter() - start

    names = output_names(case.outputs, leaf_names(case.inputs))
    rows = list(zip(names, plain_names(case.outputs), leaves_of(case.outputs), strict=True))
    rows = [row for row in rows if is_data(row[2]) or isinstance(row[2], str)]
    places = match(list(results), [(name, *spellings_of(plain), plain) for name, plain, _ in rows])
    found = {place: name for name, place in places.items()}
    outputs = []
    for place, (name, _, expected) in enumerate(rows):
        if place not in found:
            outputs.append(OutputDifference(name, None, float("inf"), "the model has no such output"))
            continue
        difference, error = float("inf"), None
        try:
            difference = largest_difference(expected, results[found[place]])
        except ReplayError as failed:
            error = without_cause(failed)
        outputs.append(OutputDifference(name, found[place], difference, error, share_of_nan(expected)))
    return CaseReport(case.name, runner.name, outputs, unused, seconds, tolerance)
