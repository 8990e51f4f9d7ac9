"""Planning the training of models of transformers: also which tables stay on the host, and what travels."""

import json

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig

from matrix.models import make_config
from roundpipe_runtime import ConfigError, CutError, RoundPipeRunConfig, VirtualDevice, wrap_model_to_roundpipe
from roundpipe_runtime.engine.planner import FOR_PARAMETERS
from roundpipe_runtime.estimate.hardware import Hardware
from roundpipe_runtime.fine_tune import Lora, add_lora
from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta
from roundpipe_runtime.optim import layer_contents
from tests import fresh_process

CARDS = Hardware(("cuda:0", "cuda:1"), "cuda", 150e12, 25e9, 24 * 2**30, 10**12, 20e9, {})

HUGE = """
import json, resource, time
import transformers
from roundpipe_runtime.estimate.hardware import Hardware
from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.process_time()
config = transformers.LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256, dtype="bfloat16",
)
cards = Hardware(tuple(f"cuda:{i}" for i in range(8)), "cuda", 400e12, 50e9, 80 * 2**30, 10**13, 100e9, {})
training = PlannedTraining(model_on_meta(config), cards)
report = training.report(batch=18, length=8192, num_microbatch=9)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([
    time.process_time() - begin, grown * 1024, report.fits_devices,
    sum(layer.forward_flops for layer in report.layers), report.host_memory.parameters,
]))
"""


def test_a_model_of_70_billion_parameters_is_planned_in_seconds_and_without_its_memory():
    """141 GB of weights: the process grows by less than 0.6 GB, and computes for less than a minute."""
    done = fresh_process.run("-c", HUGE, imported=fresh_process.TRAINER)
    seconds, grown, fits, flops, weights = json.loads(done.stdout.splitlines()[-1])
    assert seconds < 60
    assert grown < 0.6e9
    assert fits
    assert weights == pytest.approx(141.1e9, rel=0.01)
    # two operations a parameter and token in the layers, attention, and a head that goes back at once
    tokens, layers, head = 2 * 8192, 80 * 855.6e6, 8192 * 128256
    attention = 80 * 4 * 8192 * 8192
    assert flops == pytest.approx(tokens * (2 * layers + attention + 6 * head), rel=0.02)


def test_layers_of_a_mixture_compute_with_two_experts_of_eight():
    """All experts are copied, and the operations are those of the active ones."""
    config = MixtralConfig(num_hidden_layers=2, dtype="bfloat16")
    report = PlannedTraining(model_on_meta(config), CARDS).report(batch=2, length=512, num_microbatch=2)
    layer = report.layers[1]
    expert, attention = 3 * 4096 * 14336, 4096 * (4096 + 2 * 1024 + 4096)
    assert layer.param_bytes == pytest.approx(2 * (8 * expert + attention), rel=0.01)
    assert layer.forward_flops == pytest.approx(512 * (2 * (2 * expert + attention) + 4 * 512 * 4096), rel=0.01)


def test_what_adapters_leave_frozen_has_no_gradient():
    pytest.importorskip("peft", reason="adapters are PEFT's")
    model = model_on_meta(LlamaConfig(num_hidden_layers=2, dtype="bfloat16"))
    with torch.device("meta"):
        model = add_lora(model, Lora.parse("8,16,q_proj,v_proj"))
    report = PlannedTraining(model, CARDS, optim_dtype=torch.float32).report(batch=2, length=64, num_microbatch=2)
    adapters = 2 * 2 * 2 * 8 * 4096
    assert report.host_memory.optimizer == 2 * 4 * adapters
    assert report.layers[1].grad_bytes == 4 * adapters // 2
    assert report.layers[1].param_bytes > 400e6


def test_logits_of_a_large_vocabulary_are_not_planned_for():
    """The head computes its loss in chunks, as a training does: less than all logits in float32."""
    model = model_on_meta(LlamaConfig(num_hidden_layers=2, vocab_size=128_000, hidden_size=256, dtype="bfloat16"))
    report = PlannedTraining(model, CARDS).report(batch=2, length=8192, num_microbatch=2)
    assert report.layers[-1].forward_peak < 0.5 * 8192 * 128_000 * 4


