"""A script for the Trainer that is killed, again and again, and goes on each time. A program of its own.

    python -m tests.runtime.huggingface.trainer.killed_trainer FOLDER --kills 4 --seed 0

It imports everything once and forks a process per attempt. An attempt goes on with ``resume_from_checkpoint=True`` if
there is a checkpoint, saves after every step, keeps two, and writes each loss to ``FOLDER/losses``. It is killed with
SIGKILL at the n-th thing that it does to a file, where weights and states of torch count as well, half-way through.
"""

import argparse
import os
import pathlib
import random
import signal
import sys
import warnings

import safetensors.torch
import torch
import transformers
from transformers import TrainerCallback

from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from tests.runtime.checkpoint.killed_training import die_at, write_digest
from tests.runtime.huggingface.trainer.trainer_runs import arguments, make_model, make_trainer

# A kill comes within so many things done to files, which is about one and a half steps.
FILE_EVENTS = 60


class WritesLosses(TrainerCallback):
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            with open(self.folder / "losses", "a", encoding="utf-8") as file:
                file.write(f"{state.global_step} {logs['loss'].hex()} {logs['learning_rate'].hex()}\n")


def train(folder: pathlib.Path, devices: int, steps: int) -> None:
    torch.set_num_threads(1)
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "eval_strategy": "no"}
    trainer = make_trainer(
        "gpt2", arguments(folder / "run", steps, **saving), RoundPipeTrainer,
        model=make_model("gpt2", dropout=0.1).to(torch.bfloat16), optim_dtype=torch.float32,
        devices=f"virtual:{devices}", callbacks=[WritesLosses(folder)],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    begun = any((folder / "run").glob("checkpoint-*")) or any((folder / "run").glob(".checkpoint-*"))
    try:
        trainer.train(resume_from_checkpoint=begun)
    except ValueError as error:  # killed before the first was complete
        if "No valid checkpoint" not in str(error):
            raise
        trainer.train()
    write_digest(folder, [*trainer.model.state_dict().values(), *trainer.pipeline.optim_parameters()])
    trainer.pipeline.close()


def die_half_way(folder: pathlib.Path, number: int) -> None:
    """Kill this process at the n-th thing that it does to files of the folder, or in the middle of writing one."""
    happens = die_at(folder, number)

    def half_way(write, path_of):
        def writing(*args, **kwargs):
            result = write(*args, **kwargs)
            if happens(path := path_of(*args, **kwargs)):
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return writing

    torch.save = half_way(torch.save, lambda value, path, *args, **kwargs: path)
    save_file = half_way(safetensors.torch.save_file, lambda tensors, filename, *args, **kwargs: filename)
    transformers.modeling_utils.safe_save_file = safetensors.torch.save_file = save_file


def attempt(folder: pathlib.Path, devices: int, steps: int, event: int | None) -> bool:
    """Train in a process of its own, which may be killed; tell whether it came to the end before."""
    child = os.fork()
    if child == 0:
        if event is not None:
            die_half_way(folder / "run", event)
        train(folder, devices, steps)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"a training failed with {os.WEXITSTATUS(status)}")
    return os.WIFEXITED(status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("error")
    options.folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(options.seed)
    kills = half = 0
    for number in range(options.kills):
        if attempt(options.folder, 1 + number % 3, options.steps, draws.randrange(FILE_EVENTS)):
            break
        kills += 1
        half += any((options.folder / "run").glob(".checkpoint-*"))
    attempt(options.folder, 2, options.steps, None)
    sys.stdout.write(f"{kills} kills, {half} in the middle of a checkpoint\n")


if __name__ == "__main__":
    main()
