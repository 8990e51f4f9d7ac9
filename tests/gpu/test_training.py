"""What belongs to a training on a device: checkpoints, adapters, few bits, scaled and clipped gradients, Ctrl-C."""

import copy
import functools
import signal

import pytest
import torch
from torch import nn

from roundpipe_runtime import GradScaler, wrap_model_to_roundpipe
from tests.gpu.models import CASES, llama, mlp, tokens
from tests.gpu.place import MODES, on_a_device
from tests.runtime.small import relative_error, same_bits

F = nn.functional
pytestmark = on_a_device

_MLP = CASES["MLP"]


def sgd(pipe, lr=0.05):
    return torch.optim.SGD([one for one in pipe.optim_parameters() if one.requires_grad], lr=lr, momentum=0.9)


def train(pipe, optimizer, numbers, mode=False, case=_MLP):
    losses = []
    for number in numbers:
        losses.append(case.call(pipe, case.batch(number)).detach().cpu().clone())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=mode)
    pipe.synchronize()
    return losses


@pytest.mark.parametrize("mode", MODES, ids=["sync", "exact", "async"])
def test_a_resumed_training_has_the_bits_of_one_that_was_not_stopped(place, tmp_path, mode):
    pytest.importorskip("safetensors")
    pytest.importorskip("msgspec", reason="a checkpoint is read with msgspec, which is not installed")
    from roundpipe_runtime import load_checkpoint, save_checkpoint

    if mode is True:  # a resumed run reads all updates; one that goes on reads those up to the last but one
        numbers, rest = [0, 1], []
    else:
        numbers, rest = [0, 1], [2, 3]
    pipe = _MLP.wrap(mlp(), place)
    optimizer = sgd(pipe)
    train(pipe, optimizer, numbers, mode)
    save_checkpoint(tmp_path, pipe, optimizer=optimizer, data={"step": 2})
    expected = train(pipe, optimizer, rest, mode) + [weight.detach().clone() for weight in pipe.parameters()]
    pipe.close()
    other = _MLP.wrap(mlp(width=32), place)
    with torch.no_grad():
        for weight in other.parameters():
            weight.fill_(7.0)
    again = sgd(other)
    assert load_checkpoint(tmp_path, other, optimizer=again) == {"step": 2}
    found = train(other, again, rest, mode) + [weight.detach().clone() for weight in other.parameters()]
    other.close()
    assert same_bits(found, expected)


def train_alike(place, pipe, plain, near):
    optimizer, other = sgd(pipe, 0.5), torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.5, 0.9)
    for number in range(3):
        (loss,) = train(pipe, optimizer, [number], case=CASES["Llama"])
        batch = CASES["Llama"].batch(number)
        expected = plain(**{name: one.to(place.torch_device) for name, one in batch.items()}).loss
        expected.backward()
        other.step()
        other.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=near)


@pytest.mark.parametrize("keep", [0, "auto"])
def test_adapters_train_as_peft_trains_them(place, keep):
    pytest.importorskip("peft")
    from roundpipe_runtime.fine_tune import Lora, add_lora

    plain = add_lora(llama(), Lora(4, 8)).to(place.torch_device).train()
    model = add_lora(llama(), Lora(4, 8)).train()
    frozen = {name: one.detach().clone() for name, one in model.named_parameters() if not one.requires_grad}
    pipe = CASES["Llama"].wrap(model, place, keep_parameters=keep)
    train_alike(place, pipe, plain, near=1e-5)
    for name, weight in model.named_parameters():
        if name in frozen:
            assert torch.equal(weight, frozen[name])
        else:
            assert relative_error(weight.detach(), plain.get_parameter(name).detach().cpu()) < 1e-3
    pipe.close()


@pytest.mark.parametrize(("kind", "library"), [("nf4", "bitsandbytes"), ("int8", "torchao")])
def test_adapters_of_weights_in_few_bits_train_as_without_a_pipeline(place, kind, library):
    pytest.importorskip("peft")
    pytest.importorskip(library, reason=f"{library} is not installed: a wheel of gpu_day.py --wheels")
    if place.torch_device.type not in ("cpu", "cuda"):
        pytest.skip(f"{library} has no kernels for {place.torch_device.type}")
    from roundpipe_runtime.fine_tune import Lora, add_lora
    from roundpipe_runtime.huggingface import quantize_frozen

    model = add_lora(quantize_frozen(llama(hidden_size=64, intermediate_size=128), kind), Lora(4, 8)).train()
    plain = copy.deepcopy(model).to(place.torch_device)
    pipe = CASES["Llama"].wrap(model, place)
    train_alike(place, pipe, plain, near=1e-4)
    pipe.close()


