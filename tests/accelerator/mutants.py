"""Remove every wait, event, record of a stream and pin once, and see which test notices: ``make mutants``.

What is removed, in the files of ``roundpipe_runtime/device``:

- a call that waits, records or notifies, as a statement: what it was called on is still evaluated
- ``pin_memory=True`` and ``.pin_memory()``
- a stream in a ``with``, or returned for one, so that its block runs on the stream of the caller
"""

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.accelerator.planted import FAULTS

ROOT = Path(__file__).parents[2]
_FOLDER = ROOT / "roundpipe_runtime" / "device"
_WAITS = {"wait_event", "record_stream", "synchronize", "result", "wait_for", "wait", "notify_all", "wait_for_futures"}
_STREAMS = {"stream", "_parameters", "_activations", "_compute", "_downloads"}
_NO_CONTEXT = "__import__('contextlib').nullcontext()"
# After so many seconds a run of tests hangs.
_SECONDS = 600

# Tests that are asked, one group after the other, until one fails. The first groups run on the accelerator.
_ON_LATE = [
    ["tests/accelerator/on_late/test_device.py", "tests/accelerator/on_late/test_order.py"],
    ["tests/accelerator/on_late/test_failures.py"],
]
_PLAIN = [
    "-k=not thread_and_no_tensor and not takes_its_threads",  # they count threads, and fail in a fork
    *["tests/runtime/device", "tests/runtime/engine/test_faults.py", "tests/runtime/engine/test_interrupted.py"],
]


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    code: str
    again: int
    tree: ast.Module

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}: {self.code}" + f" (no. {self.again + 1})" * bool(self.again)


class Removal(NamedTuple):
    """Something that can be removed from a tree."""

    function: str
    node: ast.AST
    changed: ast.AST
    field: str
    value: object

    def remove(self) -> None:
        setattr(self.changed, self.field, self.value)


def removals(tree: ast.Module) -> Iterator[Removal]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if (found := _change(node)) is not None:
                    shown = node.context_expr if isinstance(node, ast.withitem) else node
                    yield Removal(function.name, shown, *found)


