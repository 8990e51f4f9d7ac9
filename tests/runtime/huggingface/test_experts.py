"""Mixtures of transformers upload the experts that tokens are routed to, and compute what they compute with all."""

import copy

import pytest
import torch
import transformers

from roundpipe_runtime import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_runtime.engine.parameters import partial_table
from tests.cases import cases
from tests.runtime.huggingface.hf_small import known_model
from tests.runtime.small import assert_same_gradients, gradients
from tests.transformers_versions import is_older_than

# Two of eight; a shared expert; many experts; biases and matrices that are stored transposed; groups of experts
NAMES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"]
WAYS = ["eager", "grouped_mm", "batched_mm"]


def model_of(name, way):
    """A model, whose experts are one parameter in transformers 5 and modules before."""
    torch.manual_seed(0)
    model = known_model(name).float().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(way)
    return model.train()


def pipe_of(model, experts, **options):
    config = RoundPipeRunConfig(upload_experts=experts, **{"num_microbatch": 1, **options})
    return wrap_model_to_roundpipe(
        model, devices="virtual:2:check", model_run_config=config, use_sequential_preset=True, lower_threshold=0
    )


def tokens(rows, length, seed=1):
    ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def runs_of(pipe, batch, count):
    """The loss of the last of some runs, and the bytes that each of them uploaded and skipped."""
    found = []
    for _ in range(count):
        pipe.zero_grad()
        before = pipe.parameter_traffic
        loss = pipe.forward_backward(input_kwargs=batch)
        after = pipe.parameter_traffic
        found.append((after.uploaded - before.uploaded, after.skipped - before.skipped))
    return loss, found


@pytest.mark.parametrize("way", WAYS[:1] if is_older_than("5.0") else WAYS)
@pytest.mark.parametrize("name", cases(NAMES, quick=["mixtral", "gpt_oss"]))
def test_losses_and_gradients_are_those_of_the_plain_model(name, way, monkeypatch):
    monkeypatch.setattr(partial_table, "LEAST_BYTES", 0)
    plain, batch = model_of(name, way), tokens(1, 2)
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    model = model_of(name, way)
    pipe = pipe_of(model, "routed")
    loss, found = runs_of(pipe, batch, 3)
    assert torch.equal(loss, expected.detach())
    assert_same_gradients(gradients(model), gradients(plain))
    assert found[-1][1] > 0


@pytest.mark.parametrize("name", cases(NAMES, quick=["qwen3_moe"]))
def test_uneven_microbatches_have_the_bits_of_all_experts(name, monkeypatch):
    monkeypatch.setattr(partial_table, "LEAST_BYTES", 0)
    found = []
    for experts in ("all", "routed"):
        model = model_of(name, "grouped_mm")
        pipe = pipe_of(model, experts, num_microbatch=3)
        losses = [runs_of(pipe, tokens(5, 3, seed), 1)[0] for seed in range(5)]
        fused = gradients(model)
        pipe.zero_grad()
        pipe(**tokens(5, 3), use_cache=False).loss.backward()
        found.append((losses, fused, gradients(model)))
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))
    assert_same_gradients(found[0][1], found[1][1])
    assert_same_gradients(found[0][2], found[1][2])


def mixtral(**changes):
    """Two of eight experts of a size at which they count: 1.5 MB each."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**sizes, **changes}))


def gradients_of_a_small_batch(make):
    """Those of a run with all experts; six tenths of the bytes are uploaded at most, after the runs that prove."""
    found = []
    for experts in ("all", "routed"):
        model = make()
        pipe = pipe_of(model, experts)
        loss, bytes_of = runs_of(pipe, tokens(1, 3), 3)
        found.append((loss, gradients(model), bytes_of[-1]))
    assert torch.equal(found[0][0], found[1][0])
    assert_same_gradients(found[0][1], found[1][1])
    uploaded, skipped = found[1][2]
    assert uploaded <= 0.6 * (uploaded + skipped)
    return found[1][1]


def test_a_small_batch_uploads_less_than_six_tenths_and_a_large_one_all():
    assert gradients_of_a_small_batch(mixtral)
    pipe = pipe_of(mixtral(), "routed")
    _, found = runs_of(pipe, tokens(4, 16), 3)
    assert [skipped for _, skipped in found] == [0, 0, 0]


def test_frozen_experts_with_adapters_elsewhere():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0)
    found = gradients_of_a_small_batch(lambda: peft.get_peft_model(mixtral(), lora))
    assert all(value is None for name, value in found.items() if "lora" not in name)


def test_generation_uploads_few_experts_for_each_token():
    plain = mixtral().eval()
    ids = tokens(1, 4)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, **options)
    pipe = pipe_of(copy.deepcopy(plain), "routed")
    assert torch.equal(pipe.generate(ids, **options), expected)
    traffic = pipe.parameter_traffic
    assert traffic.uploaded < 0.75 * (traffic.uploaded + traffic.skipped)
