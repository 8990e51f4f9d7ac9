"""``roundpipe demo``: train a transformer larger than its devices on real text, and compare with PyTorch alone.

The pipeline and plain PyTorch start from the same weights and train on the same batches of 10 rows. The pipeline splits
a batch into microbatches of 4, 3 and 3 rows. Before the training, separate steps measure the peak memory of a device.
"""

# help pages of Python --> bytes --> batch --+--> plain, on a device of 4 MB: refused
#                                            +--> plain, on the host -> loss, ms -----+
#                                            |                                        +--> one row of the table
#                                            +--> 2 devices of 4 MB --> loss, ms -----+--> who ran what when, drawn

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import nn

from yobx_flatten.core.terminal.command_line import console as make_console
from yobx_flatten.core.terminal.command_line import say_json
from yobx_flatten.errors.failures import format_bytes, table

from ..device.protocol import Event
from ..device.virtual import VirtualDevice
from ..device.worker import generator_kept
from ..engine.config import RoundPipeRunConfig
from ..errors import DeviceMemoryError
from ..estimate.footprint import Footprint, storage_bytes
from ..optim.step import OptimizerCtx
from ..optim.torch_steps import Adam
from ..pipeline import RoundPipe
from ..schedule.timeline import Timeline, draw_on

STEPS, SHOWN_EVERY, COUNTED_STEPS = 24, 4, 2
ROWS, LENGTH, WIDTH, BLOCKS = 10, 32, 96, 12
DEVICES, LIMIT = 2, 4_000_000  # bytes of each device: fewer than the bytes of the weights
TOLERANCE = 1e-4  # Adam normalizes gradients, so rounding differences grow with each step

_Batch = tuple[torch.Tensor, torch.Tensor]
_LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def demo(
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of steps to train.")] = STEPS,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; the tables go to stderr.")] = False,
) -> int:
    """Train a transformer that is larger than its devices, compare it with PyTorch alone, and draw a timeline.

    The pipeline runs on two simulated devices; each has less memory than the weights need. Plain PyTorch
    cannot train this model on one of these devices, so plain PyTorch trains the model in CPU memory.

    Exit status: 0 the losses are equal up to rounding; 1 they differ; 2 the demo cannot run.
    """
    console = make_console(stderr=json)
    small = [VirtualDevice(f"virtual:{index}", memory_limit=LIMIT) for index in range(DEVICES)]
    config = RoundPipeRunConfig(loss_reduction="mean")
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # small operations are slower with several threads
        pipeline = stack.enter_context(contextlib.closing(RoundPipe(_build(), devices=small, model_run_config=config)))
        plain = _build()
        count = sum(parameter.numel() for parameter in plain.parameters())
        console.print("A model that is larger than its device", style="bold")
        console.print(
            f"Text: the help pages of Python, a token per byte. Model: a transformer of {BLOCKS} blocks, {count:,} "
            f"parameters, random weights, {ROWS} rows per step. Devices: {DEVICES}, simulated on the CPU, with "
            f"{format_bytes(LIMIT)} of memory each."
        )
        needs = measure_needs(plain, list(_batches(COUNTED_STEPS)), _loss_fn, LIMIT, DEVICES)
        _compare(console, needs)
        losses, seconds, timeline = _train(console, plain, pipeline, steps)
    largest = max(abs(one - other) for one, other in losses)
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    verdict = "which is rounding." if largest < TOLERANCE else "[bold red]THE LOSSES DIFFER.[/]"
    console.print(f"\nLargest difference of {len(seconds)} steps: {largest:.1e}, {verdict}")
    console.print(
        f"Time of a step: {1000 * medians[0]:.0f} ms in plain PyTorch (one thread), {1000 * medians[1]:.0f} ms in the "
        "pipeline (one thread per device). The pipeline copies layers to the devices, and computes most of the forward "
        "twice to save memory. Where a model fits on the device, plain PyTorch is faster.\n"
    )
    console.print("The fastest step, from left to right:", style="bold")
    draw_on(console, timeline)
    if json:
        found: dict[str, Any] = {"weights_bytes": needs.weights, "device_limit_bytes": LIMIT}
        for index, name in enumerate(("plain", "pipeline")):
            most, own = getattr(needs, name), [pair[index] for pair in losses]
            found[name] = {"device_bytes": most, "fits": most <= LIMIT, "losses": own, "step_seconds": medians[index]}
        say_json({**found, "largest_difference": largest})
    return int(not largest < TOLERANCE)  # also true for NaN


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.byte(ids)
        return embedded + self.place


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        fed: torch.Tensor = self.feed(x)
        return x + fed


