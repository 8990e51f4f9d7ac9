"""Whether a model learns through the pipeline what it learns without: bytes of real text, step by step.

    python benchmarks/bench_convergence.py [--steps N] [--json FILE]

A small Llama with random weights reads the help pages of Python. Once in a loop as a script for plain transformers has
it; then through the loop of `roundpipe train`, on one, two and three virtual devices. All of them start from the same
weights and see the same rows in the same order.

Two bars. The loss of the pipeline, over the last tenth of the steps and on held-out text, is within 0.5 % of the plain
one. The runs of the pipeline, which cut a batch into the same microbatches, are the same to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from roundpipe_runtime.fine_tune import (
    Blocks,
    ByteTokenizer,
    EvalRecord,
    ModelSource,
    Settings,
    StepRecord,
    Training,
    read_blocks,
    run,
)

LENGTH, ROWS, MICROBATCHES, SEED = 128, 8, 3, 0
BAR = 0.005


def source() -> ModelSource:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=ByteTokenizer.vocab_size,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=ByteTokenizer.eos_token_id,
    )
    return ModelSource.of(config, "a small Llama")


def text() -> Blocks:
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(topics):
            (Path(folder) / f"{name}.txt").write_text(topics[name], encoding="utf-8")
        return read_blocks([folder], ByteTokenizer(), length=LENGTH, eval_share=0.02, seed=SEED)


def settings(steps: int, devices: str) -> Settings:
    return Settings(batch=ROWS, microbatches=MICROBATCHES, steps=steps, lr=2e-3, warmup=20, seed=SEED, devices=devices)


def plainly(blocks: Blocks, steps: int) -> dict[str, Any]:
    """The loop of a script without this package, whatever the other one is made of."""
    model = source().load(seed=SEED)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=2e-3
    )
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: (t + 1) / 20 if t < 20 else 0.5 * (1 + math.cos(math.pi * (t - 20) / (steps - 20))),
    )
    losses = []
    begin = time.perf_counter()
    for rows in order(blocks, steps):
        ids = blocks.tokens[rows].long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    model.eval()
    held_out = blocks.tokens[blocks.held_out].long()
    with torch.no_grad():
        parts = [model(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in held_out.split(ROWS)]
    return {"losses": losses, "held_out": sum(parts) / len(held_out), "seconds": seconds, "weights": digest(model)}


def order(blocks: Blocks, steps: int) -> list[torch.Tensor]:
    """The rows of each step, which both loops are to see: those that the other one takes."""
    from roundpipe_runtime.fine_tune.trainer import Order

    taken = Order(blocks.training, seed=SEED)
    return [torch.tensor([taken[step * ROWS + row] for row in range(ROWS)]) for step in range(steps)]


def piped(blocks: Blocks, steps: int, devices: str) -> dict[str, Any]:
    """The loop of `roundpipe train`."""
    model = source().load(seed=SEED)
    losses, held_out = [], math.nan
    begin = time.perf_counter()
    records: list[StepRecord | EvalRecord] = []
    with Training(model, blocks, settings(steps, devices)) as training:
        run(training, show=records.append)
    for record in records:
        if isinstance(record, StepRecord):
            losses.append(record.loss)
        else:
            held_out = record.eval_loss
            seconds = time.perf_counter() - begin - record.seconds
    return {"losses": losses, "held_out": held_out, "seconds": seconds, "weights": digest(model)}


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def measure(steps: int) -> dict[str, Any]:
    blocks = text()
    found: dict[str, Any] = {"plain": plainly(blocks, steps)}
    for count in (1, 2, 3):
        found[f"virtual:{count}"] = piped(blocks, steps, f"virtual:{count}")
    is_equal = len({(one["weights"], *one["losses"]) for name, one in found.items() if name != "plain"}) == 1
    plain, pipe = found["plain"], found["virtual:2"]
    for other in (found["virtual:1"], found["virtual:3"]):  # which the file need not say twice
        del other["losses"]
    last = max(1, steps // 10)
    ends = [statistics.mean(run["losses"][-last:]) for run in (plain, pipe)]
    return {
        "machine": machine(),
        "torch": torch.__version__,
        "steps": steps,
        "rows": ROWS,
        "microbatches": MICROBATCHES,
        "tokens of a step": ROWS * LENGTH,
        "parameters": sum(p.numel() for p in source().load().parameters()),
        "relative difference at the end": abs(ends[1] - ends[0]) / ends[0],
        "relative difference held out": abs(pipe["held_out"] - plain["held_out"]) / plain["held_out"],
        "largest relative difference of a step": max(
            abs(one - other) / one for one, other in zip(plain["losses"], pipe["losses"], strict=True)
        ),
        "bit-equal on 1, 2 and 3 devices": is_equal,
        "runs": found,
    }


def print_table(found: dict[str, Any]) -> None:
    steps = found["steps"]
    plain, pipe = found["runs"]["plain"], found["runs"]["virtual:2"]
    print("step   plain      pipeline   relative difference")
    for step in sorted({*(round(steps * share / 10) for share in range(1, 11)), 1}):
        one, other = plain["losses"][step - 1], pipe["losses"][step - 1]
        print(f"{step:4}   {one:.6f}   {other:.6f}   {abs(one - other) / one:.1e}")
    print(f"held   {plain['held_out']:.6f}   {pipe['held_out']:.6f}   {found['relative difference held out']:.1e}")
    for name in ("relative difference at the end", "bit-equal on 1, 2 and 3 devices"):
        print(f"{name}: {found[name]}")
    print("; ".join(f"{name}: {run['seconds']:.0f} s" for name, run in found["runs"].items()) + f". {found['machine']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What a pipeline learns next to what the reference model learns.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.steps)
    print_table(found)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if max(found["relative difference at the end"], found["relative difference held out"]) > BAR:
        print(f"above its bar: the losses differ by more than {BAR:.1%}")
        return 1
    return 0 if found["bit-equal on 1, 2 and 3 devices"] else 1


if __name__ == "__main__":
    sys.exit(main())
