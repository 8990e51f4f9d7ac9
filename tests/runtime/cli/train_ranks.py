"""`roundpipe train` in the processes of `run_ranks`, as torchrun starts it: exit statuses, what each shows, seconds."""

import contextlib
import io
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from roundpipe_runtime.__main__ import main

COMMAND = ["train", "--model", "conf", "--length", "16", "--batch", "5", "--microbatches", "2", "--lr", "1e-2",
           "--no-check", "--schedule", "constant", "--warmup", "0"]  # fmt: skip


class BadRowError(Exception):
    """An error of a layer."""


def run(*arguments: str) -> dict[str, Any]:
    """Run a command; return its exit status, and what this rank shows."""
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
    """All commands, in one start of the processes."""
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
