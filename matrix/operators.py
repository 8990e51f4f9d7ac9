"""Export operators and call each file with values unlike its example: ``python -m matrix.operators --help``.

It looks for files that silently compute different values than eager PyTorch. Recorded operators run again with
``--redo`` only.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import pathlib
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .command import ROOT
from .operators_cases import Operator, Values, operators
from .page import cleaned, row, rule, stated
from .results import Results, installed_versions, library_state

__all__ = ["main", "measured", "page_of"]

_COLUMN = "file"
_VERDICTS = {
    "right": "the values of eager PyTorch for all inputs",
    "refused": "`export_onnx` raises an error and writes no file",
    "not exported": "torch raises an error",
    "wrong": "different values than eager PyTorch, and no error",
}
_CLOSE = {"rtol": 1e-4, "atol": 1e-5}

_PAGE = """# Operators

`export_onnx` exports each PyTorch operator with ordinary example values. onnxruntime then runs the ONNX file with
values that differ from the example: zeros of both signs, negative and large numbers, infinities, NaN, equal values, the
smallest and largest integers, and attention masks with a fully masked row. The outputs of onnxruntime are compared with
those of eager PyTorch (relative tolerance 1e-4). Input values for which eager PyTorch raises an error are left out.
`make operators` checks each operator that has no recorded result. The results come from `data/{file}`, measured with
{versions}.

{counts}

`yobx_flatten/trace/onnx_repairs.py` contains corrected translations of operators that `torch.onnx.export` translates
wrongly. The operators that are marked wrong below also return wrong values in files of `torch.onnx.export`, mostly for
infinities and NaN. `export_onnx` does not check files with infinities or NaN. If your program passes infinities or NaN
to one of these operators, give `export_onnx` your own translation:
`export_onnx(..., translations={{torch.ops.aten.NAME.default: function}})`.

## What is not correct

{failures}

## All operators

