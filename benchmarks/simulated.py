"""One training step on accelerators that are simulated: the runtime is real, and nothing is computed.

    LATE_DRY=1 LATE_DEVICES=8 python -m benchmarks.simulated --model "Llama 8B" --kind H200

The reference accelerator of ``tests/accelerator`` runs dry: streams, copy engines and the host have clocks that advance
with the bytes and operations they get. Prints JSON. ``bench_dry.py`` runs this file for each of its cases.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.engine import lifecycle
from roundpipe_runtime.huggingface import WrappedModel
from tests.accelerator import late

__all__ = ["KINDS", "MODELS", "Kind"]


class Kind(NamedTuple):
    """A kind of device, as fast as such devices are in trainings: about half of what its data sheet states.

    Attributes:
        flops: operations per second of products of matrices in bfloat16.
        memory: bytes per second of its memory.
        link: bytes per second between host and device, each way.
        nbytes: bytes of its memory.
    """

    flops: float
    memory: float
    link: float
    nbytes: int


KINDS = {
    "H200": Kind(500e12, 4e12, 50e9, 141 * 10**9),
    "4090": Kind(120e12, 0.9e12, 25e9, 24 * 10**9),
}

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
MODELS = {
    "Llama 8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                 "num_attention_heads": 32},
    "Llama 70B": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                  "num_attention_heads": 64},
    "Mixtral 8x7B": {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
                     "num_experts_per_tok": 2},
    # in memory that does not hold all of them
    "8 layers of Llama 70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8,
                              "memory": 40 * 10**9},
    "tiny": {**_LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
             "vocab_size": 256},
}  # fmt: skip


# -- models whose parameters are pinned, and never written or read -----------------------------------------------------


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made


def _fill(model: nn.Module) -> None:
    """Give parameters and buffers memory, of which a dry run touches nothing."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    known.setdefault(id(tensor), _pinned(tensor))
                    held[name] = known[id(tensor)]


class Block(nn.Module):
    """A layer of Llama without its attention, which takes a few percent."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        options: Any = {"bias": False, "dtype": torch.bfloat16}
        self.norms = nn.ModuleList([nn.RMSNorm(width, dtype=torch.bfloat16) for _ in range(2)])
        self.q, self.o = (nn.Linear(width, width, **options) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 8, **options) for _ in range(2))
        self.gate, self.up, self.down = (nn.Linear(a, b, **options) for a, b in
                                         ((width, inner), (width, inner), (inner, width)))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.o(self.q(y) + (self.k(y).sum() + self.v(y).sum()) * 0)
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


Step = Callable[[], object]


def blocks(settings: dict[str, int], devices: Sequence[str], microbatches: int, tokens: int) -> tuple[RoundPipe, Step]:
    """Layers alone, one in each stage, and a loss of almost no work."""
    width, count = settings["hidden_size"], settings["num_hidden_layers"]
    with torch.device("meta"):
        head = nn.Linear(width, 8, bias=False, dtype=torch.bfloat16)
        model = nn.Sequential(*(Block(width, settings["intermediate_size"]) for _ in range(count)), head)
    _fill(model)
    one = [range(place, place + 1) for place in range(count)]
    plan = ModelExecutePlan(one, [range(count, count + 1), *reversed(one)])
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean", execute_plan=plan)
    pipe = RoundPipe(model, devices=devices, model_run_config=config)
    inputs = torch.empty(microbatches, tokens, width, dtype=torch.bfloat16, pin_memory=True)
    return pipe, lambda: pipe.forward_backward((inputs,), loss_fn=lambda out, _: out.float().square().mean())


def language_model(
    settings: dict[str, Any], devices: Sequence[str], microbatches: int, tokens: int
) -> tuple[RoundPipe, Step]:
    """A Hugging Face model with its own loss, in a plan that the runtime chose."""
    from transformers import AutoConfig

    from roundpipe_runtime.estimate.footprint import device_kernels
    from roundpipe_runtime.huggingface.cutting.cut import cut
    from roundpipe_runtime.huggingface.plan_training import model_on_meta

    given = dict(settings)
    config = AutoConfig.for_model(given.pop("model_type"), **given, max_position_embeddings=tokens)
    model = model_on_meta(config, dtype=torch.bfloat16)
    with device_kernels("cuda"):
        ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
        made = cut(model, {"input_ids": ids, "labels": ids.clone()}, check=False)
    _fill(nn.ModuleList([model, *made.pieces]))
    made.sync()
    pipe = WrappedModel(made, devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    ids = torch.zeros(microbatches, tokens, dtype=torch.int64)
    return pipe, lambda: pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})


# -- what the clocks state ---------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of one step, per device where it is work.

    Attributes:
        step: the whole step, without the optimizer's.
        kernels: kernels.
        up: copies to the device.
        down: copies from the device.
        longest: the longest times in which no kernel ran: seconds, when they began, and what came next.
    """

    step: float
    kernels: float
    up: float
    down: float
    longest: list[tuple[float, float, str]]


