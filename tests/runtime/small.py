"""Small models for the tests of the runtime, and what is compared of them."""

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_runtime import Device, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, VirtualDevice, WeightedLoss

MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


class Tied(nn.Module):
    """A layer of a shape that two of them can share one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x):
        return torch.tanh(x @ self.weight.T + self.bias)


def small_model(*, tied: bool = False, dropout: float = 0.0, norm: bool = False, seed: int = 0) -> nn.Sequential:
    """Six or seven layers, 4 features in and 3 out."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.Tanh()]
    first = Tied(nn.Parameter(torch.randn(6, 6) / 3))
    layers += [first, Tied(first.weight) if tied else Tied(nn.Parameter(torch.randn(6, 6) / 3))]
    if norm:
        layers.append(nn.BatchNorm1d(6))
    if dropout:
        layers.append(nn.Dropout(dropout))
    layers += [nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)]
    return nn.Sequential(*layers)


@contextlib.contextmanager
def checked_devices(count: int):
    """Virtual devices that check every access, closed at the end."""
    made = [VirtualDevice(f"virtual:{number}", check=True) for number in range(count)]
    try:
        yield made
    finally:
        for device in made:
            device.close()


def allocated(device: Device) -> int:
    if isinstance(device, VirtualDevice):
        return device.allocated
    device.synchronize()
    return torch.accelerator.memory_allocated(device.torch_device)


def batch(rows: int, seed: int = 1, inputs: int = 4, labels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``(rows, inputs)`` and labels ``(rows, labels)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator), torch.randn(rows, labels, generator=generator)


def rows(count: int, *shape: int) -> torch.Tensor:
    """A tensor whose values tell the row."""
    return torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape).contiguous()


def firsts(parts: Any, pick: Any) -> list[Any]:
    """The rows that each microbatch got."""
    return [pick(part).flatten(1)[:, 0].tolist() if pick(part).dim() > 1 else pick(part).tolist() for part in parts]


def cut_plan(num_layers: int, forward: list[int], backward: list[int], fused: int) -> ModelExecutePlan:
    """A plan for ``forward_backward`` with cuts behind these layers; the last ``fused`` layers are the fused stage."""
    behind = num_layers - fused
    starts = [0, *sorted({cut for cut in forward if 0 < cut < behind}), behind]
    ends = [0, *sorted({cut for cut in backward if 0 < cut < behind}), behind]
    fwd = [range(a, b) for a, b in itertools.pairwise(starts) if a < b]
    bwd = [range(a, b) for a, b in itertools.pairwise(ends) if a < b]
    return ModelExecutePlan(fwd, [range(behind, num_layers), *reversed(bwd)])


def all_recomputed(layers: int, microbatches: int = 2, **fields: Any) -> RoundPipeRunConfig:
    """All of these layers run forward, and the loss, before any goes back."""
    plan = ModelExecutePlan([range(layers)], [range(layers, layers + 1), range(layers)])
    return RoundPipeRunConfig(execute_plan=plan, num_microbatch=microbatches, loss_reduction="mean", **fields)


def without_row_check(pipe: RoundPipe) -> RoundPipe:
    """The pipeline, which calls its layers for batches only: the first call of a kind would also try some rows."""
    pipe._rp_engine.row_check = None
    pipe._rp_engine.loss_checks.reduction = lambda loss_fn, stated, *_: "sum" if stated == "sum" else "rows"
    return pipe


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> None:
    """The same bits, and `None` in the same places."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


def state(model: nn.Module) -> list[torch.Tensor]:
    """Copies of gradients and buffers, in order."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [b.clone() for b in model.buffers()]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, beside the norm of what was expected."""
    scale = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / max(scale, 1e-12)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors differ by the rounding of float32 alone."""
    return relative_error(found, expected) < 1e-6


def near_gradients(found: Any, expected: Any, **tolerance: float) -> bool:
    """Whether gradients are missing in the same places, and differ by rounding or what torch.allclose allows."""
    one, other = (list(of.parameters() if isinstance(of, nn.Module) else of) for of in (found, expected))
    pairs = [(p.grad, q.grad) for p, q in zip(one, other, strict=True)]
    if [p is None for p, _ in pairs] != [q is None for _, q in pairs]:
        return False
    pairs = [(p, q) for p, q in pairs if p is not None]
    return all(torch.allclose(p, q, **tolerance) if tolerance else near(p, q) for p, q in pairs)


def trains_like(
    pipe: Any, plain: Any, loss_fn: Any, inputs: Any, labels: Any, *, own: Any = None, config: Any = None, **near: float
) -> bool:
    """Whether loss and gradients of a call are those of the plain layers, whose loss may be an object of their own."""
    expected = (own or loss_fn)(plain(inputs), labels)
    expected = expected.sum / expected.weight if isinstance(expected, WeightedLoss) else expected
    expected.backward()
    found = pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=config)
    return relative_error(found, expected) < 1e-6 and near_gradients(pipe, plain, **near)


def same_bits(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    """Whether two lists of tensors are equal to the last bit, and have `None` in the same places."""
    pairs = zip(one, other, strict=len(one) == len(other))
    return len(one) == len(other) and all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
