"""What the simulator predicts of steps on virtual devices, next to the steps themselves.

    python benchmarks/bench_simulate.py [--json FILE] [--repeat N] [--computed]

Layers that wait for fixed times are known beforehand, so the schedule, the bubble and the optimizer are what is
compared; other processes cost them little. With --computed, layers of a Llama compute, with the mean costs of each
layer in the same step, and rates that are measured here; that needs a quiet machine. Devices that count every tensor
state the peaks.

The least time of some steps counts. Bars: time within 15 %, bubbles within 2 points, peak bytes within 5 %. The exit
status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine, versions  # found there only
from benchmarks.waiting_layers import WaitingLayer, WaitingSGD
from roundpipe_runtime import LayerCost, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, Timeline
from roundpipe_runtime.estimate import Hardware, describe_hardware, measure_layers, simulate, step_plan
from roundpipe_runtime.schedule.timeline import device_totals

__all__ = ["Compared", "compare_waiting"]

TIME, BUBBLE, PEAK = 0.15, 0.02, 0.05


class Compared(NamedTuple):
    """Seconds and bubble of a step, or bytes, predicted and measured.

    Attributes:
        seconds: seconds of a step, simulated and measured.
        bubble: share of the devices' time in a run in which they wait, simulated and measured.
    """

    seconds: tuple[float, float]
    bubble: tuple[float, float]

    def misses(self) -> list[str]:
        """Return the bars that are missed."""
        found = []
        if abs(self.seconds[0] / self.seconds[1] - 1) > TIME:
            found.append(f"time {self.seconds[0]:.3f} s for {self.seconds[1]:.3f} s")
        if abs(self.bubble[0] - self.bubble[1]) > BUBBLE:
            found.append(f"bubble {self.bubble[0]:.1%} for {self.bubble[1]:.1%}")
        return found


def _mean(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().mean()


def _virtual(count: int, **rates: Any) -> Hardware:
    names = tuple(f"virtual:{number}" for number in range(count))
    given = {"flops": 1e12, "link": 1e12, "memory": None, "host": None, "host_rate": 1e12, "origin": {}, **rates}
    return Hardware(names=names, kind="cpu", **given)


def _plan_of(layers: Sequence[LayerCost], devices: int) -> ModelExecutePlan:
    found = ModelExecutePlan.auto("fused", list(layers), min_stages=devices)
    assert isinstance(found, ModelExecutePlan)
    return found


# -- layers that wait --------------------------------------------------------------------------------------------------


def compare_waiting(
    seconds: Sequence[float],
    devices: int,
    microbatches: int,
    *,
    optimizer: float = 0.0,
    is_async: Any = False,
    steps: int = 3,
) -> Compared:
    """Compare a step of layers that wait.

    Args:
        seconds: seconds of each layer's forward on a microbatch.
        devices: number of devices.
        microbatches: number of microbatches.
        optimizer: seconds of the optimizer for each layer.
        is_async: when the optimizer runs, as in ``RoundPipe.step``.
        steps: number of steps, of which the least counts; one more goes before.
    """
    layers = [WaitingLayer(one) for one in seconds]
    costs = [LayerCost(one, 3 * one) for one in seconds]
    plan = _plan_of(costs, devices)
    # what flows is four bytes a sample: found without waiting
    found = measure_layers([WaitingLayer(0.0) for _ in layers], (torch.ones(1, 1),))
    described = step_plan(
        plan, found, nn.Sequential(*layers), num_microbatch=microbatches, tokens=microbatches, measured=costs
    )
    whole = optimizer * len(layers) or 1e-9
    predicted = simulate(described, _virtual(devices, host_rate=described.optimizer_bytes / whole), is_async=is_async)

    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean", execute_plan=plan)
    pipe = RoundPipe(nn.Sequential(*layers), devices=f"virtual:{devices}", model_run_config=config)
    sgd = WaitingSGD(pipe.optim_parameters(), lr=0.0)
    sgd.seconds = optimizer
    taken, bubbles, before = [], [], 0.0
    for number in range(steps + 2):
        with Timeline() as timeline:
            pipe.forward_backward((torch.ones(microbatches, 1),), loss_fn=_mean)
        now = time.perf_counter()
        if number > 1:  # the first step has no optimizer before it
            taken.append(now - before)
            bubbles.append(_bubble(timeline, devices))
        before = now
        pipe.step(lambda: (sgd.step(), sgd.zero_grad()), is_async)
    pipe.synchronize()
    pipe.close()
    least = min(range(steps), key=lambda step: taken[step])
    # a run next to its optimizer waits for it inside of layers' uploads, which a timeline has as copies
    return Compared((predicted.seconds, taken[least]), (predicted.run.bubble, bubbles[least]))


def _bubble(timeline: Timeline, devices: int) -> float:
    totals = device_totals(timeline.records)
    whole = sum(one.busy + one.transfers + one.idle for one in totals[:1]) * devices
    return 1 - sum(one.busy for one in totals) / whole


WAITING: dict[str, tuple[list[float], int, int, dict[str, Any]]] = {
    "6 equal layers, 1 device": ([0.02] * 6, 1, 2, {}),
    "6 equal layers, 2 devices": ([0.02] * 6, 2, 3, {}),
    "6 equal layers, 2 devices, 8 microbatches": ([0.02] * 6, 2, 8, {}),
    "embedding, 8 layers, head of 3, 4 devices": ([0.001, *[0.02] * 8, 0.06], 4, 5, {}),
    "embedding, 16 layers, head of 3, 8 devices": ([0.001, *[0.02] * 16, 0.06], 8, 9, {}),
    "16 layers, head of 3, 8 devices, 16 microbatches": ([*[0.02] * 16, 0.06], 8, 16, {}),
    "optimizer a third, after the run": ([0.02] * 8, 1, 1, {"optimizer": 0.04}),
    "optimizer a third, exact": ([0.02] * 8, 1, 1, {"optimizer": 0.04, "is_async": "exact"}),
    "optimizer a third, exact, 2 devices": ([0.02] * 8, 2, 3, {"optimizer": 0.06, "is_async": "exact"}),
    "optimizer a third, one step late": ([0.02] * 8, 1, 1, {"optimizer": 0.04, "is_async": True}),
}


# -- layers that compute -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of Llama: attention and a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


VOCABULARY, LENGTH = 4096, 128


class HeadWithLoss(nn.Module):
    """The last layer, which computes the loss itself, as a Hugging Face model does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def _model(width: int, count: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block(width, 4) for _ in range(count))
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, HeadWithLoss(width))


