"""Layers that write inputs, attributes or views, read parameters of others, or parametrize their own."""

import collections
import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError
from roundpipe_runtime.engine.draws import traits_of
from roundpipe_runtime.engine.layer_graph import check_leaves
from roundpipe_runtime.engine.parameters.on_device import LayerOnDevice
from roundpipe_runtime.optim.layer_contents import scan
from tests.modules import Answers, module_class
from tests.runtime.small import MEAN, all_recomputed, batch, near, near_gradients, trains_like, without_row_check

F = nn.functional


class Late(nn.Linear):
    """Writes its input in place from its third call on."""

    calls = 0
    counts = False

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.counts:
            self.seen += 1
        return super().forward(x.mul_(2) if self.calls > 2 else x * 2)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Late(), nn.Linear(4, 3))


def train(wrapped, inputs, labels):
    wrapped.zero_grad()
    return wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)


def test_a_layer_that_leaves_its_input_alone_gets_the_leaf(devices):
    seen = {0: [], 1: []}
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    inputs, labels = batch(6)
    for number in seen:
        layers[number + 1].register_forward_pre_hook(lambda m, args, n=number: seen[n].append(args[0].is_leaf))
    wrapped = without_row_check(RoundPipe(layers, devices=devices, model_run_config=MEAN))
    for _ in range(2):
        train(wrapped, inputs, labels)
    assert not any(seen[0])
    assert seen[1][0] is False
    assert all(seen[1][-3:])
    assert traits_of(layers[1]).mutates_inputs[True] is True
    assert traits_of(layers[2]).mutates_inputs[True] is False


@pytest.mark.parametrize("counts", [False, True])
def test_a_layer_may_begin_to_write_its_input(devices, counts):
    """torch refuses to write a leaf, so the call is repeated. If the layer wrote a buffer, only the next call runs."""
    inputs, labels = batch(6)
    expected, found = model(), model()
    found[1].counts = counts
    wrapped = RoundPipe(found, devices=devices, model_run_config=MEAN)
    if counts:
        without_row_check(wrapped)
    message = r"layer 1 \(Late\) must be called again to write its input in place"
    with pytest.raises(StageError, match=message) if counts else contextlib.nullcontext():
        [train(wrapped, inputs, labels) for _ in range(2)]
    assert found[1].calls >= 3
    train(wrapped, inputs, labels)
    F.mse_loss(expected(inputs), labels).backward()
    assert near_gradients(found, expected)


def test_an_error_of_the_layer_s_own_is_not_taken_for_that(devices):
    class Own(nn.Linear):
        broken = False

        def forward(self, x):
            if self.broken:
                self.weight.add_(1)
            return super().forward(x)

    inputs, labels = batch(6)
    layers = nn.Sequential(nn.Linear(4, 4), Own(4, 3))
    wrapped = RoundPipe(layers, devices=devices, model_run_config=MEAN)
    train(wrapped, inputs, labels)
    layers[1].broken = True
    with pytest.raises(RuntimeError, match="leaf Variable"):
        train(wrapped, inputs, labels)


X, Y = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) for size in (8, 4))


class Bank(nn.Module):
    """The last features, in a tensor that is made anew."""

    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(0, 8)

    def forward(self, x):
        self.queue = torch.cat([self.queue, x.detach()])[-12:]
        return x + self.queue.mean()

    def state(self):
        return [self.queue]


class InPlace(nn.Module):
    """How often each expert was chosen, added up in place, before it is made and after; calls, in a buffer."""

    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.counts += torch.bincount(x.argmax(-1), minlength=8)
        self.last = x.detach().sum()
        return x * (1 + self.counts / 100) * self.calls.clone()

    def state(self):
        return [self.counts, self.last, self.calls]


class Containers(nn.Module):
    """A list, a table, a deque and a set; an object with a list; numbers, of which one is made at the first call."""

    class Held:
        def __init__(self):
            self.rows = []

    def __init__(self):
        super().__init__()
        self.rows, self.sizes, self.last, self.kinds = [], {}, collections.deque(maxlen=2), set()
        self.held, self.calls, self.total = self.Held(), 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.first = getattr(self, "first", len(x))
        self.total += len(x)
        self.rows.append(len(x))
        self.held.rows.append(len(x))
        self.sizes[len(x)] = self.sizes.get(len(x), 0) + 1
        self.last.append(self.calls)
        self.kinds.add(x.dtype)
        return x / self.calls

    def state(self):
        return self.rows, self.sizes, list(self.last), self.kinds, self.held.rows, self.calls, self.first, self.total


