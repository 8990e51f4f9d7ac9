"""A call as its caller sees it: autograd, modes and thread locals, configuration, progress."""

import copy
import re
import threading
import types

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError
from roundpipe_runtime.errors import ConfigError
from tests.modules import module_class
from tests.runtime.small import MEAN, all_recomputed, batch, near, near_gradients, same_bits, small_model, trains_like

F = nn.functional


@pytest.fixture
def pair(devices):
    model = small_model(tied=True)
    plain = copy.deepcopy(model)
    return RoundPipe(model, devices=devices), plain


def test_gradients_can_be_asked_for(pair):
    pipe, plain = pair
    inputs, labels = batch(6)
    found = torch.autograd.grad(F.mse_loss(pipe(inputs), labels), list(pipe.parameters()))
    expected = torch.autograd.grad(F.mse_loss(plain(inputs), labels), list(plain.parameters()))
    assert all(near(one, other) for one, other in zip(found, expected, strict=True))
    inputs.requires_grad_()
    (found,) = torch.autograd.grad(pipe(inputs).sum(), inputs)
    (expected,) = torch.autograd.grad(plain(inputs).sum(), inputs)
    assert near(found, expected)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_parameters_that_are_part_of_a_graph(devices):
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    pipe = RoundPipe(copy.deepcopy(plain), devices=devices)
    inputs, labels = batch(6)
    gradients = []
    for model in (pipe, plain):
        made_of = {name: parameter.detach().clone().requires_grad_() for name, parameter in plain.named_parameters()}
        weights = {name: 2 * tensor for name, tensor in made_of.items()}
        F.mse_loss(torch.func.functional_call(model, weights, (inputs,)), labels).backward()
        gradients.append([tensor.grad for tensor in made_of.values()])
    assert all(near(one, other) for one, other in zip(*gradients, strict=True))


def test_hooks_on_parameters_run(pair):
    pipe, plain = pair
    seen = {"pipe": [], "plain": []}
    for name, model in (("pipe", pipe), ("plain", plain)):
        model[2].weight.register_hook(lambda gradient, name=name: seen[name].append(gradient.clone()) or 3 * gradient)
        model[0].weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
    inputs, labels = batch(6)
    for model in (pipe, plain):
        for _ in range(2):
            F.mse_loss(model(inputs), labels).backward()
    assert len(seen["pipe"]) == len(seen["plain"]) == 4
    for kind in (0, 1):  # a tensor of 6 by 6, and one of 6 by 4
        one, other = (sorted(seen[name], key=lambda t: t.numel())[2 * kind :][:2] for name in ("pipe", "plain"))
        assert all(near(a, b) for a, b in zip(one, other, strict=True))
    assert all(near(p.grad, q.grad) for p, q in zip(pipe.parameters(), plain.parameters(), strict=True))


def test_forward_mode_and_gradients_of_gradients_are_refused(pair):
    """Outputs would have no tangents; a penalty on a gradient would count in the loss and not in its gradient."""
    pipe, _ = pair
    inputs = batch(6)[0]
    with forward_ad.dual_level(), pytest.raises(StageError, match="forward-mode"):
        pipe(forward_ad.make_dual(inputs, torch.ones_like(inputs)))
    output = pipe(inputs.requires_grad_()).sum()
    with pytest.raises(StageError, match="create_graph=True"):
        torch.autograd.grad(output, inputs, create_graph=True)


def test_sparse_and_dense_gradients_of_one_weight():
    """The table looks up, the head multiplies: the sum is dense, also of two backwards."""
    table, head = nn.Embedding(7, 4, sparse=True), module_class("Head", lambda self, x: x @ self.weight.T)()
    head.weight = table.weight
    plain = nn.Sequential(table, nn.Linear(4, 4), head)
    model = copy.deepcopy(plain)
    pipe = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=3))
    ids = torch.tensor([[0, 1], [2, 2], [6, 0]])
    for _ in range(2):
        pipe(ids).square().mean().backward()
        plain(ids).square().mean().backward()
    assert near_gradients(model, plain)


class Own(threading.local):
    scale = 1.0


STATE, OWN = threading.local(), Own()
SWITCHES = types.SimpleNamespace(local=threading.local())


def factor():
    return getattr(STATE, "scale", 1.0)


class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) * getattr(STATE, "scale", 1.0)


class Asks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.scale()

    def scale(self):
        return factor()


class OfObject(nn.Linear):
    def forward(self, x):
        return super().forward(x) * getattr(SWITCHES.local, "scale", 1.0)


class OfClass(nn.Linear):
    def forward(self, x):
        return super().forward(x) * OWN.scale


class Holds(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.state = STATE

    def __deepcopy__(self, memo):
        made = Holds(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        return super().forward(x) * getattr(self.state, "scale", 1.0)


X, Y = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) for size in (8, 4))


