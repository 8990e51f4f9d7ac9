"""Steps of an optimizer layer by layer, and the order in which runs read and steps write."""

import contextlib
import importlib
import random
import threading

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.two_tensor import TwoTensor

from roundpipe_runtime import StageError
from roundpipe_runtime.device.worker import generator_alone
from roundpipe_runtime.optim.parts import OptimizerParts, can_step_in_parts
from roundpipe_runtime.optim.readiness import LayerReadiness, ReadinessTable
from roundpipe_runtime.optim.torch_steps import hear_steps, other_post_hooks

SHAPES = [(40, 30), (30,), (17, 30), (17,), (3, 17)]


def parameters(seed=0, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(found, step):
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(found):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if step and (number + step) % 4 == 0 else gradient


def groups(found):
    return [{"params": found[:2], "lr": 0.03}, {"params": found[2:], "weight_decay": 0.1}]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_bits_of_the_whole_step(name, dtype):
    if dtype == torch.bfloat16 and name in ("Adafactor", "SGD fused"):
        pytest.skip("torch's Adafactor multiplies two dtypes; momenta of its fused SGD differ from run to run")
    whole, parts = parameters(dtype=dtype), parameters(dtype=dtype)
    expected, optimizer = OPTIMIZERS[name](groups(whole)), OPTIMIZERS[name](groups(parts))
    for step in range(50):
        give_gradients(whole, step)
        give_gradients(parts, step)
        expected.step()
        pieces = OptimizerParts(optimizer)
        for chosen in (parts[3:], parts[1:3], parts[:1]):
            pieces.step(set(map(id, chosen)))
        pieces.finish().step()
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
        assert expected.state[one].keys() == optimizer.state[other].keys()
        pairs = [(expected.state[one][key], value) for key, value in optimizer.state[other].items()]
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs)
    assert can_step_in_parts(optimizer)


class Counts(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        self.count += 1
        return super().step(closure)


def test_a_layer_that_draws_is_not_disturbed():
    """Stand-ins are stepped next to layers; the state of the generator is put back, so it must be nobody else's."""
    found = torch.optim.SGD(groups(parameters()), lr=0.1)
    step = threading.Thread(target=can_step_in_parts, args=(found,))
    expected = torch.rand(2, generator=torch.Generator().manual_seed(7))
    with torch.random.fork_rng(devices=[]), generator_alone():
        torch.manual_seed(7)
        drawn = [torch.rand(1)]
        step.start()
        step.join(0.3)
        assert step.is_alive()
        drawn.append(torch.rand(1))
    step.join()
    assert torch.equal(torch.cat(drawn), expected)
    assert can_step_in_parts(found)


def test_what_an_optimizer_counts_is_counted_once():
    found = parameters()
    optimizer = Counts(groups(found), lr=0.1)
    assert can_step_in_parts(optimizer)
    for step in range(3):
        give_gradients(found, step)
        pieces = OptimizerParts(optimizer)
        for parameter in found:
            pieces.step({id(parameter)})
        pieces.finish()
    assert optimizer.count == 3
    assert [group["count"] for group in optimizer.param_groups] == [3, 3]


class Clips(torch.optim.SGD):
    """Its update of a parameter depends on the gradients of all."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class Draws(torch.optim.SGD):
    """Its update of a parameter depends on how many were updated before."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


@pytest.mark.parametrize("kind", [Clips, Draws, torch.optim.LBFGS])
def test_an_optimizer_that_needs_all_parameters_is_not_stepped_in_parts(kind):
    """It is seen on stand-ins: the optimizer, its parameters and the generator of random numbers stay as they are."""
    found = parameters()
    give_gradients(found, 1)
    before = [p.detach().clone() for p in found]
    optimizer = kind(found, lr=0.1)
    generator = torch.get_rng_state()
    assert not can_step_in_parts(optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, found, strict=True))
    assert not optimizer.state
    assert torch.equal(generator, torch.get_rng_state())


def test_what_changes_after_the_step_began_has_no_effect():
    found, plain = parameters(), parameters()
    optimizer = torch.optim.SGD(found, lr=0.1)
    give_gradients(found, 1)
    give_gradients(plain, 1)
    pieces = OptimizerParts(optimizer)
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 7.0
    pieces.step(set(map(id, found)))
    pieces.finish()
    torch.optim.SGD(plain, lr=0.1).step()
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_hooks_of_this_package_are_no_obstacle_and_others_are():
    """A pipeline of several processes hears of the steps of all optimizers, in other pipelines also."""
    heard = []
    hear_steps(lambda *_: heard.append("before"), lambda *_: heard.append("after"))
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    assert heard == ["before", "after"]
    assert not other_post_hooks(optimizer)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert other_post_hooks(optimizer)
    finally:
        handle.remove()