def _costs(timeline: Timeline, layers: int, microbatches: int) -> list[LayerCost]:
    """The mean costs of each layer in a step; what has no layer is the loss, part of the last one."""
    there, back = [0.0] * layers, [0.0] * layers
    visited = {record.layer for record in timeline.records if record.kind == "recompute"}
    for record in timeline.records:
        if record.kind in ("upload", "download"):
            continue
        layer = record.layer if record.layer >= 0 else layers - 1
        side = there if record.kind == "forward" and layer in visited else back
        side[layer] += (record.end - record.start) / microbatches
    return [LayerCost(forward, backward) for forward, backward in zip(there, back, strict=True)]


def _between_calls(layers: int = 16, microbatches: int = 4, repeat: int = 8) -> float:
    """Seconds of the host between calls, per layer and microbatch: costs from a timeline have the rest of a call."""
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    config = RoundPipeRunConfig(
        num_microbatch=microbatches,
        loss_reduction="mean",
        execute_plan=_plan_of([LayerCost(1.0, 3.0)] * layers, 1),
    )
    pipe = RoundPipe(small, devices="virtual:1", model_run_config=config)
    found = []
    for _ in range(repeat):
        with Timeline() as timeline:
            pipe.forward_backward((torch.ones(microbatches, 8),), loss_fn=_mean)
        pipe.zero_grad()
        # a device alone waits for nothing but the host
        found.append(device_totals(timeline.records)[0].idle / (layers * microbatches))
    pipe.close()
    return min(found)


