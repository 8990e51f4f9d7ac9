"""Functions that run in several processes at once, connected by gloo.

    run_ranks("tests.runtime.distributed.module:function", 2, "argument")  # what the function returned, rank by rank

The processes are forks of one that has imported what a training needs (`tests/fresh_process`): they start at once.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

__all__ = ["run_ranks"]


def run_ranks(function: str, size: int, *arguments: Any, timeout: float = 120) -> list[Any]:
    from tests import fresh_process

    with tempfile.TemporaryDirectory() as folder:
        program = ("-m", __name__, function, str(size), folder, json.dumps(arguments))
        fresh_process.run(*program, timeout=timeout, imported=fresh_process.TRAINER)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def _start(function: str, size: int, folder: str, arguments: list[Any]) -> None:
    """Fork the ranks and wait for all; when one has failed, the others are not waited for."""
    importlib.import_module(function.partition(":")[0])  # once, and not in every rank
    children = {}
    for rank in range(size):
        child = os.fork()
        if not child:
            os._exit(_rank(function, rank, size, folder, arguments))
        children[child] = rank
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        was_ended = os.WIFSIGNALED(status) and Path(folder, f"{rank}.json").exists()  # by another, after its result
        if status and not was_ended:
            for other in children:
                os.kill(other, 9)
            sys.exit(1)


def _rank(function: str, rank: int, size: int, folder: str, arguments: list[Any]) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
        module, _, name = function.partition(":")
        found = getattr(importlib.import_module(module), name)(*arguments)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sys.stderr.write(f"rank {rank}\n{traceback.format_exc()}")
        sys.stderr.flush()
        return 1
    return 0


if __name__ == "__main__":
    _start(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
