"""Remove every wait, event, record of a stream and pin once, and see which test notices: ``make mutants``.

What is removed, in the files of ``roundpipe_runtime/device``:

- a call that waits, records or notifies, as a statement: what it was called on is still evaluated
- ``pin_memory=True`` and ``.pin_memory()``
- a stream in a ``with``, so that its block runs on the stream of the caller
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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Mutant", "install", "mutants"]

ROOT = Path(__file__).parents[2]
_FOLDER = ROOT / "roundpipe_runtime" / "device"
_WAITS = {"wait_event", "record_stream", "synchronize", "result", "wait_for", "wait", "notify_all", "wait_for_futures"}
_STREAMS = {"stream", "_parameters", "_activations", "_compute", "_downloads"}

# Tests that are asked, one group after the other, until one fails. The first group runs on the accelerator.
_ON_LATE = ["tests/accelerator/on_late/test_order.py", "tests/accelerator/on_late"]
_PLAIN = ["tests/runtime/device", "tests/runtime/engine/test_faults.py", "tests/runtime/engine/test_interrupted.py"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One removal.

    Attributes:
        file: name of the file in ``roundpipe_runtime/device``.
        place: number of the removal in its file.
        function: function that it is in.
        code: code that is removed.
        again: how often the same code is in the function before.
        tree: the file without it.
    """

    file: str
    place: int
    function: str
    code: str
    again: int
    tree: ast.Module

    @property
    def name(self) -> str:
        """Name for the command line and the record."""
        return f"{self.file}:{self.function}: {self.code}" + f" (no. {self.again + 1})" * bool(self.again)


def _removals(tree: ast.Module) -> Iterator[tuple[str, ast.AST, Callable[[], None]]]:
    """Function, code that goes, and what removes it from this tree."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value.func
                if isinstance(called, ast.Attribute) and called.attr in _WAITS:
                    yield function.name, node, lambda node=node, called=called: setattr(node, "value", called.value)
                elif isinstance(called, ast.Name) and called.id in _WAITS:
                    yield function.name, node, lambda node=node: setattr(node, "value", ast.Constant(None))
            elif isinstance(node, ast.keyword) and node.arg in ("pin_memory", "wait"):
                if not isinstance(node.value, ast.Constant) or node.value.value is True:
                    yield function.name, node, lambda node=node: setattr(node, "value", ast.Constant(False))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory":
                yield function.name, node, lambda node=node: setattr(node.func, "attr", "clone")
            elif isinstance(node, ast.withitem) and _last_name(node.context_expr) in _STREAMS:
                nothing = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
                yield (
                    function.name,
                    node.context_expr,
                    lambda node=node, nothing=nothing: setattr(node, "context_expr", nothing),
                )


def _last_name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def mutants() -> list[Mutant]:
    """All removals, file by file."""
    found = []
    for file in sorted(_FOLDER.glob("*.py")):
        tree = ast.parse(file.read_text())
        for place, (function, node, _) in enumerate(_removals(tree)):
            changed = copy.deepcopy(tree)
            list(_removals(changed))[place][2]()
            code = ("with " if isinstance(node, (ast.Name, ast.Attribute)) else "") + ast.unparse(node)
            again = sum((one.file, one.function, one.code) == (file.name, function, code) for one in found)
            found.append(Mutant(file.name, place, function, code, again, ast.fix_missing_locations(changed)))
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
            return (
                importlib.util.spec_from_file_location(module, path, loader=Loader(module, path))
                if fullname == module
                else None
            )

    sys.meta_path.insert(0, Finder())


# -- which test notices ------------------------------------------------------------------------------------------------


def _first_failure(arguments: list[str], mutant: str) -> str | None:
    """The test that fails, or what else happened; ``None`` if all pass."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.accelerator.mutant_plugin", *arguments]
    command += ["-p", "no:cacheprovider", "-n", "0", "-q", "-x", "--timeout", "60", "--tb", "no", "-rf"]
    environment = {**os.environ, "ROUNDPIPE_MUTANT": mutant, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    for line in done.stdout.splitlines():
        if line.startswith("FAILED "):
            return line.split()[1]
    if "Timeout" in done.stdout + done.stderr:
        return "a test hangs"
    return f"the process ends with status {done.returncode}"


def check(mutant: str) -> str | None:
    """The first test that notices this mutant, or ``None``."""
    for group in [["-p", "tests.accelerator.plugin", *_ON_LATE], _PLAIN]:
        if found := _first_failure(group, mutant):
            return found
    return None


def page(results: dict[str, str | None]) -> str:
    """The results as a page in Markdown."""
    rows = []
    for name, found in results.items():
        file, function, code = name.split(":", 2)
        shown = found or "**nothing**"
        rows.append(
            f"| `{file}` | `{function}` | `{code.strip()}` | {shown if ' ' in shown or not found else f'`{shown}`'} |"
        )
    noticed = sum(found is not None for found in results.values())
    return _PAGE.format(noticed=noticed, all=len(results), rows="\n".join(rows))


_PAGE = """# Waits that are needed

Each wait, record of a stream, pin and choice of a stream in `roundpipe_runtime/device` was removed once, and tests were
run until one noticed: {noticed} of {all} removals are noticed. `make mutants` does so and writes this page from
`docs/data/mutants.json`; [](accelerator.md) states what the tests run on.

| file | function | removed | noticed by |
|---|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--only", default="", help="run those with this text in their name")
    parser.add_argument("--output", type=Path, help="file of results, from which a run that was ended goes on")
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
    for number, name in enumerate(names, start=1):
        if arguments.only not in name or results.get(name):
            continue
        begin = time.monotonic()
        results[name] = check(name)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(
            f"{number}/{len(names)} {name}\n    {results[name] or 'NOT NOTICED'} ({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
    if arguments.page:
        arguments.page.write_text(page(results))
    missed = [name for name in names if not results.get(name) and arguments.only in name]
    print(f"{len(names) - len(missed)} of {len(names)} removals are noticed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
