"""An error anywhere comes out of the call that caused it, and the next step is as if it had not been."""

import _thread
import gc
import itertools
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceMemoryError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, VirtualDevice
from tests.runtime.small import allocated, batch, cut_plan, same_bits, small_model, state, without_row_check

F = nn.functional
LAYERS = 9
MICROBATCHES = 3
CONFIG = RoundPipeRunConfig(
    loss_reduction="mean", num_microbatch=MICROBATCHES, execute_plan=cut_plan(LAYERS, [2, 4], [3, 5], 2)
)


class FaultError(Exception):
    """Raised on purpose."""


class Trap:
    """Raises at its n-th call, then never again."""

    def __init__(self, at, error=FaultError):
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("on purpose")


def model_with_everything():
    return small_model(tied=True, dropout=0.3, norm=True)


def train(model, devices, steps=2, **fields):
    pipe = RoundPipe(model, devices=devices, model_run_config=CONFIG)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = batch(8)
    losses = []
    for _ in range(steps):
        losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss))
        pipe.step(optimizer.step)
    return [*losses, *state(model), *(p.detach().clone() for p in model.parameters())]


@pytest.fixture
def undisturbed(devices):
    """What two steps without a fault come to."""
    return train(model_with_everything(), devices)


def in_hook(layer, hook):
    return lambda model, devices: (model[layer].register_forward_hook(hook).remove, {})


def fails_once_then_trains(devices, arm, undisturbed, error=FaultError):
    """Arm a fault, meet it in the first step, and train as if nothing had been. Returns the exception's notes."""
    model = model_with_everything()
    pipe = without_row_check(RoundPipe(model, devices=devices, model_run_config=CONFIG))  # its transfers are counted
    inputs, labels = batch(8)
    disarm, arguments = arm(model, devices)
    try:
        with pytest.raises(error) as caught:
            pipe.forward_backward((inputs,), label=labels, **{"loss_fn": F.mse_loss, **arguments})
    finally:
        disarm()
    assert all(p.grad is None for p in model.parameters())
    notes = getattr(caught.value, "__notes__", [])
    del pipe, caught
    assert all(map(torch.equal, model.buffers(), model_with_everything().buffers()))
    assert same_bits(train(model, devices), undisturbed)
    return notes


# The last two layers are the fused stage, which recomputes nothing.
LAYER_CALLS = [
    *itertools.product(range(LAYERS), [1, MICROBATCHES]),
    *((n, MICROBATCHES + 1) for n in range(LAYERS - 2)),
]


@pytest.mark.parametrize(("layer", "call"), LAYER_CALLS)
def test_a_fault_in_a_layer(devices, undisturbed, layer, call):
    (note,) = fails_once_then_trains(devices, in_hook(layer, Trap(call)), undisturbed)
    assert f"layer {layer} (" in note
    assert f"microbatch {(call - 1) % MICROBATCHES} of {MICROBATCHES}" in note
    assert f"float32({(3, 3, 2)[(call - 1) % MICROBATCHES]}, " in note
    assert any(f"on {device.name}" in note for device in devices)
    assert ("recompute" in note) == (call > MICROBATCHES)


@pytest.mark.parametrize("layer", [0, 2, 3, 6])
def test_a_fault_in_the_backward_of_a_layer(devices, undisturbed, layer):
    trap = Trap(2)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            trap()
            return gradient

    (note,) = fails_once_then_trains(devices, in_hook(layer, lambda m, args, out: Backward.apply(out)), undisturbed)
    assert f"layer {layer} (" in note
    assert "microbatch 1 of 3" in note


@pytest.mark.parametrize("microbatch", range(MICROBATCHES))
def test_a_fault_in_the_loss(devices, undisturbed, microbatch):
    trap = Trap(microbatch + 1)

    def loss_fn(outputs, labels):
        if threading.current_thread() is not threading.main_thread():  # else it is being checked
            trap()
        return F.mse_loss(outputs, labels)

    (note,) = fails_once_then_trains(devices, lambda m, d: (lambda: None, {"loss_fn": loss_fn}), undisturbed)
    assert "loss" in note
    assert f"microbatch {microbatch} of 3" in note


@pytest.mark.parametrize("where", ["split_input", "split_label", "merge_output"])
def test_a_fault_in_split_or_join(devices, undisturbed, where):
    arguments = {"run_config": RoundPipeRunConfig(**{where: Trap(1)}), "return_outputs": True}
    fails_once_then_trains(devices, lambda m, d: (lambda: None, arguments), undisturbed)


