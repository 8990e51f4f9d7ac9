"""What a training step takes with the optimizer in the caller's thread, next to the next run, or one step late.

    python benchmarks/bench_steps.py [--json FILE] [--repeat N] [--computed]

One virtual device, one thread for the layers and one for the optimizer. Blocks of steps are taken in turns; a step is
the time from the end of one run to the end of the next. The least counts, as other processes only ever add to it.

The layers and the optimizer wait instead of computing, so that other processes cost them little: the rows show the
order of the work alone. A forward of a layer takes 20 ms, its backward 40 ms. With --computed, more rows train layers
of one matrix each with AdamW (fused), with as many rows in a batch as the share of the optimizer asks for.

"Compute" is a step without an optimizer. An exact step cannot take less than the optimizer and the backward together:
the backward begins when the forward has read the last layer. The exit status is 1 if an exact step took longer than a
synchronous one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from benchmarks.waiting_layers import WaitingLayer, WaitingSGD
from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

LAYERS, WIDTH, FORWARD = 8, 1024, 0.02
BLOCK = 5
MODES: dict[str, Any] = {"compute": None, "synchronous": False, "exact": "exact", "one step late": True}
PLAN = ModelExecutePlan([], [range(LAYERS)])
CONFIG = RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean", execute_plan=PLAN)


class Trained:
    """A training whose steps are timed."""

    def __init__(self, layers: list[nn.Module], inputs: torch.Tensor, make: Callable[..., Any], mode: Any) -> None:
        self.pipe = RoundPipe(nn.Sequential(*layers), devices="virtual:1", model_run_config=CONFIG)
        self.optimizer = make(self.pipe.optim_parameters())
        self.inputs, self.mode, self.seconds = inputs, mode, list[float]()

    def block(self) -> None:
        """Take some steps one after the other, and time all but the first."""
        before = 0.0
        for number in range(BLOCK):
            self.pipe.forward_backward((self.inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
            now = time.perf_counter()
            if number:
                self.seconds.append(now - before)
            before = now
            if self.mode is None:
                self.optimizer.zero_grad()
            else:
                self.pipe.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), self.mode)
        self.pipe.synchronize()

    def alone(self) -> float:
        """Return the seconds of the optimizer alone."""
        found = []
        for _ in range(BLOCK):
            for parameter in self.pipe.optim_parameters():
                parameter.grad = torch.zeros_like(parameter)
            before = time.perf_counter()
            self.optimizer.step()
            found.append(time.perf_counter() - before)
        return min(found)


def timed(share: float) -> Callable[[Any], Trained]:
    """Trainings of layers that wait, whose optimizer takes this share of a synchronous step."""

    def make(mode: Any) -> Trained:
        made = Trained(
            [WaitingLayer(FORWARD) for _ in range(LAYERS)], torch.ones(4, 1), lambda p: WaitingSGD(p, lr=0.0), mode
        )
        made.optimizer.seconds = 3 * FORWARD * share / (1 - share)
        return made

    return make


def computed(rows: int) -> Callable[[Any], Trained]:
    """Trainings of layers that compute."""

    def make(mode: Any) -> Trained:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        return Trained(layers, torch.randn(rows, WIDTH), lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), mode)

    return make


def measure(make: Callable[[Any], Trained], repeat: int) -> dict[str, float]:
    trained = {name: make(mode) for name, mode in MODES.items()}
    for one in trained.values():
        one.block()
        one.seconds.clear()
    for _ in range(repeat):
        for one in trained.values():
            one.block()
    found = {name: 1000 * min(one.seconds) for name, one in trained.items()}
    found["optimizer"] = 1000 * trained["synchronous"].alone()
    for one in trained.values():
        one.pipe.close()
    return found


def rows_for(share: float) -> int:
    """Rows of a batch with which the optimizer takes about this share of a synchronous step."""
    trained = computed(64)(None)
    trained.block()
    trained.block()
    seconds = min(trained.seconds)
    optimizer = trained.alone()
    trained.pipe.close()
    return max(8, round(64 * optimizer * (1 - share) / share / seconds / 8) * 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--computed", action="store_true", help="also layers that compute; needs a quiet machine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for title, share in (("a third", 1 / 3), ("a fifth", 1 / 5)):
        results[f"timed, {title}"] = measure(timed(share), arguments.repeat)
        if arguments.computed:
            rows = rows_for(share)
            results[f"computed, {title}, {rows} rows"] = measure(computed(rows), arguments.repeat)
    slower = []
    for name, found in results.items():
        print(name, {key: round(value, 1) for key, value in found.items()})
        if found["exact"] > found["synchronous"]:
            slower.append(name)
    if arguments.json:
        stored = {"torch": torch.__version__, "machine": machine(), "repeat": arguments.repeat, "milliseconds": results}
        arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print("slower than a synchronous step:", slower or "none")
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