@pytest.mark.parametrize("devices", ["virtual:1", "virtual:2"])
@pytest.mark.parametrize("kind", [Reads, Asks, OfObject, OfClass, Holds])
def test_a_thread_local_of_the_caller_is_seen_by_layers(kind, devices):
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices=devices)
    for scale in (3.0, 1.0):
        plain.zero_grad()
        pipeline.zero_grad()
        for local in (STATE, SWITCHES.local, OWN):
            local.scale = scale
        config = all_recomputed(3, 1)
        assert trains_like(pipeline, plain, lambda out, y: F.mse_loss(out, y) * factor(), X, Y, config=config)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def test_modes_of_the_caller_are_seen_by_layers():
    """A function mode, and one that counts operations."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    pipeline = RoundPipe(copy.deepcopy(model), devices="virtual:2")
    config = RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean")
    with Doubles():
        expected = F.mse_loss(model(X), Y)
        assert near(pipeline.forward_backward((X,), label=Y, loss_fn=F.mse_loss, run_config=config), expected)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        pipeline(X, roundpipe_run_config=config)
    assert counter.get_total_flops() == 2 * 6 * 8 * (8 + 4)


def test_a_call_goes_before_the_model():
    model = RoundPipeRunConfig(num_microbatch=2, recompute_grain="layer", merge_output=True)
    merged = RoundPipeRunConfig(num_microbatch=4, merge_output=False).over(model)
    assert (merged.num_microbatch, merged.recompute_grain, merged.merge_output) == (4, "layer", False)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("requires_grad", 1, "True, False or None"),
        ("output_device", "toaster", 'a torch.device, like "cpu"'),
        ("recompute_grain", "block", '"stage" or "layer"'),
        ("num_microbatch", True, "a whole number of at least 1"),
        ("last_stage_copies", "all", 'an integer >= 1, or "auto"'),
        ("keep_parameters", -1, 'a number of GB of at least 0, or "auto"'),
        ("split_input", True, "(spec of args, spec of kwargs), a mapping from key paths or a function"),
        ("split_label", 3, "a tree of TensorChunkSpec and Replicate or a function"),
        ("merge_output", "cat", "True, False, a tree of TensorChunkSpec and Replicate, or a function"),
        ("execute_plan", [range(2)], "a ModelExecutePlan"),
        ("loss_reduction", "none", '"auto", "sum", "mean" or "joined"'),
    ],
)
def test_a_wrong_value_names_its_field(field, value, expected):
    with pytest.raises(
        ConfigError, match=re.escape(f"RoundPipeRunConfig: {field} must be {expected}, found {value!r}.")
    ):
        RoundPipeRunConfig(**{field: value})


def gradients_of(pipe):
    return [parameter.grad for parameter in pipe.optim_parameters()]


def test_training_goes_on_from_progress_and_state_dict():
    inputs, labels = batch(6)

    def made():
        model = small_model(dropout=0.5).to(torch.bfloat16)
        return RoundPipe(model, torch.float32, name="same", devices="virtual:2", model_run_config=MEAN)

    def run(pipe):
        pipe.forward_backward((inputs.bfloat16(),), label=labels.bfloat16(), loss_fn=F.mse_loss)

    first = made()
    optimizer = torch.optim.SGD(first.optim_parameters(), lr=0.1)
    run(first)
    first.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    run(first)
    progress = first.progress()
    assert progress.runs == 2
    other = made()
    other.load_state_dict(first.state_dict())
    other.load_progress(progress)
    run(first), run(other)
    assert same_bits(gradients_of(first), gradients_of(other))
    masters = [parameter.detach() for parameter in first.optim_parameters()]
    assert same_bits(masters, [parameter.detach() for parameter in other.optim_parameters()])
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)  # a state dict alone would have rounded them


def test_copies_of_the_optimizer_are_left_out_where_there_are_none():
    with_copies = RoundPipe(small_model(), torch.float64, devices="virtual:1", model_run_config=MEAN)
    without = RoundPipe(small_model(), devices="virtual:1", model_run_config=MEAN)
    inputs, labels = batch(6)
    with_copies.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    before = [parameter.detach().clone() for parameter in without.parameters()]
    without.load_progress(with_copies.progress())
    assert (without.progress().runs, without.progress().masters) == (1, {})
    assert same_bits(before, [parameter.detach() for parameter in without.parameters()])
    assert same_bits(gradients_of(without), [gradient.float() for gradient in gradients_of(with_copies)])
    with_copies.close(), without.close()


def test_a_parent_module_loads_after_a_step_in_the_background():
    pipe = RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices="virtual:1")
    parent = nn.ModuleDict({"inside": pipe})
    go = threading.Event()

    def step():
        go.wait(10)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.fill_(2.0)

    loaded = {name: torch.full_like(value, 7.0) for name, value in parent.state_dict().items()}
    pipe.step(step, is_async=True)
    threading.Timer(0.2, go.set).start()
    parent.load_state_dict(loaded)
    assert all((parameter == 7.0).all() for parameter in pipe.parameters())
