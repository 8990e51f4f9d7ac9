"""A stage on its device: what a loss learns beside the layers, and layers that call parts of themselves again."""

import collections
import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe_runtime import (
    ModelExecutePlan,
    Replicate,
    RoundPipe,
    RoundPipeRunConfig,
    StageError,
    VirtualDevice,
    WeightedLoss,
)
from tests.runtime.small import batch, near, near_gradients, small_model, without_row_check

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


class Criterion(nn.Module):
    """A loss with a temperature that it learns, and a penalty on a weight of the model."""

    def __init__(self, weight, *, pair):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.penalised = [weight]
        self.pair = pair

    def forward(self, outputs, labels):
        squares = (self.temperature * outputs - labels).square()
        penalty = self.penalised[0].square().sum()
        if self.pair:
            return WeightedLoss(squares.sum() + penalty * outputs.numel(), outputs.numel())
        return squares.mean() + penalty


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_loss_learns_with_the_model(wrap, pair, dtype):
    model = small_model()
    plain = copy.deepcopy(model)
    inputs, labels = batch(10)
    criterion, expected = Criterion(model[0].weight, pair=pair), Criterion(plain[0].weight, pair=False)
    expected(plain(inputs), labels).backward()
    pipe = wrap(model, dtype, model_run_config=MEAN)
    pipe.forward_backward((inputs,), label=labels, loss_fn=criterion)
    assert near(criterion.temperature.grad, expected.temperature.grad)
    assert near_gradients(pipe.optim_parameters(), plain)


def test_a_loss_that_fails_has_learned_nothing(wrap):
    model = small_model()
    criterion = Criterion(model[0].weight, pair=False)
    calls = []

    def loss_fn(outputs, labels):
        if threading.current_thread() is not threading.main_thread():  # else it is being checked
            calls.append(None)
        if len(calls) == 3:
            raise ValueError("the third one")
        return criterion(outputs, labels)

    inputs, labels = batch(6)
    with pytest.raises(ValueError, match="the third one"):
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=MEAN)
    assert criterion.temperature.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tensor_that_a_layer_kept_is_no_part_of_the_loss(wrap):
    """Its gradient would have been lost; the error names the layer and says to return the tensor."""

    class Keeps(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            self.auxiliary = output.square().mean()
            return output

    model = nn.Sequential(Keeps(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    inputs, labels = batch(6)
    with pytest.raises(StageError, match=r"layer 0 \(Keeps\) stored as an .*\n.*return outputs, auxiliary_loss"):
        wrap(model).forward_backward(
            (inputs,),
            label=labels,
            loss_fn=lambda o, y: F.mse_loss(o, y) + model[0].auxiliary.to(o.device),
            run_config=MEAN,
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_with_a_checkpoint_inside(wrap, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    inputs, labels = batch(10)
    F.mse_loss(plain(inputs), labels).backward()
    wrap(model).forward_backward(
        (inputs,), label=labels, loss_fn=lambda o, y: WeightedLoss((o - y).square().sum(), o.numel())
    )
    assert near_gradients(model, plain)


class Counting(VirtualDevice):
    """Counts the tensors that go down to the host, by their number of axes."""

    def __init__(self):
        super().__init__("virtual:0", check=True)
        self.down = collections.Counter()

    def copy_out(self, tensor, *, parameter=False, **options):
        self.down[tensor.dim()] += not parameter
        return super().copy_out(tensor, parameter=parameter, **options)


class Shifts(nn.Linear):
    """Takes and returns a hidden state and a vector that is the same for all layers; or writes the vector."""

    writes = False

    def forward(self, both):
        x, shift = both
        if self.writes:
            shift.mul_(2.0)
        return torch.tanh(super().forward(x) + shift), shift


class First(Shifts):
    def forward(self, x, shift):
        return super().forward((x, shift))


class Last(nn.Module):
    def forward(self, both):
        return both[0]


def shifted(writes):
    torch.manual_seed(0)
    model = nn.Sequential(First(4, 4), *[Shifts(4, 4) for _ in range(4)], Last())
    model[2].writes = writes
    return model


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("call", ["forward_backward", "forward"])
def test_what_passes_layers_unchanged_goes_down_at_most_once(call, grain, writes):
    (inputs, labels), shift, device = batch(6), torch.randn(4), Counting()
    plain, labels = shifted(writes), torch.randn(6, 4)
    outputs = plain[0](inputs, shift.clone())
    for layer in plain[1:]:
        outputs = layer(outputs)
    F.mse_loss(outputs, labels).backward()
    plan = ModelExecutePlan(*[[range(2), range(2, 4)], [range(4, 6), range(2, 4), range(2)]])
    if call == "forward":
        plan = ModelExecutePlan([range(2), range(2, 4), range(4, 6)], [range(4, 6), range(2, 4), range(2)])
    whole = {"args[1]": Replicate}
    options = RoundPipeRunConfig(
        loss_reduction="mean", num_microbatch=2, recompute_grain=grain, execute_plan=plan, split_input=whole
    )
    model = shifted(writes)
    pipe = without_row_check(RoundPipe(model, devices=[device], model_run_config=options))
    if call == "forward_backward":
        pipe.forward_backward((inputs, shift), label=labels, loss_fn=F.mse_loss)
    else:
        loss = F.mse_loss(pipe(inputs, shift), labels)
        shift.zero_()  # the caller's own: it may change before the backward
        loss.backward()
    assert near_gradients(model, plain)
    once = call == "forward"  # what the backward starts from must not be the caller's
    assert device.down[1] == 2 * (once + writes)
