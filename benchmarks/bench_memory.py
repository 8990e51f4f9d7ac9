"""What a training keeps in the memory of the host, in bytes per parameter, for weights in bfloat16.

    python benchmarks/bench_memory.py [--json FILE] [--millions N ...] [--losses STEPS]

Each row trains in a separate process: layers of one matrix each, AdamW (fused), a stage per layer, and one virtual
device that has room for a tenth of the model. The number is the highest resident memory of the third step, less that of
the same process after a training of a tiny model, per parameter. What is on the virtual device is in the memory of the
host, and counts. Freed blocks of 1 MB and more go back to the system at once (MALLOC_MMAP_THRESHOLD_): glibc
keeps those of up to 32 MB, which takes up to 1.6 bytes per parameter more. Where the plan states a number, the process
may allocate 3 % more than it, and no more. Moments in 8 bits are those of torchao's
AdamW8bit, where torchao is installed.

With --losses, a small Llama is also trained each way, on bytes of the text that Python ships with, from the same
weights and with the same batches.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from benchmarks.resident import status, tokens_of_text
from roundpipe_runtime import (
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    VirtualDevice,
    wrap_model_to_roundpipe,
)
from roundpipe_runtime.estimate import measure_layers
from roundpipe_runtime.estimate.step_plan import device_memory, host_memory

LAYERS, ROWS, TINY = 48, 32, 64
MMAP_THRESHOLD = 2**20
EIGHT = "float32 copies, bfloat16 gradients, moments in 8 bits"
IN_BACKWARD = "float32, stepped in the backward"
WAYS: dict[str, dict[str, Any]] = {
    "float32 copies, float32 gradients": {"optim_dtype": torch.float32},
    "float32 copies, bfloat16 gradients": {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16},
    EIGHT: {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16},
    "float32 in place, bfloat16 gradients": {
        "optim_dtype": torch.float32,
        "gradient_dtype": torch.bfloat16,
        "update": "in_place",
    },
    IN_BACKWARD: {"optim_dtype": torch.float32, "update": "in_backward"},
    "bfloat16 only": {},
}
BARS = {
    "float32 copies, bfloat16 gradients": 16.5,
    EIGHT: 12.0,
    "float32 in place, bfloat16 gradients": 14.5,
    IN_BACKWARD: 12.5,
    "bfloat16 only": 12.0,
}
# of the losses
RATE, ROWS_OF_TEXT, LENGTH, AVERAGED = 3e-3, 4, 64, 20


def optimizer_of(way: str, parameters: Any, rate: float) -> torch.optim.Optimizer:
    if way != EIGHT:
        return torch.optim.AdamW(parameters, lr=rate, fused=True)
    from torchao.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(parameters, lr=rate)
    return found


def layers_of(width: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(LAYERS)]


def plan_of() -> ModelExecutePlan:
    stages = [range(n, n + 1) for n in range(LAYERS)]
    return ModelExecutePlan(stages[:-1], [stages[-1], *reversed(stages[:-1])])


def planned(width: int, way: str) -> float | None:
    """Return the bytes that the plan states, of the host and the device; none for moments in 8 bits."""
    if way == EIGHT:
        return None
    options = WAYS[way]
    dtype = options.get("optim_dtype")
    with torch.device("meta"):
        layers, inputs = layers_of(width), torch.empty(ROWS, width)
    found = measure_layers(layers, (inputs,), gradient_dtype=lambda parameter: dtype or parameter.dtype)
    stages = plan_of().stages("fused", LAYERS)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    host = host_memory(parameters, [], stages, found, 1, **options)
    (device,) = device_memory(stages, [0] * len(stages), found, 1, stays=False, prefetches=False)
    return host.total + device.total


def train(width: int, way: str) -> int:
    """Take three steps; return the highest resident bytes of the last one."""
    layers = layers_of(width)
    config = RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean", execute_plan=plan_of())
    device = VirtualDevice("virtual:0", memory_limit=max(2 * LAYERS * width**2 // 10, 2**20))
    pipe = RoundPipe(nn.Sequential(*layers), devices=[device], model_run_config=config, **WAYS[way])
    optimizer = optimizer_of(way, pipe.optim_parameters(), 1e-4)
    if way == IN_BACKWARD:
        pipe.step_with(optimizer)
    inputs = torch.ones(ROWS, width)
    for _ in range(3):
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the highest resident memory is counted anew
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.float().square().mean())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async="exact")
    pipe.synchronize()
    pipe.close()
    return status("VmHWM")


def measure(way: str, millions: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    train(TINY, way)
    before = status("VmRSS")
    width = round((1e6 * millions / LAYERS) ** 0.5 / 16) * 16  # blocks of 8-bit moments have 256 numbers
    parameters = LAYERS * width**2
    plan = planned(width, way)
    if plan is not None:  # what is beyond the plan ends the training
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(1.03 * plan),) * 2)
    found = {"parameters": parameters, "bytes per parameter": (train(width, way) - before) / parameters}
    return found if plan is None else {**found, "planned": plan / parameters}


def losses(ways: list[str], steps: int) -> dict[str, list[float]]:
    """Train a small Llama each way; return the mean of each 20 losses."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # compiling takes longer than these steps
    learned = {}
    for way in ways:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=1, vocab_size=256
        )
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        run = RoundPipeRunConfig(num_microbatch=1)
        pipe = wrap_model_to_roundpipe(model, devices="virtual:1", model_run_config=run, check=False, **WAYS[way])
        optimizer = optimizer_of(way, list(pipe.optim_parameters()), RATE)
        if way == IN_BACKWARD:
            pipe.step_with(optimizer)
        found = []
        for number in range(steps):
            tokens = tokens_of_text(ROWS_OF_TEXT, LENGTH, number)
            found.append(float(pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})))
            pipe.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))
        pipe.close()
        learned[way] = [sum(found[n : n + AVERAGED]) / AVERAGED for n in range(0, steps, AVERAGED)]
        print(f"{way}: {[round(loss, 3) for loss in learned[way]]}", flush=True)
    return learned


def of_child(what: str, way: str, number: int) -> Any:
    """Measure in a separate process."""
    command = [sys.executable, __file__, "--one", what, way, str(number)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--millions", type=int, nargs="+", default=[100, 400, 1000])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        what, way, number = arguments.one
        print(json.dumps(measure(way, int(number)) if what == "bytes" else losses(way.split("; "), int(number))))
        return 0
    ways = [way for way in arguments.ways if way != EIGHT or importlib.util.find_spec("torchao")]
    results: dict[str, dict[str, Any]] = {}
    learned = of_child("losses", "; ".join(ways), arguments.losses) if arguments.losses else {}
    above, here = [], machine()
    used = {name: version(name) for name in ("torch", "torchao") if importlib.util.find_spec(name)}
    for way in ways:
        for millions in arguments.millions:
            found = of_child("bytes", way, millions)
            results.setdefault(way, {})[str(millions)] = found
            plan = f", planned {found['planned']:.2f}" if "planned" in found else ""
            print(f"{way}, {millions} M: {found['bytes per parameter']:.2f} bytes per parameter{plan}", flush=True)
            if found["bytes per parameter"] > BARS.get(way, float("inf")):
                above.append(f"{way}, {millions} M")
            if arguments.json:  # each time: the largest may not fit into the memory of a machine
                stored = {"versions": used, "machine": here, "bars": BARS, "ways": results, "losses": learned}
                arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print("above the bar:", above or "none")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
