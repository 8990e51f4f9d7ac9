"""A wrapped model is used as the model itself; its parameters, buffers and shared modules."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig, StageError
from tests.modules import module_class
from tests.runtime.small import MEAN, batch, near_gradients, same_bits, small_model, state

F = nn.functional


class Reversed(nn.Sequential):
    def forward(self, x):
        for layer in reversed(list(self)):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        lambda: [nn.Linear(4, 4), nn.Tanh()],
        lambda: nn.ModuleList([nn.Linear(4, 4), nn.Tanh()]),
        lambda: nn.Linear(4, 4),
        lambda: Reversed(nn.Linear(4, 4), nn.Tanh()),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    ],
)
def test_what_can_be_wrapped(wrap, make):
    torch.manual_seed(0)
    model = make()
    plain = nn.Sequential(*model) if isinstance(model, (list, nn.ModuleList)) else model
    inputs, _ = batch(6)
    inputs = inputs.reshape(6, 1, 4)
    plain.eval()
    with torch.no_grad():
        assert torch.allclose(wrap(model)(inputs), plain(inputs), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "wraps an nn.Module"),
        (([],), "found list of no layers"),
        ((nn.Sequential(),), r"found Sequential of no layers. Give RoundPipe layers:\n    RoundPipe\(nn.Seq"),
        (([nn.Linear(2, 2), len],), "found list with builtin_function_or_method"),
        ((nn.Linear,), "found the class Linear"),
        ((nn.Linear(2, 2, device="meta"),), "weight is on the meta device, and has no values"),
        ((nn.Linear(2, 2), torch.int8), "optim_dtype"),
        ((nn.Linear(2, 2), None, None, {"num_microbatch": 2}), "model_run_config must be a RoundPipeRunConfig"),
        ((nn.Linear(2, 2), None, None, None, "sometimes"), "pin_model"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RoundPipe(*arguments, devices="virtual:1")


def test_wrong_uses_of_a_pipeline_are_refused(wrap):
    pipeline, x = wrap(nn.Linear(4, 4)), torch.ones(2, 4)
    with pytest.raises(ConfigError, match="is a RoundPipe already: do not wrap the model again"):
        RoundPipe(pipeline, devices="virtual:1")
    with pytest.raises(ConfigError, match=r"step_fn must be a function, found None:\n.*model\.step\(lambda"):
        pipeline.step(None)
    with pytest.raises(ConfigError, match=r'is_async must be True, False or "exact", found \'later\''):
        pipeline.step(lambda: None, is_async="later")
    for config in ({"num_microbatch": 2}, 3):
        with pytest.raises(ConfigError, match="must be a RoundPipeRunConfig"):
            pipeline(x, roundpipe_run_config=config)
        with pytest.raises(ConfigError, match="must be a RoundPipeRunConfig"):
            pipeline.forward_backward((x,), label=x, loss_fn=F.mse_loss, run_config=config)
    with pytest.raises(StageError, match="Run the model once"):  # a parameter without a shape cannot travel
        wrap(nn.Sequential(nn.LazyLinear(3)))(x)


def test_keyword_arguments_reach_the_first_layer(wrap):
    scaled = module_class("Scaled", lambda self, x, *, options: x * options["scale"] + options["shift"])()
    inputs, _ = batch(6)
    options = {"scale": torch.arange(6.0).reshape(6, 1), "shift": 2.0}
    with torch.no_grad():
        assert torch.equal(wrap(scaled)(inputs, options=options), inputs * options["scale"] + 2.0)


def test_attributes_are_those_of_the_model_and_the_name_is_the_call_site_or_given(wrap):
    assert RoundPipe(nn.Linear(2, 2), devices="virtual:1").name.startswith("test_wrapping.py:")
    model = nn.Linear(3, 2)
    pipe = wrap(model, name="mine")
    assert pipe.name == "mine"
    assert next(pipe.optim_parameters()) is next(pipe.parameters()) is model.weight  # without a dtype for the optimizer
    assert pipe.in_features == 3
    pipe.note = "here"
    assert model.note == "here"
    del pipe.note
    assert not hasattr(model, "note")
    original = nn.Module()
    original.config = {"vocab_size": 7}
    pipe.set_original_model(original)
    assert pipe.config == {"vocab_size": 7}
    pipe.flag = 1
    assert original.flag == 1
    del pipe.flag
    assert not hasattr(original, "flag")
    with pytest.raises(AttributeError, match="nothing"):
        _ = pipe.nothing


def test_it_is_a_module_inside_another_one(wrap):
    model = small_model(norm=True)
    parent, plain = nn.ModuleDict({"net": wrap(model)}), nn.ModuleDict({"net": model})
    assert [n for n, _ in parent.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(parent.state_dict()) == list(plain.state_dict())
    parent.load_state_dict(nn.ModuleDict({"net": small_model(norm=True, seed=4)}).state_dict())
    assert torch.equal(model[0].weight, small_model(norm=True, seed=4)[0].weight)
    parent.eval()
    assert not model.training
    parent.double()
    assert model[0].weight.dtype == torch.float64
    assert [n for n, _ in wrap(model).named_buffers()] == [n for n, _ in model.named_buffers()]


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: pipe.append(nn.Tanh()),
        lambda pipe: setattr(pipe.model, "1", nn.Tanh()),
        lambda pipe: pipe.model.__delitem__(0),
    ],
)
def test_layers_that_were_changed_after_wrapping_are_refused(wrap, change):
    """The pipeline would have gone on with the old ones."""
    pipe = wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    change(pipe)
    for call in (
        lambda: pipe(torch.ones(2, 4)),
        lambda: pipe.forward_backward((torch.ones(2, 4),), label=torch.ones(2, 4), loss_fn=F.mse_loss),
    ):
        with pytest.raises(StageError, match=r"was made of 2 layers, and then .*\n.*RoundPipe\(pipeline\.model"):
            call()
    assert wrap(pipe.model)(torch.ones(2, 4)).shape == (2, 4)


def test_a_parent_module_finds_the_optimizers_parameters(wrap):
    parent = nn.ModuleDict({"net": wrap(small_model().bfloat16(), torch.float32), "head": nn.Linear(3, 3)})
    outside = list(parent.named_parameters())
    with OptimizerCtx():
        inside = dict(parent.named_parameters())
        optimizer = torch.optim.SGD(parent.parameters(), lr=0.5)
    assert list(inside) == [name for name, _ in outside]
    assert outside[0][1] is parent["net"][0].weight
    assert inside["net.0.weight"] is next(parent["net"].optim_parameters())
    assert [p.dtype for n, p in outside if n.startswith("net")] == [torch.bfloat16] * (len(inside) - 2)
    assert all(parameter.dtype == torch.float32 for parameter in inside.values())
    before = parent["net"][0].weight.detach().clone()
    parent["head"](parent["net"](batch(6)[0].bfloat16()).float()).sum().backward()
    parent["net"].step(lambda: (optimizer.step(), parent.zero_grad()))
    assert not torch.equal(before, parent["net"][0].weight)
    assert all(parameter.grad is None for parameter in inside.values())


def test_frozen_and_unused_parameters_get_no_gradient(wrap):
    """None, as in PyTorch, and not zeros: an optimizer skips it."""
    model, (inputs, labels) = small_model(), batch(6)
    model[2].spare = nn.Parameter(torch.ones(2))
    pipe = wrap(model)
    model[0].requires_grad_(False)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert [p.grad for p in [*model[0].parameters(), model[2].spare]] == [None] * 3
    assert model[2].weight.grad is not None


def assert_trains_like_the_plain_model(wrap, model, inputs, labels, plans):
    plain, found = copy.deepcopy(model), []
    F.mse_loss(plain(inputs), labels).backward()
    for plan in plans:
        model.zero_grad()
        config = RoundPipeRunConfig(loss_reduction="mean", execute_plan=plan)
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        assert near_gradients(model, plain)
        found.append(state(model))
    assert same_bits(*found)


def test_one_module_in_two_places(wrap):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))
    assert_trains_like_the_plain_model(wrap, model, *batch(6), (
        ModelExecutePlan([range(3)], [range(3, 4), range(3)]),
        ModelExecutePlan([range(1), range(1, 3)], [range(3, 4), range(2, 3), range(2)]),
    ))  # fmt: skip


def test_one_buffer_that_two_layers_write_is_refused(wrap):
    """Each would have overwritten what the other counted, in one module or two: stages run one microbatch apart."""
    norm, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    twin.running_mean = norm.running_mean
    with pytest.raises(StageError, match=r"layer 0 \(BatchNorm1d\) and layer 2 \(BatchNorm1d\)"):
        wrap(nn.Sequential(norm, nn.Linear(4, 4), norm)).forward_backward(
            (batch(6)[0],), loss_fn=lambda o, _: o.mean(), run_config=MEAN
        )
    with pytest.raises(StageError, match="both write its buffer 'running_mean'"):
        wrap(nn.Sequential(norm, nn.Linear(4, 4), twin))(batch(6)[0])
    assert torch.equal(norm.running_mean, torch.zeros(4))


def test_a_skip_connection_travels_in_a_tuple(wrap):
    class Body(nn.Linear):
        def forward(self, pair):
            assert pair[0] is pair[1] or pair[0].shape != pair[1].shape or not torch.equal(*pair)
            return super().forward(pair[0]), pair[1]

    split = module_class("Split", lambda self, x: (x, x))()
    add = module_class("Add", lambda self, pair: pair[0] + pair[1])()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), split, Body(4, 4), add)
    assert_trains_like_the_plain_model(wrap, model, batch(6)[0], batch(6, seed=2)[0], (
        ModelExecutePlan([], [range(4)]),
        ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)]),
    ))  # fmt: skip


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
