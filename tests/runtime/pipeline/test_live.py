"""Layers that are changed after they were wrapped, hooks of the whole model, and how a model is read."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig, SplitError, StageError
from roundpipe_runtime.pipeline.live import ModelReading, changed_layers
from tests.runtime.small import batch, near_gradients

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=1)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _on_the_object(model):
    forward = type(model).forward
    model.forward = lambda x: 2 * forward(model, x)
    return model


def _with_another_call(model):
    class Called(nn.Sequential):
        def __call__(self, x):
            return 2 * super().__call__(x)

    return Called(*model)


def _as_accelerate_does(model):
    before = model.forward

    def forward(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs) * 2

    model._old_forward = before
    model.forward = forward.__get__(model)
    return model


@pytest.mark.parametrize("patch", [_on_the_object, _with_another_call, _as_accelerate_does])
@pytest.mark.parametrize("of", ["model", "layer"])
def test_a_forward_that_was_set_before_wrapping(wrap, patch, of):
    model = layers()
    if of == "layer":
        model[2] = patch(nn.Sequential(model[2]))
    else:
        model = patch(model)
    x, y = batch(6)
    loss = F.mse_loss(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    found = wrap(model, model_run_config=MEAN).forward_backward((x,), label=y, loss_fn=F.mse_loss)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5)


def test_a_forward_that_is_set_after_wrapping(wrap):
    model = layers()
    pipe = wrap(model, model_run_config=MEAN)
    x, y = batch(6)
    pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss)
    _on_the_object(model[2])
    found = pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss)
    assert found.item() == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-6)
    _on_the_object(model)
    with pytest.raises(StageError, match="of 3 layers, and then its forward was replaced"):
        pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss)


HOOKS = {
    "pre": lambda model: model.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "forward": lambda model: model.register_forward_hook(lambda module, args, output: output * 3),
    "backward": lambda model: model.register_full_backward_hook(lambda module, given, out: (given[0],)),
    "backward pre": lambda model: model.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,)),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("of", ["pipeline", "model"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_layers_in_a_row(wrap, hook, of, when):
    model, plain = layers(), layers()
    HOOKS[hook](plain)
    if when == "before" and of == "model":
        HOOKS[hook](model)
    pipe = wrap(model, model_run_config=MEAN)
    if when == "after" or of == "pipeline":
        HOOKS[hook](pipe if of == "pipeline" else model)
    x, y = batch(6)
    x.requires_grad_()
    F.mse_loss(pipe(x), y).backward()
    found, x.grad = x.grad, None
    F.mse_loss(plain(x), y).backward()
    assert torch.allclose(found, x.grad, rtol=1e-5)
    assert near_gradients(model, plain, rtol=1e-5)
    with pytest.raises(StageError, match=r"has \w+ .*hooks, which forward_backward does not run.*\n.*model\[0\]"):
        pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss)


@pytest.mark.parametrize("hook", ["pre", "forward", "backward pre"])
@pytest.mark.parametrize("of", ["pipeline", "model"])
def test_hooks_of_a_model_that_is_one_layer(wrap, hook, of):
    def one_layer():
        torch.manual_seed(0)
        model = nn.ModuleDict({"inner": nn.Linear(4, 3)})
        model.forward = lambda x: model["inner"](x)
        return model

    model, plain = one_layer(), one_layer()
    HOOKS[hook](plain)
    pipe = wrap(model, model_run_config=MEAN)
    HOOKS[hook](pipe if of == "pipeline" else model)
    x, y = batch(6)
    x.requires_grad_()
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    for is_fused in (True, False):
        model.zero_grad()
        found = pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss) if is_fused else F.mse_loss(pipe(x), y)
        if not is_fused:
            found.backward()
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert near_gradients(model, plain, rtol=1e-5)


class Mixes(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_rows_are_proven_again_when_a_part_of_a_layer_was_replaced(wrap):
    """What was proven was so of another module."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3))
    pipe = wrap(model)
    x, _ = batch(6)
    with torch.no_grad():
        assert torch.allclose(pipe(x), model(x), atol=1e-6)
        model[0][0] = Mixes(4, 4)
        with pytest.raises(SplitError, match="mixes"):
            pipe(x)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_parameters_that_are_replaced_between_calls(wrap, dtype):
    model, plain = layers(), layers()
    pipe = wrap(model, dtype, model_run_config=MEAN)
    x, y = batch(6)
    for change in (
        lambda one: setattr(one[0], "weight", nn.Parameter(torch.full((8, 4), 0.5))),
        lambda one: setattr(one[2].weight, "data", torch.full((3, 8), 0.25)),
        lambda one: one[0].bias.data.fill_(2.0),
    ):
        change(model), change(plain)
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.5)
        other = torch.optim.SGD(plain.parameters(), lr=0.5)
        found = pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss)
        expected = F.mse_loss(plain(x), y)
        expected.backward()
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))  # noqa: B023 # it runs at once
        other.step(), other.zero_grad()
        for parameter, one in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(parameter, one, rtol=1e-4, atol=1e-6)


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])
        self.head = nn.Linear(2, 2)
        self.count, self.mode, self.tensor = 0, "mean", torch.zeros(2)
        self.table = {"a": [1, {"b": torch.zeros(1)}]}
        self.config = type("Config", (), {})()
        self.config.size, self.config.kind = 3, "one"


