"""One short training that uses all of a pipeline, and what it leaves, bit by bit."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import Device, RoundPipe, RoundPipeRunConfig, VirtualDevice
from roundpipe_runtime.device.accelerator import AcceleratorDevice
from tests.runtime.small import Tied, batch, cut_plan, small_model, state

__all__ = ["GRAINS", "expected", "late_devices", "moved_by_runs", "train"]

F = nn.functional
GRAINS = ["stage", "layer"]
_LAYERS = 9

# Streams of each device, which later pipelines take again: an order is drawn among all streams that there are.
_STREAMS: dict[int, tuple[torch.Stream, ...]] = {}


class Checkpointed(nn.Module):
    """A layer that keeps nothing for its backward, and draws in it."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def late_devices(count: int) -> list[Device]:
    """The first devices of the reference accelerator, with the streams that they had before."""
    made = [AcceleratorDevice(torch.device("late", number), _STREAMS.get(number, ())) for number in range(count)]
    _STREAMS.update((number, device.streams) for number, device in enumerate(made))
    return made


@contextlib.contextmanager
def moved_by_runs(count: int) -> Iterator[None]:
    """Check that the block moves torch's generator by one number for each run, as runs do in which a layer draws."""
    before = torch.get_rng_state()
    yield
    found = torch.get_rng_state()
    torch.set_rng_state(before)
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(found, torch.get_rng_state())


def _short_model() -> nn.Sequential:
    """Five layers with what nine of :func:`small_model` have, for many trainings."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4) / 2)
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3))
    return nn.Sequential(Tied(weight), norm, nn.ReLU(inplace=True), Tied(weight), nn.Linear(4, 3))


def train(
    devices: list[Device],
    *,
    grain: str = "stage",
    is_async: bool | Literal["exact"] = False,
    checkpoints: bool = False,
    classic: bool = False,
    pin: str = "alloc",
    steps: int = 3,
    copies: int = 1,
    keep: float = 0,
    is_short: bool = False,
) -> list[torch.Tensor]:
    """Losses, gradients, buffers and weights of a model with tied weights, dropout, batch norm and a layer in place.

    Args:
        devices: devices of the pipeline; they are closed at the end.
        grain: ``recompute_grain``.
        is_async: whether weights are updated one step late, or, with ``"exact"``, layer by layer next to the next step.
        checkpoints: whether a layer has a checkpoint of its own.
        classic: whether ``forward`` and ``backward`` are called, and no ``forward_backward``.
        pin: ``pin_model``.
        steps: number of steps.
        copies: number of devices that run the last stage.
        keep: GB of a device for parameters that stay there. With some, the first layer is frozen, and its weight is one
            that another layer has too.
        is_short: whether there are five layers and two microbatches, instead of nine and three.
    """
    model = _short_model() if is_short else small_model(tied=True, dropout=0.3, norm=True)
    if checkpoints:  # in the place of the batch norm
        model[1 if is_short else 4] = Checkpointed(4 if is_short else 6)
    if keep:
        model[0 if is_short else 2].requires_grad_(False)
    plan = cut_plan(5, [2], [1, 3], 1) if is_short else cut_plan(_LAYERS, [2, 4], [3, 5], 2)
    plan.last_stage_copies = copies
    config = RoundPipeRunConfig(
        loss_reduction="mean",
        num_microbatch=2 if is_short else 3,
        recompute_grain=grain,
        keep_parameters=keep,
        **({} if classic else {"execute_plan": plan}),
    )
    pipe = RoundPipe(model, devices=devices, model_run_config=config, pin_model=pin)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = batch(4 if is_short else 8)
    inputs.requires_grad_(classic)
    found = []
    for _ in range(steps):
        if classic:
            loss = F.mse_loss(pipe(inputs), labels)
            loss.backward()
            found.append(inputs.grad.clone())
        else:
            loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
        found.append(loss.detach().clone())
        pipe.step(optimizer.step, is_async=is_async)
    pipe.synchronize()
    found += [*state(model), *(parameter.detach().clone() for parameter in model.parameters())]
    pipe.close()
    return found


def expected(**options: object) -> list[torch.Tensor]:
    """The same on a virtual device, where every copy is there at once, and every access is checked."""
    return train([VirtualDevice("virtual:0", check=True)], **options)
