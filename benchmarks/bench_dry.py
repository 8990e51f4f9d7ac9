"""Steps of large models on accelerators that are simulated, and what a layer costs the host.

    python benchmarks/bench_dry.py [--json FILE] [--only TEXT]

The runtime is real; nothing is computed, and no time is measured but that of the host (``simulated.py``). "Busy" is the
share of the step in which kernels ran, or a link copied up or down; the largest is the bottleneck. The last rows are
processor time of a layer call beyond that of the layer, in torch and Python, where that of the reference accelerator is
left out; and steps of layers of one millisecond with a host that takes time and one that takes none. What is above its
bar is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine, versions  # found there only

ROOT = Path(__file__).parent.parent

# Model, kind, devices, microbatches (for eight devices as many as the runtime chooses); rows of 4,096 tokens.
CASES = [
    (model, kind, devices, max(4, devices + 1))
    for model in ("Llama 8B", "Llama 70B", "Mixtral 8x7B")
    for kind in ("H200", "4090")
    for devices in (1, 8)
]
# Layers alone, on devices like an H200: devices, microbatches, and the milliseconds that are the bar. The bars come
# from a clock that counted a third more operations: they show what became slower, and not how fast it is.
_LAYERS = "8 layers of Llama 70B"
BARS = [(1, 4, 2750), (1, 2, 1425), (1, 1, 890), (2, 4, 1500)]
OVERHEAD_BAR = 150.0

LAYERS, MICROBATCHES, WIDTH = 32, 4, 8

# Milliseconds of the forward of a layer that the host must not delay, and microseconds that a host takes for a layer
# and microbatch in forward, forward again and backward, about twice those of the pipeline with torch.
LAYER_MS, HOST_US = 1.0, 1000.0


def simulated(model: str, kind: str, devices: int, microbatches: int) -> dict[str, Any]:
    """Run one case in a separate process."""
    found: dict[str, Any] = _in_process(
        devices, "-m", "benchmarks.simulated", "--model", model, "--kind", kind, "--microbatches", str(microbatches)
    )
    return found


def _in_process(devices: int, *arguments: str) -> Any:
    environment = {**os.environ, "LATE_DRY": "1", "LATE_DEVICES": str(devices), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- what a layer call costs beyond the layer, in a process with the reference accelerator -----------------------------


def overhead(repeat: int) -> dict[str, float]:
    """Microseconds of processor time per layer and microbatch; the least of some steps."""
    from torch.utils.checkpoint import checkpoint

    from tests.accelerator import late

    device = torch.device("late", 0)
    torch.manual_seed(0)
    there = [torch.nn.Linear(WIDTH, WIDTH).to(device) for _ in range(LAYERS)]
    inputs, labels = (torch.randn(2 * MICROBATCHES, WIDTH).pin_memory() for _ in range(2))
    last = LAYERS - 4
    pipe = _pipeline(device)
    mse_loss = torch.nn.functional.mse_loss

    def alone() -> None:
        """Forward of all layers but the last ones, forward again and backward of each."""
        for hidden, label in zip(inputs.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            hidden, kept = hidden.to(device), []
            with torch.no_grad():
                for layer in there[:last]:
                    kept.append(hidden)
                    hidden = layer(hidden)
            graphs = []
            for layer in there[last:]:
                hidden = hidden.detach().requires_grad_()
                graphs.append((hidden, layer(hidden)))
                hidden = graphs[-1][1]
            result = hidden.detach().requires_grad_()
            mse_loss(result, label.to(device)).backward()
            gradient = result.grad
            for hidden, output in reversed(graphs):
                output.backward(gradient)
                gradient = hidden.grad
            for layer, hidden in zip(reversed(there[:last]), reversed(kept), strict=True):
                hidden = hidden.detach().requires_grad_()
                layer(hidden).backward(gradient)
                gradient = hidden.grad

    def checkpointed() -> None:
        """The same layers with torch's checkpoints, as most programs go backward through layers again."""
        for hidden, label in zip(inputs.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            hidden = hidden.to(device)
            for layer in there[:last]:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            for layer in there[last:]:
                hidden = layer(hidden)
            mse_loss(hidden, label.to(device)).backward()

    def pipeline() -> None:
        pipe.forward_backward((inputs,), label=labels, loss_fn=mse_loss)
        pipe.zero_grad()

    def taken(step: Callable[[], None]) -> tuple[float, float]:
        """What torch and Python take of a step, and what the reference accelerator takes in it."""
        late.set_order("eager")
        late.host_seconds()
        start = time.process_time()
        step()
        seconds = time.process_time() - start
        inside = late.host_seconds()
        calls = LAYERS * MICROBATCHES
        return 1e6 * (seconds - inside) / calls, 1e6 * inside / calls

    # They take turns, so that other load on the machine affects all of them; the least of each counts.
    steps = (alone, checkpointed, pipeline)
    rounds = [[taken(step) for step in steps] for _ in range(repeat)]
    (plain, plain_inside), (again, _), (ours, ours_inside) = map(min, zip(*rounds, strict=True))
    return {
        "layers alone": plain, "with torch's checkpoints": again, "pipeline": ours, "overhead": ours - plain,
        "accelerator, layers alone": plain_inside, "accelerator, pipeline": ours_inside,
    }  # fmt: skip


def _pipeline(device: torch.device) -> Any:
    from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

    last = LAYERS - 4
    plan = ModelExecutePlan(
        [range(first, min(first + 10, last)) for first in range(0, last, 10)],
        [range(first, first + 4) for first in range(last, -1, -4)],
    )
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=MICROBATCHES, execute_plan=plan)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return RoundPipe(torch.nn.Sequential(*layers), devices=[device], model_run_config=config)


