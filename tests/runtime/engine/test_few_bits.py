"""Frozen weights in few bits, with adapters that train: they travel as they are, and the losses are the plain ones."""

import collections
import functools
from contextlib import closing

import pytest
import torch

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.device import composite
from roundpipe_runtime.device.composite import all_tensors, parts_of, stored_bytes
from tests.runtime.few_bits import CONFIG, KINDS, WIDTH, loss_of, model_of, rows, trained_in, trained_plainly
from tests.runtime.small import checked_devices, without_row_check


@pytest.fixture(params=[1, 2])
def devices(request):
    with checked_devices(request.param) as made:
        yield made


def everything(model):
    found = []
    for module in model.modules():
        held = [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")]
        held += [(p, vars(p)) for p in module._parameters.values() if p is not None and not p.requires_grad]
        found += [tensor.detach().clone() for tensor in all_tensors(held)]
    return found


def test_an_object_is_made_anew_where_all_it_holds_is_in_its_attributes():
    """Python 3.12 marks classes in C as made by a class statement, and `object` cannot make those."""
    named = type("Named", (collections.UserDict,), {})(a=1)
    held, together = composite._opened(named)
    assert together(held) == named
    for value in (type("Queue", (collections.deque,), {})([1]), functools.partial(print)):
        assert composite._opened(value) is None


@pytest.mark.parametrize("keep", [0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_plain_model(kind, dtype, keep, devices):
    expected = trained_plainly(model_of(kind, dtype=dtype), 5, dtype=dtype)
    model = model_of(kind, dtype=dtype)
    before = everything(model)
    config = RoundPipeRunConfig(keep_parameters=keep).over(CONFIG)
    with closing(RoundPipe(model, devices=devices, model_run_config=config)) as pipe:
        losses = trained_in(pipe, 5, dtype=dtype)
    assert losses == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-3)
    after = everything(model)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_between_steps_changes_nothing(kind, devices):
    expected = trained_plainly(model_of(kind), 4)
    model = model_of(kind)
    inputs, _ = rows()
    with torch.no_grad():
        output = model_of(kind).eval()(inputs)
    with closing(RoundPipe(model, devices=devices, model_run_config=CONFIG)) as pipe:
        optimizer = torch.optim.Adam([p for p in pipe.optim_parameters() if p.requires_grad], lr=1e-2)
        pipe.eval()
        with torch.no_grad():
            found = pipe(inputs)
        losses = trained_in(pipe.train(), 2, optimizer=optimizer)
        pipe.eval()
        with torch.no_grad():
            pipe(inputs)
        losses += trained_in(pipe.train(), 2, optimizer=optimizer)
    assert torch.allclose(found, output, rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "bits"), [("packed", 4), ("stated", 4), ("moved", 8)])
def test_the_link_carries_the_bits_and_the_scales(kind, bits):
    model = model_of(kind)
    with closing(RoundPipe(model, devices="virtual:1", model_run_config=CONFIG)) as pipe, torch.no_grad():
        without_row_check(pipe)(rows()[0])
        uploaded = pipe.parameter_traffic.uploaded / len(model)
    frozen = WIDTH * WIDTH * bits // 8
    scales = {"packed": 4 * WIDTH * WIDTH // 32, "stated": WIDTH * WIDTH // 32 + 4, "moved": 4 * WIDTH}[kind]
    trained = 4 * (2 * 4 * WIDTH + 2 * WIDTH)
    assert uploaded == frozen + scales + trained
    assert sum(map(stored_bytes, model[0].parameters())) == uploaded


def test_a_copy_that_stays_is_uploaded_once():
    model = model_of("stated")
    config = RoundPipeRunConfig(keep_parameters=1.0).over(CONFIG)
    frozen = sum(part.nbytes for p in model.parameters() if not p.requires_grad for part in parts_of([p]))
    traffic = []
    with closing(RoundPipe(model, devices="virtual:1", model_run_config=config)) as pipe:
        for _ in range(2):
            trained_in(pipe, 1)
            traffic.append(pipe.parameter_traffic)
    first, later = traffic
    assert sum(first.kept.values()) >= frozen
    assert later.uploaded - first.uploaded == first.uploaded - frozen


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_run_leaves_the_weights_of_the_host(kind):
    expected = trained_plainly(model_of(kind), 1)
    model = model_of(kind)
    before = everything(model)
    calls = []

    def fail_once(*_):
        calls.append(None)
        if len(calls) == 4:
            raise ValueError("once")

    model[1].base.register_forward_hook(fail_once)
    with closing(RoundPipe(model, devices="virtual:2:check", model_run_config=CONFIG)) as pipe:
        with pytest.raises(ValueError, match="once"):
            trained_in(pipe, 1)
        assert all(torch.equal(one, other) for one, other in zip(before, everything(model), strict=True))
        assert trained_in(pipe, 1) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["packed", "stated"])
def test_a_weight_of_two_layers_travels_with_each(kind):
    def tied():
        model = model_of(kind)
        model[2].base = model[0].base
        return model

    expected = trained_plainly(tied(), 3)
    model = tied()
    with closing(RoundPipe(model, devices="virtual:2:check", model_run_config=CONFIG)) as pipe:
        assert trained_in(pipe, 3) == pytest.approx(expected, rel=1e-6)
    assert model[2].base.weight is model[0].base.weight


def test_an_asynchronous_step_and_a_wider_optimizer_see_no_frozen_weight():
    model = model_of("packed", dtype=torch.bfloat16)
    expected = trained_plainly(model_of("packed", dtype=torch.bfloat16), 1, dtype=torch.bfloat16)
    inputs, labels = rows(dtype=torch.bfloat16)
    losses = []
    with closing(RoundPipe(model, devices="virtual:2", model_run_config=CONFIG, optim_dtype=torch.float32)) as pipe:
        optimizer = torch.optim.Adam([p for p in pipe.optim_parameters() if p.requires_grad], lr=1e-2)
        for _ in range(4):
            losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=loss_of).item())
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
        pipe.synchronize()
    assert losses[0] == pytest.approx(expected[0], rel=5e-3)
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
