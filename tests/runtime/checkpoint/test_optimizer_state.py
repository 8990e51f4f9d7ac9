"""Checkpoints of optimizers and of random number generators."""

import copy
import types

import pytest
import torch
from torch import nn

from roundpipe_runtime import (
    CheckpointError,
    OptimizerCtx,
    RoundPipe,
    RoundPipeRunConfig,
    load_checkpoint,
    optim,
    save_checkpoint,
)
from roundpipe_runtime.checkpoint import training_state
from roundpipe_runtime.checkpoint.training_state import (
    named_state,
    random_state,
    restore_optimizer,
    restore_random_state,
)
from tests.runtime.small import batch, same_bits, small_model

MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
mse = nn.functional.mse_loss

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adamw, amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), capturable=False, foreach=False),
    "two groups": lambda params: torch.optim.AdamW(
        [{"params": params[:3], "lr": 0.1}, {"params": params[3:]}], lr=0.01
    ),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),  # lists of tensors, of the first parameter
    "named": lambda params: torch.optim.AdamW([(f"mine {n}", p) for n, p in enumerate(params)], lr=0.01),
}


def make(name, seed, devices=2):
    model = small_model(dropout=0.2, seed=seed)
    pipe = RoundPipe(model, devices=f"virtual:{devices}", model_run_config=MEAN)
    with OptimizerCtx():
        return pipe, OPTIMIZERS[name](list(pipe.parameters()))


def train(pipe, optimizer, steps):
    inputs, labels = batch(6)

    def closure():
        pipe.zero_grad()
        return pipe.forward_backward((inputs,), label=labels, loss_fn=mse)

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            pipe.step(lambda: optimizer.step(closure))
        else:
            closure()
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, name):
    pipe, optimizer = make(name, seed=0)
    train(pipe, optimizer, 2)
    save_checkpoint(tmp_path, pipe, optimizer=optimizer)
    train(pipe, optimizer, 2)
    again, other = make(name, seed=1, devices=3)
    load_checkpoint(tmp_path, again, optimizer=other)
    train(again, other, 2)
    assert same_bits(list(again.parameters()), list(pipe.parameters()))


def test_state_is_found_by_name_whatever_the_order():
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    first = torch.optim.Adam(model.parameters())
    first.step()
    second = torch.optim.Adam(reversed(list(model.parameters())))
    targets = dict(model.named_parameters())
    restore_optimizer(second, named_state(first, targets), targets)
    for parameter in model.parameters():
        assert torch.equal(second.state[parameter]["exp_avg"], first.state[parameter]["exp_avg"])


class WideSGD(torch.optim.SGD):
    """Keeps its momentum in float64, whatever the parameters are."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros(parameter.shape, dtype=torch.float64)) + parameter.grad


def test_state_keeps_a_dtype_that_is_not_the_parameters():
    """torch's own `load_state_dict` casts it, pytorch#43706."""
    model = nn.Linear(2, 2)
    targets = dict(model.named_parameters())
    optimizer = WideSGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1 / 3)
    optimizer.step()
    optimizer.step()
    expected = {name: optimizer.state[target]["sum"].clone() for name, target in targets.items()}
    stored = copy.deepcopy(named_state(optimizer, targets))
    other = WideSGD(model.parameters(), lr=1.0)
    restore_optimizer(other, stored, targets)
    for name, target in targets.items():
        assert other.state[target]["sum"].dtype == torch.float64
        assert torch.equal(other.state[target]["sum"], expected[name])


def test_parameters_of_something_else_are_refused(tmp_path):
    pipe = RoundPipe(small_model().bfloat16(), torch.float32, devices="virtual:2")
    stray = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"Parameter 0 in group 0 .*\n    model\.optim_parameters\(\)"):
        save_checkpoint(tmp_path, pipe, optimizer=stray)
    own = torch.optim.SGD(pipe.model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="does not belong to the model"):
        save_checkpoint(tmp_path, pipe, optimizer=own)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), "contains the state of AdamW, but your optimizer is SGD"),
        (
            lambda params: torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}]),
            "has 2 parameter groups; the checkpoint has 1",
        ),
        (lambda params: torch.optim.AdamW(params[1:]), r"Missing in optimizer or checkpoint: 0\.weight"),
    ],
)
def test_another_optimizer_is_refused_and_nothing_changed(tmp_path, other, message):
    model = small_model()
    save_checkpoint(tmp_path, model, optimizer=torch.optim.AdamW(model.parameters()))
    again = small_model(seed=1)
    before = [parameter.detach().clone() for parameter in again.parameters()]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, again, optimizer=other(list(again.parameters())))
    assert same_bits(list(again.parameters()), before)


def test_masters_without_a_place_are_refused(tmp_path):
    """The moments would belong to parameters that have lost two thirds of their bits."""
    pipe = RoundPipe(small_model().bfloat16(), torch.float32, devices="virtual:2")
    save_checkpoint(tmp_path, pipe, optimizer=torch.optim.SGD(pipe.optim_parameters(), lr=0.1))
    plain = small_model().bfloat16()
    with pytest.raises(CheckpointError, match=r"\n    RoundPipe\(model, optim_dtype=torch\.float32\)"):
        load_checkpoint(tmp_path, plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1))
    load_checkpoint(tmp_path, plain)  # the weights alone are welcome


@pytest.fixture(autouse=True)
def generators_left_as_found():
    before = random_state()
    yield
    restore_random_state(before)


class FakeLibrary:
    """What torch has for a kind of accelerator."""

    def __init__(self, count):
        self.states = [torch.tensor([number]) for number in range(count)]

    def device_count(self):
        return len(self.states)

    def get_rng_state(self, number):
        return self.states[number].clone()

    def set_rng_state(self, state, number):
        self.states[number] = state


@pytest.mark.parametrize(
    ("kind", "count", "expected"), [("cuda", 1, [0]), ("cuda", 2, [0, 1]), ("cuda", 3, [0, 1, -1]), ("xpu", 1, [-1])]
)
def test_generators_of_accelerators_come_back_where_there_are_any(monkeypatch, kind, count, expected):
    monkeypatch.setattr(training_state, "_accelerator", lambda: ("cuda", FakeLibrary(2)))
    state = random_state()
    here = FakeLibrary(count)
    here.states = [torch.tensor([-1])] * count
    monkeypatch.setattr(training_state, "_accelerator", lambda: (kind, here))
    restore_random_state(state)
    assert [generator.item() for generator in here.states] == expected


@pytest.mark.parametrize(("started", "expected"), [(True, "npu"), (False, "")])
def test_any_accelerator_that_the_process_uses_has_generators(monkeypatch, started, expected):
    library = FakeLibrary(1)
    library.is_initialized = lambda: started
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: library)
    assert training_state._accelerator()[0] == expected
