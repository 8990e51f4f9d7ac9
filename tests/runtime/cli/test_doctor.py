"""``roundpipe doctor`` as a user meets it."""

import dataclasses
import json

import pytest

from roundpipe_runtime.cli import doctor
from roundpipe_runtime.cli.app import run
from roundpipe_runtime.cli.doctor import Check
from roundpipe_runtime.estimate import Hardware, load_machine
from roundpipe_runtime.estimate.hardware import DiskRates


def test_every_line_says_how_it_is(capsys, monkeypatch):
    """ok or warning, what was looked at, what was found; 0 at the end."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert {line.split()[0] for line in lines if line and line[0] != " "} >= {"ok"}
    assert max(map(len, lines)) <= 80
    assert "training on 2 virtual devices: two steps match plain PyTorch" in out
    assert "\x1b" not in out


def test_a_failure_ends_with_1_and_says_what_to_do(capsys, monkeypatch):
    """Warnings alone do not."""
    findings = [Check("disk", "ok", "1 GB free"), Check("peft", "warning", "not installed", "pip install peft")]
    monkeypatch.setattr(doctor, "examine", lambda disk: findings)
    assert run(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 warning"
    monkeypatch.setattr(doctor, "examine", lambda disk: [*findings, Check("torch", "fail", "old", "pip install")])
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail     torch: old\n         -> pip install\n" in out
    assert out.splitlines()[-1] == "1 fail, 1 warning"


def test_json_has_the_same(capsys, monkeypatch):
    """For a script."""
    monkeypatch.setattr(doctor, "examine", lambda disk: [Check("torch", "fail", "old", "pip install")])
    assert run(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "findings": [{"name": "torch", "status": "fail", "found": "old", "remedy": "pip install"}],
    }


@pytest.mark.parametrize("columns", ["40", "80"])
def test_long_lines_are_wrapped(capsys, monkeypatch, columns):
    """In the width of the terminal."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(doctor, "examine", lambda disk: [Check("a", "warning", "long " * 30, "do " * 60)])
    assert run(["doctor"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= int(columns)


def test_rates_are_written_for_plans(tmp_path, capsys, monkeypatch):
    """What the machine has, its disk among it, and what a layer costs its host."""
    here = Hardware(("virtual:0",), "cpu", 1e9, 2e9, None, 10**9, 3e9, {"flops": "measured"})
    monkeypatch.setattr(doctor, "examine", lambda disk: [])
    monkeypatch.setattr(doctor, "describe_hardware", lambda: here)
    monkeypatch.setattr(doctor, "measure_disk", lambda folder: DiskRates(5e8, 4e8))
    assert run(["doctor", "--machine", str(tmp_path / "here.json")]) == 0
    found = load_machine(tmp_path / "here.json")
    assert 0 < found.call < 0.1
    assert dataclasses.replace(found, call=0.0) == dataclasses.replace(here, disk_read=5e8, disk_write=4e8)
    assert "here.json" in capsys.readouterr().out
