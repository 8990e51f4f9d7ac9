"""What the doctor finds, and what it says about it."""

import importlib.metadata
import math
import re

import pytest
import torch

from roundpipe_runtime.cli import doctor
from roundpipe_runtime.cli.doctor import examine, train_difference
from yobx_flatten.errors.tried_versions import NEWEST_TRIED


def found(name):
    return next(finding for finding in examine() if finding.name == name)


def test_this_installation_is_well():
    """Nothing fails here, and a training on virtual devices is among what was done."""
    findings = examine()
    assert [finding for finding in findings if finding.status == "fail"] == []
    assert "training on 2 virtual devices" in [finding.name for finding in findings]


def test_a_pipeline_trains_like_plain_torch():
    """Two steps of AdamW: losses and parameters but for rounding."""
    assert train_difference("virtual:2") < 1e-6


def test_a_pipeline_that_computes_something_else_fails(monkeypatch):
    """NaN included."""
    for difference in (0.5, math.nan):
        monkeypatch.setattr(doctor, "train_difference", lambda devices, found=difference: found)
        finding = found("training on 2 virtual devices")
        assert finding.status == "fail"
        assert "differs from plain PyTorch" in finding.found


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    """The others are done all the same."""

    def broken(devices):
        raise RuntimeError("no kernel image is available\nmore lines")

    monkeypatch.setattr(doctor, "train_difference", broken)
    findings = examine()
    assert findings[-1].name == "training"
    assert (findings[-1].status, findings[-1].found) == ("fail", "RuntimeError: no kernel image is available")
    assert len(findings) > 8


@pytest.mark.parametrize(
    ("version", "status"), [("4.40.0", "fail"), ("4.56.0", "ok"), ("5.23.1.dev0", "ok"), ("6.0.0", "fail")]
)
def test_versions_are_compared_with_what_is_declared(monkeypatch, version, status):
    """transformers>=4.56,<6."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "transformers" else real(name))
    finding = found("transformers")
    assert finding.status == status
    assert ("pip install 'transformers>=4.56" in finding.remedy or "<6" in finding.remedy) is (status == "fail")


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (NEWEST_TRIED["transformers"], "ok", "(newest tried: "),
        ("4.57.0", "ok", "(newest tried: "),
        ("5.99.0", "warning", "5.99.0, newer than the newest tried ("),
    ],
)
def test_a_version_that_was_not_tried_is_a_warning(monkeypatch, version, status, words):
    """It names the newest one that was, and the line that installs it."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "transformers" else real(name))
    finding = found("transformers")
    assert finding.status == status
    assert f"{words}{NEWEST_TRIED['transformers']})" in finding.found
    assert (f"pip install 'transformers<={NEWEST_TRIED['transformers']}'" in finding.remedy) is (status != "ok")


def test_a_library_that_is_missing_is_a_warning_that_says_what_it_is_for(monkeypatch):
    """PEFT is not needed by everybody."""
    real = importlib.metadata.version

    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = found("peft")
    assert finding.status == "warning"
    assert "LoRA" in finding.found
    assert finding.remedy.startswith("pip install 'peft")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here the devices are no virtual ones")
@pytest.mark.parametrize(
    ("cores", "threads", "status", "advice"),
    [
        (8, 4, "ok", ""),
        (8, 8, "warning", "OMP_NUM_THREADS=4"),
        (2, 4, "warning", "OMP_NUM_THREADS=2"),
        (1, 1, "ok", ""),
    ],
)
def test_threads_that_wait_for_each_other_are_a_warning(monkeypatch, cores, threads, status, advice):
    """Two virtual devices compute at the same time, each with all threads."""
    monkeypatch.setattr(doctor, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    (finding,) = doctor._threads()
    assert finding.status == status
    assert advice in finding.remedy


def test_beside_accelerators_the_host_wants_its_cores(monkeypatch):
    """AdamW runs there."""
    monkeypatch.setattr(doctor, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(doctor, "cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (finding,) = doctor._threads()
    assert (finding.status, "unset OMP_NUM_THREADS" in finding.remedy) == ("warning", True)


@pytest.mark.parametrize(("free", "status"), [(1e11, "ok"), (1e9, "warning"), (1e6, "fail")])
def test_a_disk_that_is_full_fails(monkeypatch, free, status):
    """A checkpoint would not fit."""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    (finding,) = doctor._disk()
    assert finding.status == status
    assert bool(finding.remedy) is (status != "ok")


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


def test_little_memory_is_a_warning(monkeypatch):
    """With a way to find out how much is needed."""
    monkeypatch.setattr(doctor, "host_memory_available", lambda: 10**9)
    (finding,) = doctor._memory()
    assert finding.status == "warning"
    assert "roundpipe plan" in finding.remedy