def _build() -> nn.Sequential:
    with generator_kept():
        torch.manual_seed(0)
        blocks = [_Block() for _ in range(BLOCKS)]
        return nn.Sequential(_Embedding(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def _batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels of shape (rows, length); the label of a token is the next byte of the text."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def _loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def _train(
    console: Any, plain: nn.Module, pipeline: RoundPipe, steps: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], Timeline]:
    """Train with plain PyTorch and with the pipeline; return losses, step times, and the fastest step's timeline."""
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=2e-3, fused=True)
    with OptimizerCtx():
        optimizer = Adam(pipeline.parameters(), lr=2e-3)

    def plain_step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        loss = _loss_fn(plain(inputs), labels)
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        return loss.item()

    def pipeline_step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        loss = pipeline.forward_backward((inputs,), label=labels, loss_fn=_loss_fn)
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        return float(loss)

    losses: list[tuple[float, float]] = []
    seconds: list[tuple[float, float]] = []
    fastest = Timeline()
    for step, batch in enumerate(_batches(steps)):
        one, plain_seconds = _timed(plain_step, *batch)
        with Timeline() as timeline:
            other, pipeline_seconds = _timed(pipeline_step, *batch)
        if all(pipeline_seconds < before for _, before in seconds):
            fastest = timeline
        losses.append((one, other))
        seconds.append((plain_seconds, pipeline_seconds))
        if step % SHOWN_EVERY == 0 or step == steps - 1:
            scale = losses[0][0]
            bar = "━" * max(1, round((min(console.width, 120) - 45) * other / scale)) if other < 2 * scale else ""
            row = f"{step:>4}  {one:>9.6f}  {other:>9.6f}  {abs(one - other):>10.1e}  [cyan]{bar}[/]"
            console.print(row, soft_wrap=True)
    return losses, seconds, fastest


def _timed(step: Callable[..., float], inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    loss = step(inputs, labels)
    return loss, time.perf_counter() - start


def _compare(console: Any, needs: Needs) -> None:
    weights = format_bytes(needs.weights)
    rows = [
        ["", "weights", "most per device", f"device of {format_bytes(LIMIT)}"],
        ["plain PyTorch", weights, format_bytes(needs.plain), "too small"],
        ["pipeline", weights, format_bytes(needs.pipeline), "large enough"],
    ]
    headings, *lines = table(rows, align="<>>", indent="")
    console.print(f"\n{headings}", style="bold")
    console.print("\n".join(lines))
    console.print(
        "\nPlain PyTorch needs weights, gradients, Adam's state and all activations on the device, which runs out of "
        f"memory: {needs.refusal} The pipeline keeps all this in CPU memory, and loads a few layers at a time.\n\n"
        "For the comparison, plain PyTorch now trains in CPU memory. The pipeline splits the rows into microbatches of "
        "4, 3 and 3:"
    )
    console.print(f"\n{'step':>4}  {'plain':>9}  {'pipeline':>9}  {'difference':>10}  loss", style="bold")


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    weights: int  # the weights of the model
    plain: int  # memory for weights, gradients, Adam's state and all activations on the device
    refusal: str  # the out-of-memory error of plain training on a device with the limit
    pipeline: int  # the peak of the pipeline's devices, each of which has the limit


class CountingDevice(VirtualDevice):
    """A simulated device whose memory limit covers copies, activations, gradients and temporaries of operations."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        super().__init__(name, memory_limit=limit)
        self.footprint = _LimitedFootprint(self)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        tensor = super().allocate(like)
        self.footprint.count(tensor)
        return tensor

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[Any]:
        return self.footprint


class _LimitedFootprint(Footprint):
    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device = device

    def _note(self, tensor: torch.Tensor, *, counted: bool) -> None:
        before = self.alive
        super()._note(tensor, counted=counted)
        size, limit = self.alive - before, self.device.memory_limit
        if limit is not None and size and self.alive > limit:
            raise DeviceMemoryError(
                f"{self.device.name} is out of memory: it uses {before} of {limit} bytes, and {size} more were "
                f"requested for a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}."
            )


def measure_needs(model: nn.Module, batches: Sequence[_Batch], loss_fn: _LossFn, limit: int, devices: int) -> Needs:
    """Train copies of a model, in plain PyTorch and in a pipeline, and return the device memory that each needs."""
    # batches: inputs and labels of each step. The second step has Adam's state in addition to the activations.
    # limit: bytes of a device, which suffice for the pipeline and not for plain training
    roomy = CountingDevice("a device with room")
    _train_plainly(model, batches, loss_fn, roomy)
    refusal = ""
    try:
        _train_plainly(model, batches, loss_fn, CountingDevice("the device", limit))
    except DeviceMemoryError as error:
        refusal = str(error)
    small = [CountingDevice(f"virtual:{index}", limit) for index in range(devices)]
    config = RoundPipeRunConfig(loss_reduction="mean")
    with contextlib.closing(RoundPipe(copy.deepcopy(model), devices=small, model_run_config=config)) as pipeline:
        optimizer = Adam(pipeline.optim_parameters())
        for inputs, labels in batches:
            pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
            pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return Needs(
        weights=storage_bytes(model.parameters()),
        plain=roomy.footprint.peak,
        refusal=refusal,
        pipeline=max(device.footprint.peak for device in small),
    )


def _train_plainly(model: nn.Module, batches: Sequence[_Batch], loss_fn: _LossFn, device: CountingDevice) -> None:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = device.copy_in(parameter.data)
    optimizer = Adam(model.parameters())
    for inputs, labels in batches:
        inputs, labels = device.copy_in(inputs), device.copy_in(labels)
        with device.computing():
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
