"""On a device a pipeline has the bits of the plain model, whenever its optimizer steps and whatever stays there."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.gpu.models import CASES, Case, mlp
from tests.gpu.place import MODES, Mode, Place, Plain, on_a_device
from tests.runtime.small import relative_error

pytestmark = on_a_device

_STEPS = 3
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def trained(case: Case, place: Place, mode: Mode, make=_SGD, *, model=None, **options):
    pipe = case.wrap(copy.deepcopy(model or case.model()), place, **options)
    optimizer = make(pipe.optim_parameters())
    found = []
    for number in range(_STEPS):
        loss = case.call(pipe, case.batch(number))
        found += [loss.detach().cpu().clone(), *(p.grad.clone() for p in pipe.parameters())]
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=mode)
    pipe.synchronize()
    found += [weight.detach().clone() for weight in pipe.parameters()]
    pipe.close()
    return found


def plain(case: Case, place: Place, mode: Mode, make=_SGD, *, model=None):
    model = Plain(model or case.model(), place, make)
    found = []
    for number in range(_STEPS):
        loss, gradients = model.step(case.split(case.batch(number), place), case.loss, mode)
        found += [loss, *gradients.values()]
    return found + [weight.detach() for weight in model.model.parameters()]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {number}: off by {relative_error(one, other):.1e}"


@pytest.mark.parametrize("mode", MODES, ids=["sync", "exact", "async"])
def test_training_has_the_bits_of_the_plain_model(case, place, mode, deterministic):
    assert_same_bits(trained(case, place, mode), plain(case, place, mode))


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.AdamW, lr=0.01, fused=True)],
                         ids=["AdamW", "fused"])  # fmt: skip
@pytest.mark.parametrize("mode", [False, "exact"], ids=["sync", "exact"])
def test_adamw_has_the_bits_of_adamw_on_the_host(place, mode, make, deterministic):
    assert_same_bits(trained(CASES["MLP"], place, mode, make), plain(CASES["MLP"], place, mode, make))


def test_layers_recomputed_one_by_one_have_the_same_bits(case, place, deterministic):
    assert_same_bits(trained(case, place, False, recompute_grain="layer"), plain(case, place, False))


@pytest.mark.parametrize("keep", [1e-5, "auto"])
def test_what_stays_on_the_device_is_what_would_be_uploaded(case, place, keep, deterministic):
    assert_same_bits(trained(case, place, False, keep_parameters=keep), plain(case, place, False))


def test_a_forward_has_the_bits_of_the_plain_model(case, place, deterministic):
    model = case.model().eval()
    (part,) = case._replace(parts=1).split(case.batch(0), place)
    with torch.no_grad():
        if isinstance(model, nn.Sequential):
            expected = place.moved(model)(part["x"]).cpu()
            pipe = case.wrap(model, place)
            found = pipe(case.batch(0)["x"])
        else:
            expected = place.moved(model)(**part).logits.cpu()
            pipe = case.wrap(model, place)
            found = pipe(**case.batch(0)).logits
    pipe.close()
    assert_same_bits([found.cpu()], [expected]) if case.parts == 1 else torch.testing.assert_close(found, expected)


def test_gradients_in_bfloat16_are_within_its_rounding(case, place):
    """Of the same model in float64 on the host, as far as those of the plain model in bfloat16 on the device are."""
    model = case.model()
    batch = case.batch(0)
    exact = copy.deepcopy(model).double()
    case.loss(exact, {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}).backward()
    narrow = {name: one.bfloat16() if one.is_floating_point() else one for name, one in batch.items()}
    there = place.moved(copy.deepcopy(model).bfloat16())
    for part in case.split(narrow, place):
        (case.loss(there, part) / case.parts).backward()
    model = model.bfloat16()
    pipe = case.wrap(model, place)
    case.call(pipe, narrow)
    for name, weight in model.named_parameters():
        right = exact.get_parameter(name).grad
        noise = relative_error(there.get_parameter(name).grad.cpu(), right)
        assert relative_error(weight.grad, right) < max(0.01, 1.5 * noise), name
    pipe.close()


def test_masters_in_float32_are_those_of_the_host(place, deterministic):
    """Weights in bfloat16 are the rounded masters, which an optimizer on the host updates with the same gradients."""
    case, model = CASES["MLP"], mlp().bfloat16()
    pipe = case.wrap(copy.deepcopy(model), place, dtype=torch.float32)
    optimizer = _SGD(pipe.optim_parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in model.parameters()]
    other, there = _SGD(masters), place.moved(model)
    for number in range(_STEPS):
        batch = {name: one.bfloat16() for name, one in case.batch(number).items()}
        case.call(pipe, batch)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        sums = [torch.zeros_like(master) for master in masters]
        for part in case.split(batch, place):
            gradients = torch.autograd.grad(case.loss(there, part) / 2, list(there.parameters()))
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient.float().cpu()
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        other.step()
        with torch.no_grad():
            for weight, master in zip(there.parameters(), masters, strict=True):
                weight.copy_(master)
        assert_same_bits([*pipe.parameters()], [master.detach().bfloat16() for master in masters])
    pipe.close()


@pytest.mark.parametrize("mode", [False, "exact"], ids=["sync", "exact"])
def test_state_on_a_disk_has_the_same_bits(place, mode, folder_on_disk, deterministic):
    found = []
    for host in ("memory", f"disk:{folder_on_disk}"):
        pipe = place.wrap(mlp(), host=host)
        optimizer = _SGD(pipe.optim_parameters())
        for number in range(_STEPS):
            found.append(CASES["MLP"].call(pipe, CASES["MLP"].batch(number)).detach().clone())
            pipe.step(lambda step=optimizer: (step.step(), step.zero_grad()), is_async=mode)
        pipe.synchronize()
        pipe.close()
    assert_same_bits(found[_STEPS:], found[:_STEPS])
