"""Explain errors about static axes, about ``dynamic_shapes``, and about inputs that a program does not accept."""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import os
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram

from ..errors import DynamicShapesError
from ..errors.failures import first_line
from ..trees.arguments import inputs_by_name
from ..trees.shapes import check_dynamic_shapes
from ..trees.walk import torch_leaves
from .comparison import compare_spec_texts, compare_specs

T = TypeVar("T")


def _constraints(failure: Failure, found: re.Match[str]) -> Explanation | None:
    message = failure.message
    fixed = re.findall(r"You marked (.+?) as dynamic but your code specialized it to be a constant \((\d+)\)", message)
    equal = re.findall(r"The values of (.+?) and (.+?) must always be equal", message)
    related = re.findall(r"The values of (.+?) must always be related to the values of (.+?) by ", message)
    narrower = re.findall(r"Not all values of (.+?) in the specified range satisfy the generated guard (.+)", message)
    sentences, paths = [], []
    for name, size in fixed:
        path = format_size(name)
        paths.append(path)
        if int(size) < 2:
            sentences.append(
                f"{path} should vary, but has size {size} in the example; torch.export fixes sizes 0 and 1. Pass an "
                "example of size 2 or more, or fix the size:"
            )
        else:
            sentences.append(
                f"{path} should vary, but the code works for size {size} only. Change the code, or fix the size:"
            )
    for pair in equal + related:
        sides = [format_size(side) for side in pair]
        paths += sides
        kind = "are equal" if pair in equal else "vary together"
        sentences.append(f"The code works only where {' and '.join(sides)} {kind}. Declare this relation:")
    for name, guard in narrower:
        path, condition = format_size(name), format_size(guard)
        paths.append(path)
        sentences.append(
            f"The code takes another branch for some sizes of {path}: the trace is valid where {condition}. Limit the "
            "size to this range, or remove the branch:"
        )
    if not sentences:
        return None
    suggested = re.search(r"Suggested fixes:\n(.+?)(?:\n\n|\Z)", message, re.DOTALL)
    remedy = re.sub(r"(?m)^\s+", "", suggested[1]) if suggested else "Dim.AUTO  # instead of Dim.DYNAMIC"
    return Explanation("\n".join(dict.fromkeys(sentences)), tuple(dict.fromkeys(paths)), remedy)


def format_size(text: str) -> str:
    """Convert torch's name of a size, ``L['x'].size()[0]``, to Python code that a user would write: ``x.shape[0]``.

    >>> format_size("batch"), format_size("L['x']['a'].size()[1]"), format_size("b = L['y'].size()[0]")
    ('batch', "x['a'].shape[1]", 'b (y.shape[0])')
    """
    text = re.sub(r"L\['(\w+)'\]", r"\1", text).replace(".size()[", ".shape[")
    return re.sub(r"(\w+) = (\S+\.shape\[\d+\])", r"\1 (\2)", text)


def _conflicts(failure: Failure, found: re.Match[str]) -> Explanation | None:
    given = r"hint of (\d)|static shape of (\d+)|inferred min/max range of \[(\d+), (\w+)\]"
    sentences, paths = [], []
    for hint, size, lower, upper, place in re.findall(rf"(?:{given}).*? inputs(\[\S+\])", failure.message):
        paths.append(re.sub(r"^\['(\w+)'\]", r"\1", place))
        works = f"size {size or lower}" if size or lower == upper else f"sizes from {lower} to {upper}"
        why = f"the code works for {works} only. Change the code or the range"
        if hint:
            why = f"has size {hint} in the example; torch.export fixes sizes 0 and 1. Pass an example of size 2 or more"
        sentences.append(f"{paths[-1]} should vary, but {why}, or let torch choose:")
    return Explanation("\n".join(sentences), tuple(paths), "Dim.AUTO  # instead of Dim.DYNAMIC") if paths else None


