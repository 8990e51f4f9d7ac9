"""``roundpipe doctor`` as a user meets it, and what it finds."""

import dataclasses
import importlib.metadata
import json
import math
import re

import pytest
import torch

from roundpipe_runtime.cli import doctor
from roundpipe_runtime.cli.app import run
from roundpipe_runtime.cli.doctor import Check, examine, train_difference
from roundpipe_runtime.estimate import Hardware, load_machine
from roundpipe_runtime.estimate.hardware import DiskRates
from yobx_flatten.errors import NEWEST_TRIED

TRIED = NEWEST_TRIED["transformers"]


def test_every_line_says_how_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert {line.split()[0] for line in lines if line and line[0] != " "} >= {"ok"}
    assert max(map(len, lines)) <= 80
    assert "training on 2 virtual devices: two steps match plain PyTorch" in out
    assert "\x1b" not in out


def test_a_failure_ends_with_1_and_says_what_to_do(capsys, monkeypatch):
    """Warnings alone do not; JSON has the same; long lines are wrapped."""
    findings = [Check("disk", "ok", "1 GB free"), Check("peft", "warning", "not installed", "pip install peft")]
    monkeypatch.setattr(doctor, "examine", lambda disk: findings)
    assert run(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 warning"
    monkeypatch.setattr(doctor, "examine", lambda disk: [*findings, Check("torch", "fail", "old", "pip install")])
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail     torch: old\n         -> pip install\n" in out
    assert out.splitlines()[-1] == "1 fail, 1 warning"
    assert run(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["findings"][0]) == (False, dataclasses.asdict(findings[0]))
    assert shown["findings"][2] == {"name": "torch", "status": "fail", "found": "old", "remedy": "pip install"}
    monkeypatch.setattr(doctor, "examine", lambda disk: [Check("a", "warning", "long " * 30, "do " * 60)])
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["doctor"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_rates_are_written_for_plans(tmp_path, capsys, monkeypatch):
    here = Hardware(("virtual:0",), "cpu", 1e9, 2e9, None, 10**9, 3e9, {"flops": "measured"})
    monkeypatch.setattr(doctor, "examine", lambda disk: [])
    monkeypatch.setattr(doctor, "describe_hardware", lambda: here)
    monkeypatch.setattr(doctor, "measure_disk", lambda folder: DiskRates(5e8, 4e8))
    assert run(["doctor", "--machine", str(tmp_path / "here.json")]) == 0
    found = load_machine(tmp_path / "here.json")
    assert 0 < found.call < 0.1
    assert dataclasses.replace(found, call=0.0) == dataclasses.replace(here, disk_read=5e8, disk_write=4e8)
    assert "here.json" in capsys.readouterr().out


# -- what it finds -----------------------------------------------------------------------------------------------------


def test_a_pipeline_that_does_not_train_like_plain_torch_fails(monkeypatch):
    assert train_difference("virtual:2") < 1e-6
    for difference in (0.5, math.nan):
        monkeypatch.setattr(doctor, "train_difference", lambda devices, found=difference: found)
        finding = doctor._training()[0]
        assert (finding.name, finding.status) == ("training on 2 virtual devices", "fail")
        assert "differs from plain PyTorch" in finding.found


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    """The others are done all the same, and nothing else fails here."""

    def broken(devices):
        raise RuntimeError("no kernel image is available\nmore lines")

    monkeypatch.setattr(doctor, "train_difference", broken)
    findings = examine()
    assert findings[-1].name == "training"
    assert (findings[-1].status, findings[-1].found) == ("fail", "RuntimeError: no kernel image is available")
    assert len(findings) > 8
    assert [finding for finding in findings[:-1] if finding.status == "fail"] == []


@pytest.mark.parametrize(
    ("library", "version", "status", "words", "remedy"),
    [
        ("transformers", "4.40.0", "fail", "4.40.0, and ", "pip install 'transformers"),
        ("transformers", "6.0.0", "fail", "6.0.0, and ", "pip install 'transformers"),
        ("transformers", "4.56.0", "ok", f"(newest tried: {TRIED})", ""),
        ("transformers", "5.23.1.dev0", "ok", f"(newest tried: {TRIED})", ""),
        ("transformers", TRIED, "ok", f"(newest tried: {TRIED})", ""),
        ("transformers", "5.99.0", "warning", f"newer than the newest tried ({TRIED})", f"'transformers<={TRIED}'"),
        ("peft", None, "warning", "LoRA", "pip install 'peft"),
    ],
)
def test_versions_are_compared_with_those_declared_and_tried(monkeypatch, library, version, status, words, remedy):
    """transformers>=4.56,<6; the line that installs another version; PEFT is not needed by everybody."""
    real = importlib.metadata.version

    def installed(name):
        if name == library and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == library else real(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    (finding,) = (one for one in doctor._versions() if one.name == library)
    assert finding.status == status
    assert words in finding.found
    assert (remedy in finding.remedy) if remedy else (finding.remedy == "")
    assert status != "fail" or ">=4.56" in finding.remedy or "<6" in finding.remedy


@pytest.mark.parametrize(
    ("devices", "cores", "threads", "status", "advice"),
    [
        ([], 8, 4, "ok", ""),
        ([], 8, 8, "warning", "OMP_NUM_THREADS=4"),
        ([], 2, 4, "warning", "OMP_NUM_THREADS=2"),
        ([], 1, 1, "ok", ""),
        ([torch.device("cuda", 0)], 16, 1, "warning", "unset OMP_NUM_THREADS"),
    ],
)
def test_threads_that_wait_for_each_other_are_a_warning(monkeypatch, devices, cores, threads, status, advice):
    """Two virtual devices compute at the same time, each with all threads; beside accelerators, AdamW wants cores."""
    monkeypatch.setattr(doctor, "accelerators", lambda: devices)
    monkeypatch.setattr(doctor, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    (finding,) = doctor._threads()
    assert finding.status == status
    assert advice in finding.remedy


@pytest.mark.parametrize(("free", "status"), [(1e11, "ok"), (1e9, "warning"), (1e6, "fail")])
def test_a_disk_that_is_full_fails(monkeypatch, free, status):
    """A checkpoint would not fit; little memory is a warning, with a way to find out how much is needed."""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    (finding,) = doctor._disk()
    assert finding.status == status
    assert bool(finding.remedy) is (status != "ok")
    monkeypatch.setattr(doctor, "host_memory_available", lambda: free)
    (finding,) = doctor._memory()
    assert (finding.status, "roundpipe plan" in finding.remedy) == (("ok", False) if free > 4e9 else ("warning", True))


def test_the_speed_of_a_disk_is_a_finding(folder_on_disk):
    """Its rates are stated; a missing folder is a warning, as only some trainings need one."""
    (finding,) = doctor._speed_of_disk(folder_on_disk)
    assert (finding.status, finding.name) == ("ok", "speed of the disk")
    assert re.fullmatch(r"it reads [\d.]+ [kMG]B/s and writes [\d.]+ [kMG]B/s", finding.found)
    assert list(folder_on_disk.iterdir()) == []
    (finding,) = doctor._speed_of_disk(folder_on_disk / "nowhere")
    assert (finding.status, "--disk DIR" in finding.remedy) == ("warning", True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_a_driver_without_a_device_fails(monkeypatch):
    """The usual cause is a torch for the CPU."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = doctor._accelerators()
    assert finding.status == "fail"
    assert "torch with CUDA" in finding.remedy
