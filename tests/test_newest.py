"""`make newest`: each step has a result with a reason, and none can pass without having done something."""

import json
import re
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from matrix import newest, newest_programs, newest_unknown
from matrix.newest import Outcome, Step, run_step, steps
from matrix.results import recorded_file
from yobx_flatten import flattening_list

ROOT = Path(__file__).parent.parent


def program(source, **options):
    return Step("a step", (sys.executable, "-S", "-c", source), **options)


@pytest.mark.parametrize(
    ("source", "result", "reason"),
    [
        ("print('ok it')", "ok", ""),
        ("pass", "failed", "it ended with 0, and has done nothing"),
        ("print('ok it'); raise SystemExit(3)", "failed", "ok it"),
        ("print('FAIL one: x'); print('ok two'); raise SystemExit(1)", "failed", "FAIL one: x"),
        ("raise SystemExit(3)", "failed", "exit status 3"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("import time; time.sleep(60)", "failed", "not done after 1 seconds"),
    ],
)
def test_a_step_is_ok_if_it_ended_with_0_and_shows_what_it_did(source, result, reason, tmp_path):
    found = run_step(program(source, shows=r"^ok "), tmp_path / "log", timeout=1.0 if "sleep" in source else 60.0)
    assert (found.result, found.reason, found.ok) == (result, reason, result == "ok")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_a_step_leaves_no_process_behind(tmp_path):
    source = "import subprocess, sys; print('ok', subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1).pid)"
    assert run_step(program(source), tmp_path / "log", timeout=60.0).ok
    pid = int((tmp_path / "log").read_text(encoding="utf-8").split()[1])
    deadline = time.monotonic() + 30.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # a signal takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_step_writes_where_it_runs_is_gone_afterwards_and_a_reason_names_no_place_of_this_machine(tmp_path):
    source = "import os, matrix; open('made', 'w').close(); print('ok', os.getcwd(), matrix.__file__)"
    assert run_step(program(source), tmp_path / "log", timeout=60.0).ok
    place, imported = (tmp_path / "log").read_text(encoding="utf-8").split()[1:]
    assert not Path(place).exists()
    assert Path(imported).parents[1] == ROOT
    source = f"import os; print('FAIL {ROOT}/x', os.environ['TMPDIR'], {sys.prefix!r}); raise SystemExit(1)"
    assert run_step(program(source), tmp_path / "log", timeout=60.0).reason == "FAIL ./x TMP ENV"
    for optional, result in ((True, "not there"), (False, "failed")):
        step = program("pass", missing="no such folder", optional=optional)
        assert run_step(step, tmp_path / "log", timeout=60.0) == Outcome("a step", result, "no such folder", 0.0)


def test_the_steps_are_those_that_people_run(tmp_path):
    planned = {step.name: step for step in steps(tmp_path)}
    assert list(planned) == [
        *("the programs of the README", "yobx-flatten demo", "roundpipe demo", "signatures of replaced functions"),
        *("generation next to eager", "further cases", "a sample of the matrix", "a sample of the cut matrix"),
        "what the tables do not know",
    ]
    cases = planned["further cases"]
    assert (cases.optional, cases.missing) == (True, "the folder of CASES is not there")
    (tmp_path / "run.py").write_text("", encoding="utf-8")
    assert next(step for step in steps(tmp_path) if step.name == "further cases").missing == ""
    assert [name for name, step in planned.items() if step.optional] == ["further cases"]
    for stem, step in (("matrix", "a sample of the matrix"), ("cut", "a sample of the cut matrix")):
        command = planned[step].command
        assert command[command.index("--against") + 1] == str(recorded_file(stem))
    for name in ("matrix-5.9.0", "matrix-5.23.0", "matrix-5.30.0-executorch", "matrix-deferred-5.40.0"):
        (tmp_path / f"{name}.json").write_text("{}", encoding="utf-8")
    assert recorded_file("matrix", tmp_path).name == "matrix-5.23.0.json"


def test_all_steps_are_recorded_with_versions_and_a_failed_one_stops_no_other(monkeypatch, tmp_path, capsys):
    unknown = program('print(\'{"model types": ["x"]}\')', shows=r"^\{")
    planned = [program("print(1)"), Step(newest.UNKNOWN, unknown.command, unknown.shows)]
    monkeypatch.setattr(newest, "steps", lambda cases: planned)
    monkeypatch.setattr(newest, "LOGS", ROOT / "build" / "newest-test")
    path = tmp_path / "newest.json"
    monkeypatch.setattr(newest, "OUTPUT", path)
    assert newest.main(["--only", "step"]) == 0
    assert not path.exists()  # some of the steps record nothing
    with pytest.raises(SystemExit):
        newest.main(["--only", "nonsense"])
    assert "no step has such a name; they are a step, what the tables do not know" in capsys.readouterr().err
    assert newest.main([]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["ok"] is True
    assert {"python", "torch", "transformers"} <= set(found["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert [(step["name"], step["result"]) for step in found["steps"]] == [("a step", "ok"), (newest.UNKNOWN, "ok")]
    assert found["unknown"] == {"model types": ["x"]}
    said = capsys.readouterr().out
    assert "[1/2] a step ..." in said
    assert "not in the tables, model types: x" in said
    planned[0] = program("1 / 0")
    assert newest.main([]) == 1
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["ok"] is False
    assert [step["result"] for step in found["steps"]] == ["failed", "ok"]
    assert capsys.readouterr().out.splitlines()[-1] == "failed: a step"


def test_programs_of_a_page_share_their_names_and_one_that_fails_stops_no_other(capsys, monkeypatch, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = list(newest_programs.blocks(text))
    assert len(found) == text.count("```python\n") > 1
    assert found[0][0] == "Export a model and generate text"
    assert found[0][1].startswith("import torch\n")
    monkeypatch.chdir(tmp_path)
    sources = {"One": "x = 1", "Two": "x / 0", "Three": "open('f', 'w').close(); assert x == 1"}
    page = "".join(f"## {name}\n\n```python\n{source}\n```\n\n" for name, source in sources.items())
    assert newest_programs.readme(page) == 1
    lines = ["ok One", "FAIL Two: ZeroDivisionError: division by zero", "ok Three"]
    assert [line for line in capsys.readouterr().out.splitlines() if line] == lines
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_tokens_that_differ_from_those_of_the_model_fail(monkeypatch, capsys):

    def generator(wrong):
        return types.SimpleNamespace(generate=lambda prompt, **options: prompt + wrong)

    made = iter([0, 1, 0])
    monkeypatch.setattr("yobx_flatten.model_folder.source.configuration.small_model", lambda name: generator(0))
    monkeypatch.setattr("yobx_flatten.export_folder", lambda model, folder, **options: None)
    monkeypatch.setattr("yobx_flatten.open_generator", lambda folder: generator(next(made)))
    assert newest_programs.generation(("a", "b", "c")) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in said] == ["ok a", "FAIL b", "ok c"]
    assert "ArithmeticError: found [[" in said[1]


def test_classes_and_model_types_that_no_table_knows_are_listed(monkeypatch, tmp_path):
    known = {row.cls for row in flattening_list()}
    assert {"transformers.cache_utils.DynamicLayer", "transformers.cache_utils.StaticCache"} <= known
    before = newest_unknown.unknown_classes(known)
    assert not [name for names in before.values() for name in names if name.startswith("transformers.")]
    found = newest_unknown.unknown_classes(
        known - {"transformers.cache_utils.DynamicLayer", "transformers.cache_utils.StaticCache"}
    )
    assert "transformers.cache_utils.DynamicLayer" in found["cache layers"]
    assert "transformers.cache_utils.StaticCache" in found["caches"]
    held = {"versions": {}, "way": "", "types": {"gpt2": {"columns": {}}}}
    (tmp_path / "matrix.json").write_text(json.dumps(held), encoding="utf-8")
    monkeypatch.setattr(newest_unknown, "recorded_file", lambda stem: tmp_path / "matrix.json")
    monkeypatch.setattr(newest_unknown, "import_models", list)
    found = newest_unknown.unknown()["model types"]
    assert "llama" in found
    assert "gpt2" not in found


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="an archive of the sources has no workflows")
def test_the_target_installs_without_constraints_and_a_workflow_runs_it_each_night():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^newest:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    assert "constraint" not in recipe
    assert "PIP_INSTALL" not in recipe
    assert "--upgrade --upgrade-strategy eager" in recipe
    workflow = (ROOT / ".github" / "workflows" / "newest.yml").read_text(encoding="utf-8")
    assert re.search(r'cron: "\d+ \d+ \* \* \*"', workflow)
    assert "- run: make newest" in workflow
