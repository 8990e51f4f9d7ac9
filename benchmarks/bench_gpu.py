"""A step of training on one accelerator: this runtime next to plain PyTorch, FSDP2 with CPU offload, and RoundPipe.

    make bench-gpu       or       python benchmarks/bench_gpu.py [--shapes 1.7B,8B] [--json FILE]

In this order, so that the first minute decides: two steps of a small training next to plain PyTorch; how fast the
device and its link are; then each program in a process of its own, which has ten minutes. Everyone trains the same
weights on the same tokens, in bfloat16 with AdamW in bfloat16, and recomputes the activations of each layer. One that
is not installed, has no room or fails is a row that states so. Link bytes are those of one step, as the profiler (of a
device of CUDA) or the reference accelerator counts them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine, versions  # found there only

ROOT = Path(__file__).parent.parent

MINUTES = 10
ROUNDING = 0.02  # of a loss in bfloat16, relative


class Shape(NamedTuple):
    """A model and its batch.

    Attributes:
        config: sizes of a Llama.
        microbatches: number of microbatches, of one row each.
        tokens: tokens of a row.
    """

    config: dict[str, Any]
    microbatches: int
    tokens: int


SHAPES = {
    "1.7B": Shape({"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
                  8, 2048),
    "8B": Shape({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256}, 8, 2048),
    "tiny": Shape({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "vocab_size": 128}, 4, 16),
}  # fmt: skip

# One step of training, which returns the loss.
Step = Callable[[], float]


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    """The same random weights for everyone, drawn on the device where that is faster, and kept on the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape.config, max_position_embeddings=shape.tokens, use_cache=False))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.empty_like(parameter, device=device).normal_(0.0, 0.02)
            parameter.copy_(torch.ones_like(drawn) if "norm" in name else drawn)
    model.train()
    return model


def batch(shape: Shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.config["vocab_size"], (shape.microbatches, shape.tokens), generator=generator)


# -- who is compared ---------------------------------------------------------------------------------------------------


def _pipeline(package: str, shape: Shape, device: torch.device, *, is_async: bool) -> Step:
    runtime = importlib.import_module(package)
    model, ids = make_model(shape, device), batch(shape)
    config = runtime.RoundPipeRunConfig(num_microbatch=shape.microbatches)
    pipe = runtime.wrap_model_to_roundpipe(model, model_run_config=config, **_options(package, device))
    with runtime.OptimizerCtx():
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, **_loss(package))
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        return float(loss)

    return step


def _options(package: str, device: torch.device) -> dict[str, Any]:
    return {"devices": [device], "check": False, "lower_threshold": 0} if package == "roundpipe_runtime" else {}


def _loss(package: str) -> dict[str, Any]:
    # there a loss has to be given, and is a sum over microbatches
    return {} if package == "roundpipe_runtime" else {"loss_fn": lambda outputs, _: outputs.loss}


def ours(shape: Shape, device: torch.device) -> Step:
    return _pipeline("roundpipe_runtime", shape, device, is_async=False)


def ours_async(shape: Shape, device: torch.device) -> Step:
    return _pipeline("roundpipe_runtime", shape, device, is_async=True)


def roundpipe(shape: Shape, device: torch.device) -> Step:
    return _pipeline("roundpipe", shape, device, is_async=True)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, device: torch.device) -> Step:
    ids = batch(shape).to(device)

    def step() -> float:
        total = torch.zeros((), device=device)
        for row in ids.split(1):
            loss = model(input_ids=row, labels=row).loss / shape.microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def resident(shape: Shape, device: torch.device) -> Step:
    """Everything stays on the device."""
    model = make_model(shape, device).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fused = device.type == "cuda"
    return _plain_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused), shape, device)


