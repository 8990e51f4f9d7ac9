"""`roundpipe train` under the agent of torchrun, which starts it again when a rank was killed.

    python -m tests.runtime.cli.restarted_ranks FOLDER KILLS

A kill is `rank:steps:call`: of the layers that the rank calls when so many steps are done, the one in which it gets
SIGKILL; the first start has the first kill, and so on.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from roundpipe_runtime.__main__ import main
from tests.runtime.cli.train_ranks import COMMAND


def work(folder: str, kills: list[str]) -> None:
    """One rank, in one start."""
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