def test_the_remedy_is_what_fits():
    training = PlannedTraining(model_on_meta(LlamaConfig(num_hidden_layers=4, dtype="bfloat16")), CARDS)
    size = {"batch": 128, "length": 4096, "num_microbatch": 2}
    assert training.report(**size).fits_devices is False
    remedy = training.remedy(**size)
    assert remedy.fits
    assert remedy.what.startswith("--microbatches ")
    number = int(remedy.what.split()[1])
    better = training.report(**{**size, "num_microbatch": number})
    assert better.fits_devices
    assert max(memory.total for memory in better.device_memory) == remedy.device_bytes
    assert training.report(**{**size, "num_microbatch": number // 2}).fits_devices is False


def test_a_remedy_that_does_not_exist_is_said_to_be_none_and_one_of_unknown_memory_is_an_error():
    tiny = Hardware(("cuda:0",), "cuda", 150e12, 25e9, 600_000, None, 20e9, {})
    training = PlannedTraining(model_on_meta(make_config("llama")), tiny)
    for size, what in (((1, 64, 1), "--microbatches 1"), ((8, 2048, 2), "--microbatches 8 --length 64")):
        remedy = training.remedy(**dict(zip(("batch", "length", "num_microbatch"), size, strict=True)))
        assert (remedy.fits, remedy.what) == (False, what)
    unknown = Hardware(("mps:0",), "mps", 150e12, 25e9, None, None, 20e9, {})
    training = PlannedTraining(model_on_meta(make_config("llama")), unknown)
    with pytest.raises(ConfigError, match=r"the memory of mps:0 is unknown.*\n.*memory=24 \* 2\*\*30"):
        training.remedy(batch=8, length=64, num_microbatch=2)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "gemma3_text", "qwen3_moe", "bloom", "mamba", "bart", "doge", "diffllama"]
)
def test_types_of_models_are_planned_without_a_line_for_each(name):
    model = model_on_meta(make_config(name))
    report = PlannedTraining(model, CARDS).report(batch=4, length=32, num_microbatch=2)
    assert all(layer.param_bytes for layer in report.layers[1:-1])
    assert sum(layer.forward_flops for layer in report.layers) > 0
    assert report.host_memory.gradients == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_model_with_memory_or_that_looks_at_values_is_refused():
    """Which expert a token goes to, in a loop over experts: nobody knows that on meta."""
    with pytest.raises(ConfigError, match=r"torch.device\(.meta.\)"):
        PlannedTraining(torch.nn.Linear(2, 2), CARDS)
    with pytest.raises(CutError, match="cannot be planned: on meta, where tensors have no values") as caught:
        PlannedTraining(model_on_meta(make_config("dbrx")), CARDS)
    assert len(str(caught.value).splitlines()) == 1


def test_weights_of_float16_are_planned_as_they_are_trained():
    """Their gradients vanish, so a training loads them as bfloat16."""
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, dtype="float16")
    assert model_on_meta(config).dtype == torch.bfloat16
    assert model_on_meta(config, dtype=torch.float32).dtype == torch.float32
    assert model_on_meta(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16)).dtype == torch.float32


VOCABULARY, WIDTH, LENGTH = 3001, 32, 6


@pytest.fixture
def small_is_large(monkeypatch):
    """The tables of the small model count as large, and have many slices."""
    monkeypatch.setattr(layer_contents, "LARGE", VOCABULARY * WIDTH)
    monkeypatch.setattr(layer_contents, "_SMALLEST_SLICE", 2**10)


def llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def planned(memory, large_tables="auto", *, frozen=False):
    with torch.device("meta"):
        model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "layers" in name)
    machine = Hardware(("virtual:0",), "cpu", 1e12, 1e10, memory, 2**36, 1e10, {})
    training = PlannedTraining(model, machine, large_tables=large_tables)
    return training.report(batch=4, length=LENGTH, num_microbatch=2)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_least_device_holds_two_layers(frozen, small_is_large):
    enough = int(2 * 2 * sum(p.nbytes for p in llama().model.layers[0].parameters()) / FOR_PARAMETERS) + 1000
    report = planned(enough, frozen=frozen)
    assert not report.too_large
    assert report.least_memory <= enough
    assert planned(int(0.98 * (enough - 1000)), frozen=frozen).too_large.startswith("layer 1 has")
    whole = planned(enough, "whole", frozen=frozen)
    assert whole.too_large.startswith("layer 0 has")
    assert whole.least_memory > 5 * enough


def test_bytes_of_parts_are_those_that_a_run_copies(small_is_large):
    assert planned(10**8).layers[-1].slice_bytes == 0  # a head that fits
    assert planned(10**8).least_memory < 10**6
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
