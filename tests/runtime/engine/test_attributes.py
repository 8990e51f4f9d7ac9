"""What layers keep in Python attributes is what plain layers keep: a recomputation does not change it again."""

import collections
import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError
from tests.runtime.small import all_recomputed, near, near_gradients

F = nn.functional
X, Y = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) for size in (8, 4))


class Bank(nn.Module):
    """The last features, in a tensor that is made anew."""

    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(0, 8)

    def forward(self, x):
        self.queue = torch.cat([self.queue, x.detach()])[-12:]
        return x + self.queue.mean()


class InPlace(nn.Module):
    """How often each expert was chosen, added up in place, before it is made and after."""

    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(8)

    def forward(self, x):
        self.counts += torch.bincount(x.argmax(-1), minlength=8)
        self.last = x.detach().sum()
        return x * (1 + self.counts / 100)


class Containers(nn.Module):
    """A list, a table, a deque and a set; and an object with a list."""

    class Held:
        def __init__(self):
            self.rows = []

    def __init__(self):
        super().__init__()
        self.rows, self.sizes, self.last, self.kinds = [], {}, collections.deque(maxlen=2), set()
        self.held, self.calls = self.Held(), 0

    def forward(self, x):
        self.calls += 1
        self.rows.append(len(x))
        self.held.rows.append(len(x))
        self.sizes[len(x)] = self.sizes.get(len(x), 0) + 1
        self.last.append(self.calls)
        self.kinds.add(x.dtype)
        return x / self.calls

    def state(self):
        return self.rows, self.sizes, list(self.last), self.kinds, self.held.rows, self.calls


def kept(layer):
    if isinstance(layer, Containers):
        return layer.state()
    return [layer.queue] if isinstance(layer, Bank) else [layer.counts, layer.last]


def is_same(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(near(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)


@pytest.mark.parametrize("classic", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", [Bank, InPlace, Containers])
def test_attributes_and_gradients_are_those_of_the_plain_layers(kind, microbatches, classic):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), kind(), nn.Tanh(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    pipeline = RoundPipe(model, devices="virtual:2")
    pipeline._rp_engine.row_check = None  # the layer compares what it has seen
    config = all_recomputed(3, microbatches)
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        losses = [
            F.mse_loss(plain(x), y) / microbatches
            for x, y in zip(X.chunk(microbatches), Y.chunk(microbatches), strict=True)
        ]
        expected = sum(losses)
        expected.backward()
        if classic:
            options = RoundPipeRunConfig(num_microbatch=microbatches)
            found = F.mse_loss(pipeline(X, roundpipe_run_config=options), Y)
            found.backward()
        else:
            found = pipeline.forward_backward((X,), label=Y, loss_fn=F.mse_loss, run_config=config)
        assert near(found, expected)
        assert near_gradients(model, plain)
        assert is_same(kept(model[1]), kept(plain[1]))


# -- outputs that are views of each other ------------------------------------------------------------------------------


class Split(nn.Module):
    """Returns tokens, and a part of them."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return x, self.part(x)


class Writes(nn.Module):
    """Adds to one of both in place."""

    def __init__(self, number):
        super().__init__()
        self.number, self.prompt = number, nn.Parameter(torch.full((8,), 2.0))

    def forward(self, both):
        both[self.number].add_(self.prompt)
        return both[0] + both[1].sum()


class Passes(nn.Module):
    def forward(self, both):
        return both


PARTS = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1:],
    "all": lambda x: x.view(x.shape),
    "transposed": lambda x: x.transpose(1, 2).transpose(1, 2),
    "columns": lambda x: x.unflatten(1, (5, 1))[:, 2],
}


def split_model(part, number, *between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Split(part), *between, Writes(number), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("mode", ["loss", "evaluation"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", PARTS)
def test_a_write_that_would_not_reach_the_other_view_is_refused(name, number, mode, passes):
    model = split_model(PARTS[name], number, *[Passes() for _ in range(passes)])
    pipeline = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = torch.randn(6, 5, 8)

    def run():
        if mode == "loss":
            return pipeline.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean())
        with torch.no_grad():
            return pipeline(x)

    with pytest.raises(
        StageError, match=r"\(Writes\) writes in place to its input number .*layer . \((Split|Passes)\) returned it"
    ):
        run()


@pytest.mark.parametrize("part", [lambda x: x[:, 0].clone(), lambda x: x.mean(1)])
def test_a_write_to_memory_of_its_own_is_that_of_the_plain_layers(part):
    model = split_model(part, 1)
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = torch.randn(6, 5, 8)
    expected = plain(x).square().mean()
    expected.backward()
    assert near(pipeline.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean()), expected)
    assert near_gradients(model, plain)


def test_halves_of_one_tensor_may_be_written():
    """Queries, keys and values of one product share its memory, and no number of it."""

    class Halves(nn.Module):
        def forward(self, x):
            return x[:, :4], x[:, 4:]

    class Adds(nn.Module):
        def forward(self, both):
            both[0].add_(1.0)
            return both[0] * both[1]

    model = nn.Sequential(nn.Linear(8, 8), Halves(), Adds())
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices="virtual:2")
    expected = plain(X).square().mean()
    expected.backward()
    assert near(pipeline.forward_backward((X,), loss_fn=lambda outputs, _: outputs.square().mean()), expected)
    assert near(model[0].weight.grad, plain[0].weight.grad)