def _change(node: ast.AST) -> tuple[ast.AST, str, object] | None:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=subject, attr=name))) if name in _WAITS:
            return node, "value", subject
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in _WAITS:
            return node, "value", ast.Constant(None)
        case ast.keyword(arg="pin_memory" | "wait", value=value) if getattr(value, "value", True) is not False:
            return node, "value", ast.Constant(False)
        case ast.Call(func=ast.Attribute(attr="pin_memory") as method):
            return method, "attr", "clone"
        case ast.withitem(context_expr=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _STREAMS:
            return node, "context_expr", ast.parse(_NO_CONTEXT, mode="eval").body
        case ast.Return(value=ast.Attribute(attr=name)) if name in _STREAMS:  # for a `with` of the caller
            return node, "value", ast.parse(_NO_CONTEXT, mode="eval").body
    return None


def mutants() -> list[Mutant]:
    found = []
    for file in sorted(_FOLDER.glob("*.py")):
        tree = ast.parse(file.read_text())
        for place, removal in enumerate(removals(tree)):
            code = ("with " if removal.field == "context_expr" else "") + ast.unparse(removal.node)
            changed = copy.deepcopy(tree)
            list(removals(changed))[place].remove()
            ast.fix_missing_locations(changed)
            again = sum((one.file, one.function, one.code) == (file.name, removal.function, code) for one in found)
            found.append(Mutant(file.name, removal.function, code, again, changed))
    return found


def install(name: str) -> None:
    """Make Python import the mutant with this name instead of its file."""
    (mutant,) = (mutant for mutant in mutants() if mutant.name == name)
    module = f"roundpipe_runtime.device.{mutant.file.removesuffix('.py')}"
    path = str(_FOLDER / mutant.file)

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> object:
            return compile(mutant.tree, path, "exec")

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
            if fullname == module:
                return importlib.util.spec_from_file_location(module, path, loader=Loader(module, path))
            return None

    sys.meta_path.insert(0, Finder())


def _first_failure(arguments: list[str], mutant: str | None) -> str | None:
    """The test that fails, or what else happened; ``None`` if all pass.

    The tests run in a fork of this process, which has imported torch, and nothing of this project.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _run_tests(arguments, mutant, writing)
    os.close(writing)
    watch = threading.Timer(_SECONDS, os.kill, [child, signal.SIGKILL])
    watch.start()
    with open(reading) as stream:
        failed = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    watch.cancel()
    if failed or not status:
        return failed or None
    return "a test hangs" if status == -signal.SIGKILL else f"the process ends with status {status}"


class _FirstFailure:
    """A plugin of pytest that writes the name of the first test that fails, and ends the process."""

    def __init__(self, writing: int) -> None:
        self.writing = writing

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.writing, report.nodeid.encode())
            os._exit(1)

    pytest_collectreport = pytest_runtest_logreport


def _run_tests(arguments: list[str], mutant: str | None, writing: int) -> NoReturn:
    import pytest

    os.chdir(ROOT)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        if mutant:
            install(mutant)
        options = ["-p", "no:cacheprovider", "-n", "0", "--timeout", "60", "--tb", "no"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that the parent has imported
        os._exit(int(pytest.main([*arguments, *options], plugins=[_FirstFailure(writing)])))
    except BaseException as error:
        os.write(writing, f"pytest does not start: {error!r}".encode())
        os._exit(3)


def check(mutant: str | None) -> str | None:
    """The first test that notices this mutant, or fails without one; ``None`` if all pass."""
    groups = [*(["-p", "tests.accelerator.plugin", *tests] for tests in _ON_LATE), _PLAIN]
    if mutant and mutant.startswith(("accelerator.py", "pinning.py")):
        groups.pop()  # they do nothing there
    elif mutant:
        groups.reverse()
    for group in groups:
        if found := _first_failure(group, mutant):
            return found
    return None


def page(results: dict[str, str | None]) -> str:
    """The results as a page in Markdown."""
    rows, newline = [], "\n"
    waits = {name: found for name, found in results.items() if not name.startswith("model.onnx:: ")}
    for name, found in waits.items():
        file, function, code = name.split(":", 2)
        shown = found or "**nothing**"
        shown = shown if " " in shown or not found else f"`{shown}`"
        rows.append(f"| `{file}` | `{function}` | `{code.strip()}` | {shown} |")
    noticed, total = sum(found is not None for found in waits.values()), len(waits)
    files = "\n".join(f"| {what} | {test} |" for what, test in FAULTS.items())
    return f"""# Waits that are needed

Each wait, record of a stream, pin and choice of a stream in `roundpipe_runtime/device` was removed once, and tests were
run until one noticed: {noticed} of {total} removals are noticed. `make mutants` repeats this and writes this page from
`docs/data/mutants.json`; [](accelerator.md) states what the tests run on.

| file | function | removed | noticed by |
|---|---|---|---|
{newline.join(rows)}

## Faults in files

Each fault is planted in an ONNX file before its proof, with `proof="standard"`, that of models from 100 MB of weights.
No folder appears:

| planted | noticed by |
|---|---|
{files}
"""


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--only", default="", help="run those with this text in their name")
    parser.add_argument("--output", type=Path, help="file of results, from which a run that was ended goes on")
    parser.add_argument("--trust", action="store_true", help="begin without the tests on what is not changed")
    parser.add_argument("--page", type=Path, help="write the table of the results to this page")
    arguments = parser.parse_args()
    output = arguments.output or ROOT / "docs" / "data" / "mutants.json"
    results: dict[str, str | None] = {}
    with contextlib.suppress(FileNotFoundError):
        results = json.loads(output.read_text())
    names = [mutant.name for mutant in mutants()]
    if arguments.list:
        print("\n".join(names))
        return
    results = {name: results[name] for name in names if name in results}
    results |= {f"model.onnx:: {what}": test for what, test in FAULTS.items()}
    import torch._dynamo  # noqa: F401 # what takes long to import, before the forks
    import transformers  # noqa: F401

    if not arguments.trust and (found := check(None)):
        sys.exit(f"A test fails without a mutant: {found}")
    for number, name in enumerate(names, start=1):
        if arguments.only not in name or results.get(name):
            continue
        begin = time.monotonic()
        results[name] = check(name)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{number}/{len(names)} {name}\n    {results[name] or 'NOT NOTICED'}", flush=True)
        print(f"    ({time.monotonic() - begin:.0f} s)", flush=True)
    if arguments.page:
        arguments.page.write_text(page(results))
    tried = [name for name in names if arguments.only in name]
    noticed = sum(bool(results.get(name)) for name in tried)
    print(f"{noticed} of {len(tried)} removals are noticed")
    sys.exit(noticed < len(tried))


if __name__ == "__main__":
    main()
