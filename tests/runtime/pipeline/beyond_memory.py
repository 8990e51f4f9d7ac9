"""Train a model with its state on a disk, and measure resident memory. A program of its own.

    python -m tests.runtime.pipeline.beyond_memory FOLDER disk 12

It prints a line of JSON: bytes of weights, gradients, master weights and moments, the losses, and the largest resident
memory that came on top of what the process had before, by what it was doing.
"""

import contextlib
import json
import pathlib
import sys

import safetensors.torch  # noqa: F401 # before the memory is measured
import torch
from torch import nn

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, load_checkpoint, save_checkpoint

# Bytes per parameter: weight in bfloat16; gradient, master weight and two moments in float32.
BYTES = 2 + 4 + 4 + 8
WIDTH, STEPS = 512, 2


class Block(nn.Module):
    """A layer of four times its width inside, as those of language models are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def status(entry: str) -> int:
    """Bytes of an entry of the kernel's report on this process."""
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.partition(f"{entry}:")[2].split()[0])


def pipeline(folder: pathlib.Path, host: str, layers: int) -> tuple[RoundPipe, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(WIDTH).bfloat16() for _ in range(layers)])
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
    place = f"disk:{folder}" if host == "disk" else "memory"
    pipe = RoundPipe(model, torch.float32, devices="virtual:1", model_run_config=config, host=place)
    with OptimizerCtx():
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-3)


def main() -> None:
    folder, host, layers = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    with torch.device("meta"):
        count = layers * sum(p.numel() for p in Block(WIDTH).parameters())
    before, found = status("VmRSS"), dict[str, int]()

    @contextlib.contextmanager
    def during(what: str):
        """Note the largest resident memory of what is done here, beyond that before."""
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begins a new peak
        yield
        found[what] = max(found.get(what, 0), status("VmHWM") - before)

    with during("made"):
        pipe, optimizer = pipeline(folder, host, layers)
    losses = []
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(STEPS):
        with during("run"):
            loss = pipe.forward_backward((x,), label=x.float(), loss_fn=lambda out, label: ((out - label) ** 2).mean())
            losses.append(loss.item().hex())
        with during("clip"):
            torch.nn.utils.clip_grad_norm_(pipe.optim_parameters(), 0.1)
        with during("step"):
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    with during("save"):
        save_checkpoint(folder / "checkpoints", pipe, optimizer=optimizer)
    with during("load"):
        load_checkpoint(folder / "checkpoints", pipe, optimizer=optimizer)
    pipe.close()
    sys.stdout.write(json.dumps({"state": BYTES * count, "losses": losses, **found}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
