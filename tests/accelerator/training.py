"""One short training that uses all of a pipeline, and what it leaves, bit by bit."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import Device, RoundPipe, RoundPipeRunConfig, Timeline, VirtualDevice
from roundpipe_runtime.device.accelerator import AcceleratorDevice
from tests.runtime.small import Tied, batch, cut_plan, small_model, state

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


@dataclasses.dataclass
class _Step:
    """What one step of a training ran."""

    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    plans: list[str] = dataclasses.field(default_factory=list)
    rows: Sequence[int | None] = ()


class Log:
    """The names of the tensors that a training returns, and what each step ran, for the message of a failed test."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._names: list[tuple[str, int]] = []

    def follow(self, pipe: RoundPipe) -> None:
        """Note the stages of each run of a pipeline from now on, except the runs that try a few rows."""
        engine = pipe._rp_engine
        original = engine._dispatch

        def run(one: Any, stages: Sequence[Any]) -> None:
            if one.spec.trial is None and self.steps:
                self.steps[-1].plans.append(", ".join(f"{stage.kind} {[*stage.layers]}" for stage in stages))
                self.steps[-1].rows = one.contract.rows
            original(one, stages)

        engine._dispatch = run  # type: ignore[method-assign] # of this pipeline

    def begin_step(self) -> Timeline:
        self.steps.append(_Step())
        return self.steps[-1].timeline

    def name(self, *names: str) -> None:
        """Name the next tensors that the training returns, which the last step has computed."""
        self._names += [(name, len(self.steps) - 1) for name in names]

    def difference(self, found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
        """Describe the first tensor that has other bits: its microbatches, and the plan and the order of its step."""
        pairs = enumerate(zip(found, right, strict=True))
        place = next(number for number, (one, other) in pairs if not torch.equal(one, other))
        (name, number), one, other = self._names[place], found[place], right[place]
        step = self.steps[number]
        lines = [f"Step {number}: the {name} differs from the expected one.", f"found {one}", f"expected {other}"]
        of_rows = [microbatch for microbatch, count in enumerate(step.rows) for _ in range(count or 0)]
        if one.dim() and len(one) == len(of_rows):
            rows = [row for row in range(len(one)) if not torch.equal(one[row], other[row])]
            lines.append(f"rows {rows}, of the microbatches {sorted({of_rows[row] for row in rows})}")
        lines += [f"plan: {plan}" for plan in step.plans]
        lines += [
            f"{record.start:.6f} to {record.end:.6f} s, {record.device}: {record.kind}, stage {record.stage}, "
            f"layer {record.layer}, microbatch {record.microbatch}"
            for record in sorted(step.timeline.records, key=lambda record: record.start)
        ]
        return "\n".join(lines)


def late_devices(count: int) -> list[Device]:
    """The first devices of the reference accelerator, with the streams that they had before."""
    made = [AcceleratorDevice(torch.device("late", number), _STREAMS.get(number, ())) for number in range(count)]
    _STREAMS.update((number, device.streams) for number, device in enumerate(made))
    return made


@contextlib.contextmanager
def memory_of(*limits: int) -> Iterator[None]:
    """Devices with so many bytes each."""
    from tests.accelerator import late

    before = torch.accelerator.get_memory_info(0)[1]
    torch.accelerator.empty_cache()
    for number, limit in enumerate(limits):
        late.set_memory(number, limit)
    try:
        yield
    finally:
        for number in range(len(limits)):
            late.set_memory(number, before)


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
    log: Log | None = None,
) -> list[torch.Tensor]:
    """Losses, gradients, buffers and weights of a model with tied weights, dropout, batch norm and a layer in place."""
    model = _short_model() if is_short else small_model(tied=True, dropout=0.3, norm=True)
    if checkpoints:  # in the place of the batch norm
        model[1 if is_short else 4] = Checkpointed(4 if is_short else 6)
    if keep:
        model[0 if is_short else 2].requires_grad_(False)
    plan = cut_plan(5, [2], [1, 3], 1) if is_short else cut_plan(_LAYERS, [2, 4], [3, 5], 2)
    plan.last_stage_copies = copies
    config = RoundPipeRunConfig(
        loss_reduction="mean", num_microbatch=2 if is_short else 3, recompute_grain=grain, keep_parameters=keep,
        **({} if classic else {"execute_plan": plan}),
    )  # fmt: skip
    pipe = RoundPipe(model, devices=devices, model_run_config=config, pin_model=pin)
    log = Log() if log is None else log
    log.follow(pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = batch(4 if is_short else 8)
    inputs.requires_grad_(classic)
    found = []
    for _ in range(steps):
        with log.begin_step():
            if classic:
                loss = F.mse_loss(pipe(inputs), labels)
                loss.backward()
                found.append(inputs.grad.clone())
                log.name("gradient of the inputs")
            else:
                loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
        found.append(loss.detach().clone())
        log.name("loss")
        pipe.step(optimizer.step, is_async=is_async)
    pipe.synchronize()
    found += [*state(model), *(parameter.detach().clone() for parameter in model.parameters())]
    log.name(*(f"gradient of {name}" for name, parameter in model.named_parameters() if parameter.grad is not None))
    log.name(*(name for name, _ in model.named_buffers()), *(name for name, _ in model.named_parameters()))
    pipe.close()
    return found


def expected(**options: object) -> list[torch.Tensor]:
    return train([VirtualDevice("virtual:0", check=True)], **options)