def compare_computed(width: int, count: int, devices: int, microbatches: int, rows: int, repeat: int) -> dict[str, Any]:
    """Compare steps of a model that computes: time, bubble, peak bytes of each device."""
    from tests.runtime.device.measuring_device import MeasuringDevice

    model = _model(width, count)
    tokens = torch.randint(0, VOCABULARY, (rows * microbatches, LENGTH))
    named = ModelExecutePlan.auto("fused", model, min_stages=devices)
    assert isinstance(named, ModelExecutePlan)
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean", execute_plan=named)
    pipe = RoundPipe(model, devices=f"virtual:{devices}", model_run_config=config)
    taken, timelines = [], []
    for number in range(repeat + 2):
        with Timeline() as timeline:
            start = time.perf_counter()
            pipe.forward_backward((tokens,), loss_fn=lambda loss, _: loss)
            seconds = time.perf_counter() - start
        pipe.zero_grad()
        if number > 1:
            taken.append(seconds)
            timelines.append(timeline)
    pipe.close()
    least = min(range(repeat), key=lambda step: taken[step])
    costs = _costs(timelines[least], len(model), microbatches)
    layers = measure_layers(list(_model(width, count)), (tokens[:rows],), kind="cpu")
    here = dataclasses.replace(describe_hardware(f"virtual:{devices}"), call=_between_calls())
    described = step_plan(named, layers, model, num_microbatch=microbatches, tokens=tokens.numel(), measured=costs)
    predicted = simulate(described, here)
    bubble = _bubble(timelines[least], devices)
    compared = Compared((predicted.run.time, taken[least]), (predicted.run.bubble, bubble))
    measuring = [MeasuringDevice(f"virtual:{number}") for number in range(devices)]
    pipe = RoundPipe(_model(width, count), devices=measuring, model_run_config=config)
    gc.collect()
    gc.disable()
    pipe.forward_backward((tokens,), loss_fn=lambda loss, _: loss)
    gc.enable()
    pipe.close()
    peaks = [(memory.total, device.footprint.peak)
             for memory, device in zip(predicted.device_memory, measuring, strict=True)]  # fmt: skip
    return {"compared": compared, "peaks": peaks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="steps of each case")
    parser.add_argument("--computed", action="store_true", help="also layers that compute; needs a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, missed = [], []

    def note(name: str, compared: Compared, peaks: Sequence[tuple[int, int]] = ()) -> None:
        misses = compared.misses()
        misses += [f"peak {a:,} for {b:,} bytes" for a, b in peaks if abs(a / b - 1) > PEAK]
        rows.append({"name": name, **compared._asdict(), "peaks": list(peaks), "misses": misses})
        (simulated, seconds), (bubble, waited) = compared
        text = f"{name:50} {simulated:6.3f} s simulated, {seconds:6.3f} s measured ({simulated / seconds - 1:+.1%})"
        text += f", bubble {bubble:.1%} and {waited:.1%}"
        print(text + "".join(f", peak {a / b - 1:+.1%}" for a, b in peaks), flush=True)
        missed.extend(f"{name}: {miss}" for miss in misses)

    for name, (seconds, devices, microbatches, given) in WAITING.items():
        note(name, compare_waiting(seconds, devices, microbatches, steps=options.repeat, **given))
    if options.computed:
        for devices, microbatches in ((1, 2), (2, 3), (2, 8)):
            found = compare_computed(256, 6, devices, microbatches, 2, options.repeat)
            note(
                f"Llama of 6 layers, {devices} devices, {microbatches} microbatches", found["compared"], found["peaks"]
            )
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    if options.json:
        content = {"machine": machine(), "versions": versions(), "repeat": options.repeat, "cases": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
