"""Copies of parameters for the optimizer: what is published, resized, and the dtype of gradients."""

import contextlib
import pickle

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim
from roundpipe_runtime.device import pinning
from roundpipe_runtime.engine import lifecycle
from roundpipe_runtime.optim.layer_contents import scan
from roundpipe_runtime.optim.parameters import ParameterStore
from tests.runtime.optim.test_parts import Clips
from tests.runtime.small import batch, relative_error, same_bits, small_model


def test_a_tied_weight_is_one_parameter_of_its_layer_and_layers_that_share_a_module_share_a_lock():
    """Device copies stand in the places of a module: two layers with a module in common take turns."""
    layer = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    layer[1].weight = layer[0].weight
    shared = nn.Linear(2, 2)
    tied, first, second, third = scan(
        [layer, nn.Sequential(shared), nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), shared)]
    )
    assert len(tied.slots) == 2
    assert [id(p) for p in tied.parameters()] == [id(layer[0].weight)]
    assert tied.nbytes() == 36
    assert first.lock is third.lock
    assert first.lock is not second.lock
    contents = scan(list(small_model(tied=True)))
    assert contents[2].lock is not contents[3].lock  # a weight in common is no module in common


def test_gradients_are_added_in_the_order_of_the_list():
    """What was there first, then the last layer, then those before it: float32 sums in exactly that order."""
    model = nn.Linear(1, 1, bias=False)
    store = ParameterStore(model)
    numbers = [torch.full((1, 1), value) for value in (1e8, 3.0, -1e8)]
    store.add_gradients([{model.weight: number.clone()} for number in numbers])
    expected = (numbers[0] + numbers[1]) + numbers[2]
    assert torch.equal(model.weight.grad, expected)
    store.add_gradients([{model.weight: torch.ones(1, 1)}])
    assert torch.equal(model.weight.grad, expected + 1)


def test_a_master_holds_gradients_in_its_own_dtype():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    store = ParameterStore(model, torch.float32)
    ((name, master),) = store.named()
    for _ in range(300):  # in bfloat16 the sum would stay at 256
        store.add_gradients([{model.weight: torch.ones(1, 1)}])
    assert name == "weight"
    assert master.dtype == torch.float32
    assert master.grad.item() == 300
    assert model.weight.grad.data_ptr() == master.grad.data_ptr()
    store.show_gradients()
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.item() == 300
    store.zero_grad(set_to_none=False)
    assert (master.grad.item(), model.weight.grad.item()) == (0, 0)
    store.zero_grad()
    assert (master.grad, model.weight.grad) == (None, None)


WRITES = {
    "vector": lambda layer: nn.utils.vector_to_parameters(torch.arange(12000).bfloat16(), [layer.weight]),
    "memory": lambda layer: setattr(layer.weight, "data", torch.full_like(layer.weight, 0.25)),
    "mask": lambda layer: layer.weight.data.mul_(torch.arange(12000).reshape(300, 40) % 2),
    "row": lambda layer: layer.weight.data[17].zero_(),
    "in place": lambda layer: nn.init.constant_(layer.weight, 3),
    "state": lambda layer: layer.load_state_dict({"weight": torch.full_like(layer.weight, 4.0)}, assign=True),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_wins_over_the_master(write, stepped):
    """Averages of weights, a rollback, a mask, one row of a table, a state: also where torch counts no write."""
    model = nn.Linear(40, 300, bias=False).to(torch.bfloat16)
    store = ParameterStore(model, torch.float32)
    ((_, master),) = store.named()
    optimizer = torch.optim.SGD([master], lr=0.5)
    for number in range(5):
        if stepped:
            store.add_gradients([{model.weight: torch.full((300, 40), 1.0 + number)}])
            optimizer.step()
            optimizer.zero_grad()
            store.publish()
        write(model)
        expected = model.weight.detach().clone()
        store.adopt()
        store.publish()
        assert torch.equal(model.weight, expected)
        assert torch.equal(master.detach(), expected.float())


def test_a_master_keeps_its_bits_where_the_parameter_was_not_written():
    """A parameter with other memory and the same numbers, as pinned memory has, was not written."""
    model = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
    store = ParameterStore(model, torch.float32)
    ((_, master),) = store.named()
    with torch.no_grad():
        master.add_(1e-5)  # less than bfloat16 has
    store.publish()
    finer = master.detach().clone()
    assert not torch.equal(finer, model.weight.float())
    for _ in range(4):
        model.weight.data = model.weight.detach().clone()
        store.adopt()
        store.publish()
    assert torch.equal(master.detach(), finer)


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_sparse_and_dense_gradients_add_up(first):
    table = nn.Embedding(3, 2)
    sparse = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (3, 2), check_invariants=True)
    parts = [{table.weight: sparse}, {table.weight: torch.ones(3, 2)}]
    ParameterStore(table).add_gradients(parts if first == "sparse" else parts[::-1])
    assert table.weight.grad.tolist() == [[1, 1], [2, 2], [1, 1]]