def read_clocks(devices: int) -> Times:
    """Read the trace of a step."""
    busy: collections.Counter[str] = collections.Counter()
    running = []
    for device, _, name, start, end in late.trace():
        what = name if name in ("up", "down") else "kernels"
        busy[what] += end - start
        if what == "kernels" and device == 0:
            running.append((start, end, name))
    running.sort()
    idle, last = [], 0.0
    for start, end, name in running:
        idle.append((start - last, last, name))
        last = max(last, end)
    step = late.clock()
    idle.append((step - last, last, "the end"))
    parts = (busy[what] / devices for what in ("kernels", "up", "down"))
    return Times(step, *parts, sorted(idle, reverse=True)[:12])


def simulate(model: str, kind: str, devices: int, microbatches: int, tokens: int, steps: int) -> dict[str, Any]:
    """Run some steps, so that the plan is made from what was measured, and return what the last one took."""
    lifecycle.is_due = lambda count: False  # no run looks at numbers, which are not computed
    its = KINDS[kind]
    late.set_costs(flops=its.flops, memory=its.memory, link=its.link)
    settings: dict[str, Any] = dict(MODELS[model])
    nbytes = settings.pop("memory", its.nbytes)
    for number in range(devices):
        late.set_memory(number, nbytes)
    make = language_model if "model_type" in settings else blocks
    pipe, step = make(settings, [f"late:{number}" for number in range(devices)], microbatches, tokens)
    for _ in range(steps):
        pipe.zero_grad()
        late.set_order("eager")
        for number in range(devices):
            torch.accelerator.reset_peak_memory_stats(number)
        begin = time.process_time()
        step()
        cpu = time.process_time() - begin
        times = read_clocks(devices)
    layers = len(pipe._rp_engine.layers)
    parameters = sum(parameter.numel() for parameter in pipe.parameters())
    plan = pipe._rp_engine.planner.plan("fused", 0) if "model_type" in settings else None
    return {
        "model": model, "kind": kind, "devices": devices, "microbatches": microbatches, "tokens": tokens,
        "parameters": parameters, "layers": layers, "milliseconds": 1e3 * times.step,
        "busy": {name: getattr(times, name) / times.step for name in ("kernels", "up", "down")},
        "tokens per second": microbatches * tokens / times.step,
        "peak bytes": max(torch.accelerator.max_memory_allocated(number) for number in range(devices)),
        "stages": [] if plan is None else [len(plan.fwd_plan), len(plan.bwd_plan)],
        "idle": [[round(1e3 * seconds, 2), round(1e3 * begin, 1), name] for seconds, begin, name in times.longest],
        "seconds of processor": cpu,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8 layers of Llama 70B")
    parser.add_argument("--kind", choices=KINDS, default="H200")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    found = simulate(options.model, options.kind, late.DEVICES, options.microbatches, options.tokens, options.steps)
    print(json.dumps(found), flush=True)
    os._exit(0)  # a thread of autograd for a device may abort a process that ends after a backward


if __name__ == "__main__":
    sys.exit(main())