{table}
"""


def measured(operator: Operator) -> dict[str, Any]:
    """Export one operator, call its file with all values, and return the verdict.

    Args:
        operator: the operator.

    Returns:
        ``ok``, ``verdict``, ``seconds``, and ``why`` where it is not right.
    """
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict, why = _verdict(operator, pathlib.Path(folder) / "operator.onnx")
    found: dict[str, Any] = {"ok": verdict == "right", "verdict": verdict, "why": why}
    return {**found, "seconds": round(time.process_time() - started, 2)}


def _verdict(operator: Operator, path: pathlib.Path) -> tuple[str, str]:
    from yobx_flatten import export_onnx
    from yobx_flatten.errors import FlattenError

    module = operator.module()
    try:
        export_onnx(module, operator.example, path=path)
    except FlattenError as error:
        return "refused", _first(error)
    except Exception as error:  # whatever torch raises
        return "not exported", _first(error.__cause__ or error)
    apart = [f"{values.name}: {found}" for values in operator.others if (found := _apart(module, values, path))]
    return ("wrong", "; ".join(apart)) if apart else ("right", "")


def _first(error: BaseException) -> str:
    """The error in a line, without the columns of a table."""
    text = " ".join(str(error).split()).replace(f"{ROOT}/", "")
    return f"{type(error).__name__}: {text[:200]}".replace("|", "/")


def _apart(module: torch.nn.Module, values: Values, path: pathlib.Path) -> str:
    """What a file does otherwise than a module; ``""`` where it does the same, or the module refuses the values."""
    import onnxruntime

    try:
        expected = torch.utils._pytree.tree_leaves(module(*values.inputs))
    except (RuntimeError, ValueError, IndexError):
        return ""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    given = {f"x{index}": one.numpy() for index, one in enumerate(values.inputs) if f"x{index}" in wanted}
    try:
        found = [torch.as_tensor(one) for one in session.run(None, given)]
    except Exception as error:  # it stops, and returns no number; onnxruntime has no base class for its errors
        return "" if "sizes are refused" in str(error) else f"stops ({_first(error)[:80]})"
    for one, other in zip(expected, found, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(one.shape)} {one.dtype} eager, {tuple(other.shape)} {other.dtype} in the file"
        far = ~torch.isclose(one.double(), other.double(), equal_nan=True, **_CLOSE)
        if bool(far.any()):
            return f"{one[far][0].item():.6g} eager, {other[far][0].item():.6g} in the file"
    return ""


def _in_words(why: str) -> str:
    """A recorded reason; of a wrong value, who computed which number."""
    text = re.sub(
        r"(\S+) eager, (\S+) in the file",
        r"eager PyTorch returns \1, the file \2",
        cleaned(why).partition(" Use other")[0],
    )
    return text.replace("edges: ", "extreme values: ")


def page_of(results: Results, file: str) -> str:
    """Return the page of the results.

    Args:
        results: the results of all operators.
        file: the name of their file.
    """
    held = {name: entry["columns"][_COLUMN] for name, entry in results.types.items()}
    kinds = {one.name: one.kind for one in operators()}
    counts = Counter(result["verdict"] for result in held.values())
    summary = [row(["", "operators", ""]), rule(3)]
    summary += [row([verdict, str(counts[verdict]), text]) for verdict, text in _VERDICTS.items()]
    order = list(_VERDICTS)
    apart = sorted(held.items(), key=lambda item: (-order.index(item[1]["verdict"]), item[0]))
    failures = [row(["operator", "", "why"]), rule(3)]
    failures += [row([name, found["verdict"], _in_words(found["why"])]) for name, found in apart if not found["ok"]]
    table = [row(["kind", "right"]), rule(2)]
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in held if kinds.get(name) == kind and held[name]["ok"]]
        table.append(row([kind, ", ".join(names)]))
    versions = stated(results.versions)
    parts = {"counts": "\n".join(summary), "failures": "\n".join(failures), "table": "\n".join(table)}
    return _PAGE.format(file=file, versions=versions, **parts)


@contextlib.contextmanager
def _quietly() -> Any:
    """Without what torch logs of each export."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 where a file is wrong that was not in the results before."""
    parser = argparse.ArgumentParser("python -m matrix.operators", description=__doc__, allow_abbrev=False)
    versions = installed_versions()
    default = ROOT / "docs" / "data" / f"operators-{versions.get('torch', '').partition('+')[0]}.json"
    parser.add_argument("--only", metavar="WORD,...", help="operators whose name holds one of these words")
    parser.add_argument("--output", metavar="FILE", type=pathlib.Path, default=default, help="results (docs/data)")
    parser.add_argument("--page", metavar="FILE", type=pathlib.Path, help="write this page from the results, and end")
    parser.add_argument("--redo", action="store_true", help="run again what is recorded")
    options = parser.parse_args(arguments)
    if options.page is not None:
        options.page.write_text(page_of(Results.read(options.output), options.output.name), encoding="utf-8")
        return 0
    results = Results.open(options.output, versions, "operators")
    state, console = library_state(ROOT / "yobx_flatten"), Console(highlight=False, soft_wrap=True)
    words = (options.only or "").split(",")
    chosen = [one for one in operators() if any(word in one.name for word in words)]
    todo = [one for one in chosen if options.redo or results.missing(one.name, [_COLUMN])]
    before = {name for name, entry in results.types.items() if entry["columns"][_COLUMN]["verdict"] == "wrong"}
    worse = []
    for one in track(todo, "operators", console=console, disable=not console.is_terminal):
        with _quietly():
            found = measured(one)
        results.record(one.name, {_COLUMN: found}, state)
        console.print(f"{one.name:40} {found['verdict']:12} {found['why'][:120]}", markup=False)
        if found["verdict"] == "wrong" and one.name not in before:
            worse.append(one.name)
    return 1 if worse and before else 0


if __name__ == "__main__":
    sys.exit(main())
