"""Tests of ``RoundPipe(compile=...)``: each kind of layer is compiled once, and learns the same."""

import copy
import functools
import pickle
import shutil
from contextlib import closing

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, parse_devices
from roundpipe_runtime.engine.recomputed import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe_runtime.errors import ConfigError
from tests.cases import cases
from tests.modules import module_of
from tests.runtime.small import all_recomputed, batch, gradients, near, relative_error

pytestmark = [
    pytest.mark.slow,
    # torch's own compiler asks inputs that are no leaves for it, also without a pipeline
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

MEAN = {"loss_reduction": "mean"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted:
    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.second(torch.nn.functional.gelu(self.first(x))))


class Gate(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x):
        return x * torch.sigmoid(self.weight * x)


def model_of(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(4)), Gate(), Block(dropout=dropout), Gate())


data = functools.partial(batch, 7, inputs=8, labels=8)


def learnt(model, compile, config=None, steps=2, devices="virtual:2"):
    model, losses, (x, y) = copy.deepcopy(model), [], data()
    config = config or RoundPipeRunConfig(num_microbatch=3, **MEAN)
    with closing(RoundPipe(model, devices=devices, compile=compile, name="compiled")) as pipe:
        for step in range(steps):
            model.zero_grad()
            torch.manual_seed(step)
            losses.append(pipe.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss, run_config=config))
        pipe.synchronize()
        return losses, {**gradients(model), **dict(model.named_buffers())}


@pytest.fixture(params=cases(["aot_eager", "inductor"], quick=["aot_eager"]))
def backend(request):
    """The passes of torch's compiler without its code, which takes a minute to make, and with it."""
    if request.param == "inductor" and not any(shutil.which(name) for name in ("g++", "clang++")):
        pytest.skip("inductor needs a compiler for C++")
    return request.param


def test_equal_layers_share_what_is_compiled_once():
    """Graphs of the first block, whose input needs no gradient, of the others and of gates, for each kind of device."""
    counted = Counted()
    layers = len(model_of()) - 1
    learnt(model_of(), {"backend": counted}, all_recomputed(layers, 3), steps=3)
    places = {device.torch_device for device in parse_devices("virtual:2")}
    assert len(counted.graphs) == 3 * len(places)


def test_losses_and_gradients_are_those_of_the_plain_model(backend):
    plain, (x, y) = model_of(), data()
    for layer in plain:
        layer.compile(backend=backend, dynamic=True)
    nn.functional.mse_loss(plain(x), y).backward()
    eager = learnt(model_of(), False)
    losses, found = learnt(model_of(), {"backend": backend})
    assert all(near(one, other) for one, other in zip(losses, eager[0], strict=True))
    for name, gradient in gradients(plain).items():
        assert relative_error(found[name], gradient) < 1e-6
        assert relative_error(found[name], eager[1][name]) < 1e-6


def test_dropout_draws_again_what_it_drew(backend):
    model = model_of(dropout=0.3)
    whole = learnt(model, {"backend": backend}, RoundPipeRunConfig(num_microbatch=2, **MEAN), devices="virtual:1")
    again = learnt(model, {"backend": backend}, all_recomputed(len(model) - 1), devices="virtual:3")
    assert whole[0] == again[0]
    assert whole[0][0] != whole[0][1]  # each step has a seed of its own
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in whole[1].items())


def test_layers_are_as_they_were_for_everyone_else():
    counted, model = Counted(), model_of()
    x, y = data()
    with closing(RoundPipe(model, devices="virtual:1", compile={"backend": counted})) as pipe:
        config = RoundPipeRunConfig(num_microbatch=2, **MEAN)
        pipe.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss, run_config=config)
        pipe.synchronize()
        assert all(layer._compiled_call_impl is None for layer in model.modules())
        before = len(counted.graphs)
        model[0](x[:1])
        assert len(counted.graphs) == before
        pickle.dumps(model)


def writing():
    """Writes its input in place."""
    return module_of(lambda self, x: self.linear(x.mul_(2)), linear=nn.Linear(8, 8)).train()


def counting():
    """Writes a buffer, and what it computed, in place."""
    parts = {"linear": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8)}
    return module_of(lambda self, x: self.norm(self.linear(x).relu_()), **parts).train()


def noisy():
    """Draws once; its recomputation reads what was drawn."""

    def forward(self, x):
        if doing_recompute():
            (noise,) = get_recompute_data()
        else:
            noise = torch.rand_like(x)
            save_for_recompute(noise)
        return x * self.weight + noise

    return module_of(forward, weight=torch.ones(8)).train()


@pytest.mark.parametrize("layers", [[writing, counting, writing], [noisy]], ids=["writes", "saves"])
def test_layers_that_write_buffers_and_inputs_or_save_data_do_so_once(layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(kind() for kind in layers), nn.Linear(8, 8))
    config = all_recomputed(len(layers) + 1)
    (_, eager), (_, found) = (learnt(model, compile, config, steps=1) for compile in (False, {"backend": "aot_eager"}))
    for name, expected in eager.items():
        assert relative_error(found[name], expected) < 1e-6, name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("inductor", "compile must be True, or keyword arguments of torch.compile, found 'inductor'"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' records the addresses of parameters"),
        ({"dynamic": None}, "dynamic=None compiles a layer again at the second size"),
    ],
)
def test_what_a_pipeline_cannot_compile_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        RoundPipe(model_of(), devices="virtual:1", compile=given)