SEEN = {
    "another text": lambda m: setattr(m, "mode", "sum"),
    "a function": lambda m: setattr(m, "mode", torch.neg),
    "another attribute": lambda m: setattr(m, "other", 3),
    "an attribute less": lambda m: delattr(m, "mode"),
    "deep in a table": lambda m: m.table["a"][1].update(b=torch.zeros(1)),
    "a number in a table": lambda m: m.table["a"].__setitem__(0, 2),
    "the kind of a configuration": lambda m: setattr(m.config, "kind", "two"),
    "a parameter by name": lambda m: m.head.register_parameter("bias", None),
    "a module in a layer": lambda m: m.layers[1].__setitem__(0, nn.Linear(2, 2)),
    "the class of a module in a layer": lambda m: setattr(m.layers[1][0], "__class__", Mixes),
    "a forward in a layer": lambda m: setattr(m.layers[0][0], "forward", torch.neg),
    "a layer": lambda m: m.layers.append(nn.Tanh()),
}
NOT_SEEN = {
    "nothing": lambda m: None,
    "a number": lambda m: setattr(m, "count", 1),
    "a tensor": lambda m: setattr(m, "tensor", torch.ones(3)),
    "a number of a configuration": lambda m: setattr(m.config, "size", 5),
    "the mode": lambda m: m.eval(),
    "a parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(2, 2))),
    "a hook": lambda m: m.register_forward_hook(print),
    "an attribute of a layer": lambda m: setattr(m.layers[0], "calls", [1]),
}


@pytest.mark.parametrize("change", [*SEEN, *NOT_SEEN])
def test_what_a_reading_sees(change):
    """What a copy of the model's own code would not have; numbers and tensors are set on it in each call anyway."""
    model = Owner()
    before = ModelReading(model, list(model.layers))
    (SEEN | NOT_SEEN)[change](model)
    assert ModelReading(model, list(model.layers)[:2]).matches(before) is (change in NOT_SEEN)


def test_changed_layers_are_named():
    held = {str(number): nn.Linear(1, 1) for number in range(6)}
    assert changed_layers(held, dict(held)) is None
    assert changed_layers(held, {**held, "0": held["1"], "1": held["0"]}) == "0, 1 were moved"
    assert (
        changed_layers(held, {}) == "0 (Linear) was removed, 1 (Linear) was removed, 2 (Linear) was removed and 3 more"
    )
    assert changed_layers(held, {**held, "6": nn.Tanh()}) == "6 (Tanh) was added"