def fsdp(shape: Shape, device: torch.device) -> Step:
    """Weights, gradients and optimizer on the host; each layer is on the device while it computes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.NamedTemporaryFile(delete=False) as file:
        dist.init_process_group(backend, init_method=f"file://{file.name}2", rank=0, world_size=1)
    torch.accelerator.set_device_index(device.index or 0)
    mesh = init_device_mesh(device.type, (1,))
    model = make_model(shape, device).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return _plain_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), shape, device)


CONTESTANTS: dict[str, Callable[[Shape, torch.device], Step]] = {
    "this runtime": ours,
    "this runtime, asynchronous steps": ours_async,
    "PyTorch, all on the device": resident,
    "FSDP2, CPU offload": fsdp,
    "RoundPipe": roundpipe,
}
NEEDS = {"RoundPipe": "roundpipe"}


# -- one of them, in its process ---------------------------------------------------------------------------------------


def run_one(name: str, shape: Shape, device: torch.device, seconds: float) -> dict[str, Any]:
    """Run steps for some seconds, at least two after one that does not count, and one more for the bytes."""
    torch.accelerator.set_device_index(device.index or 0)
    step = CONTESTANTS[name](shape, device)
    losses = [step()]
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        losses.append(step())
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return {
        "losses": losses[:3],
        "seconds": times,
        "tokens per second": shape.microbatches * shape.tokens / statistics.median(times),
        "peak bytes": torch.accelerator.max_memory_allocated(device),
        "link bytes": link_bytes(step, device),
    }


def link_bytes(step: Step, device: torch.device) -> dict[str, int] | None:
    """The bytes up and down of a step, where they are counted."""
    if device.type == "late":
        from tests.accelerator import late

        late.counts()
        step()
        counts = late.counts()
        return {way: sum(n for what, n in counts.items() if what.startswith(f"bytes {way}")) for way in ("up", "down")}
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return copied_bytes(json.loads(path.read_text())["traceEvents"])


def copied_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """The bytes of copies between host and device among the events of a profile."""
    ways = {"up": "HtoD", "down": "DtoH"}
    found = dict.fromkeys(ways, 0)
    for event in events:
        for way, mark in ways.items():
            if str(event.get("cat", "")) == "gpu_memcpy" and mark in str(event.get("name", "")):
                found[way] += int(event["args"]["bytes"])
    return found


# -- all of them -------------------------------------------------------------------------------------------------------


def apart(name: str, shape: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """What one of them found in a process of its own, or why it found nothing."""
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        return {"error": f"{package} is not installed"}
    command = [sys.executable, __file__, "--contestant", name, "--shapes", shape, "--device", str(device)]
    command += ["--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {MINUTES} minutes"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        text = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"exit status {done.returncode}: {text[:300]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def agree(found: dict[str, dict[str, Any]]) -> list[str]:
    """Who has another first loss than plain PyTorch, or than the first one that has any."""
    losses = {name: one["losses"][0] for name, one in found.items() if "losses" in one}
    if not losses:
        return []
    right = losses.get("PyTorch, all on the device", next(iter(losses.values())))
    return [name for name, loss in losses.items() if not abs(loss - right) <= ROUNDING * abs(right)]


def described(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def measure(shapes: list[str], device: torch.device, seconds: float) -> dict[str, Any]:
    from roundpipe_runtime.cli.doctor.checks import train_difference
    from roundpipe_runtime.estimate.device_rates import measure_device

    difference = train_difference([str(device)])
    print(f"two steps on {device} differ from plain PyTorch by {difference:.1e}", flush=True)
    if not difference < 1e-3:
        raise SystemExit("That is too much: nothing else is measured.")
    small = {"nbytes": 2**20, "rows": 256} if shapes == ["tiny"] else {}
    rates = measure_device(device, **small)
    print(
        f"{rates.up / 1e9:.1f} GB/s up, {rates.down / 1e9:.1f} down, {rates.both / 1e9:.1f} both; "
        f"{rates.flops / 1e12:.1f} TFLOP/s; {rates.overlap:.0%} of a copy hidden",
        flush=True,
    )
    found: dict[str, Any] = {}
    for shape in shapes:
        found[shape] = {}
        for name in CONTESTANTS:
            found[shape][name] = one = apart(name, shape, device, seconds)
            shown = one.get("error") or (
                f"{one['tokens per second']:,.0f} tokens/s, peak {one['peak bytes'] / 1e9:.1f} GB, link "
                + (
                    ", ".join(f"{n / 1e9:.1f} GB {way}" for way, n in (one["link bytes"] or {}).items())
                    or "not counted"
                )
            )
            print(f"{shape}, {name}: {shown}", flush=True)
        for name in agree(found[shape]):
            found[shape][name]["error"] = "its loss differs from that of plain PyTorch"
            print(f"{shape}, {name}: {found[shape][name]['error']}: {found[shape][name]['losses']}", flush=True)
    fields = {name: getattr(rates, name) for name in rates.__slots__}
    return {"difference of a small training": difference, "rates": fields, "shapes": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1.7B,8B", help=f"some of {', '.join(SHAPES)}, with commas")
    parser.add_argument("--device", help="accelerator. Default: the first one")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of steps that are timed, for each program")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.device or "").startswith("late"):  # the reference accelerator, made of the CPU
        importlib.import_module("tests.accelerator.late")
    if not torch.accelerator.is_available():
        print("There is no accelerator here, so nothing is measured.")
        return 0
    device = torch.device(options.device or f"{torch.accelerator.current_accelerator()}:0")
    if options.contestant:
        shape = SHAPES[options.shapes]
        print(json.dumps(run_one(options.contestant, shape, device, options.seconds)), flush=True)
        os._exit(0)  # threads of the contestants may not end by themselves
    found = measure(options.shapes.split(","), device, options.seconds)
    if options.json:
        content = {"machine": f"{described(device)}; {machine()}", "versions": versions(), **found}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # a thread of autograd for a device may abort a process that ends after a backward


if __name__ == "__main__":
    sys.exit(main())