class Uncut(TwoTensor):
    """A tensor made of two, which cannot be cut, as moments in 8 bits cannot."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.slice.Tensor:
            raise ValueError("blocks cannot be cut")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Blocks(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    zeros = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    moment = self.state[parameter].setdefault("moment", Uncut(*zeros))
                    moment.a.mul_(0.9).add_(parameter.grad)
                    parameter.data.sub_(moment.a, alpha=group["lr"])


def test_an_optimizer_whose_state_cannot_be_cut_is_tried_without_it():
    found = parameters()
    optimizer = Blocks(found, lr=0.1)
    give_gradients(found, 0)
    optimizer.step()
    assert can_step_in_parts(optimizer)
    assert not any(torch.equal(optimizer.state[p]["moment"].a, torch.zeros_like(p)) for p in found)


def test_trying_an_optimizer_compiles_nothing():
    """One may compile its update for each shape; the shapes of stand-ins are not met again."""

    class Compiles(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    torch.compile(lambda p, g: p.sub_(g), backend=counted)(parameter.data, parameter.grad)

    compiled = []

    def counted(graph, inputs):
        compiled.append(graph)
        return graph

    importlib.import_module("torch._dynamo")  # as an optimizer does that compiles
    assert can_step_in_parts(Compiles(parameters(), lr=0.1))
    assert not compiled


class Walk:
    """Runs and optimizer steps over some layers, one event at a time, in the order that a random generator says.

    A run holds its version of all layers, reads each layer (twice, as forward and backward do) and lets go; it reads
    every layer in the version that it announced. A publisher writes one version after the other. What a layer holds is
    a number; a write takes two events, between which the number is nonsense.
    """

    def __init__(self, seed, layers=3, rounds=3):
        self.random = random.Random(seed)
        self.layers = [LayerReadiness() for _ in range(layers)]
        self.values = [0] * layers
        self.rounds = rounds
        self.next_version = 0
        self.published = 0

    def processes(self):
        return [self.runs(), self.publisher(), self.late_reader()]

    def runs(self):
        for number in range(self.rounds):
            version = number
            yield lambda: True
            for layer in self.layers:
                layer.hold(version)
            for index in [*range(len(self.layers)), *reversed(range(len(self.layers)))]:
                yield lambda i=index, v=version: self.layers[i].can_read(v)
                self.layers[index].start_read(version)
                assert self.values[index] == version
                yield lambda: True
                assert self.values[index] == version
                self.layers[index].end_read()
            for layer in self.layers:
                layer.let_go(version)
            self.next_version = number + 1

    def publisher(self):
        for version in range(1, self.rounds + 1):
            yield lambda v=version: self.next_version >= v  # the step of a run is published after it
            for index, layer in enumerate(self.layers):
                yield lambda la=layer, v=version: la.can_write(v)
                layer.start_write(version)
                self.values[index] = None
                yield lambda: True
                self.values[index] = version
                layer.end_write()
            self.published = version

    def late_reader(self):
        """Reads whatever version is there, as an evaluation would."""
        for _ in range(4):
            index = self.random.randrange(len(self.layers))
            layer = self.layers[index]
            yield lambda la=layer: la.can_read(la.version)
            layer.start_read(layer.version)
            assert self.values[index] == layer.version
            yield lambda: True
            layer.end_read()

    def go(self):
        waiting = [(process, next(process)) for process in self.processes()]
        while waiting:
            able = [number for number, (_, guard) in enumerate(waiting) if guard()]
            assert able, f"deadlock: {self.layers}"
            process, _ = waiting.pop(self.random.choice(able))
            with contextlib.suppress(StopIteration):
                waiting.append((process, next(process)))
        assert self.values == [self.rounds] * len(self.values)
        assert all(layer == LayerReadiness(version=self.rounds) for layer in self.layers)


def test_no_interleaving_deadlocks_or_loses_an_update():
    for seed in range(10_000):
        Walk(seed, layers=1 + seed % 3, rounds=1 + seed % 4).go()


WRONG = [
    lambda layer: layer.start_read(1), lambda layer: layer.end_read(), lambda layer: layer.start_write(2),
    lambda layer: layer.end_write(), lambda layer: layer.let_go(0),
    lambda layer: (layer.start_read(0), layer.start_write(1)), lambda layer: (layer.hold(0), layer.start_write(1)),
    lambda layer: (layer.start_write(1), layer.start_read(0)),
    lambda layer: (layer.start_write(1), layer.end_write(), layer.hold(0)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_rules_forbid_raises(wrong):
    with pytest.raises(StageError, match="were read or replaced out of order"):
        wrong(LayerReadiness())


def test_a_writer_waits_for_the_run_that_holds_the_version():
    table = ReadinessTable(1)
    order = []
    assert table.hold_latest() == 0
    writer = threading.Thread(target=table.write, args=(0, 1, lambda: order.append("written")))
    reader = threading.Thread(target=lambda: (table.start_read(0, 1), order.append("read"), table.end_read(0)))
    writer.start()
    reader.start()
    order.append("held")
    table.let_go(0)
    writer.join(5)
    reader.join(5)
    assert order == ["held", "written", "read"]
    assert table.version(0) == 1
