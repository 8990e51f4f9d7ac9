"""A training that is killed, again and again, and resumed each time until it is through. A program of its own.

    python -m tests.runtime.checkpoint.killed_training FOLDER --kind adam --kills 30 --seed 0 --devices 2,3,1

It imports torch once and forks a process per attempt. An attempt trains, saves after every step, and writes each loss
to ``FOLDER/losses``. It is killed with SIGKILL: after a time drawn at random, or, with ``--at file``, at the n-th thing
that it does to a file of the folder. Without kills, this is the uninterrupted run.
"""

import argparse
import hashlib
import os
import pathlib
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable

import numpy
import safetensors.torch  # noqa: F401 # here, and not in every attempt
import torch
from torch import nn

import roundpipe_runtime
from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, load_checkpoint, optim, save_checkpoint

ROWS = 8
# A kill comes within so many things done to files, which is about two steps.
FILE_EVENTS = 90


def build(kind: str, devices: int, steps: int, host: str):
    torch.manual_seed(7)
    layers = [
        nn.Linear(16, 24), nn.Dropout(0.2), nn.LayerNorm(24), nn.Linear(24, 24), nn.Dropout(0.2), nn.Linear(24, 4),
    ]  # fmt: skip
    layers.append(nn.BatchNorm1d(4))
    model = nn.Sequential(*layers)
    half = kind in ("scaled", "half", "disk")
    pipe = RoundPipe(
        model.bfloat16() if half else model, optim_dtype=torch.float32 if half else None,
        devices=f"virtual:{devices}", host=host,
        model_run_config=RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3),
    )  # fmt: skip
    with OptimizerCtx():
        makes = {"sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)}
        optimizer = makes.get(kind, lambda params: optim.Adam(params, lr=0.01))(pipe.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps + 1)
    scaler = roundpipe_runtime.GradScaler(init_scale=2.0**6, growth_interval=5) if kind == "scaled" else None
    return pipe, optimizer, scheduler, scaler


def draw_batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch from all three generators, so that each must be where it was."""
    inputs = torch.randn(ROWS, 16) * random.uniform(0.5, 2.0)
    labels = inputs[:, :4].cos() + torch.from_numpy(numpy.random.standard_normal((ROWS, 4))).float() * 0.1
    return inputs.to(dtype), labels.to(dtype)


def train(folder: pathlib.Path, kind: str, devices: int, steps: int, started: Callable[[], None]) -> None:
    """Go on from the last checkpoint to the end; write ``FOLDER/final`` there."""
    torch.set_num_threads(1)
    is_on_disk = kind == "disk"
    pipe, optimizer, scheduler, scaler = build(kind, devices, steps, f"disk:{folder}" if is_on_disk else "memory")
    random.seed(1)
    numpy.random.seed(2)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    scale = scaler.scale if scaler else lambda loss: loss

    def step_fn():
        scaler.step(optimizer) if scaler else optimizer.step()
        optimizer.zero_grad()

    started()
    data = load_checkpoint(folder / "checkpoints", pipe, **parts)
    dtype = next(pipe.parameters()).dtype
    for step in range(data["step"] if data else 0, steps):
        inputs, labels = draw_batch(dtype)
        loss = pipe.forward_backward(
            (inputs,), label=labels, loss_fn=lambda o, y: scale(nn.functional.mse_loss(o.float(), y.float()))
        )
        if step % 3 != 1:  # gradients of two batches are added, with a checkpoint in between
            pipe.step(step_fn)
            if scaler:
                scaler.update()
            scheduler.step()
        with open(folder / "losses", "a", encoding="utf-8") as file:
            file.write(f"{step} {loss.item().hex()}\n")
        save_checkpoint(
            folder / "checkpoints", pipe, data={"step": step + 1}, keep=2, **parts,
            is_async=step % 2 == 0 and not is_on_disk,
        )  # fmt: skip
    write_digest(folder, [*pipe.state_dict().values(), *pipe.optim_parameters()])
    pipe.close()


def write_digest(folder: pathlib.Path, tensors: Iterable[torch.Tensor]) -> None:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    (folder / "final").write_text(digest.hexdigest(), encoding="utf-8")


def attempt(options: argparse.Namespace, devices: int, seconds: float | None, file_event: int | None) -> bool:
    """Train in a process of its own that is killed; tell whether it came to the end before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if file_event is not None:
            die_at(options.folder / "checkpoints", file_event)
        train(options.folder, options.kind, devices, options.steps, lambda: os.close(writer))
        sys.exit(0)  # as a program ends: threads are waited for
    os.close(writer)
    os.read(reader, 1)  # returns when the child has closed its end
    os.close(reader)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"a training failed with {os.WEXITSTATUS(status)}")
    return os.WIFEXITED(status)


_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir", "os.chmod"}


def die_at(folder: pathlib.Path, number: int) -> Callable[[object], bool]:
    """Kill this process at the n-th change of the folder; returns what counts a change and tells if it is the n-th."""
    count = [number]

    def happens(path: object) -> bool:
        count[0] -= str(folder) in str(path)
        return count[0] < 0

    def hook(event, args):
        if event in _FILE_EVENTS and happens(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return happens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kind", choices=["adam", "sgd", "scaled", "half", "disk"], default="adam")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--at", choices=["time", "file"], default="time")
    parser.add_argument("--here", action="store_true", help="train in this process, once")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step, with its checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", default="2")
    options = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"Layer \d+ .*normalizes each microbatch")
    torch.set_num_threads(1)  # the same in every process that goes on with a training
    options.folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(options.seed)
    devices = [int(count) for count in options.devices.split(",")]
    if options.here:
        train(options.folder, options.kind, devices[0], options.steps, lambda: None)
        return
    longest = options.pace * options.steps / max(options.kills, 1)  # so that half of the steps are left at the end
    half = kills = 0
    for number in range(options.kills):
        seconds = draws.uniform(0.0, longest) if options.at == "time" else None
        event = draws.randrange(FILE_EVENTS) if options.at == "file" else None
        if attempt(options, devices[number % len(devices)], seconds, event):
            break
        kills += 1
        half += any(path.name.startswith(".") for path in options.folder.glob("checkpoints/.*"))
    start = time.perf_counter()
    attempt(options, devices[-1], None, None)
    pace = (time.perf_counter() - start) / options.steps
    sys.stdout.write(f"{kills} kills, {half} in the middle of a checkpoint, {pace:.4f} seconds per step\n")


if __name__ == "__main__":
    main()