def test_what_stages_read_during_a_step_is_pinned_if_the_parameters_are(monkeypatch):
    """A clone of a pinned tensor is not, so that each copy to a device would wait."""
    monkeypatch.setattr(pinning, "_allocate", lambda nbytes: memoryview(bytearray(nbytes)))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.dim() == 2)
    taken = []
    empty_like = pinning.PinnedMemory.empty_like
    monkeypatch.setattr(
        pinning.PinnedMemory, "empty_like", lambda self, *args: taken.append(found := empty_like(self, *args)) or found
    )
    model = nn.Linear(4, 3)
    store = ParameterStore(model)
    store.freeze()
    pinned = [one.data_ptr() for one in taken if one is not None]
    assert [store.source(p).data_ptr() in pinned for p in model.parameters()] == [True, False]
    assert all(torch.equal(store.source(p), p) and store.source(p) is not p for p in model.parameters())


F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def stepped():
    parameter = nn.Parameter(torch.ones(64, 16))
    optimizer = optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("rows", [70, 60])
@pytest.mark.parametrize("when", ["before the gradient", "after the gradient"])
def test_a_parameter_that_was_resized_is_refused(when, rows):
    """As `resize_token_embeddings` resizes: the parameter stays, with other data."""
    parameter, optimizer = stepped()
    if when == "after the gradient":
        parameter.data = torch.ones(rows, 16)
    else:
        parameter.grad = None
        parameter.data = torch.ones(rows, 16)
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(
        ConfigError, match=rf"resized to \({rows}, 16\).* moments \(64, 16\)\. Create the optimizer again"
    ):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(rows, 16))
    parameter.grad = torch.ones_like(parameter)
    plain = nn.Parameter(torch.ones(rows, 16))
    plain.grad = torch.ones_like(plain)
    optim.Adam([parameter], lr=0.1).step()
    torch.optim.Adam([plain], lr=0.1).step()
    assert torch.allclose(parameter, plain)
    parameter, optimizer = stepped()
    parameter.data = torch.zeros(64, 16)  # other data of the same shape
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((64, 16), -0.1), atol=1e-4)


def test_no_gradient_is_read_while_a_step_runs_in_the_background(monkeypatch):
    """That step sets gradients to None in its thread: reading one there at the same time would corrupt memory."""
    reads, check = [], lifecycle.check_gradients
    monkeypatch.setattr(lifecycle, "check_gradients", lambda contents: reads.append(1) or check(contents))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline = RoundPipe(model, devices="virtual:2")
    optimizer = torch.optim.Adam(pipeline.optim_parameters())
    for _ in range(3):
        pipeline.forward_backward((torch.ones(6, 4),), label=torch.ones(6, 2), loss_fn=nn.functional.mse_loss)
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
    pipeline.synchronize()
    assert len(reads) == 1


HALF = {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16}


OPTIMIZERS = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "one that clips": lambda params: Clips(params, lr=0.1),
}


