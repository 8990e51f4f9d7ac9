"""Phrases that our texts avoid, and files that they name; `codespell` in `make lint` finds misspelt words."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The glossary, which explains the picture once.
LEFT_OUT = {"docs/guide/words.md"}

# What to write instead is the second part.
PHRASES = {
    r"\b(?:come|came|take|took|taken|taking)s? (?:\w+ ){0,4}apart\b": "flatten",
    r"\b(?:some|every|any|no)body\b": "name who it is: another library, the caller",
    r"\bwho(?:so)?ever\b": "name who it is: another library, the caller",
    r"(?<!there)(?<!where)(?<!here) is no (?!longer\b|more\b|less\b)[a-z]": "is not a ...",
    r"\bto the same bits?\b|\bto the bit\b": "bitwise identical",
    r",? too[.,;:)]|, too$": "also",
    r"\bas well(?! as\b)": "also",
    r"\bbeside\b": "next to, with, in addition to",
    r"\bbehind (?:an?|the|this|that|these|its?|their|our|them|each|one|every|all)\b": "after",
    r"\bsays\b": "states, reports",
    r"(?<!\.)\b(?:tells?|told)\b": "states, returns; notify, distinguish",
    r"\bin force\b": "registered, applied, used",
    r"\bplain models?\b": "reference model",
    r"\b(?:the|of|and|with|by) masters\b": "master weights",
    r"^[^\S\n]+\**(?-i:[a-z_]+):[^\S\n](?:of|by|in)[^\S\n]": "begin with a noun: `name: the name of ...`",
    r"\b(?:she|her|his|him)\b": "the caller, the user",
}


PLAIN = tomllib.loads((ROOT / "tests" / "plain_english.toml").read_text(encoding="utf-8"))
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files are listed by git")


def listed(*folders: str) -> list[str]:
    return subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def texts() -> list[Path]:
    folders = ["yobx_flatten", "roundpipe_runtime", "docs", "examples", "matrix", "benchmarks", "notebooks"]
    names = listed(*folders, "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    return [ROOT / name for name in names if name.endswith((".py", ".md", ".ipynb")) and name not in LEFT_OUT]


def everything() -> list[Path]:
    read = (".py", ".md", ".ipynb", ".rst", ".yml", ".toml", ".cff", ".html", ".js", ".mjs", "Makefile")
    names = [name for name in listed() if name.endswith(read) or name.startswith(".ci/")]
    return [ROOT / name for name in names if not name.startswith(tuple(PLAIN["left_out"]))]


def readable(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


@needs_git
@pytest.mark.parametrize(("phrase", "instead"), PHRASES.items())
def test_a_phrase_is_avoided(phrase, instead):
    found = places(phrase, texts())
    assert not found, f"write {instead!r}:\n" + "\n".join(found)


def places(phrase: str, paths: list[Path]) -> list[str]:
    spaced = re.compile(phrase.replace(" ", r"\s+(?:# )?"), re.IGNORECASE | re.MULTILINE)
    return [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())!r}"
        for path in paths
        for text in [readable(path)]
        for match in spaced.finditer(text)
    ]


@needs_git
@pytest.mark.parametrize(("phrase", "instead"), PLAIN["instead"].items())
def test_an_idiom_of_our_own_is_avoided(phrase, instead):
    found = places(rf"\b(?:{phrase})", everything())
    assert not found, f"write {instead!r}:\n" + "\n".join(found)


IDIOMS = [
    "Exports models\n    # of transformers.", "Then the training goes on with the next step.", "An unproven file.",
    "It runs in a thread of its own.", "The checkpoint is of another\n    model.",
]  # fmt: skip
OTHERS = [
    "The light goes on the table.", "The gradients of its own rows.", "It loads another model.",
    "    >>> proven = check(program)",
]  # fmt: skip


@pytest.mark.parametrize("text", [*IDIOMS, *OTHERS])
def test_an_idiom_is_found_where_it_is_written(text, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    found = [place for one in PLAIN["instead"] for place in places(rf"\b(?:{one})", [tmp_path / "page.md"])]
    assert bool(found) == (text in IDIOMS), found


def test_the_pages_name_files_that_are_there():
    named = re.compile(r"`((?:tests|benchmarks|examples|matrix|yobx_flatten|roundpipe_runtime)/[\w./-]+)`")
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "tables" not in path.parts]
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not any((ROOT / (name + ending)).exists() for ending in ("", ".py"))
    ]
    assert gone == []
