"""Every block of code on the site is run by a test, or compared with what it names: targets, options, arguments."""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main
from torch.distributed.run import get_args_parser

import roundpipe_runtime
import yobx_flatten
from roundpipe_runtime.cli.app import app as roundpipe
from roundpipe_runtime.estimate.hardware import load_machine
from tests.test_docs_guide import FENCE
from yobx_flatten.cli.app import app as flatten

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted(
    path for path in (ROOT / "docs").rglob("*.md") if not {"auto_examples", "rows", "tables"} & {*path.parts}
)
RUN = {ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md")}  # by test_docs_guide and test_readme
COMMANDS = {"yobx-flatten": typer.main.get_command(flatten), "roundpipe": typer.main.get_command(roundpipe)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"].keys()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


class Block(NamedTuple):
    place: str
    kind: str
    text: str


def blocks(*kinds: str) -> list[Block]:
    return [
        Block(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", found[1], found[2])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for found in FENCE.finditer(text)
        if found[1] in kinds
    ]


def test_the_kinds_of_blocks_are_those_that_tests_read():
    """A new language needs a test; directives of the site hold pages, pictures and cards."""
    known = {"python", "console", "bash", "javascript", "text", "json", "yaml"}
    known |= {"{code-block}", "{toctree}", "{include}", "{literalinclude}", "{image}", "{eval-rst}"}
    found = {found[1] for page in PAGES for found in FENCE.finditer(page.read_text(encoding="utf-8"))}
    assert found <= known
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text)), page


@pytest.mark.parametrize("kind", ["python", "console"])
def test_programs_stand_where_a_test_runs_them(kind):
    """In the guide and the README; a program that is only shown is a `{code-block}`."""
    assert {ROOT / block.place.rpartition(":")[0] for block in blocks(kind)} - RUN == set()


def public(name: str) -> object:
    for package in (yobx_flatten, roundpipe_runtime):
        if name in package.__all__:
            return getattr(package, name)
    methods = {"to_openvino", "to_executorch", "to_onnx", "to_aotinductor", "save"}
    return getattr(yobx_flatten.export.ExportedModel, name) if name in methods else None


def calls(source: str) -> Iterator[tuple[str, object, ast.Call]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if (found := public(name)) is not None:
                yield name, found, node


def shown_blocks(language: str) -> list[Block]:
    fence = re.compile(rf"^```\{{code-block\}} {language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", language, found[1])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for found in fence.finditer(text)
    ]


def test_calls_that_are_shown_fit_the_signatures():
    shown = shown_blocks("python")
    assert len(shown) > 5
    assert len(blocks("{code-block}")) == len(shown) + len(shown_blocks("shell"))
    wrong, checked = [], 0
    for block in shown:
        source = block.text
        for name, function, call in calls(source):
            words = {word.arg: None for word in call.keywords if word.arg}
            try:
                inspect.signature(function).bind_partial(*[None] * len(call.args), **words)
            except TypeError as error:
                wrong.append(f"{block.place} {name}: {error}")
            checked += 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                module = __import__(node.module or "", fromlist=["x"])
                wrong += [f"{block.place} {name.name}" for name in node.names if not hasattr(module, name.name)]
    assert wrong == []
    assert checked > 5


def test_profiles_of_machines_are_read(tmp_path):
    shown = blocks("json")
    assert len(shown) == 1
    for block in shown:
        (tmp_path / "machine.json").write_text(block.text, encoding="utf-8")
        typed = json.loads(block.text)
        read = json.loads(json.dumps(dataclasses.asdict(load_machine(tmp_path / "machine.json"))))
        assert {name: read[name] for name in typed} == typed


def option_names(command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def unknown_options(words: list[str]) -> list[str]:
    command, named = COMMANDS[words[0]], [word for word in words[1:] if not word.startswith("-")]
    known = {"--help", "--version", "--debug", "--install-completion", *option_names(command)}
    if named:
        if named[0] not in command.commands:
            return [named[0]]
        known |= option_names(command.commands[named[0]])
    return [word for word in words[1:] if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]


def pip_mistakes(words: list[str]) -> list[str]:
    asked = [extra for word in words for extra in re.findall(r"\[([\w,]+)\]", word)]
    wrong = [extra for some in asked for extra in some.split(",") if extra not in EXTRAS]
    groups = [after for word, after in itertools.pairwise(words) if word == "--group"]
    wheels = [re.match(r"dist/yobx_flatten-([\d.]+)-py3", word) for word in words]
    wrong += [group for group in groups if group not in PROJECT["dependency-groups"]]
    return wrong + [wheel[0] for wheel in wheels if wheel and wheel[1] != yobx_flatten.__version__]


def mistakes(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    words = words[next(place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])  # it exits where it refuses them
        return []
    if words[:1] == ["make"]:
        return [word for word in words[1:] if "=" not in word and word not in TARGETS]
    if words[0] in COMMANDS:
        return unknown_options(words)
    if "pip" in words:
        return pip_mistakes(words)
    known = (["git", "clone"], ["python", "train.py"], ["python3.11", "-m"])
    return [] if words[:2] in known else [f"nothing checks {line}"]


def test_lines_for_a_shell_name_what_there_is():
    typed = []
    for block in [*blocks("bash", "console"), *shown_blocks("shell")]:
        lines = re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)
        if block.kind != "console":
            lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
        typed += [(block.place, line) for line in lines]
    assert len(typed) > 20
    assert [(place, line, wrong) for place, line in typed for wrong in mistakes(line)] == []


@pytest.mark.parametrize(
    ("command", "least"), [(r"(?:yobx-flatten|roundpipe|make) [^`]+", 60), (r"pip install [^`]+", 8)]
)
def test_commands_within_the_text_name_what_there_is(command, least):
    pages = [(page.name, " ".join(page.read_text(encoding="utf-8").split())) for page in PAGES]
    found = [
        (name, line)
        for name, text in pages
        if name != "changelog.md" or command.startswith("pip")
        for line in re.findall(f"`({command})`", text)
    ]
    assert len(found) > least
    assert [(name, line, wrong) for name, line in found for wrong in mistakes(line)] == []


def test_a_mistake_is_found():
    assert mistakes("yobx-flatten export llama -o x --quantise int4") == ["--quantise"]
    assert mistakes("yobx-flatten exprot llama") == ["exprot"]
    assert mistakes("roundpipe train llama --text x -o y --lora 8") == []
    assert mistakes("make tests") == ["tests"]
    assert mistakes("A=1 torchrun --nproc-per-node=2 x.py") == []
    assert mistakes("pip install './yobx-flatten[onnx,gpu]'") == ["gpu"]
    assert mistakes("pip install x --group nothing") == ["nothing"]
    assert mistakes("rm -r x") == ["nothing checks rm -r x"]


def is_code(line: str) -> bool:
    if re.match(r"\s*(pip|git|make|python|yobx-flatten|roundpipe|hf|cd|from|import|def|class) \S", line):
        return "──" not in line  # a drawing
    try:
        nodes = list(ast.walk(ast.parse(line.strip())))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Assign | ast.Import | ast.ImportFrom) for node in nodes)


def test_text_that_is_no_output_holds_no_code():
    """What a program prints is compared with it; every other block of text is a drawing, a formula or a message."""
    wrong = []
    for page in PAGES:
        before = ""
        for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if kind == "text" and before != "python":
                wrong += [f"{page.name}: {line}" for line in text.splitlines() if is_code(line)]
            before = kind
    assert wrong == []
