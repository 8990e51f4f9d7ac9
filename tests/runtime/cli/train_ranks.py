"""`roundpipe train` in the processes of `run_ranks`, as torchrun starts it: exit statuses, what each shows, seconds.

Under the agent of torchrun, which starts the ranks again when one was killed:

    python -m tests.runtime.cli.train_ranks FOLDER KILLS

A kill is `rank:steps:call`: of the layers that the rank calls when so many steps are done, the one in which it gets
SIGKILL; the first start has the first kill, and so on.
"""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from roundpipe_runtime.__main__ import main

COMMAND = ["train", "--model", "conf", "--length", "16", "--batch", "5", "--microbatches", "2", "--lr", "1e-2",
           "--no-check", "--schedule", "constant", "--warmup", "0"]  # fmt: skip


class BadRowError(Exception):
    """An error of a layer."""


def run(*arguments: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    dist.barrier()
    begin = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*COMMAND, *arguments])
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.monotonic() - begin}


@contextlib.contextmanager
def bad_layer(rank: int, call: int, notes: list[float]) -> Iterator[None]:
    """A block in which the second layer of a Llama fails on one rank, from one of its trained calls on; notes when."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward, calls = LlamaDecoderLayer.forward, [0]

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_trained = self.training and torch.is_grad_enabled()  # and not cut
        if is_trained and self.self_attn.layer_idx == 1:  # another device may compute another layer at the same time
            calls[0] += 1
            if calls[0] >= call and dist.get_rank() == rank:  # from then on: the first may be a check of a few rows
                notes[:] = [time.monotonic()]
                raise BadRowError("a bad row")
        return forward(self, *args, **kwargs)

    LlamaDecoderLayer.forward = failing
    try:
        yield
    finally:
        LlamaDecoderLayer.forward = forward


def in_ranks(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.chdir(folder)
    half = run("texts", "-o", "half", "--steps", "2", "--devices", "virtual:2", "--checkpoint", "c", "--metrics",
               "half.jsonl", "--timeline", "t.json")  # fmt: skip
    goes_on = run("texts", "-o", "whole", "--steps", "3", "--devices", "virtual:1", "--checkpoint", "of one",
                  "--metrics", "whole.jsonl", "--resume")  # fmt: skip
    found = {
        "half": half,
        "goes on": goes_on,
        "few groups": run("texts", "-o", "x", "--replicas", "1"),
        "many groups": run("texts", "-o", "x", "--replicas", "6"),
        "few rows": run("texts", "-o", "x", "--batch", "1", "--microbatches", "1"),
        "other texts": run(f"texts/{rank}.txt", "-o", "x"),
        "no text": run("texts" if rank == "0" else "gone.txt", "-o", "x"),
        "another option": run("texts", "-o", "x", "--clip", "1.0" if rank == "0" else "0.5"),
        "output": run("texts", "-o", "whole"),
    }
    moments: list[float] = []
    with bad_layer(1, 3, moments):
        found["layer"] = run("texts", "-o", "x", "--steps", "4")
    found["layer"].update(failed=moments, ended=time.monotonic())  # a clock that processes share
    return found


def work(folder: str, kills: list[str]) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(kills):
        rank, steps, call = map(int, kills[start].split(":"))
        if int(os.environ["RANK"]) == rank:
            _kill_in_call(steps, call)
    status = main([*COMMAND, "texts", "-o", "ranks", "--steps", "3", "--devices", "virtual:1", "--every", "1",
                   "--metrics", "ranks.jsonl"])  # fmt: skip
    if status:
        sys.exit(status)


def _kill_in_call(steps: int, number: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward, calls, metrics = LlamaDecoderLayer.forward, [0], Path("ranks.jsonl")

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += metrics.exists() and metrics.read_text().count('"loss"') >= steps
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *args, **kwargs)

    LlamaDecoderLayer.forward = dying


def launch(folder: str, kills: list[str]) -> None:
    """Do what `torchrun --standalone --nproc-per-node=2` does, with forks as workers."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="test",
        max_restarts=len(kills), monitor_interval=0.05, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, work)(folder, kills)


if __name__ == "__main__":
    launch(sys.argv[1], sys.argv[2:])
