"""The demo of the runtime as a user meets it, and what it says of memory."""

import copy
import itertools
import json

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceMemoryError
from roundpipe_runtime.__main__ import main
from roundpipe_runtime.cli import demo
from roundpipe_runtime.cli.demo import CountingDevice, Needs, measure_needs

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.mark.slow
def test_the_demo_trains_both_ways_and_draws_the_pipeline(capsys, monkeypatch):
    """Plain text in a log, with equal losses. Weights are larger than a device, so plain training is refused there."""
    monkeypatch.delenv("COLUMNS", raising=False)
    threads = torch.get_num_threads()
    assert main(["demo", "--steps", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "\x1b" not in shown.out
    lines = shown.out.splitlines()
    rows = [line.split() for line in lines if line.strip()[:2] in ("0 ", "4 ") and len(line.split()) == 5]
    assert [int(row[0]) for row in rows] == [0, 4]
    assert all(float(row[1]) == pytest.approx(float(row[2]), abs=1e-5) for row in rows)
    assert float(rows[1][2]) < float(rows[0][2])
    assert " ms in plain PyTorch (one thread), " in shown.out
    drawn = {line.split()[0]: line.split()[1] for line in lines if line.startswith("virtual:")}
    assert sorted(drawn) == ["virtual:0", "virtual:1"]
    assert set("FB") <= set("".join(drawn.values())) <= set("FRLBud.")
    assert torch.get_num_threads() == threads

    def megabytes(line):
        return [float(word) for word, unit in itertools.pairwise(line.split()) if unit == "MB"]

    (limit,) = megabytes(next(line for line in lines if "device of 4 MB" in line))
    plain = next(line for line in lines if line.startswith("plain PyTorch"))
    pipeline = next(line for line in lines if line.startswith("pipeline  "))
    assert plain.endswith("too small")
    assert pipeline.endswith("large enough")
    weights = 4 * sum(parameter.numel() for parameter in demo._build().parameters()) / 1e6
    assert megabytes(plain)[0] == megabytes(pipeline)[0] == pytest.approx(weights, abs=0.01)
    assert megabytes(pipeline)[1] <= limit < weights < 4 * weights < megabytes(plain)[1]
    assert "the device is out of memory: it uses" in " ".join(shown.out.split())


@pytest.fixture
def counted(monkeypatch):
    """For tests of what comes after: counting takes seconds."""
    monkeypatch.setattr(demo, "measure_needs", lambda *args: Needs(5_580_000, 41_700_000, "It is too much.", 2_330_000))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, counted, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["demo", "--steps", "1"]) == 0
    widths = [len(line) for line in capsys.readouterr().out.splitlines()]
    assert columns - 4 <= max(widths) <= columns


@pytest.mark.slow
def test_json_holds_what_the_tables_show(capsys, counted):
    """One object on stdout: bytes and losses of both ways, a loss for each step; the tables are on stderr."""
    assert main(["demo", "--steps", "2", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["plain"]["fits"], found["pipeline"]["fits"]) == (False, True)
    assert (found["weights_bytes"], found["pipeline"]["device_bytes"]) == (5_580_000, 2_330_000)
    assert found["plain"]["losses"] == pytest.approx(found["pipeline"]["losses"], abs=1e-5)
    assert len(found["plain"]["losses"]) == 2
    assert "A model that is larger than its device" in shown.err


def test_losses_that_differ_end_the_demo_with_1(capsys, monkeypatch, counted):
    monkeypatch.setattr(demo, "_timed", lambda step, *batch: (step(*batch) and float("nan"), 0.001))
    assert main(["demo", "--steps", "1"]) == 1
    assert "THE LOSSES DIFFER." in capsys.readouterr().out


# -- memory that is counted on devices, and refused by one that has too little -----------------------------------------


WIDTH, LAYERS, ROWS = 64, 12, 6
MATRIX = WIDTH * WIDTH * 4  # bytes


def test_a_pipeline_keeps_the_limit_that_plain_training_does_not():
    """Plain training holds weight, gradient and two moments; the pipeline has weights and gradients of two stages."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    before = copy.deepcopy(model.state_dict())
    batches = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(2)]
    needs = measure_needs(model, batches, nn.functional.mse_loss, LAYERS * MATRIX * 3 // 4, devices=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert needs.weights == LAYERS * MATRIX
    activations = (LAYERS + 6) * ROWS * WIDTH * 4
    assert 4 * needs.weights <= needs.plain <= 4 * needs.weights + activations + MATRIX
    assert needs.refusal == (  # nine of twelve matrices fit to the last byte; the tenth does not
        f"the device is out of memory: it uses {9 * MATRIX} of {9 * MATRIX} bytes, and {MATRIX} more were requested "
        "for a tensor of shape (64, 64) and dtype torch.float32."
    )
    assert 2 * MATRIX < needs.pipeline <= LAYERS * MATRIX * 3 // 4 < needs.weights < needs.plain


def test_what_is_computed_counts_for_the_limit_as_copies_do():
    """Two tensors of 4 kB on a device of 10 kB, and no third one; it makes room when one of them goes."""
    device = CountingDevice("virtual:0", 10_000)
    copied = device.copy_in(torch.ones(1000))
    with device.computing():
        for _ in range(3):
            computed = copied + 1
            del computed
        computed = copied + 1
        with pytest.raises(DeviceMemoryError, match=r"it uses 8000 of 10000 bytes, and 4000 more .*\(1000,\)"):
            computed + 1
    device.close()
