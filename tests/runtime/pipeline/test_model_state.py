"""What a call of RoundPipe leaves in the model: gradients and parameters of the plain model."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipeRunConfig, StageError
from tests.runtime.small import batch, gradients, near, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def test_frozen_parameters_get_no_gradient(wrap):
    model, inputs, labels = small_model(), *batch(6)
    pipe = wrap(model)
    model[0].requires_grad_(False)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert [p.grad is None for p in model[0].parameters()] == [True, True]
    assert model[2].weight.grad is not None


def test_a_parameter_that_no_microbatch_uses_has_no_gradient(wrap):
    """None, as in PyTorch, and not zeros: an optimizer skips it."""

    class Spare(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.spare = nn.Parameter(torch.ones(2))

    model = nn.Sequential(Spare(), nn.Linear(4, 3))
    inputs, labels = batch(6)
    wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert model[0].spare.grad is None
    assert model[0].weight.grad is not None


def test_one_module_in_two_places(wrap):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))
    inputs, labels = batch(6)
    F.mse_loss(model(inputs), labels).backward()
    exact = gradients(model)
    for plan in (
        ModelExecutePlan([range(3)], [range(3, 4), range(3)]),
        ModelExecutePlan([range(1), range(1, 3)], [range(3, 4), range(2, 3), range(2)]),
    ):
        model.zero_grad()
        config = RoundPipeRunConfig(loss_reduction="mean", execute_plan=plan)
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())


def test_one_norm_in_two_places_is_refused(wrap):
    """Both places write the running statistics, and stages run one microbatch apart: an error that names both."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    before = norm.running_mean.clone()
    with pytest.raises(StageError, match=r"layer 0 \(BatchNorm1d\) and layer 2 \(BatchNorm1d\)"):
        wrap(model).forward_backward((batch(6)[0],), loss_fn=lambda o, _: o.mean(), run_config=MEAN)
    assert torch.equal(norm.running_mean, before)


def test_a_skip_connection_travels_in_a_tuple(wrap):
    class Split(nn.Module):
        def forward(self, x):
            return x, x

    class Body(nn.Linear):
        def forward(self, pair):
            assert pair[0] is pair[1] or pair[0].shape != pair[1].shape or not torch.equal(*pair)
            return super().forward(pair[0]), pair[1]

    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Split(), Body(4, 4), Add())
    inputs, labels = batch(6)[0], batch(6, seed=2)[0]
    F.mse_loss(model(inputs), labels).backward()
    exact = gradients(model)
    found = []
    for plan in (
        ModelExecutePlan([], [range(4)]),
        ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)]),
    ):
        model.zero_grad()
        config = RoundPipeRunConfig(loss_reduction="mean", execute_plan=plan)
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
        found.append(state(model))
    assert same_bits(*found)


def test_one_buffer_in_two_modules_is_refused_when_both_write(wrap):
    """The tensor is shared, the modules are not: each would have overwritten what the other counted."""

    class Counts(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x):
            self.count += 1
            return x + 0

    count = torch.zeros(())
    pipe = wrap(nn.Sequential(Counts(count), nn.Linear(4, 4), Counts(count)))
    with pytest.raises(StageError, match="both write its buffer 'count'"):
        pipe(batch(6)[0])
    assert count.item() == 0


def test_a_parameter_keeps_its_class(wrap):
    """Layers that look at it see what they would see in the plain model."""

    class Marked(nn.Parameter):
        pass

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Marked(torch.eye(4))

        def forward(self, x):
            assert type(self.weight) is Marked
            return x @ self.weight

    model = Looks()
    wrap(model).forward_backward((batch(6)[0],), loss_fn=lambda outputs, _: outputs.mean(), run_config=MEAN)
    assert type(model.weight) is Marked
    assert model.weight.grad is not None
