"""Checkpoints of models and optimizers: names, buffers, gradients, frozen weights, states, random generators."""

import copy
import types
from contextlib import closing

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, load_checkpoint, optim, save_checkpoint
from roundpipe_runtime.checkpoint import training_state
from roundpipe_runtime.checkpoint.training_state import named_state, restore_optimizer
from roundpipe_runtime.errors import CheckpointError
from tests.runtime.few_bits import CONFIG, KINDS, model_of, trained_in
from tests.runtime.small import MEAN, batch, same_bits, small_model

mse = nn.functional.mse_loss


def pipeline(devices: int = 2, dtype: torch.dtype | None = None, **options) -> RoundPipe:
    model = small_model(**options)
    if dtype:
        model.bfloat16()
    return RoundPipe(model, optim_dtype=dtype, devices=f"virtual:{devices}", model_run_config=MEAN)


def run(pipe: RoundPipe) -> float:
    inputs, labels = batch(6)
    dtype = next(pipe.model.parameters()).dtype
    return pipe.forward_backward((inputs.to(dtype),), label=labels.to(dtype), loss_fn=mse).item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def scramble(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()


def test_names_are_those_of_the_model_and_buffers_are_there_again(tmp_path):
    pipe = pipeline(norm=True)
    run(pipe)
    saved = save_checkpoint(tmp_path, pipe)
    plain = small_model(norm=True, seed=9)
    plain.load_state_dict(load_file(saved.path / "model.safetensors"))
    assert same_bits(weights(plain), weights(pipe))
    scramble(pipe)
    load_checkpoint(tmp_path, pipe)
    assert same_bits(weights(pipe), weights(plain))
    assert int(pipe[4].num_batches_tracked) == 3


def test_a_tied_weight_is_stored_once(tmp_path):
    pipe = pipeline(tied=True)
    expected = pipe[2].weight.detach().clone()
    stored = load_file(save_checkpoint(tmp_path, pipe).path / "model.safetensors")
    assert "2.weight" in stored
    assert "3.weight" not in stored
    scramble(pipe)
    load_checkpoint(tmp_path, pipe)
    assert pipe[3].weight is pipe[2].weight
    assert torch.equal(pipe[2].weight, expected)
    untied = small_model(seed=5)
    load_checkpoint(tmp_path, untied)
    assert torch.equal(untied[3].weight, expected)
    assert untied[3].weight is not untied[2].weight


def test_masters_keep_the_bits_that_parameters_have_not(tmp_path):
    pipe = pipeline(dtype=torch.float32)
    with OptimizerCtx():
        optimizer = optim.Adam(pipe.parameters(), lr=1e-3)
    run(pipe)
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    expected = [master.detach().clone() for master in pipe.optim_parameters()]
    save_checkpoint(tmp_path, pipe)
    again = pipeline(dtype=torch.float32, seed=3)
    load_checkpoint(tmp_path, again)
    found = [master.detach() for master in again.optim_parameters()]
    assert same_bits(found, expected)
    assert not same_bits(found, [parameter.float() for parameter in again.model.parameters()])
    run(again)  # which publishes: parameters stay the masters, rounded
    assert same_bits([m.detach().bfloat16() for m in expected], [p.detach() for p in again.model.parameters()])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_that_wait_for_a_step_are_there_again(tmp_path, dtype):
    pipe = pipeline(dtype=dtype)
    run(pipe)
    expected = [target.grad.clone() for target in pipe.optim_parameters()]
    save_checkpoint(tmp_path, pipe)
    again = pipeline(dtype=dtype, seed=3)
    run(again)
    load_checkpoint(tmp_path, again)
    assert same_bits([target.grad for target in again.optim_parameters()], expected)
    again.zero_grad()
    save_checkpoint(tmp_path, again)
    run(again)
    load_checkpoint(tmp_path, again)
    assert all(target.grad is None for target in again.optim_parameters())


class Counting(nn.Module):
    """A buffer that is no part of the state dict, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.words = {"seen": (0,)}

    def forward(self, x):
        self.seen.add_(1)
        return self.linear(x)

    def get_extra_state(self):
        return self.words

    def set_extra_state(self, state):
        self.words = state


def test_what_a_state_dict_leaves_out_and_what_is_no_tensor(tmp_path):
    module = Counting()
    pipe = RoundPipe(module, devices="virtual:2", model_run_config=MEAN)
    run(pipe)
    module.words = {"seen": (3, "times"), "where": torch.ones(2)}
    save_checkpoint(tmp_path, pipe)
    again = Counting()
    load_checkpoint(tmp_path, again)
    assert again.seen == 3
    assert again.words["seen"] == (3, "times")
    assert torch.equal(again.words["where"], torch.ones(2))


def test_pipelines_inside_of_a_module(tmp_path):
    def make(seed):
        parts = {"first": pipeline(dtype=torch.float32, seed=seed), "second": pipeline(dropout=0.5, seed=seed)}
        return nn.ModuleDict(parts)

    both = make(0)
    run(both["first"])
    run(both["second"])
    expected = [*both["first"].optim_parameters(), *both["second"].parameters()]
    save_checkpoint(tmp_path, both)
    loss = run(both["second"])
    again = make(4)
    load_checkpoint(tmp_path, again)
    assert same_bits([*again["first"].optim_parameters(), *again["second"].parameters()], expected)
    assert run(again["second"]) == loss


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6)), r"The model lacks 2\.bias, 2\.weight, 3\.bias and 5 more"),
        (
            lambda: small_model(norm=True),
            r"The checkpoint lacks 4\.num_batches_.* and 4 more\. The model lacks 6\.bias",
        ),
        (
            lambda: nn.Sequential(*small_model()[:-1], nn.Linear(5, 4)),
            r"6\.weight is float32\(3, 5\) in the checkpoint, and float32\(4",
        ),
    ],
)
def test_another_model_is_refused_and_unchanged(tmp_path, other, message):
    """By the names and shapes of what differs; torch would load the tensors before the first that does not fit."""
    save_checkpoint(tmp_path, small_model(seed=1))
    model = other()
    before = weights(model)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, model)
    assert same_bits(weights(model), before)


def test_a_training_does_not_go_on_in_another_dtype(tmp_path):
    """The weights would be rounded in silence. Who loads the model alone may want just that."""
    model = small_model()
    save_checkpoint(tmp_path, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    half = small_model(seed=1).bfloat16()
    with pytest.raises(CheckpointError, match=r"0\.weight is float32\(6, 4\) in the checkpoint, and bfloat16\(6, 4"):
        load_checkpoint(tmp_path, half, optimizer=torch.optim.SGD(half.parameters(), lr=0.1))
    load_checkpoint(tmp_path, half)
    assert torch.equal(half[0].weight, model[0].weight.bfloat16())


def test_weights_on_meta_are_refused(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        save_checkpoint(tmp_path, model)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_training_goes_on_with_other_microbatches(tmp_path, microbatches):
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=microbatches)
    inputs, labels = batch(6)
    pipe = pipeline(dropout=0.5)
    run(pipe)
    pipe.zero_grad()
    save_checkpoint(tmp_path, pipe)
    again = pipeline(3, dropout=0.5, seed=2)
    load_checkpoint(tmp_path, again)
    saved = torch.get_rng_state()
    second = again.forward_backward((inputs,), label=labels, loss_fn=mse, run_config=config)
    torch.set_rng_state(saved)  # that of the process that saved
    assert torch.equal(pipe.forward_backward((inputs,), label=labels, loss_fn=mse, run_config=config), second)
    assert same_bits([p.grad.clone() for p in again.parameters()], [p.grad for p in pipe.parameters()])


def training(kind, seed=0):
    pipe = RoundPipe(model_of(kind, seed=seed), devices="virtual:2", model_run_config=CONFIG)
    return pipe, torch.optim.Adam([p for p in pipe.optim_parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_has_the_same_bits_and_frozen_weights_are_not_stored(tmp_path, kind, is_async):
    whole, optimizer = training(kind)
    first = trained_in(whole, 3, optimizer=optimizer)
    path = save_checkpoint(tmp_path, whole, optimizer=optimizer, is_async=is_async).wait().path
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {name for name, p in whole.named_parameters() if p.requires_grad}
    expected = trained_in(whole, 3, optimizer=optimizer)
    resumed, optimizer = training(kind)
    load_checkpoint(tmp_path, resumed, optimizer=optimizer)
    assert trained_in(resumed, 3, optimizer=optimizer) == expected != first
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs if one.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_other_frozen_weights_are_refused(tmp_path, kind):
    with closing(training(kind)[0]) as pipe:
        save_checkpoint(tmp_path, pipe)
    other, _ = training(kind, seed=1)
    before = [p.detach().clone() for p in other.parameters() if p.requires_grad]
    with pytest.raises(
        CheckpointError, match=r"changed since the checkpoint was saved: \S*base\.weight, .*weight, .*weight\. Quantize"
    ):
        load_checkpoint(tmp_path, other)
    after = [p for p in other.parameters() if p.requires_grad]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


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


def optimized(name, seed, devices=2):
    model = small_model(dropout=0.2, seed=seed)
    pipe = RoundPipe(model, devices=f"virtual:{devices}", model_run_config=MEAN)
    with OptimizerCtx():
        return pipe, OPTIMIZERS[name](list(pipe.parameters()))


def steps(pipe, optimizer, steps, is_async):
    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            pipe.step(lambda: optimizer.step(lambda: (pipe.zero_grad(), run(pipe))[1]))
        else:
            run(pipe)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)


@pytest.mark.parametrize(("name", "is_async"), [("adam", True), *((name, False) for name in OPTIMIZERS)])
def test_training_goes_on_bit_for_bit(tmp_path, name, is_async):
    pipe, optimizer = optimized(name, seed=0)
    steps(pipe, optimizer, 2, is_async)
    save_checkpoint(tmp_path, pipe, optimizer=optimizer)
    steps(pipe, optimizer, 2, is_async)
    again, other = optimized(name, seed=1, devices=3)
    load_checkpoint(tmp_path, again, optimizer=other)
    steps(again, other, 2, is_async)
    again.synchronize()
    pipe.synchronize()
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
        (lambda params: torch.optim.AdamW(params[1:]), r"Not in both: 0\.weight"),
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
    before = training_state.random_state()
    yield
    training_state.restore_random_state(before)


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
    state = training_state.random_state()
    here = FakeLibrary(count)
    here.states = [torch.tensor([-1])] * count
    monkeypatch.setattr(training_state, "_accelerator", lambda: (kind, here))
    training_state.restore_random_state(state)
    assert [generator.item() for generator in here.states] == expected


@pytest.mark.parametrize(("started", "expected"), [(True, "npu"), (False, "")])
def test_any_accelerator_that_the_process_uses_has_generators(monkeypatch, started, expected):
    library = FakeLibrary(1)
    library.is_initialized = lambda: started
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: library)
    assert training_state._accelerator()[0] == expected
