"""What the pipeline costs next to plain PyTorch and next to torch.distributed.pipelining, on two virtual devices.

    python benchmarks/bench_pipeline.py [--json FILE] [--repeat N]

A small transformer, the same batch, the same microbatches, two threads for all but one loop. Steps (forward,
loss, backward) are taken in turns, each program in processes of its own. The least of them counts, as other processes
only ever add to it; medians are in the file. "Overhead" is what a layer call costs beyond the call of the layer:
processor time of a pipeline of tiny layers, less that of the same calls in a loop, per layer and microbatch. The last
row trains a model four times as large as its devices.

Numbers above their bar are listed. The exit status is 0 also then, because a machine may be slow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package of the benchmarks, also in spawned processes

from benchmarks.bench_flatten import machine  # found there only
from benchmarks.turns import Contestant, in_turns

WIDTH, HEADS, LENGTH, VOCABULARY, BLOCKS = 128, 4, 64, 256, 8
MICROBATCHES, ROWS = 4, 8  # rows of one microbatch
TINY_LAYERS, TINY_WIDTH = 32, 8
STEP_BAR, OVERHEAD_BAR, PEER_BAR = 1.10, 150.0, 1.0


# -- the model and its batch -------------------------------------------------------------------------------------------


class Embed(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bytes(ids) + self.positions


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(Embed(), *blocks, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (MICROBATCHES * ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- who is compared ---------------------------------------------------------------------------------------------------


def plain(rank: int, world: int, path: str) -> Callable[[], float]:
    from torch.utils.checkpoint import checkpoint

    model, (ids, labels) = transformer(), batch()

    def step() -> float:
        model.zero_grad()
        total = 0.0
        for part, label in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            hidden = model[0](part)
            for layer in model[1:]:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            loss = loss_fn(hidden, label) / MICROBATCHES
            loss.backward()
            total += loss.item()
        return total

    return step


def pipeline(rank: int, world: int, path: str) -> Callable[[], float]:
    from roundpipe_runtime import RoundPipe, RoundPipeRunConfig

    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=MICROBATCHES)
    model, (ids, labels) = RoundPipe(transformer(), devices="virtual:2", model_run_config=config), batch()

    def step() -> float:
        model.zero_grad()
        return float(model.forward_backward((ids,), label=labels, loss_fn=loss_fn))

    return step


def _distributed(rank: int, world: int, path: str, schedule: str, *, recompute: bool) -> Callable[[], float]:
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.utils.checkpoint import checkpoint

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)

    class Recomputed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(self.layer, hidden, use_reentrant=False)
            return output

    layers = list(transformer())
    if recompute:
        layers = [layers[0], *map(Recomputed, layers[1:])]
    half = (len(layers) + 1) // 2
    model = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    stage = pipelining.PipelineStage(model, rank, world, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=loss_fn)
    ids, labels = batch()

    def step() -> float:
        model.zero_grad()
        if rank == 0:
            run.step(ids)
            return 0.0
        losses: list[torch.Tensor] = []
        run.step(target=labels, losses=losses)
        return float(torch.stack(losses).detach().mean())

    return step


def peer_1f1b(rank: int, world: int, path: str) -> Callable[[], float]:
    return _distributed(rank, world, path, "Schedule1F1B", recompute=True)


def peer_gpipe(rank: int, world: int, path: str) -> Callable[[], float]:
    return _distributed(rank, world, path, "ScheduleGPipe", recompute=True)


def peer_keeps_all(rank: int, world: int, path: str) -> Callable[[], float]:
    return _distributed(rank, world, path, "Schedule1F1B", recompute=False)


STEPS = {
    "plain": Contestant(plain, 1, 2),
    "plain, one thread": Contestant(plain, 1, 1),
    "pipeline": Contestant(pipeline, 1, 1),
    "1F1B": Contestant(peer_1f1b, 2, 1),
    "GPipe": Contestant(peer_gpipe, 2, 1),
    "1F1B, nothing recomputed": Contestant(peer_keeps_all, 2, 1),
}


# -- what a layer call costs beyond the layer ------------------------------------------------------------------------


def tiny() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(TINY_LAYERS)])
    return model, torch.randn(2 * MICROBATCHES, TINY_WIDTH), torch.randn(2 * MICROBATCHES, TINY_WIDTH)


def calls_alone(rank: int, world: int, path: str) -> Callable[[], None]:
    """What the layers themselves take: forward, forward again and backward of each, and nothing else."""
    model, inputs, labels = tiny()

    def step() -> None:
        for part, label in zip(inputs.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            kept = []
            with torch.no_grad():
                for layer in model:
                    kept.append(part)
                    part = layer(part)
            part.requires_grad_()
            nn.functional.mse_loss(part, label).backward()
            gradient = part.grad
            for layer, hidden in zip(reversed(model), reversed(kept), strict=True):
                hidden = hidden.detach().requires_grad_()
                layer(hidden).backward(gradient)
                gradient = hidden.grad

    return step


def tiny_pipeline(rank: int, world: int, path: str) -> Callable[[], None]:
    from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

    model, inputs, labels = tiny()
    # Four layers to a stage, and all but the last ones recomputed.
    last = TINY_LAYERS - 4
    plan = ModelExecutePlan(
        [range(first, min(first + 10, last)) for first in range(0, last, 10)],
        [range(first, first + 4) for first in range(last, -1, -4)],
    )
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=MICROBATCHES, execute_plan=plan)
    wrapped = RoundPipe(model, devices="virtual:2", model_run_config=config)

    def step() -> None:
        wrapped.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss)

    return step


TINY = {"layers": Contestant(calls_alone, 1, 1), "pipeline": Contestant(tiny_pipeline, 1, 1)}


# -- a model that is larger than its devices -------------------------------------------------------------------------


def too_large() -> dict[str, Any]:
    """Train a model four times as large as its device, and report what the devices held at most."""
    from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, VirtualDevice

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(64)])
    size = sum(p.nbytes for p in model.parameters())
    devices = [VirtualDevice(f"virtual:{number}", memory_limit=size // 4) for number in range(2)]
    wrapped = RoundPipe(model, devices=devices, model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
    for _ in range(2):
        wrapped.forward_backward((torch.randn(12, 128),), loss_fn=lambda outputs, _: outputs.square().mean())
    wrapped.close()
    return {"model": size, "limit": size // 4, "peak": max(device.peak for device in devices)}


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(repeat: int) -> dict[str, Any]:
    steps = in_turns(STEPS, repeat)
    losses = {name: samples.result for name, samples in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"These do not compute the same loss: {losses}")
    small = in_turns(TINY, 4 * repeat)
    calls = TINY_LAYERS * MICROBATCHES
    cpu = {name: 1e6 * min(samples.cpu) / calls for name, samples in small.items()}
    clock = {name: 1e6 * min(samples.seconds) / calls for name, samples in small.items()}
    others = [name for name in steps if name != "pipeline"]
    ours = steps["pipeline"]
    return {
        "milliseconds": {name: 1e3 * min(samples.seconds) for name, samples in steps.items()},
        "milliseconds, median": {name: 1e3 * samples.median for name, samples in steps.items()},
        "milliseconds of processors": {name: 1e3 * min(samples.cpu) for name, samples in steps.items()},
        "ratios": {f"pipeline / {name}": min(ours.seconds) / min(steps[name].seconds) for name in others},
        "ratios of medians": {f"pipeline / {name}": ours.median / steps[name].median for name in others},
        "microseconds per layer and microbatch": {
            "layers alone": cpu["layers"],
            "overhead, processor": cpu["pipeline"] - cpu["layers"],
            "overhead, clock": clock["pipeline"] - clock["layers"],
        },
        "memory": too_large(),
    }


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    times, ratios = found["milliseconds"], found["ratios"]
    costs, memory = found["microseconds per layer and microbatch"], found["memory"]
    rows = [["one step", f"pipeline {times['pipeline']:.1f} ms", "", ""]]
    bars = {"plain": STEP_BAR, "1F1B": PEER_BAR, "GPipe": PEER_BAR}
    titles = {
        "plain": "loop with checkpointing",
        "plain, one thread": "the same with one thread",
        "1F1B": "torch.distributed 1F1B",
        "GPipe": "torch.distributed GPipe",
        "1F1B, nothing recomputed": "the same, nothing recomputed",
    }
    for name, title in titles.items():
        bar = f"at most {bars[name]:.2f}x" if name in bars else "for comparison"
        rows.append([f"next to {title}", f"{times[name]:.1f} ms", f"{ratios[f'pipeline / {name}']:.2f}x", bar])
    rows.append(["overhead per layer and microbatch", f"layer {costs['layers alone']:.0f} µs",
                 f"{costs['overhead, processor']:.0f} µs", f"at most {OVERHEAD_BAR:.0f} µs"])  # fmt: skip
    rows.append(["the same by the clock", "", f"{costs['overhead, clock']:.0f} µs", ""])
    rows.append(["copies on a device at most", f"model {memory['model'] / 1e6:.2f} MB",
                 f"{memory['peak'] / 1e6:.2f} MB", f"at most {memory['limit'] / 1e6:.2f} MB"])  # fmt: skip
    return rows


def missed(found: dict[str, Any]) -> list[str]:
    ratios, memory = found["ratios"], found["memory"]
    overhead = found["microseconds per layer and microbatch"]["overhead, processor"]
    checks = [
        ("the step next to a loop", ratios["pipeline / plain"], STEP_BAR),
        ("the step next to 1F1B", ratios["pipeline / 1F1B"], PEER_BAR),
        ("the step next to GPipe", ratios["pipeline / GPipe"], PEER_BAR),
        ("overhead", overhead, OVERHEAD_BAR),
        ("bytes of copies", memory["peak"], memory["limit"]),
    ]
    return [f"{name}: {value:.2f}, and at most {bar:.2f} was wanted" for name, value, bar in checks if value > bar]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--repeat", type=int, default=15, help="samples of a step; the least counts")
    options = parser.parse_args()
    found = measure(options.repeat)
    print_table(rows_of(found))
    print(f"{BLOCKS} blocks of width {WIDTH}, {MICROBATCHES} microbatches of {ROWS} x {LENGTH} bytes, 2 threads each; "
          f"{options.repeat} steps; load {os.getloadavg()[0]:.1f}")  # fmt: skip
    for line in missed(found):
        print("above its bar:", line)
    if options.json:
        content = {"machine": machine(), "torch": torch.__version__, "load": os.getloadavg(), **found}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
