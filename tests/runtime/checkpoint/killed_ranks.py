"""A training in several processes of which one is killed, again and again; all start again, also more or fewer.

    python -m tests.runtime.checkpoint.killed_ranks FOLDER --kind masters --kills 10 --seed 0 --ranks 2,3,1

It imports torch once and forks the ranks of an attempt. An attempt trains, saves every other step, and writes each loss
to ``FOLDER/losses``. One of its ranks, drawn at random, is killed with SIGKILL after a time drawn at random; the others
have to end by themselves. Without kills, this is the uninterrupted run.
"""

import argparse
import contextlib
import datetime
import os
import pathlib
import random
import signal
import sys
import time
import traceback
import warnings

import safetensors.torch  # noqa: F401 # here, and not in every attempt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
from torch import nn

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, load_checkpoint, save_checkpoint
from roundpipe_runtime.distributed.replicas.reduction import rows_of_rank
from tests.runtime.checkpoint.killed_training import write_digest

ROWS, REPLICAS = 13, 6
# seconds after which the ranks that are left must have ended
BOUND = 60


def build(kind, mesh):
    """The pipeline and its optimizer: with master weights in shards, or with shards that are rows of the weights."""
    torch.manual_seed(7)
    layers = [nn.Linear(16, 24), nn.Dropout(0.2), nn.LayerNorm(24), nn.Linear(24, 5), nn.Linear(5, 4)]
    has_masters = kind == "masters"
    pipe = RoundPipe(
        nn.Sequential(*layers).to(torch.bfloat16 if has_masters else torch.float32),
        optim_dtype=torch.float32 if has_masters else None, name="killed", devices="virtual:2",
        model_run_config=RoundPipeRunConfig(num_microbatch=2), mesh=mesh, replicas=REPLICAS,
    )  # fmt: skip
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def squares(outputs, labels):
    return ((outputs.float() - labels) ** 2).sum()


def train(folder, kind, rank, size, steps, started):
    """Go on from the last checkpoint to the end; rank 0 writes ``FOLDER/final`` there."""
    mesh = dist.init_device_mesh("cpu", (size,)) if size > 1 else None
    pipe, optimizer, scheduler = build(kind, mesh)
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    data = load_checkpoint(folder / "checkpoints", pipe, **parts)
    own = rows_of_rank(ROWS, rank, size, REPLICAS)
    started()

    def step_fn():
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(data["step"] if data else 0, steps):
        generator = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 4, generator=generator)
        inputs = inputs.to(torch.bfloat16 if kind == "masters" else torch.float32)
        loss = pipe.forward_backward((inputs[own],), label=labels[own], loss_fn=squares)
        if step % 3 != 1:  # gradients of two batches are added, with a checkpoint in between
            pipe.step(step_fn)
            scheduler.step()
        if rank == 0:
            with open(folder / "losses", "a", encoding="utf-8") as file:
                file.write(f"{step} {loss.item().hex()}\n")
        if step % 2:
            save_checkpoint(
                folder / "checkpoints", pipe, data={"step": step + 1}, keep=2, is_async=step % 4 == 1, **parts
            )
    pipe.synchronize()
    if rank == 0:
        write_digest(folder, pipe.state_dict().values())
    pipe.close()


def run_rank(options, rank, size, store, started):
    torch.set_num_threads(1)
    try:
        if size > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size,
                timeout=datetime.timedelta(seconds=BOUND // 2),
            )  # fmt: skip
        train(options.folder, options.kind, rank, size, options.steps, started)
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (options.folder / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        return 1
    return 0


def attempt(options, size, number, seconds, victim):
    store = options.folder / f"store-{number}"
    reader, writer = os.pipe()
    ranks = {}
    for rank in range(size):
        child = os.fork()
        if not child:
            os._exit(run_rank(options, rank, size, store, lambda: os.close(writer)))
        ranks[child] = rank
    os.close(writer)
    os.read(reader, 1)  # returns when all ranks have closed their ends: a launcher ends what has not begun
    os.close(reader)
    if seconds is not None:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(next(child for child, rank in ranks.items() if rank == victim), signal.SIGKILL)
    deadline = time.monotonic() + BOUND
    ends = {}
    while len(ends) < size and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            ends[ranks[child]] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    hung = sorted(set(ranks.values()) - set(ends))
    for child, rank in ranks.items():
        if rank in hung:
            os.kill(child, signal.SIGKILL)
    if hung:
        sys.exit(f"after rank {victim} of {size} was killed, ranks {hung} did not end within {BOUND} s: {ends}")
    if seconds is None and any(ends.values()):
        sys.exit(f"a training failed: {ends}\n" + "\n".join(p.read_text() for p in options.folder.glob("error-*")))
    return not any(ends.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kind", choices=["masters", "views"], default="masters")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.15, help="seconds of a step, with its checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1", help="how many of them, attempt by attempt")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(options.seed)
    ranks = [int(count) for count in options.ranks.split(",")]
    kills = 0
    for number in range(options.kills):
        size = ranks[number % len(ranks)]
        seconds = draws.uniform(0.0, options.pace * options.steps)
        if attempt(options, size, number, seconds, draws.randrange(size)):
            break  # it was through before it was killed
        kills += 1
    attempt(options, ranks[kills % len(ranks)], options.kills, None, None)
    sys.stdout.write(f"{kills} of {options.kills} kills\n")


if __name__ == "__main__":
    main()
