"""Explain errors of a program that refuses its inputs: structure, keywords, guards."""

from __future__ import annotations

import re
import traceback

from torch.export import ExportedProgram

from .explanation import Explanation, Failure, Row
from .size_errors import format_size
from .spec_diff import Difference, compare_spec_texts, compare_specs


def _other_structure(failure: Failure, found: re.Match[str]) -> Explanation | None:
    names = ("exported", "called")
    differences: list[Difference] | None = None
    if isinstance(failure.module, ExportedProgram) and (failure.args or failure.kwargs):
        differences = compare_specs(failure.module, (failure.args, dict(failure.kwargs)), names=names)
    if not differences:
        differences = compare_spec_texts(found[1], found[2], names)
    if not differences:
        return None
    listed = "\n".join(map(str, differences))
    return Explanation(
        f"The program was exported for inputs of another structure:\n{listed}",
        tuple(difference.path for difference in differences),
        "",
    )


def _other_keywords(failure: Failure, found: re.Match[str]) -> Explanation:
    given, expected = (re.findall(r"'([^']+)'", names) for names in (found[1], found[2]))
    paths = tuple(f"kwargs[{name!r}]" for name in given if name not in expected)
    missing = [name for name in expected if name not in given]
    text = [f"{', '.join(paths)} was not passed by keyword when the program was exported."] if paths else []
    text += [f"{', '.join(missing)} is missing: it was passed by keyword then."] if missing else []
    return Explanation(" ".join(text) + " Call the program as it was exported:", paths, _call(expected))


def _call(keywords: list[str]) -> str:
    return (
        f"program.module()(..., {', '.join(f'{name}=...' for name in keywords)})"
        if keywords
        else "program.module()(...)"
    )


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
        return Explanation(
            f"{path} has another size along axis {axis} than {value}, which the program was exported for: the axis "
            "was not dynamic, or the code fixed it. Export again with:",
            (path,),
            f"dynamic_shapes={{{_root(path)!r}: {{{axis}: Dim.AUTO}}, ...}}  # with an example of size 2 or more",
        )
    return Explanation(
        f"The program is valid only for {format_size(guard)}: the code branches on it, or bounds= or a Dim set the "
        "range. Remove the branch, export with a larger bound, or export one program for each branch and choose "
        "before the call.",
        (path,),
        "",
    )


def _root(path: str) -> str:
    return re.split(r"[\[.]", path)[0]


def explain_guards(failure: Failure) -> Explanation | None:
    """Explain an error raised by the code that torch generates to check the inputs of a program, in a nameless file."""
    frames = traceback.extract_tb(failure.error.__traceback__)
    if not frames or (frames[-1].filename, frames[-1].name) != ("<string>", "_"):
        return None
    return Explanation(
        "The program could not check its inputs. Known causes: None where the example had a tensor, or an example that "
        "is a slice of a larger tensor. Pass what the example had, and export with contiguous examples:",
        (),
        "example.contiguous()",
    )


PROGRAM_ROWS: list[Row] = [
    (
        r"exported input tree spec: *\n(.*?)\nbut actually got inputs with tree spec of: *\n(.*?)\.\nPlease check",
        _other_structure,
    ),
    (r"kwarg keyword mismatch: Got the following keywords (\[.*?\]) but expected (\[.*?\])", _other_keywords),
    (r"^Guard failed: (.+)$", _guard),
]
