"""Memory of a training on a device: what is pinned, what a device without room states, and nothing that grows."""

import contextlib
import threading

import psutil
import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.errors import RoundPipeError
from tests.gpu.models import CASES, mlp
from tests.gpu.place import MODES, on_a_device
from yobx_flatten.errors.failures import first_line

pytestmark = on_a_device

_WIDE = 256


def wide(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(_WIDE, _WIDE) for _ in range(layers)])


def step(pipe, rows=8):
    return pipe.forward_backward((torch.ones(rows, _WIDE),), loss_fn=lambda outputs, _: outputs.square().mean())


@contextlib.contextmanager
def limited(place, nbytes):
    """A device with so many bytes of memory beyond what it holds now."""
    place.needs_accelerator("memory of its own")
    device = place.torch_device
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    limit = torch.accelerator.memory_allocated(device) + nbytes
    total = torch.accelerator.get_memory_info(device)[1]
    if device.type == "late":
        from tests.accelerator import late

        late.set_memory(0, limit)
    else:
        place.needs_cuda("a limit of memory")
        torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        yield
    finally:
        if device.type == "late":
            late.set_memory(0, total)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.parametrize("how", ["alloc", "register"])
def test_parameters_are_pinned(place, how):
    """So that copies run next to the computation; and still hold what they held."""
    place.needs_accelerator("pinned memory")
    if how == "register":
        place.needs_cuda("to register memory")
    model = wide()
    before = [weight.detach().clone() for weight in model.parameters()]
    pipe = place.wrap(model, pin_model=how)
    assert all(weight.is_pinned() for weight in pipe.parameters())
    assert all(torch.equal(weight, one) for weight, one in zip(pipe.parameters(), before, strict=True))
    pipe.close()


def test_parameters_stay_where_they_are_with_pinning_off(place):
    model = wide()
    addresses = [weight.data_ptr() for weight in model.parameters()]
    pipe = place.wrap(model, pin_model="off")
    step(pipe)
    assert [weight.data_ptr() for weight in pipe.parameters()] == addresses
    assert not any(weight.is_pinned() for weight in pipe.parameters())
    pipe.close()


@pytest.mark.parametrize("how", ["alloc", "off"])
def test_gradients_do_not_depend_on_pinning(place, how):
    """Those of the plain model in float64, within the rounding of float32."""
    model = wide(3)
    exact = wide(3).double()
    exact(torch.ones(8, _WIDE, dtype=torch.float64)).square().mean().backward()
    pipe = place.wrap(model, pin_model=how)
    step(pipe)
    for weight, right in zip(pipe.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(weight.grad.double(), right.grad, rtol=1e-4, atol=1e-9)
    pipe.close()


@pytest.mark.parametrize("where", ["parameters", "activations"])
def test_a_device_without_room_states_it_in_one_line(place, where):
    layers = [nn.Linear(4096, 4096)] if where == "parameters" else [nn.Linear(_WIDE, _WIDE) for _ in range(4)]
    width, rows = layers[0].in_features, 8 if where == "parameters" else 2**14
    torch.manual_seed(0)
    pipe = place.wrap(nn.Sequential(*layers, nn.Linear(width, width)))
    inputs = torch.ones(rows, width)

    def once():
        return pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())

    with limited(place, 12 * 2**20), pytest.raises((RoundPipeError, torch.OutOfMemoryError)) as error:
        once()
    line = first_line(error.value)
    assert "memory" in line
    assert len(line) < 300
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "microbatch" in said or isinstance(error.value, RoundPipeError)  # what to change, or what does not fit
    assert once().isfinite()
    pipe.close()


@pytest.mark.parametrize("mode", MODES, ids=["sync", "exact", "async"])
def test_fifty_steps_leave_nothing_behind(place, mode):
    pipe = place.wrap(wide(4))
    optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-3)
    found = []
    for number in range(50):
        step(pipe)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=mode)
        if number in (9, 49):
            pipe.synchronize()
            found.append((place.allocated(pipe), psutil.Process().memory_info().rss, threading.active_count()))
    pipe.close()
    (device, host, threads), (device_after, host_after, threads_after) = found
    assert device_after <= device
    assert threads_after <= threads
    assert host_after - host < 20 * 2**20  # a step has 4 MiB of weights, gradients and moments


def test_a_closed_pipeline_gives_everything_back(place):
    place.needs_accelerator("memory of its own")
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean", keep_parameters="auto")
    pipe = place.wrap(wide(), model_run_config=config)
    step(pipe)
    assert place.allocated(pipe) > before
    pipe.close()
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() <= before


def test_what_stays_is_uploaded_once(place):
    pipe = place.wrap(wide(), model_run_config=RoundPipeRunConfig(num_microbatch=1, keep_parameters="auto"))
    with torch.no_grad():
        first = pipe(torch.ones(2, _WIDE)).clone()
        held = place.allocated(pipe)
        assert torch.equal(pipe(torch.ones(2, _WIDE)), first)
        assert place.allocated(pipe) == held
        for weight in pipe.parameters():
            weight.mul_(2.0)
        assert not torch.equal(pipe(torch.ones(2, _WIDE)), first)
    pipe.close()


def test_an_error_of_a_layer_leaves_no_tensor_on_the_device(place):
    class Refuses(nn.Module):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return x

    model = nn.Sequential(*mlp(), Refuses())
    pipe = place.wrap(model)
    batch = CASES["MLP"].batch(0)
    CASES["MLP"].call(pipe, batch)
    pipe.zero_grad(set_to_none=True)
    before = place.allocated(pipe)
    with pytest.raises(ValueError, match="three rows"):
        pipe.forward_backward((torch.ones(6, 8),), label=torch.ones(6, 4), loss_fn=nn.functional.mse_loss)
    assert place.allocated(pipe) <= before
    assert CASES["MLP"].call(pipe, batch).isfinite()
    pipe.close()
