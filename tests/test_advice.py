"""Each line that a message tells to type can be typed: the names are public, and take the arguments by these names."""

import ast
import functools
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

import roundpipe_runtime
import yobx_flatten
from roundpipe_runtime.cli.app import app as roundpipe
from yobx_flatten.cli.app import app as flatten

ROOT = Path(__file__).parents[1]
VALUE = "value_of_the_message"

# what is typed on an object, by the class that has it
METHODS = {
    "forward_backward": "roundpipe_runtime:RoundPipe.forward_backward", "step": "roundpipe_runtime:RoundPipe.step",
    "generate": "yobx_flatten:OnnxGenerator.generate", "stream": "yobx_flatten:OnnxGenerator.stream",
    "optim_parameters": "roundpipe_runtime:RoundPipe.optim_parameters",
    "check_valid": "roundpipe_runtime:ModelExecutePlan.check_valid", "auto": "roundpipe_runtime:ModelExecutePlan.auto",
    "load": "yobx_flatten:RecordedCalls.load",
}  # fmt: skip
# what is imported from elsewhere, also from a module of ours that the guide names
OTHERS = {
    "init_device_mesh": "torch.distributed.device_mesh", "cross_entropy": "torch.nn.functional",
    "RandomSampler": "torch.utils.data", "DataCollatorWithFlattening": "transformers",
    "TrainingArguments": "transformers", "GetAttrKey": "torch.utils._pytree",
    "describe_hardware": "roundpipe_runtime.estimate.hardware", "Training": "roundpipe_runtime.fine_tune",
    "prove_program": "yobx_flatten.export", "Quantization": "yobx_flatten.export",
    "SmoothedLoss": "roundpipe_runtime.huggingface", "RoundPipeTrainer": "roundpipe_runtime",
    "ReplicaBatchSampler": "roundpipe_runtime.distributed.replicas.sampler",
    "LongRows": "roundpipe_runtime.huggingface", "cut": "roundpipe_runtime.huggingface",
    "DynamoExporter": "transformers.exporters",
}  # fmt: skip
COMMANDS = {"yobx-flatten": flatten, "roundpipe": roundpipe}
# programs of others, and options alone
SHELL = ("pip", "apt", "export", "mkdir", "torchrun", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


class Advice(NamedTuple):
    place: str
    lines: str


def advice() -> Iterator[Advice]:
    for package in ("yobx_flatten", "roundpipe_runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                text = "" if id(node) in docs | parts else _text(node)
                lines = [line[4:] for line in text.split("\n")[1:] if line.startswith("    ")]
                lines = [re.sub(rf"{VALUE}(?=[a-z])|^(agreed|found) +{VALUE}$", "", line) for line in lines]
                if "".join(lines).strip(f" {VALUE}") and path.name != "describe.py":  # a table of types
                    yield Advice(f"{path.relative_to(ROOT)}:{node.lineno}", "\n".join(lines))


def _text(node: Any) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or VALUE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_shell(line: str) -> bool:
    return line.split()[0] in (*COMMANDS, *SHELL) or line.startswith("--")


def parsed(lines: str) -> ast.Module | None:
    whole = re.sub(r":$", ": ...", lines, flags=re.MULTILINE)
    for text in (lines, re.sub(r"\s+\([^()]*\)$", "", lines), whole, f"f({lines})", f"f({lines}\n)"):
        try:
            return ast.parse(text)
        except SyntaxError:
            continue
    return None


def of_name(name: str) -> Any:
    for module in (yobx_flatten, roundpipe_runtime):
        if name in module.__all__:
            return getattr(module, name)
    return getattr(importlib.import_module(OTHERS[name]), name) if name in OTHERS else None


def called(node: ast.Call) -> Any:
    if isinstance(node.func, ast.Name):
        return of_name(node.func.id) or _method(node.func.id)
    return _method(node.func.attr) if isinstance(node.func, ast.Attribute) else None


def _method(name: str) -> Any:
    module, _, path = METHODS.get(name, "::").partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module)) if module else None


ADVICE = list(advice())
assert len(ADVICE) > 200  # the lines of messages are found


@pytest.mark.parametrize("one", ADVICE, ids=[one.place for one in ADVICE])
def test_a_line_can_be_typed(one):
    shell = [line for line in one.lines.splitlines() if line.strip() and is_shell(line.strip())]
    for line in shell:
        check_command(shlex.split(line.replace("...", "")))
    rest = "\n".join(line for line in one.lines.splitlines() if line.strip() and not is_shell(line.strip()))
    tree = parsed(rest)
    assert tree is not None, rest
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (found := called(node)) is None:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id in USERS, f"{node.func.id} is not public"
            continue
        signature = inspect.signature(found)
        names = {word.arg for word in node.keywords if word.arg is not None}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        assert takes_all or names <= signature.parameters.keys(), f"{one.lines}: {names} of {signature}"
        most = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in signature.parameters.values())
        given = [arg for arg in node.args if not isinstance(arg, ast.Starred) and not _is_left_out(arg)]
        has_rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())
        assert has_rest or len(given) <= most, f"{one.lines}: {len(given)} arguments of {signature}"


def _is_left_out(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


# functions that the user has, or built into Python
USERS = ("model", "module", "pipeline", "loss_fn", "tokenizer", "write", "range", "list", "chat", "f", VALUE)


def check_command(words: list[str]) -> None:
    if words[0] not in COMMANDS:
        return
    command = typer.main.get_command(COMMANDS[words[0]]).commands[words[1]]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert [word for word in words[2:] if word.startswith("-") and word not in known] == []