def _misfit(failure: Failure, found: re.Match[str]) -> Explanation | None:
    # an empty match is of an error that is unknown so far, which a misfit of `dynamic_shapes` may cause
    named = re.findall(r"`(dynamic_shapes\[[^`]*\])`", failure.message)[:1] if found[0] else ()
    text = failure.message.strip().split("\n")[0].split(" For more information")[0] if found[0] else ""
    if failure.dynamic_shapes is not None:
        inputs = failure.inputs()
        given = inputs if isinstance(failure.dynamic_shapes, Mapping) else tuple(inputs.values())
        try:
            check_dynamic_shapes(given, failure.dynamic_shapes)
        except DynamicShapesError as error:
            text = str(error).removeprefix("the inputs: ")
    if not text:
        return None
    line = "export_program(module, args, kwargs)  # writes them"
    if bool(failure.args) != bool(failure.kwargs) and isinstance(failure.module, torch.nn.Module):
        kinds = {parameter.kind for parameter in inspect.signature(failure.module.forward).parameters.values()}
        # torch has no dynamic shapes by name for `*args` and `**kwargs`
        if kinds.isdisjoint({inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}):
            line = f"dynamic_shapes=dynamic_shapes({'kwargs' if failure.kwargs else 'args'})"
    text = f"dynamic_shapes does not fit the inputs: {text}\nTo generate dynamic_shapes:"
    return Explanation(text, tuple(named), line)


def fixed(pattern: str, text: str, line: str, *paths: str) -> Row:
    """Return an entry for the table of explained errors; the regular expression ``pattern`` matches the message."""

    def explain(failure: Failure, found: re.Match[str]) -> Explanation:
        shown, remedy, *places = (part.format(*found.groups()) for part in (text, line, *paths))
        return Explanation(shown, tuple(places), remedy)

    return pattern, explain


def _planted(failure: Failure, found: re.Match[str]) -> Explanation:
    return Explanation(
        f"Two tensors do not fit each other{place_of(failure.error)}\n{first_line(failure.error)}\nIf only the "
        "example's size works, the code creates a tensor of a fixed size, as in torch.ones(3, 4), or uses a buffer "
        "of that size. Use the input's size, or keep the size fixed:",
        remedy="torch.ones(x.shape[0], 4)\ndynamic_shapes={'x': {0: None}}",
    )


SIZE_ROWS: list[Row] = [
    (r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)", _planted),
    (r"The expanded size of the tensor \(\d+\) must match the existing size \(\d+\)", _planted),
    (r"Sizes of tensors must match except in dimension \d+", _planted),
    (r"mat1 and mat2 shapes cannot be multiplied", _planted),
    (r"shape '.+?' is invalid for input of size \d+", _planted),
    (r"Constraints violated", _constraints),
    (r"conflicts between user-specified ranges and inferred ranges", _conflicts),
    fixed(
        r"(\d+) not in range (\[.*?\])",
        "The example has size {0} where the Dim allows {1}. Pass an example within the range, or widen it:",
        'Dim("name", min={0})',
    ),
    (r"mismatch between the structure of `inputs` and `dynamic_shapes`", _misfit),
    (r"`dynamic_shapes` is specified as a dict, its top-level keys must be", _misfit),
    (r"specified at `dynamic_shapes", _misfit),
]


TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))


