"""A stored case against a model file in onnxruntime: what the model returns, beside what was expected."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..compare import is_text, largest_difference
from ..errors import InvalidArgumentError, ReplayError, describe_class
from ..naming import leaf_names, output_names
from .cases import StoredCase
from .elements import ELEMENTS
from .matching import leaves_of, match, plain_names
from .run import require_onnxruntime

__all__ = ["CaseReport", "OutputDifference", "replay_case"]

# what onnxruntime calls types of elements, where torch has another name
_TORCH_NAMES = {"float": "float32", "double": "float64", "string": "str"}


@dataclasses.dataclass(frozen=True)
class OutputDifference:
    """One output of a replay.

    Attributes:
        name: of the expected value: ``present.0.key``.
        output: of the output in the model, ``None`` if it has no such output.
        difference: the largest absolute difference; infinite where there is an error.
        error: what makes them incomparable, ``None`` if nothing does.
    """

    name: str
    output: str | None
    difference: float
    error: str | None = None

    def __str__(self) -> str:
        other = f" ({self.output})" if self.output not in (None, self.name) else ""
        return f"{self.name}{other}"


@dataclasses.dataclass(frozen=True)
class CaseReport:
    """What came of a replay. ``print(report)`` shows it as a table.

    Attributes:
        case: the name of the case.
        model: the file.
        outputs: one entry per expected output.
        unused: inputs of the case that the model does not take.
        seconds: how long the run took.
        tolerance: the largest absolute difference allowed.
    """

    case: str
    model: str
    outputs: Sequence[OutputDifference]
    unused: Sequence[str]
    seconds: float
    tolerance: float

    @property
    def max_difference(self) -> float:
        """The largest difference of all outputs."""
        return max((output.difference for output in self.outputs), default=0.0)

    @property
    def ok(self) -> bool:
        """Tell whether every output is within the tolerance."""
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        verdict = "as expected" if self.ok else "NOT as expected"
        lines = [f"{self.case or 'case'} in {self.model}: {verdict}, {self.seconds:.3f} s"]
        width = max((len(str(output)) for output in self.outputs), default=0)
        lines += [f"  {output!s:{width}}  {output.error or f'{output.difference:.1e}'}" for output in self.outputs]
        if self.unused:
            lines.append(f"  note: the model takes no {', '.join(self.unused)}")
        return "\n".join(lines)


def replay_case(
    case: StoredCase,
    model: Any,
    *,
    tolerance: float = 1e-4,
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> CaseReport:
    """Run a model file on the inputs of a case, and compare what it returns with the outputs of the case.

    Inputs and outputs are found by name: ``past_key_values.0.key`` as :func:`export_onnx` and tools for generation
    name them, ``past_key_values_key_0`` as ``torch.onnx.export`` does, or by their order where names say nothing.

    Args:
        case: from :func:`load_case`, or made by hand.
        model: the path of an ONNX file, or an ``onnxruntime.InferenceSession``.
        tolerance: the largest absolute difference allowed.
        providers: of onnxruntime, for a path.

    Returns:
        The differences.

    Raises:
        ReplayError: when the model wants an input that the case does not have, or of another type, or fails.
        MissingDependencyError: when onnxruntime is not installed.
    """
    if not isinstance(case, StoredCase):
        raise InvalidArgumentError(
            f"replay_case takes what load_case returns, found {describe_class(case)}.\n"
            "    replay_case(load_case(path), model)"
        )
    runtime = require_onnxruntime("replay_case")
    if isinstance(model, (str, os.PathLike)):
        session, shown = _open(runtime, model, providers), os.fspath(model)
    else:
        session, shown = model, "the session"
    feeds, unused = _feeds(runtime, session, case.inputs)
    start = time.perf_counter()
    results = _run(session, feeds)
    seconds = time.perf_counter() - start
    outputs = _compare(case, results)
    return CaseReport(case.name, shown, outputs, unused, seconds, tolerance)


def _open(runtime: Any, path: Any, providers: Sequence[str]) -> Any:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"replay_case: there is no file {os.fspath(path)}")
    try:
        return runtime.InferenceSession(os.fspath(path), providers=list(providers))
    except Exception as error:  # onnxruntime has no base class for its errors
        raise ReplayError(f"onnxruntime cannot load {os.fspath(path)}: {_first_line(error)}") from error


def _feeds(runtime: Any, session: Any, inputs: Any) -> tuple[dict[str, Any], list[str]]:
    """What onnxruntime is given, and the names of what it is not given."""
    named = zip(leaf_names(inputs), plain_names(inputs), leaves_of(inputs), strict=True)
    given = [row for row in named if _is_data(row[2])]
    wanted = {node.name: node.type for node in session.get_inputs()}
    places = match(list(wanted), [(name, plain) for name, plain, _ in given])
    missing = [name for name in wanted if name not in places]
    if missing:
        raise ReplayError(
            f"The model takes {', '.join(missing)}, which the case does not have. The case has "
            f"{', '.join(name for name, _, _ in given) or 'nothing'}; the model takes {', '.join(wanted)}."
        )
    feeds = {name: _to_onnxruntime(runtime, name, kind, given[places[name]][2]) for name, kind in wanted.items()}
    used = set(places.values())
    return feeds, [name for place, (name, _, _) in enumerate(given) if place not in used]


def _is_data(leaf: Any) -> bool:
    """Whether a leaf can be an input or an output of a graph."""
    if isinstance(leaf, (torch.Tensor, bool, int, float, complex, str)):
        return True
    return hasattr(leaf, "__array__") and hasattr(leaf, "dtype")


def _to_onnxruntime(runtime: Any, name: str, kind: str, leaf: Any) -> Any:
    import numpy

    wanted = kind.removeprefix("tensor(").removesuffix(")")
    wanted = next((n for n in ELEMENTS if n.replace("_", "") == wanted), _TORCH_NAMES.get(wanted, wanted))
    if isinstance(leaf, (bool, int, float, str)):  # a number has no type of its own
        return numpy.array(leaf, object if wanted == "str" else wanted)
    tensor = leaf if isinstance(leaf, torch.Tensor) else None
    found = str(leaf.dtype).removeprefix("torch.") if tensor is not None else leaf.dtype.name
    if found != wanted and not (wanted == "str" and is_text(leaf)):
        raise ReplayError(f"The model takes {name} as {wanted}, and the case has it as {found}.")
    if tensor is None:
        return leaf.astype(object) if wanted == "str" else leaf
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    element = ELEMENTS.get(wanted)
    if element is None or not element.cast:
        return plain.numpy()
    bits = plain.view(torch.uint16 if plain.element_size() == 2 else torch.uint8).numpy()
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, element.code)


def _run(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run the model; its outputs by name, as tensors, or as arrays of text."""
    import onnxruntime

    names = [node.name for node in session.get_outputs()]
    try:
        if any(map(is_text, feeds.values())):  # no OrtValue holds text
            return {name: _tensor(array) for name, array in zip(names, session.run(names, feeds), strict=True)}
        values = {
            name: value if isinstance(value, onnxruntime.OrtValue) else onnxruntime.OrtValue.ortvalue_from_numpy(value)
            for name, value in feeds.items()
        }
        found = session.run_with_ort_values(names, values)
        return {name: _from_onnxruntime(value) for name, value in zip(names, found, strict=True)}
    except Exception as error:  # onnxruntime has no base class for its errors
        raise ReplayError(f"onnxruntime fails on the inputs of the case: {_first_line(error)}") from error