@pytest.mark.parametrize(("method", "call"), [*itertools.product(["copy_in", "copy_out"], [1, 2, 5, 11, 18])])
def test_a_fault_in_a_transfer(devices, undisturbed, monkeypatch, method, call):
    trap = Trap(call)

    def arm(model, devices):
        original = getattr(devices[1], method)

        def copy(*args, **kwargs):
            trap()
            return original(*args, **kwargs)

        monkeypatch.setattr(devices[1], method, copy)
        return monkeypatch.undo, {}

    (note,) = fails_once_then_trains(devices, arm, undisturbed)
    assert f"on {devices[1].name}" in note


@pytest.mark.parametrize("is_async", [False, True])
def test_a_fault_in_the_step(devices, is_async):
    inputs, labels = batch(8)
    pipe = RoundPipe(small_model(), devices=devices, model_run_config=CONFIG_SMALL)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    before = state(pipe)
    with pytest.raises(FaultError):
        pipe.step(Trap(1), is_async=is_async) or pipe.synchronize()
    assert same_bits(state(pipe), before)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    weight = pipe[0].weight.detach().clone()
    pipe.step(optimizer.step)
    assert torch.equal(pipe[0].weight, weight - 0.1 * pipe[0].weight.grad)


CONFIG_SMALL = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=MICROBATCHES)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_in_a_layer(devices, undisturbed, error):
    fails_once_then_trains(devices, in_hook(4, Trap(2, error)), undisturbed, error)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_an_interruption_while_the_caller_waits(devices, undisturbed):
    pressed = []

    def interrupt(*args):
        if not pressed:
            pressed.append(None)
            _thread.interrupt_main()
            time.sleep(0.2)

    fails_once_then_trains(devices, in_hook(2, interrupt), undisturbed, KeyboardInterrupt)


def test_a_fault_in_the_backward_half_of_forward_and_backward(devices):
    model, twin = small_model(), small_model()
    pipe = RoundPipe(model, devices=devices, model_run_config=CONFIG_SMALL)
    inputs, labels = batch(6)
    loss = F.mse_loss(pipe(inputs), labels)
    handle = model[3].register_forward_hook(Trap(1))
    with pytest.raises(FaultError) as caught:
        loss.backward()
    assert "layer 3 (Tied)" in caught.value.__notes__[0]
    handle.remove()
    assert all(p.grad is None for p in model.parameters())
    F.mse_loss(pipe(inputs), labels).backward()
    F.mse_loss(RoundPipe(twin, devices=devices, model_run_config=CONFIG_SMALL)(inputs), labels).backward()
    assert same_bits(state(model), state(twin))


def test_no_memory_says_which_stage_and_what_to_change():
    device = VirtualDevice("virtual:0", memory_limit=200)
    plan = ModelExecutePlan([], [range(7)])
    pipe = RoundPipe(small_model(), devices=[device], model_run_config=RoundPipeRunConfig(execute_plan=plan))
    inputs, labels = batch(6)
    with pytest.raises(DeviceMemoryError, match=r"uses .* of 200 bytes") as caught:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    text = "\n".join(caught.value.__notes__)
    assert "In stage 0" in text
    assert "num_microbatch" in text
    assert "recompute_grain='layer'" in text


def test_a_fault_leaves_no_thread_and_no_tensor():
    threads = set(threading.enumerate())
    model = small_model()
    alive = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output))) for layer in model
    ]
    handles.append(model[5].register_forward_hook(Trap(2)))
    pipe = RoundPipe(model, devices="virtual:3", model_run_config=CONFIG_SMALL)
    inputs, labels = batch(6)
    with pytest.raises(FaultError) as caught:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    for handle in handles:
        handle.remove()
    del caught
    gc.collect()
    assert len(alive) > 6
    assert not [reference for reference in alive if reference() is not None]
    assert sum(allocated(device) for device in pipe.devices) == 0
    pipe.close()
    assert set(threading.enumerate()) <= threads  # those of another test may have ended meanwhile


def test_a_pipeline_that_is_dropped_takes_its_threads_along():
    threads = set(threading.enumerate())
    pipe = RoundPipe(small_model(), devices="virtual:2")
    with torch.no_grad():
        pipe(batch(4)[0])
    started = [thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")]
    del pipe
    gc.collect()
    for thread in started:
        thread.join(5)
    assert set(threading.enumerate()) <= threads