def place_of(error: BaseException) -> str:
    """Return the last line of the model's code in a traceback, such as ``" in forward, model.py:12: x"``."""
    rows = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = [number for number, (code, _) in enumerate(rows) if code.co_filename.startswith((TORCH, _OURS))]
    # the frames above torch's first frame belong to the code that called the export
    below = rows[inside[0] :] if inside else []
    own = [row for row in below if not row[0].co_filename.startswith((TORCH, _OURS, "<"))]
    if not own:
        return ""
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()
    return f" in {code.co_name}, {code.co_filename}:{line}{': ' + text if text else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of an export error, which ``print`` shows as text.

    Attributes:
        text: the meaning of the error.
        paths: the inputs or outputs that cause the error, as Python expressions.
        remedy: line of code that solves the problem; empty if no line is known.
        known: whether :func:`explain_error` has an explanation for the error; else ``text`` quotes torch's message.
    """

    text: str
    paths: tuple[str, ...] = ()
    remedy: str = ""
    known: bool = True

    def __str__(self) -> str:
        remedy = self.remedy.replace("\n", "\n    ")
        return f"{self.text}\n    {remedy}" if remedy else self.text


@dataclasses.dataclass(frozen=True)
class Failure:
    error: BaseException  # the exception that was raised
    message: str  # the text of the error
    module: torch.nn.Module | ExportedProgram | None  # the module or program; `None` if not known
    args: tuple[Any, ...]  # positional arguments of the export or the call
    kwargs: Mapping[str, Any]  # keyword arguments of the export or the call
    dynamic_shapes: Any  # the shapes as passed to `torch.export.export`

    def inputs(self) -> dict[str, Any]:
        return inputs_by_name(self.module, self.args, self.kwargs)

    def leaves(self, kind: type[T]) -> list[tuple[str, T]]:
        leaves = [item for name, value in self.inputs().items() for item in torch_leaves(value, name)]
        return [(path, leaf) for path, leaf in leaves if isinstance(leaf, kind)]


# a pattern that matches one kind of error message in all versions of torch, and a function that explains the error
Row = tuple[str, Callable[[Failure, "re.Match[str]"], Explanation | None]]


def _other_structure(failure: Failure, found: re.Match[str]) -> Explanation | None:
    names, differences = ("exported", "called"), None
    if isinstance(failure.module, ExportedProgram) and (failure.args or failure.kwargs):
        differences = compare_specs(failure.module, (failure.args, dict(failure.kwargs)), names=names)
    differences = differences or compare_spec_texts(found[1], found[2], names)
    if not differences:
        return None
    lines = ["The program was exported for inputs of another structure:", *map(str, differences)]
    return Explanation("\n".join(lines), tuple(difference.path for difference in differences))


def _other_keywords(failure: Failure, found: re.Match[str]) -> Explanation:
    given, expected = (re.findall(r"'([^']+)'", names) for names in (found[1], found[2]))
    paths = tuple(f"kwargs[{name!r}]" for name in given if name not in expected)
    missing = [name for name in expected if name not in given]
    text = [f"{', '.join(paths)} was not passed by keyword when the program was exported."] if paths else []
    text += [f"{', '.join(missing)} is missing: the export passed it by keyword."] if missing else []
    arguments = ", ".join(["...", *(f"{name}=..." for name in expected)])
    line = f"program.module()({arguments})"
    return Explanation(" ".join(text) + " Call the program as it was exported:", paths, line)


def _guard(failure: Failure, found: re.Match[str]) -> Explanation:
    guard = found[1].strip()
    sized = re.match(r"(.+?)\.(size|stride)\(\)\[(\d+)\] (==|!=|<=|>=|<|>) (.+)$", guard)
    if sized is None:
        path = re.split(r" (?:==|!=|<=|>=|<|>) ", guard)[0]
        return Explanation(
            f"The program is valid only for {guard}: a number, string or None among the inputs is part of the program. "
            "Pass a tensor, or let the number vary when you export:",
            (path,),
            f"dynamic_shapes={{{path!r}: Dim.AUTO, ...}}",
        )
    path, what, axis, operator, value = sized.groups()
    if what == "stride":
        return Explanation(
            f"The program is valid only for {guard}: the example was a slice of a larger tensor. Export with a "
            "contiguous one:",
            (path,),
            f"{path}.contiguous()",
        )
    if value.isdigit() and operator == "==":
        root = re.split(r"[\[.]", path)[0]
        return Explanation(
            f"{path} has another size along axis {axis} than {value}, which the program was exported for: the axis "
            "was not dynamic, or the code fixed it. Export again with:",
            (path,),
            f"dynamic_shapes={{{root!r}: {{{axis}: Dim.AUTO}}, ...}}  # with an example of size 2 or more",
        )
    return Explanation(
        f"The program is valid only for {format_size(guard)}: the code branches on it, or bounds= or a Dim set the "
        "range. Remove the branch, export with a larger bound, or export one program for each branch and choose "
        "before the call.",
        (path,),
    )


def _generated_checks(failure: Failure, found: re.Match[str]) -> Explanation | None:
    # the error is in the code that torch generates to check the inputs of a program
    frames = traceback.extract_tb(failure.error.__traceback__)
    if not frames or (frames[-1].filename, frames[-1].name) != ("<string>", "_"):
        return None
    return Explanation(
        "The program could not check its inputs. Known causes: None instead of a tensor, or an example that is a "
        "slice of a larger tensor. Pass tensors where the example had tensors, and export with contiguous examples:",
        remedy="example.contiguous()",
    )


PROGRAM_ROWS: list[Row] = [
    (
        r"exported input tree spec: *\n(.*?)\nbut actually got inputs with tree spec of: *\n(.*?)\.\nPlease check",
        _other_structure,
    ),
    (r"kwarg keyword mismatch: Got the following keywords (\[.*?\]) but expected (\[.*?\])", _other_keywords),
    (r"^Guard failed: (.+)$", _guard),
]

# for errors that no other row explains
LAST_ROWS: list[Row] = [(r"", _generated_checks), (r"", _misfit)]
