"""A plan knows which tables stay on the host: what devices need, and what travels."""

import pytest
import torch
import transformers

from roundpipe_runtime import RoundPipeRunConfig, VirtualDevice, wrap_model_to_roundpipe
from roundpipe_runtime.engine.planner import FOR_PARAMETERS
from roundpipe_runtime.estimate.hardware import Hardware
from roundpipe_runtime.huggingface.plan_training import PlannedTraining
from roundpipe_runtime.optim import layer_contents

VOCABULARY, WIDTH, LENGTH = 3001, 32, 6


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """The tables of the small model count as large, and have many slices."""
    monkeypatch.setattr(layer_contents, "LARGE", VOCABULARY * WIDTH)
    monkeypatch.setattr(layer_contents, "_SMALLEST_SLICE", 2**10)


def llama(*, tied=False):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def planned(memory, large_tables="auto", *, frozen=False):
    with torch.device("meta"):
        model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "layers" in name)
    machine = Hardware(("virtual:0",), "cpu", 1e12, 1e10, memory, 2**36, 1e10, {})
    training = PlannedTraining(model, machine, large_tables=large_tables)
    return training.report(batch=4, length=LENGTH, num_microbatch=2)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_least_device_holds_two_layers(frozen):
    enough = int(2 * 2 * sum(p.nbytes for p in llama().model.layers[0].parameters()) / FOR_PARAMETERS) + 1000
    report = planned(enough, frozen=frozen)
    assert not report.too_large
    assert report.least_memory <= enough
    assert planned(int(0.98 * (enough - 1000)), frozen=frozen).too_large.startswith("layer 1 has")
    whole = planned(enough, "whole", frozen=frozen)
    assert whole.too_large.startswith("layer 0 has")
    assert whole.least_memory > 5 * enough


def test_the_least_memory_is_said_where_a_head_fits():
    report = planned(10**8)
    assert report.layers[-1].slice_bytes == 0
    assert report.least_memory < 10**6


def test_bytes_of_parts_are_those_that_a_run_copies():
    report = planned(400_000)
    head, table = report.layers[-1], llama().lm_head.weight
    assert (head.parts_forward, head.parts_backward, head.parts_down) == (table.nbytes, table.nbytes, table.nbytes)
    assert head.table_grad_bytes == table.nbytes
    first = report.layers[0]  # each of the tokens may be another one
    assert (first.parts_forward, first.parts_down) == (2 * LENGTH * WIDTH * 4, 2 * LENGTH * WIDTH * 4)

    copied = []

    class Counting(VirtualDevice):
        def copy_in(self, tensor, ready=None, *, parameter=False):
            copied.append(tensor.nbytes if tensor.shape[-1:] == (WIDTH,) and not parameter and tensor.dim() == 2 else 0)
            return super().copy_in(tensor, ready, parameter=parameter)

    device = Counting("d0", memory_limit=400_000)
    pipe = wrap_model_to_roundpipe(llama(), lower_threshold=0, devices=[device], check=False)
    ids = torch.arange(4 * LENGTH).reshape(4, LENGTH)
    config = RoundPipeRunConfig(num_microbatch=2)
    for _ in range(2):  # calls 1, 2, 4, 8, ... also try some rows
        pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, run_config=config)
    copied.clear()
    pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, run_config=config)
    rows = 2 * first.parts_forward * 2  # in the forward, and where it is computed again
    assert sum(copied) == 2 * (head.parts_forward + head.parts_backward) + rows
    assert device.peak <= max(memory.total for memory in report.device_memory)