def test_the_model_of_a_row_in_few_bits_is_whole_on_the_host(place):
    """Its weights are quantised where they are drawn, and what is computed of the configuration is drawn by none."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: a wheel of gpu_day.py --wheels")
    from benchmarks.gpu.rows import make_model, rows_of

    (row,) = [row for row in rows_of("lora", tiny=True) if row.few_bits]
    model = make_model(row, place.torch_device)
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"cpu"}
    (frequencies,) = [one for name, one in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    assert torch.allclose(frequencies, 10_000.0 ** (-torch.arange(0, 16, 2) / 16))


def test_clipping_is_that_of_torch(place):
    pipe = _MLP.wrap(mlp(), place)
    plain = mlp().double()
    _MLP.call(pipe, _MLP.batch(0))
    _MLP.loss(plain, {name: one.double() for name, one in _MLP.batch(0).items()}).backward()
    found = torch.nn.utils.clip_grad_norm_(pipe.optim_parameters(), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for weight, right in zip(pipe.optim_parameters(), plain.parameters(), strict=True):
        assert relative_error(weight.grad, right.grad) < 1e-4
    pipe.close()


def test_scaled_losses_in_float16_update_as_float32_does(place):
    pipe = _MLP.wrap(mlp().half(), place, dtype=torch.float32)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    before = [weight.detach().clone() for weight in pipe.optim_parameters()]
    plain = mlp().half().float()
    batch = {name: one.half() for name, one in _MLP.batch(0).items()}

    def call():
        pipe.forward_backward(
            (batch["x"],), label=batch["y"], loss_fn=lambda out, y: scaler.scale(F.mse_loss(out.float(), y.float()))
        )

    call()
    pipe.step(lambda: (scaler.step(optimizer), scaler.update(), optimizer.zero_grad()))
    _MLP.loss(plain, {name: one.float() for name, one in batch.items()}).backward()
    for weight, old, right in zip(pipe.optim_parameters(), before, plain.parameters(), strict=True):
        assert relative_error(old - weight.detach(), 0.1 * right.grad) < 0.02
    held = [weight.detach().clone() for weight in pipe.optim_parameters()]
    call()
    next(iter(pipe.optim_parameters())).grad[0] = float("inf")
    pipe.step(lambda: (scaler.step(optimizer), scaler.update(), optimizer.zero_grad()))
    assert same_bits([weight.detach() for weight in pipe.optim_parameters()], held)
    assert scaler.get_scale() == 512.0
    pipe.close()


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_ctrl_c_leaves_all_or_nothing_and_the_training_goes_on(place, where, python_handles_ctrl_c):
    pressed = []

    class Presses(nn.Module):
        def forward(self, x):
            if where == "forward" and armed and not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)
            if where == "backward" and x.requires_grad:
                x.register_hook(self.back)
            return x

        def back(self, gradient):
            if armed and not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)

    def update():
        if where == "step" and armed and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        optimizer.step()
        optimizer.zero_grad()

    def model():
        made = mlp()
        return nn.Sequential(*made[:2], Presses(), *made[2:])

    armed = False
    expected_pipe = _MLP.wrap(model(), place)
    train(expected_pipe, sgd(expected_pipe), range(2))
    expected = [weight.detach().clone() for weight in expected_pipe.parameters()]
    expected_pipe.close()

    pipe = _MLP.wrap(model(), place)
    optimizer = sgd(pipe)
    for number in range(2):
        armed = number == 1
        try:
            _MLP.call(pipe, _MLP.batch(number))
            pipe.step(update)
        except KeyboardInterrupt:
            optimizer.zero_grad()
            _MLP.call(pipe, _MLP.batch(number))
            pipe.step(update)
    assert pressed
    assert same_bits([weight.detach() for weight in pipe.parameters()], expected)
    pipe.close()


def test_the_trainer_trains_on_the_device(place, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from roundpipe_runtime import RoundPipeTrainer

    data = [{"input_ids": row, "labels": row} for row in tokens(3, rows=12)]
    found = []
    for make in (functools.partial(RoundPipeTrainer, devices=place.devices), Trainer):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=0.1, logging_steps=1, report_to=[],
            save_strategy="no", lr_scheduler_type="constant", optim="sgd", disable_tqdm=True, use_cpu=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = make(llama(), arguments, train_dataset=data)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_a_model_of_layers_in_float16_and_float32_trains(place):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x.float()).to(torch.bfloat16)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), Wide(), nn.Linear(8, 4).bfloat16())
    there = copy.deepcopy(model).to(place.torch_device)
    inputs = torch.randn(4, 8).bfloat16()
    there(inputs.to(place.torch_device)).float().square().mean().backward()
    pipe = place.wrap(model)
    pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.float().square().mean())
    for weight, right in zip(pipe.parameters(), there.parameters(), strict=True):
        assert weight.grad.dtype == weight.dtype
        assert relative_error(weight.grad, right.grad.cpu()) < 0.02
    pipe.close()


def test_a_wrapped_model_generates_what_the_plain_model_does(place):
    model = llama(use_cache=True)
    pipe = wrap_model_to_roundpipe(model, lower_threshold=0, devices=place.devices)
    train(pipe, sgd(pipe), [0], case=CASES["Llama"])
    plain = copy.deepcopy(model).to(place.torch_device).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = tokens(5, rows=2)
    expected = plain.generate(prompt.to(place.torch_device), attention_mask=None, **options)
    pipe.eval()
    assert torch.equal(pipe.generate(prompt, **options).cpu(), expected.cpu())
    pipe.close()
