"""One model in several processes over gloo: what the exchange costs, what it hides, what it sends and keeps.

    python benchmarks/bench_ranks.py [--ranks 2] [--turns 4] [--json docs/data/bench-ranks.json]

cost      CPU seconds per step and rank, taking turns in one run: a pipeline that exchanges nothing, the
          same with ranks, and FSDP2 with a shard per layer; 25 M parameters, activations recomputed, fused AdamW
line      layers that sleep, and a line that sleeps as long as its bytes take: what of it is not hidden
memory    bytes per parameter of what stays on the host, counted; weights in bfloat16, the rest in float32
sent      bytes per parameter that a rank sends in a step, and its collectives, next to what the formula states
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe_runtime import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

ROWS, LENGTH, STEPS_OF_A_TURN = 4, 128, 2
LAYERS, SECONDS = 12, 0.02


def llama(hidden: int = 512, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2048, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def batch(rank: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(0, 2048, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def sharded_by_torch(mesh: DeviceMesh) -> Callable[[dict[str, torch.Tensor]], None]:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    model.train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(rows: dict[str, torch.Tensor]) -> None:
        model(**rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipelined(mesh: DeviceMesh | None, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any]:
    pipeline = wrap_model_to_roundpipe(
        model or llama(), lower_threshold=0, devices="virtual:1", name="bench", mesh=mesh, check=False, **options
    )
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4, fused=True)
    config = RoundPipeRunConfig(num_microbatch=2)

    def update() -> None:
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    def step(rows: dict[str, torch.Tensor]) -> None:
        pipeline.forward_backward(input_kwargs=rows, run_config=config)
        pipeline.step(update)

    return pipeline, optimizer, step


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cost(mesh: DeviceMesh, turns: int) -> dict[str, float]:
    """CPU seconds of a step, medians over turns, and their ratios turn by turn."""
    alone, ranks = pipelined(None), pipelined(mesh)
    steps = {"alone": alone[2], "ranks": ranks[2], "FSDP2": sharded_by_torch(mesh)}
    ends = {"alone": alone[0].synchronize, "ranks": ranks[0].synchronize}
    used: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(turns + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            dist.barrier()
            begin = processor_seconds()
            for number in range(STEPS_OF_A_TURN):
                steps[name](batch(dist.get_rank(), STEPS_OF_A_TURN * turn + number))
            ends.get(name, lambda: None)()  # what is gathered next to a run belongs to this turn
            total = torch.tensor([(processor_seconds() - begin) / STEPS_OF_A_TURN])
            dist.all_reduce(total)
            if turn:
                used[name].append(total.item() / dist.get_world_size())
    for pipeline in (alone[0], ranks[0]):
        pipeline.close()

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(used[one], used[other], strict=True))

    found = {f"seconds of {name}": statistics.median(values) for name, values in used.items()}
    return {**found, "ranks over alone": ratio("ranks", "alone"), "ranks over FSDP2": ratio("ranks", "FSDP2")}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # as torch documents it
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # as above
        time.sleep(2 * SECONDS)
        return gradient


class SleepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Sleep.apply(self.linear(x))
        return found


def line(mesh: DeviceMesh) -> dict[str, float]:
    """Seconds of a step without a line, and what is exposed of a line that takes half of that."""
    torch.manual_seed(0)
    model = nn.Sequential(*(SleepingLayer() for _ in range(LAYERS)))
    pipeline = RoundPipe(model, devices="virtual:1", name="line", mesh=mesh)
    engine: Any = pipeline._rp_engine
    engine.planner.prefers_one_thread = lambda kind: False
    ranks, rate = engine.groups.ranks, [0.0]

    def slow(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            before, begin = sum(ranks.sent.values()), time.perf_counter()
            method(*arguments)
            if rate[0]:
                seconds = (sum(ranks.sent.values()) - before) / rate[0]
                time.sleep(max(0.0, seconds - (time.perf_counter() - begin)))

        return call

    ranks.all_to_all, ranks.gather = slow(ranks.all_to_all), slow(ranks.gather)
    plan = ModelExecutePlan(
        [range(i, i + 1) for i in range(LAYERS - 1)], [range(i, i + 1) for i in range(LAYERS)][::-1]
    )
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan, loss_reduction="mean")
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(4, 256), torch.randn(4, 256)

    def seconds(steps: int) -> float:
        pipeline.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            pipeline.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss, run_config=config)
            pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipeline.synchronize()
        dist.barrier()
        return (time.perf_counter() - begin) / steps

    seconds(1)
    before = sum(ranks.sent.values())
    compute = min(seconds(3) for _ in range(2))
    sent = (sum(ranks.sent.values()) - before) / 6
    rate[0] = sent / (0.5 * compute)
    exposed = min(seconds(5) for _ in range(2)) - compute
    pipeline.close()
    return {"seconds of a step": compute, "seconds of the line": 0.5 * compute, "exposed": exposed / (0.5 * compute)}


def nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    found = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(found.values())


def memory_and_sent(mesh: DeviceMesh) -> dict[str, float]:
    """Bytes per parameter that a rank keeps and sends, next to what the formulas state."""
    size = mesh.size()
    model = llama(256, torch.bfloat16)
    pipeline, optimizer, step = pipelined(mesh, model, optim_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    layer = max(sum(p.numel() for p in one.parameters()) for one in pipeline._rp_engine.layers)
    step(batch(dist.get_rank(), 0))
    pipeline.synchronize()
    ranks = pipeline.ranks
    sent, calls = dict(ranks.sent), dict(ranks.calls)
    step(batch(dist.get_rank(), 1))
    pipeline.synchronize()
    channels = ("data", "weights")
    by_data, by_weights = (ranks.sent[name] - sent[name] for name in channels)
    called = sum(ranks.calls[name] - calls[name] for name in channels)
    pipeline.forward_backward(input_kwargs=batch(dist.get_rank(), 2), run_config=RoundPipeRunConfig(num_microbatch=2))
    targets = list(pipeline.optim_parameters())
    state = [v for values in optimizer.state.values() for name, v in values.items() if name != "step"]
    kept = nbytes([*parameters, *targets, *(target.grad for target in targets), *state])
    vectors = sum(p.numel() for p in parameters if p.dim() < 2)
    share = (size - 1) / size
    found = {
        "bytes per parameter kept": kept / count,
        "bytes per parameter kept, formula": 2 + 16 / size,
        "bytes per parameter of the largest layer": 2 * 4 * layer / count,
        "bytes per parameter sent": (by_data + by_weights) / count,
        "bytes per parameter sent, formula": (4 * share * (count - vectors) + 2 * (size - 1) * vectors) / count,
        "collectives of a step": called,
        "layers": len(pipeline._rp_engine.layers),
    }
    pipeline.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", default=None)
    given = parser.parse_args()
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
        sys.exit(
            subprocess.run([*launch, __file__, *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
        )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ranks": mesh.size(),
        "load": [os.getloadavg()[0]],
    }
    for name, part in (("line", line), ("memory and sent", memory_and_sent)):
        found[name] = part(mesh)
    found["parameters"] = sum(p.numel() for p in llama().parameters())
    found["cost"] = cost(mesh, given.turns)
    found["load"].append(os.getloadavg()[0])
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                file.write(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
