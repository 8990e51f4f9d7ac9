"""``yobx-flatten explain``: draw the structure of an object or a file."""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated, Any

import typer

from ..declare.scopes import register_flattening_functions
from ..diagnose.drawing import explain as draw
from ..errors import ForeignFileError, GenerationError
from ..files.scratch import is_folder
from ..record.calls import RecordedCalls
from ..record.files import call_files
from ..runners.onnx_session import open_session
from ..runners.ports import Port
from ..runners.program_runner import ProgramRunner, open_program
from ..storage.cases import load_case
from ..storage.nested import load_nested
from ..terminal.output import say, say_json
from ..terminal.running import UserError
from .targets import call_of, is_object_name, object_of


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_CALL",
            help="A model (.onnx, .pt2), stored inputs (.onnx, .case), a folder of such files or of recorded calls, or "
            "MODULE:NAME of an object or a function. If a function returns (module, kwargs), kwargs are drawn.",
        ),
    ],
    plain: Annotated[bool, typer.Option(help="Draw how torch alone flattens the object.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load pickles, which may run code; use only if you trust their author.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Draw the structure of an object or a file.

    For a model file, draw inputs and outputs. For stored inputs and for objects, draw the tree of leaves. Objects that
    torch cannot flatten are marked, with the line that registers their class.
    """
    path = pathlib.Path(target)
    if path.exists():
        drawn = _folder(path, trust=trust) if is_folder(path) else [_file(path, trust=trust)]
    elif is_object_name(target):
        drawn = [_object(target, object_of(target), plain=plain)]
    else:
        raise UserError(f"there is no file {target}, and {target} does not have the form MODULE:NAME")
    if json:
        say_json([{"name": name, "lines": text.splitlines()} for name, text in drawn])
        return 0
    for number, (name, text) in enumerate(drawn):
        say(("\n" if number else "") + (f"{name}\n{text}" if len(drawn) > 1 else text))
    return 0


def _folder(path: pathlib.Path, *, trust: bool) -> list[tuple[str, str]]:
    if call_files(path):
        return [(str(path), str(RecordedCalls.load(path)))]
    files = sorted([*path.glob("*.onnx"), *path.glob("*.pt2")])
    if not files:
        raise UserError(f"{path} contains no .onnx or .pt2 file and no recorded calls")
    return [_file(file, trust=trust) for file in files]


def _file(path: pathlib.Path, *, trust: bool) -> tuple[str, str]:
    name = str(path)
    if path.suffix == ".safetensors":
        return name, str(RecordedCalls.load(path.parent))
    if path.suffix == ".pt2":
        runner = ProgramRunner(open_program(path, trust=trust), path.name)
        return name, _ports([_program_port(port) for port in runner.ports.values()], runner.outputs)
    try:
        return name, str(draw(load_nested(path), name=path.stem, width=120))
    except ForeignFileError:
        pass  # then it is a case, or a model
    try:
        case = load_case(path)
        return name, str(draw({"inputs": case.inputs, "outputs": case.outputs}, name=case.name, width=120))
    except ForeignFileError:
        pass
    session = open_session(path, caller="yobx-flatten explain", failure=GenerationError)
    return name, _ports([_onnx_port(node) for node in session.get_inputs()], map(_onnx_port, session.get_outputs()))


def _program_port(port: Port) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in port.shape)
    return f"{port.name}: {str(port.dtype).removeprefix('torch.')}[{sizes}]"


def _onnx_port(node: Any) -> str:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    return f"{node.name}: {kind}[{', '.join(map(str, node.shape))}]"


def _ports(inputs: list[str], outputs: Any) -> str:
    return "\n".join(["inputs", *(f"  {line}" for line in inputs), "outputs", *(f"  {line}" for line in outputs)])


def _object(name: str, found: Any, *, plain: bool) -> tuple[str, str]:
    label = name.rpartition(":")[2]
    call = call_of(found)
    if call is not None:  # the module itself is not flattened
        _, args, kwargs = call
        found = {"args": args, "kwargs": kwargs} if args else kwargs
    if plain:
        return name, str(draw(found, name=label, width=120))
    with register_flattening_functions(patch_transformers="transformers" in sys.modules):
        return name, str(draw(found, name=label, width=120))