def halved(wrap, **options):
    return wrap(small_model().bfloat16(), **{**HALF, "model_run_config": MEAN, **options})


def run(pipe):
    inputs, labels = batch(6)
    return pipe.forward_backward(
        (inputs.bfloat16(),), label=labels, loss_fn=lambda outputs, targets: F.mse_loss(outputs.float(), targets)
    )


def rounded(steps, make, wrap, **options):
    """The same training with gradients in float32 that are rounded by hand before each step."""
    pipe = halved(wrap, gradient_dtype=None, name="same", **options)
    optimizer = make(list(pipe.optim_parameters()))
    for _ in range(steps):
        run(pipe)
        for parameter in pipe.optim_parameters():
            parameter.grad.copy_(parameter.grad.bfloat16())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return [p.detach().clone() for p in pipe.optim_parameters()]


@pytest.mark.parametrize("how", [False, True, "exact", "outside", "groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_reads_the_rounded_sum(wrap, name, how):
    make = OPTIMIZERS[name]
    groups, how = ({"replicas": 2}, False) if how == "groups" else ({}, how)
    pipe = halved(wrap, name="same", **groups)
    with OptimizerCtx():
        optimizer = make(list(pipe.parameters()))
    steps = 1 if how is True else 4  # weights one step old lead elsewhere
    word = contextlib.nullcontext()
    if how == "exact" and name == "one that clips":
        word = pytest.warns(UserWarning, match="Clips does not update one parameter after the other")
    with word:
        take_steps(pipe, optimizer, steps, how)
    pipe.synchronize()
    assert same_bits([p.detach() for p in pipe.optim_parameters()], rounded(steps, make, wrap, **groups))


def take_steps(pipe, optimizer, steps, how):
    for _ in range(steps):
        run(pipe)
        assert {p.grad.dtype for p in pipe.optim_parameters()} == {torch.bfloat16}
        if how == "outside":
            optimizer.step()
            optimizer.zero_grad()
        else:
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), how)


def test_frozen_parameters_hooks_and_pickles_keep_the_dtype_and_runs_add_up(wrap):
    pipe = halved(wrap)
    pipe.model[0].requires_grad_(False)
    names = dict(pipe.optim_named_parameters())
    seen = []
    names["2.weight"].register_hook(lambda gradient: seen.append(gradient.dtype))
    run(pipe)
    assert names["0.weight"].grad is None
    once = {name: p.grad.clone() for name, p in names.items() if p.grad is not None}
    pipe.model[0].requires_grad_(True)
    run(pipe)
    assert all(relative_error(names[name].grad, 2 * gradient) < 1e-2 for name, gradient in once.items())
    again = pickle.loads(pickle.dumps(RoundPipe(pipe.model, **HALF, devices="virtual:1", model_run_config=MEAN)))
    run(again)
    for found in (pipe, again):
        assert {p.grad.dtype for p in found.optim_parameters()} == {torch.bfloat16}
    assert seen == [torch.bfloat16] * 2


def test_parameters_that_hold_their_own_gradient_are_as_they_were(wrap):
    """A model of float32 has no copies."""
    pipe = wrap(small_model(), **HALF, model_run_config=MEAN)
    inputs, labels = batch(6)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    assert {p.grad.dtype for p in pipe.parameters()} == {torch.float32}


def test_a_closure_is_refused_with_the_line_to_type(wrap):
    pipe = halved(wrap)
    optimizer = torch.optim.LBFGS(pipe.optim_parameters())
    with pytest.raises(ConfigError, match="LBFGS was given a closure"):
        pipe.step(lambda: optimizer.step(lambda: run(pipe)))


@pytest.mark.parametrize("options", [{"gradient_dtype": torch.bfloat16}, {**HALF, "gradient_dtype": "bfloat16"}])
def test_a_dtype_that_has_no_meaning_is_refused(options):
    with pytest.raises(ConfigError, match="gradient_dtype, the dtype of gradients of master weights"):
        RoundPipe(small_model(), **options)
