"""Define the command line ``yobx-flatten``, and its commands that take no exported folder.

``check``, ``explain`` and ``list`` inspect inputs, files and registered classes. ``env`` is for bug reports. ``bench``
and ``matrix`` need a clone of the repository.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from ..core.files.scratch import is_folder
from ..core.terminal.command_line import CHECK_FAILED, UserError, printable, reflow_help, run_app, say, say_json, table
from ..declare.listing import flattening_list
from ..declare.scopes import register_flattening_functions
from ..diagnose.checks import Findings, check_inputs
from ..diagnose.opaque import explain as draw
from ..errors import NEWEST_TRIED, ForeignFileError, GenerationError, untried_versions
from ..errors.failures import raised_as
from ..export.record.call import call_files
from ..export.record.calls import RecordedCalls
from ..model_folder.pieces.tasks import pieces_for
from ..model_folder.source.find import MODEL_NAMES, find_model, require_transformers
from ..runners.onnx_session import open_session
from ..runners.program_runner import ProgramRunner, open_program
from ..storage.cases import load_case
from ..storage.nested import load_nested
from .demo import demo
from .folder_commands import adapter, chat, export, generate, verify

_LIBRARIES = (
    "yobx-flatten torch transformers onnx onnxscript onnxruntime onnxruntime-genai openvino executorch torchao optree "
    "jax diffusers accelerate peft safetensors typer rich"
)
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def env(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Print the installed versions of Python and the libraries for a bug report, and the newest tested versions."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in _LIBRARIES.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    untried = untried_versions()
    if json:
        newer = [one.library for one in untried]
        say_json({**found, "executable": sys.executable, "newest_tried": NEWEST_TRIED, "newer_than_tried": newer})
        return 0
    width, shown = max(map(len, found)), {name: version or "not installed" for name, version in found.items()}
    wide = max(len(shown.get(name, "")) for name in NEWEST_TRIED)
    for name, tried in NEWEST_TRIED.items():
        if name in shown:
            shown[name] = f"{shown[name]:{wide}}  (newest tried: {tried})"
    say("\n".join(f"{name:{width}}  {version}" for name, version in shown.items()))
    if untried:
        lines = [f"{one}. If something fails: pip install '{one.library}<={one.tried}'" for one in untried]
        say("\n".join(["", *lines]))
    return 0


def clone() -> pathlib.Path | None:
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    return root if (root / "matrix" / "__main__.py").is_file() and (root / "benchmarks").is_dir() else None


def repository(what: str) -> pathlib.Path:
    root = clone()
    if root is None:
        raise UserError(
            f"{what} is part of the repository, not of the installed package: clone the repository, and run "
            "`pip install -e '.[all]'` and this command in the clone"
        )
    return root


def matrix(arguments: typer.Context) -> int:
    """Export a small model of every model type in transformers, and check each step of the export.

    The command needs a clone of the repository. It runs `python -m matrix` there, with arguments like --sample 8.
    """
    root = repository("the matrix")
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "matrix", *arguments.args]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def bench(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Benchmark to run (default: list all).")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the names as JSON.")] = False,
) -> int:
    """Run a benchmark, and print a table that compares this package with its alternatives.

    The command needs a clone of the repository, which contains the benchmarks.
    """
    root = repository("the benchmarks")
    found = {path.stem.removeprefix("bench_"): path for path in sorted((root / "benchmarks").glob("bench_*.py"))}
    if not name:
        say_json(list(found)) if json else say("\n".join(found))
        return 0
    if name not in found:
        raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(found)}")
    return subprocess.run([sys.executable, str(found[name])], check=False).returncode


def is_object_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def import_module(name: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)
    what = f"the module {name} cannot be imported"
    try:  # the module is the user's, and may raise anything
        with raised_as(lambda error: UserError(f"{what}: {type(error).__name__}: {error}")):
            return importlib.import_module(name)
    finally:
        if here in sys.path:
            sys.path.remove(here)


def object_of(name: str) -> Any:
    module_name, _, path = name.partition(":")
    found = import_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, torch.nn.Module):
        return found
    with raised_as(lambda error: UserError(f"{name}() failed: {type(error).__name__}: {error}")):
        return found()


def call_of(returned: Any) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]] | None:
    if not isinstance(returned, tuple) or not returned or not isinstance(returned[0], torch.nn.Module):
        return None
    args = next((part for part in returned[1:] if isinstance(part, tuple)), ())
    kwargs = next((part for part in returned[1:] if isinstance(part, Mapping)), {})
    return returned[0], args, kwargs


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CALL_OR_MODEL",
            help="MODULE:NAME of a function that returns (module, kwargs) or (module, args, kwargs); or else a model: "
            f"{MODEL_NAMES} To merge a PEFT adapter: its folder.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check the inputs of an export before torch.export traces the model.

    The report lists what would fail or give wrong results: unregistered classes, arguments that forward does not
    accept, one tensor passed twice, sizes of 0 and 1. Exit status: 0 no errors (warnings do not count); 1 errors.
    """
    if is_object_name(target):
        own = call_of(object_of(target))
        if own is None:
            raise UserError(f"{target} must return (module, kwargs) or (module, args, kwargs)")
        calls: dict[str, tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = {target: (*own, "auto")}
    else:
        model = find_model(target)
        if not model.has_weights:
            sys.stderr.write(printable(f"{model}\n"))
        _, pieces = pieces_for(model.load(), "auto")
        # the axes that may vary are those that export_folder declares
        calls = {piece.stem: (piece.module, (), piece.kwargs, piece.dynamic_shapes) for piece in pieces}
    found: dict[str, Findings] = {}
    for name, call in calls.items():
        with register_flattening_functions(patch_transformers="transformers" in sys.modules):
            found[name] = check_inputs(*call)
    if json:
        rows = {name: [dataclasses.asdict(finding) for finding in findings] for name, findings in found.items()}
        say_json({name: [{key: row[key] for key in row if key != "kind"} for row in rows[name]] for name in rows})
    else:
        for name, findings in found.items():
            say(f"{name}: {findings}")
    return CHECK_FAILED if any(findings.errors for findings in found.values()) else 0


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_CALL",
            help="A model (.onnx, .pt2), a file of stored inputs (.case, or .onnx of save_nested), a folder of .onnx "
            "and .pt2 files or of recorded calls, or MODULE:NAME of an object or a function. If a function returns "
            "(module, kwargs), the structure of kwargs is shown.",
        ),
    ],
    plain: Annotated[bool, typer.Option(help="Draw how torch flattens the object without this package.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load pickles, which may run code; use only if you trust their author.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Draw the structure of an object or a file.

    For a model file, draw its inputs and outputs. For stored inputs and for objects, draw the tree of leaves. Objects
    that torch cannot flatten are marked, together with the line of code that registers their class.
    """
    path = pathlib.Path(target)
    if path.exists():
        files = sorted([*path.glob("*.onnx"), *path.glob("*.pt2")]) if is_folder(path) else [path]
        if is_folder(path) and call_files(path):
            drawn = [(str(path), str(RecordedCalls.load(path)))]
        elif not files:
            raise UserError(f"{path} contains no .onnx or .pt2 file and no recorded calls")
        else:
            drawn = [_file(file, trust=trust) for file in files]
    elif is_object_name(target):
        found = object_of(target)
        call = call_of(found)
        if call is not None:  # the module itself is not flattened
            _, args, kwargs = call
            found = {"args": args, "kwargs": kwargs} if args else kwargs
        with_transformers = "transformers" in sys.modules
        with contextlib.nullcontext() if plain else register_flattening_functions(patch_transformers=with_transformers):
            drawn = [(target, str(draw(found, name=target.rpartition(":")[2], width=120)))]
    else:
        raise UserError(f"there is no file {target}, and {target} does not have the form MODULE:NAME")
    if json:
        say_json([{"name": name, "lines": text.splitlines()} for name, text in drawn])
        return 0
    for number, (name, text) in enumerate(drawn):
        say(("\n" if number else "") + (f"{name}\n{text}" if len(drawn) > 1 else text))
    return 0


def _file(path: pathlib.Path, *, trust: bool) -> tuple[str, str]:
    name = str(path)
    if path.suffix == ".safetensors":
        return name, str(RecordedCalls.load(path.parent))
    if path.suffix == ".pt2":
        runner = ProgramRunner(open_program(path, trust=trust), path.name)
        inputs = []
        for port in runner.ports.values():
            sizes = ", ".join("?" if size is None else str(size) for size in port.shape)
            inputs.append(f"{port.name}: {str(port.dtype).removeprefix('torch.')}[{sizes}]")
        return name, _ports(inputs, runner.outputs)
    with contextlib.suppress(ForeignFileError):  # then it is a case, or a model
        return name, str(draw(load_nested(path), name=path.stem, width=120))
    with contextlib.suppress(ForeignFileError):
        case = load_case(path)
        return name, str(draw({"inputs": case.inputs, "outputs": case.outputs}, name=case.name, width=120))
    session = open_session(path, caller="yobx-flatten explain", failure=GenerationError)
    return name, _ports([_onnx_port(node) for node in session.get_inputs()], map(_onnx_port, session.get_outputs()))


def _onnx_port(node: Any) -> str:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    return f"{node.name}: {kind}[{', '.join(map(str, node.shape))}]"


def _ports(inputs: list[str], outputs: Any) -> str:
    return "\n".join(["inputs", *(f"  {line}" for line in inputs), "outputs", *(f"  {line}" for line in outputs)])


_KINDS = ("layer", "cache", "output", "container")


def list_classes(
    kind: Annotated[str, typer.Option(metavar="KIND", help=f"List only one kind: {', '.join(_KINDS)}.")] = "",
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="First import a module that registers further classes."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the classes that can be flattened, the leaves of each class, and the library that registers the class.

    The list contains the transformers classes that `register_flattening_functions(patch_transformers=True)` registers.
    A class that belongs to one model is listed only if --import names the model's module.
    """
    if kind and kind not in _KINDS:
        raise UserError(f"unknown kind {kind!r}; choose from {', '.join(_KINDS)}")
    require_transformers("the list")
    for name in imports or []:
        import_module(name)
    rows = [row for row in flattening_list() if kind in ("", row.kind)]
    if json:
        say_json([dataclasses.asdict(row) for row in rows])
        return 0
    cells = [
        (row.kind, _short(row.cls), _short(row.code), row.leaves, row.tables or "-", row.registered_by) for row in rows
    ]
    table(("kind", "class", "code", "leaves", "registered in", "by"), cells)
    say(f"{len(rows)} classes. Counters and static parts: --json.")
    return 0


def _short(name: str) -> str:
    for prefix in ("transformers.cache_utils.", "transformers.", "yobx_flatten.transformers:"):
        name = name.removeprefix(prefix)
    return name


def _version(asked: bool) -> None:
    if asked:
        say(f"yobx_flatten {importlib.metadata.version('yobx-flatten')}")
        raise typer.Exit


def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False,
) -> None:
    """Export models with their KV caches, and check every file against the model.

    Exit status: 0 success; 1 a check failed; 2 the request is invalid or impossible.
    """


def _app() -> typer.Typer:
    made = typer.Typer(name="yobx-flatten", no_args_is_help=True, pretty_exceptions_enable=False)
    made.callback()(_all_commands)
    for command in (demo, export, verify, adapter, generate, chat, check, explain):
        made.command(command.__name__)(command)
    made.command("list")(list_classes)
    made.command("env")(env)
    # the help of an installed copy does not list the commands that need a clone
    hidden = clone() is None
    made.command("bench", hidden=hidden)(bench)
    made.command("matrix", hidden=hidden, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        matrix
    )
    reflow_help(made)
    return made


app = _app()


def run(argv: Sequence[str] | None = None) -> int:
    return run_app(app, argv, program="yobx-flatten")