def _from_onnxruntime(value: Any) -> Any:
    name = next((n for n, e in ELEMENTS.items() if e.cast and e.packed == 1 and e.code == value.element_type()), None)
    if name is None:
        return _tensor(value.numpy())
    # NumPy has no such type, so the bytes are read where they are
    data = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
    return torch.frombuffer(data or bytearray(8), dtype=getattr(torch, name))[: len(data)].reshape(value.shape())


def _tensor(array: Any) -> Any:
    # onnxruntime's uint64 is a type of C of the same size, which torch does not take
    return array if is_text(array) else torch.tensor(array.view(array.dtype.str))


def _compare(case: StoredCase, results: Mapping[str, Any]) -> list[OutputDifference]:
    names = output_names(case.outputs, leaf_names(case.inputs))
    rows = list(zip(names, plain_names(case.outputs), leaves_of(case.outputs), strict=True))
    rows = [row for row in rows if _is_data(row[2])]
    places = match(list(results), [(name, plain) for name, plain, _ in rows])
    found = {place: name for name, place in places.items()}
    return [
        OutputDifference(name, found[place], *_difference(expected, results[found[place]]))
        if place in found
        else OutputDifference(name, None, float("inf"), "the model has no such output")
        for place, (name, _, expected) in enumerate(rows)
    ]


def _difference(expected: Any, found: Any) -> tuple[float, str | None]:
    """The largest difference, and what makes the two incomparable."""
    try:
        return largest_difference(expected, found), None
    except ReplayError as error:
        return float("inf"), str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
