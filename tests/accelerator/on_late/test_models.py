"""Models, losses and checkpoints on the reference accelerator: the numbers of plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import LossError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, VirtualDevice
from roundpipe_runtime.engine.parameters import partial_table
from tests.accelerator import late
from tests.accelerator.training import late_devices, memory_of
from tests.runtime.engine.test_routed import BATCHES, KINDS, model_of, pipe_of, squares
from tests.runtime.small import batch, gradients, near, relative_error, same_bits, small_model

F = nn.functional
CONFIG = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)
ORDERS = [("late", 0), ("random", 1)]


def loss_fn(outputs, labels):
    return F.mse_loss(outputs.float(), labels.float())


def trained(model, devices, inputs, labels):
    pipe = RoundPipe(model, devices=devices, model_run_config=CONFIG)
    loss = pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
    pipe.close()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def plainly(model, inputs, labels):
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_autocast(count, order):
    late.set_order(*order)
    model, (inputs, labels) = small_model(), batch(8)
    on_device = copy.deepcopy(model).to("late:0")
    with torch.autocast("late", dtype=torch.bfloat16):
        right = plainly(on_device, inputs.to("late:0"), labels.to("late:0"))
        exact = plainly(copy.deepcopy(model).double(), inputs.double(), labels)
        found = trained(model, late_devices(count), inputs, labels)
    assert all(relative_error(one, other.cpu()) < 0.01 for one, other in zip(found, right, strict=True))
    assert relative_error(found[1], exact[1]) > 1e-4  # it did compute in bfloat16


class EightBits(nn.Module):
    """A frozen weight of eight bits with a scale, and a trainable one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.scale = nn.Parameter(weight.abs().max() / 448)
        self.weight = nn.Parameter((weight / self.scale).detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x @ (self.weight.to(x.dtype) * self.scale))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_float8(count, order):
    late.set_order(*order)
    torch.manual_seed(0)
    model = nn.Sequential(*[EightBits(8) for _ in range(4)])
    inputs, labels = torch.randn(8, 8), torch.randn(8, 8)
    right = plainly(copy.deepcopy(model), inputs, labels)
    late.counts()
    found = trained(model, late_devices(count), inputs, labels)
    assert [one is None for one in found] == [one is None for one in right]
    pairs = [(one, other) for one, other in zip(found, right, strict=True) if one is not None]
    assert all(relative_error(one, other) < 1e-5 for one, other in pairs)
    assert late.counts().get("bytes up, pageable", 0) < 100


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_devices_of_different_memory(order):
    late.set_order(*order)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)])
    inputs, labels = torch.randn(8, 64), torch.randn(8, 64)
    right = trained(copy.deepcopy(model), late_devices(1), inputs, labels)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with memory_of(size // 2, 8 * size):
        found = trained(model, late_devices(2), inputs, labels)
    assert same_bits(found, right)


SEVERAL_ORDERS = [("late", 0), *(("random", seed) for seed in range(3))]


def config(copies):
    plan = ModelExecutePlan([range(3), range(3, 5)], [range(5, 7), range(3, 5), range(3)])
    plan.last_stage_copies = copies
    return RoundPipeRunConfig(loss_reduction="mean", num_microbatch=6, execute_plan=plan)


def states():
    return [torch.get_rng_state(), *(torch.late.get_rng_state(number) for number in range(2))]


def contrastive(outputs, labels):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs), device=outputs.device))


@pytest.mark.parametrize("order", SEVERAL_ORDERS, ids=str)
@pytest.mark.parametrize(("count", "copies"), [(1, 1), (2, 2), (3, 3)])
def test_rows_of_several_devices_are_compared(count, copies, order):
    """Each microbatch has one row, so the three rows that are compared come from all copies of the last stage."""
    late.set_order(*order)
    inputs, labels = batch(6)
    plain, model = small_model(), small_model()
    F.mse_loss(plain(inputs), labels).backward()
    pipe = RoundPipe(model, devices=late_devices(count), model_run_config=config(copies))
    with pytest.raises(LossError, match='loss_reduction="joined"'):
        pipe.forward_backward((inputs,), label=labels, loss_fn=contrastive)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    found = gradients(model)
    assert all(near(found[name], gradient) for name, gradient in gradients(plain).items())
    pipe.close()


@pytest.mark.parametrize("order", SEVERAL_ORDERS, ids=str)
def test_the_generators_of_devices_are_left_alone(order):
    """A run that draws nothing moves no generator, and masks are the same if the loss was checked before."""
    late.set_order(*order)
    inputs, labels = batch(6)
    for dropout in (0.0, 0.4):
        found = []
        for is_checked in (True, False):
            model = small_model(dropout=dropout)
            fields = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=6)
            pipe = RoundPipe(model, devices=late_devices(2), model_run_config=fields)
            if not is_checked:  # but before
                pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
                pipe.zero_grad()
            torch.manual_seed(3)
            before = states()
            loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            pipe.close()
            assert same_bits(before[1:], states()[1:])
            assert torch.equal(before[0], torch.get_rng_state()) == (not dropout)
            found.append([loss, *gradients(model).values()])
        assert same_bits(*found)


def results(kind, devices, experts):
    """Losses of some runs, gradients that add up over them, and the bytes that were not uploaded."""
    model = model_of(kind)
    pipe = pipe_of(model, devices, experts)
    losses = [
        pipe.forward_backward((x,), label=torch.ones(len(x), 3), loss_fn=squares).item()
        for x in (*BATCHES, *BATCHES[:3])
    ]
    skipped = pipe.parameter_traffic.skipped
    pipe.close()
    return losses, gradients(model), skipped


@pytest.mark.parametrize("order", [("late", 0), ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_bits_of_a_virtual_device(kind, order, monkeypatch):
    monkeypatch.setattr(partial_table, "LEAST_BYTES", 0)
    late.set_order(*order)
    ours = results(kind, ["late:0", "late:1"], "routed")
    theirs = results(kind, [VirtualDevice("here")], "all")
    assert ours[0] == theirs[0]
    assert ours[2] > 0 == theirs[2]
    for name, value in theirs[1].items():
        assert (value is None) == (ours[1][name] is None), name
        assert value is None or torch.equal(value, ours[1][name]), name