# -- whether the device waits for the host, on the dry clock -----------------------------------------------------------


def delay() -> dict[str, float]:
    """Milliseconds of a step of layers of one millisecond, where the host takes no time, and where it takes much."""
    from tests.accelerator import late

    pipe = _pipeline(torch.device("late", 0))
    rows = 2 * MICROBATCHES
    inputs, labels = (torch.randn(rows, WIDTH).pin_memory() for _ in range(2))

    def step(launch: float) -> float:
        flops = 2 * rows / MICROBATCHES * WIDTH**2 / (LAYER_MS / 1e3)
        late.set_costs(flops=flops, memory=4e12, link=50e9, launch=launch)
        late.set_order("eager")
        late.counts()
        pipe.forward_backward((inputs,), label=labels, loss_fn=torch.nn.functional.mse_loss)
        milliseconds = late.clock() * 1e3
        pipe.zero_grad()
        return milliseconds

    for _ in range(3):
        alone = step(0.0)
    late.trace()
    step(0.0)
    launches = len(late.trace())
    launch = HOST_US / 1e6 * LAYERS * MICROBATCHES / launches
    return {"the host takes nothing, ms": alone, f"the host takes {HOST_US:.0f} µs, ms": step(launch)}


# -- the table ---------------------------------------------------------------------------------------------------------


def bottleneck(busy: dict[str, float]) -> str:
    return {"kernels": "kernels", "up": "link up", "down": "link down"}[max(busy, key=lambda name: busy[name])]


def row(case: dict[str, Any]) -> str:
    busy = case["busy"]
    shares = "  ".join(f"{name} {share:.1%}" for name, share in busy.items())
    tokens = f"{case['microbatches']:2} x {case['tokens']:,} tokens"
    return (
        f"{case['model']:22} {case['devices']} x {case['kind']:5} {tokens}  "
        f"{case['milliseconds']:9,.1f} ms  {shares}  waits for {bottleneck(busy):10} "
        f"peak {case['peak bytes'] / 1e9:5.1f} GB  stages {case['stages']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--only", default="", help="run the cases with this text in their model")
    parser.add_argument("--overhead", type=int, metavar="REPEAT", help=argparse.SUPPRESS)
    parser.add_argument("--delay", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.overhead or options.delay:
        print(json.dumps(delay() if options.delay else overhead(options.overhead)), flush=True)
        os._exit(0)  # a thread of autograd for a device may abort a process that ends after a backward
    missed, cases = [], []
    for devices, microbatches, bar in BARS if options.only in _LAYERS else ():
        case = {**simulated(_LAYERS, "H200", devices, microbatches), "bar": bar}
        cases.append(case)
        print(row(case), f"  bar {bar:,}", flush=True)
        if case["milliseconds"] > bar:
            missed.append(f"{devices} devices, {microbatches} microbatches: {case['milliseconds']:,.1f} ms")
    for model, kind, devices, microbatches in CASES:
        if options.only in model:
            cases.append(simulated(model, kind, devices, microbatches))
            print(row(cases[-1]), flush=True)
    costs = _in_process(1, __file__, "--overhead", "30")
    print(", ".join(f"{name} {value:.0f} µs" for name, value in costs.items()), "per layer and microbatch")
    delayed = _in_process(1, __file__, "--delay")
    print(f"layers of {LAYER_MS} ms:", ", ".join(f"{name}: {value:.1f}" for name, value in delayed.items()))
    if costs["overhead"] > OVERHEAD_BAR:
        missed.append(f"overhead {costs['overhead']:.0f} µs")
    for line in missed:
        print("above its bar:", line)
    if options.json:
        content = {"machine": machine(), "versions": versions(), "cases": cases, "host": costs, "delay": delayed}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