@pytest.mark.filterwarnings("ignore:The outputs of a layer depend")
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("classic", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", [Bank, InPlace, Containers])
def test_attributes_and_gradients_are_those_of_the_plain_layers(kind, microbatches, classic, grain):
    """Also in the recomputation, which reads buffers and attributes as they were in the forward."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), kind(), nn.Tanh(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    pipeline = RoundPipe(model, devices="virtual:2")
    if kind is not Containers:
        pipeline._rp_engine.row_check = None  # the layer compares what it has seen
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        pairs = zip(X.chunk(microbatches), Y.chunk(microbatches), strict=True)
        expected = sum(F.mse_loss(plain(x), y) / microbatches for x, y in pairs)
        expected.backward()
        if classic:
            options = RoundPipeRunConfig(num_microbatch=microbatches, recompute_grain=grain)
            found = F.mse_loss(pipeline(X, roundpipe_run_config=options), Y)
            found.backward()
        else:
            config = all_recomputed(3, microbatches, recompute_grain=grain)
            found = pipeline.forward_backward((X,), label=Y, loss_fn=F.mse_loss, run_config=config)
        assert near(found, expected)
        assert near_gradients(model, plain)
        for one, other in zip(model[1].state(), plain[1].state(), strict=True):
            assert near(one, other) if isinstance(one, torch.Tensor) else one == other


class Writes(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.prompt = number, nn.Parameter(torch.full((8,), 2.0))

    def forward(self, both):
        both[self.number].add_(self.prompt)
        return both[0] + both[1].sum()


PASSES = module_class("Passes", lambda self, both: both)


PARTS = {
    "first": lambda x: x[:, 0], "last": lambda x: x[:, -1:], "all": lambda x: x.view(x.shape),
    "transposed": lambda x: x.transpose(1, 2).transpose(1, 2), "columns": lambda x: x.unflatten(1, (5, 1))[:, 2],
}  # fmt: skip


def split_model(part, number, *between):
    torch.manual_seed(0)
    split = module_class("Split", lambda self, x: (x, part(x)))
    return nn.Sequential(nn.Linear(8, 8), split(), *between, Writes(number), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("mode", ["loss", "evaluation"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", PARTS)
def test_a_write_that_would_not_reach_the_other_view_is_refused(name, number, mode, passes):
    model = split_model(PARTS[name], number, *[PASSES() for _ in range(passes)])
    pipeline = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = torch.randn(6, 5, 8)

    def run():
        if mode == "loss":
            return pipeline.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean())
        with torch.no_grad():
            return pipeline(x)

    with pytest.raises(
        StageError, match=r"\(Writes\) writes in place to its input number .*outputs of layer . \((Split|Passes)\)"
    ):
        run()


ADDS = module_class("Adds", lambda self, both: both[0].add_(1.0) * both[1])
HALVES = module_class("Halves", lambda self, x: (x[..., :4], x[..., 4:]))
MAY_BE_WRITTEN = {
    "a copy": lambda: split_model(lambda x: x[:, 0].clone(), 1),
    "a mean": lambda: split_model(lambda x: x.mean(1), 1),
    # queries, keys and values of one product share its memory, and no number of it
    "a half": lambda: nn.Sequential(nn.Linear(8, 8), HALVES(), ADDS()),
}


@pytest.mark.parametrize("name", MAY_BE_WRITTEN)
def test_a_write_to_memory_of_its_own_is_that_of_the_plain_layers(name):
    model = MAY_BE_WRITTEN[name]()
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert trains_like(pipeline, plain, lambda outputs, _: outputs.square().mean(), torch.randn(6, 5, 8), None)


class Penalised(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.others[0].weight.norm()


@pytest.mark.parametrize("way", ["forward_backward", "outputs", "copy"])
def test_the_parameter_and_both_layers_are_named(way):
    """Also while the other layer computes: the weight is then a copy, which stands there for a call on its device."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Penalised(3, 2))
    model[2].others = [model[0]]  # a list hides it from torch
    pipeline = RoundPipe(model, devices="virtual:2")
    x = torch.ones(4, 3)
    if way == "outputs":
        go = pipeline(x).sum().backward
    elif way == "forward_backward":
        go = functools.partial(pipeline.forward_backward, (x,), loss_fn=lambda outputs, _: outputs.sum())
    else:
        contents = scan(list(model))
        there = LayerOnDevice(contents[0], pipeline.devices[0], lambda parameter: parameter)
        outputs = there.call(lambda: model[2](x))
        go = functools.partial(check_leaves, contents[2], [outputs], [None], list(model[2].parameters()), contents)
    with pytest.raises(StageError, match=r"layer 2 \(Penalised\) uses 'weight' of layer 0 \(Linear\)"):
        go()


def test_a_parameter_that_both_layers_have_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Penalised(3, 2))
    model[2].others = nn.ModuleList([model[0]])
    x = torch.randn(4, 3)
    (expected,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    pipeline = RoundPipe(model, devices="virtual:2")
    run = RoundPipeRunConfig(num_microbatch=2)
    pipeline.forward_backward((x,), loss_fn=lambda outputs, _: outputs.sum(), run_config=run)
    assert torch.allclose(model[0].weight.grad, expected, rtol=1e-5)


WIDTH = 6


class Adapted(nn.Module):
    """A linear layer with a matrix of rank 2 beside it, which stands in its weight while the layer runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x):
        parametrize.register_parametrization(self.linear, "weight", Answers((self.b @ self.a).add))
        self.linear.parametrizations.weight.original.requires_grad_(False)
        try:
            with parametrize.cached():
                return torch.tanh(self.linear(x))
        finally:
            parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)


class Normed(nn.Module):
    """A layer with a parametrization that stays, and is read twice."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("around", [contextlib.nullcontext, parametrize.cached])
@pytest.mark.parametrize("kind", [Adapted, Normed])
def test_gradients_are_those_of_the_plain_model(kind, around, grain):
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(4)])
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, recompute_grain=grain)
    pipe = RoundPipe(model, devices="virtual:2:check", model_run_config=config)
    for _ in range(3):
        (plain(x) - y).square().mean().backward()
        with around():
            pipe.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss)
            (pipe(x) - y).square().mean().backward()
        (plain(x) - y).square().mean().backward()
    assert near_gradients(model, plain)
    assert [one.requires_grad for one in model.parameters()] == [one.requires_grad for one in plain.parameters()]
