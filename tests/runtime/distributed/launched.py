"""A script that trains with the Trainer, as a user has one; `accelerate launch` or torchrun starts it.

accelerate launch --multi_gpu --num_processes 2 -m tests.runtime.distributed.launched FOLDER
"""

import os
import sys
import warnings
from pathlib import Path

import torch

from roundpipe_runtime import RoundPipeTrainer
from tests.runtime.distributed.trainer_ranks import train


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    found = train(RoundPipeTrainer, folder / "run", 4, devices="virtual:2", microbatches=2)
    torch.save(found["weights"], folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
