"""What the README shows runs when pasted, and prints what it says; the scripts of `examples/` learn as PyTorch does."""

import json
import os
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import yobx_flatten
from tests import fresh_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_its_python_runs_when_a_block_is_pasted_alone(number, tmp_path):
    """The one that exports writes its folder and prints the report of the README, but for times and differences."""
    (tmp_path / "pasted.py").write_text(blocks("python")[number], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = fresh_process.run("-m", "pasted", cwd=tmp_path, env=environment, imported=fresh_process.TRAINER)
    exports = "export_folder" in blocks("python")[number]
    assert exports == (tmp_path / "mistral-onnx" / "model.onnx").exists()
    if exports:
        lines = [
            [re.split(r"\d\.\de[-+]\d\d|\d+\.\d s", line)[0].rstrip() for line in report.splitlines()[1:]]
            for report in (done.stdout, *blocks("text"))
        ]
        assert lines[0] == lines[1]


def test_its_links_lead_to_files_and_the_source_archive_holds_what_make_calls():
    linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(linked) > 20
    assert [path for path in linked if not (ROOT / path).is_file()] == []
    assert len(README.splitlines()) <= 120  # it is read in a minute
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = pyproject["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    called = set(re.findall(r"(?<![\w/])(\.ci)/\w+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert called == {".ci"}
    assert {f"/{name}" for name in called} <= set(included)
    assert [name for name in included if not (ROOT / name.lstrip("/")).exists()] == []


def test_its_numbers_are_those_of_the_last_measurements():
    numbers = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+)", README.partition("## Install")[0])]
    matrix = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")
    glance = re.findall(r"^\| [A-Z][^|]+models \|(.*)\|$", matrix, re.MULTILINE)
    kinds = [[int(cell) for cell in row.split("|")] for row in glance]
    row = r"^\| other batch and length \| (\d+) of (\d+) \|(?:.*\|)? (\d+) of (\d+) \|$"
    peer = re.search(row, matrix, re.MULTILINE)
    ours, theirs = [tuple(map(int, peer.groups()[at : at + 2])) for at in (0, 2)]
    assert numbers == [(sum(kind[-1] for kind in kinds), sum(kind[0] for kind in kinds)), ours, theirs]
    measured = json.loads((ROOT / "docs" / "data" / "bench-export.json").read_text(encoding="utf-8"))
    calls = {call["work"]: call["milliseconds"] for call in measured["models"]["llama"]["calls"]}
    spent = [calls["decode, 4096 cached"][side] for side in ("yobx_flatten", "optimum", "eager")]
    assert [int(ms) for ms in re.findall(r"(\d+) ms", README)] == [round(ms) for ms in spent]


def test_the_changelog_has_a_section_for_the_version_with_highlights():
    import roundpipe_runtime

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest = re.findall(r"^## \[(.*)\]", text, re.MULTILINE)[:2]
    assert (unreleased, newest) == ("Unreleased", yobx_flatten.__version__)
    highlights = text.partition("Highlights:")[2].partition("###")[0]
    named = set(re.findall(r"`(\w+)(?:\(\w+\))?`", highlights))
    assert len(named) > 7
    assert [name for name in named if not hasattr(yobx_flatten, name) and not hasattr(roundpipe_runtime, name)] == []


EXAMPLES = ROOT / "examples"


def short_form(name, steps):
    return runpy.run_path(str(EXAMPLES / name))["main"](steps=steps)


def test_byte_text_is_learnt_alike(capsys):
    plain, piped = short_form("byte_text.py", steps=6)
    assert piped == pytest.approx(plain, rel=1e-5)
    assert len(piped) == 6
    assert piped[-1] < piped[0] - 0.5
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[:2] == ["0", f"{plain[0]:.6f}"]
    assert "Largest difference of 6 steps: " in shown


def test_digits_are_learnt_alike(capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    plain, piped = short_form("digits_resnet.py", steps=6)
    assert piped == pytest.approx(plain, rel=1e-5)
    assert piped[-1] < piped[0] - 0.3
    statistics = next(line for line in capsys.readouterr().out.splitlines() if "running statistics" in line)
    assert float(statistics.split()[-1].rstrip(".")) < 1e-5


def test_a_chat_is_trained_and_shipped_in_4_bits(tmp_path, capsys):
    for name in ("typer", "transformers", "accelerate", "onnxruntime"):
        pytest.importorskip(name, reason="the example runs both commands")
    out = runpy.run_path(str(EXAMPLES / "chat_in_4_bits.py"))["main"](folder=tmp_path)
    shown = capsys.readouterr().out
    assert "million in 4 bits" in shown
    assert shown.rstrip().endswith("holds a layer")
    assert (out / "onnx" / "model_q4.onnx").is_file()


def test_every_example_has_a_test():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []
