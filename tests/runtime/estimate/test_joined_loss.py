"""The memory of a loss that is computed once for the whole batch, beside what a run really holds."""

import gc

import torch
from transformers import AutoModelForCausalLM

from matrix.models import make_config
from roundpipe_runtime import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_runtime.estimate.hardware import Hardware
from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta
from tests.runtime.device.measuring_device import MeasuringDevice

VIRTUAL = Hardware(("virtual:0", "virtual:1"), "cpu", 1e9, 1e9, None, None, 1e9, {})


def test_the_device_of_the_last_layer_holds_what_is_stated():
    """The head and its loss for all rows need more than any stage with a microbatch: 0.8 to 1.05 times the estimate."""
    rows, length, microbatches = 8, 64, 4
    config = make_config("llama")
    training = PlannedTraining(model_on_meta(config, dtype=torch.float32), VIRTUAL)
    stated = training.joined_loss(batch=rows, length=length)
    report = training.report(batch=rows, length=length, num_microbatch=microbatches)
    assert stated.device > max(memory.total for memory in report.device_memory)

    devices = [MeasuringDevice(f"virtual:{index}") for index in range(2)]
    torch.manual_seed(0)
    model = wrap_model_to_roundpipe(
        AutoModelForCausalLM.from_config(config).train(), devices=devices, lower_threshold=0, check=False
    )
    tokens = torch.randint(5, config.vocab_size, (rows, length))
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="joined")
    for _ in range(2):
        for device in devices:
            device.footprint.peak = 0
        gc.collect()
        model.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens}, run_config=config)
    held = max(device.footprint.peak for device in devices)
    model.close()
    assert 0.8 <= held / stated.device <= 1.05


def test_the_host_holds_the_input_of_the_last_layer_three_times():
    """By microbatches, joined, and its gradient."""
    config = make_config("llama")
    training = PlannedTraining(model_on_meta(config, dtype=torch.float32), VIRTUAL)
    assert training.joined_loss(batch=8, length=64).host >= 3 * 8 * 64 * config.hidden_size * 4
