"""Adapters of PEFT on models behind a pipeline: trained, saved, loaded and merged as on the plain model."""

import copy
import pathlib
import re
import sys

import pytest
import torch
import transformers

from roundpipe_runtime import optim
from roundpipe_runtime.errors import ConfigError
from tests.cases import cases
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, without_dropout, worst_gradient, wrapped
from yobx_flatten.huggingface.cache_names import cache_of

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft", reason="LoRA is PEFT's")

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "gemma3_text": ["q_proj", "v_proj"]}


def lora(name: str = "llama", **options) -> "peft.LoraConfig":
    """Adapters whose second matrix is not zero, so that they matter from the start."""
    options.setdefault("target_modules", TARGETS[name])
    return peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=name == "gpt2", **options
    )


def adapted(name: str = "llama", **options):
    torch.manual_seed(0)
    return peft.get_peft_model(hf_model(name), lora(name, **options)).double()


def assert_the_same(pipeline, plain, batch, rel=1e-6, **options):
    expected = plain(**batch, **options, use_cache=False)
    expected.loss.backward()
    loss, found = pipeline.forward_backward(input_kwargs={**batch, **options}, return_outputs=True)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert (found.logits - expected.logits).norm() <= rel * expected.logits.norm()
    assert worst_gradient(pipeline.cut.model, plain) < rel
    return found


def test_adapters_around_the_layers_modules_that_learn_whole_experts_inside_and_a_model_in_one_piece():
    model = adapted()
    assert_the_same(wrapped(model, use_sequential_preset=False), copy.deepcopy(model), hf_batch())
    model = adapted(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    assert_the_same(wrapped(model), copy.deepcopy(model), hf_batch())
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head.modules_to_save" in name for name in learning)
    assert any("lora_embedding_A" in name for name in learning)
    model = peft.get_peft_model(hf_model("mixtral"), lora(target_modules=["q_proj"])).double()
    assert_the_same(wrapped(model), copy.deepcopy(model), hf_batch(), rel=1e-5, output_router_logits=True)


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_learn_as_in_the_plain_model(name):
    model = adapted(name)
    plain = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    pipeline = wrapped(model)
    ours = torch.optim.SGD(pipeline.optim_parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        assert_the_same(pipeline, plain, hf_batch(seed=step), rel=1e-6 if step == 0 else 1e-5)
        pipeline.step(lambda: (ours.step(), ours.zero_grad()))
        theirs.step()
        theirs.zero_grad()
    assert not pipeline.cut.report.is_whole
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)


def pages_of(file):
    """Spans of this process's memory that are pages of a file, and the bytes of them that were written."""
    spans, written, inside = [], 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
            spans += [[int(end, 16) for end in line.split()[0].split("-")]] if inside else []
        elif inside and line.startswith(("Anonymous:", "Swap:")):
            written += int(line.split()[1])
    return spans, written


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows where memory is from")
@pytest.mark.parametrize("how", [True, "exact"])
def test_frozen_weights_stay_pages_of_their_file(tmp_path, how):
    hf_model("llama").bfloat16().save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    pipeline = wrapped(peft.get_peft_model(model, lora()), optim_dtype=torch.float32, pin_model="off")
    optimizer = optim.Adam([p for p in pipeline.optim_parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(pipeline.forward_backward(input_kwargs=hf_batch()).item())
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=how)
    pipeline.synchronize()
    spans, written = pages_of(tmp_path / "model.safetensors")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert len(frozen) > 10
    assert all(any(start <= p.data_ptr() < stop for start, stop in spans) for p in frozen)
    assert written == 0
    assert losses[2] < losses[0]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head", "embed_tokens"]])
def test_adapters_put_into_a_wrapped_model(targets):
    torch.manual_seed(0)
    model = hf_model("llama")
    pipeline = wrapped(model)
    inserted = peft.get_peft_model(pipeline, lora(target_modules=targets)).double()
    plain, batch = copy.deepcopy(model), hf_batch()
    assert_the_same(pipeline, plain, batch)
    assert inserted(**batch).loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_adapters_are_switched_switched_off_and_merged(targets):
    model = adapted(target_modules=targets)
    torch.manual_seed(1)
    model.add_adapter("other", lora(target_modules=targets))
    model.double()
    plain, batch = copy.deepcopy(model), hf_batch()
    pipeline, seen = wrapped(model), []

    def compare():
        expected = plain(**batch).logits
        assert torch.allclose(pipeline(**batch).logits, expected, rtol=1e-9)
        seen.append(expected)

    for name in ("default", "other"):
        for both in (pipeline, plain):
            both.set_adapter(name)
        compare()
    with pipeline.disable_adapter(), plain.disable_adapter():
        compare()
    assert not any(torch.allclose(seen[i], seen[i - 1]) for i in range(3))
    pipeline.merge_adapter()
    compare()  # they count once
    pipeline.unmerge_adapter()
    compare()
    merged = pipeline.merge_and_unload()
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert not any("lora" in name for name in merged.state_dict())
    assert torch.allclose(merged(**batch).logits, seen[-1], rtol=1e-9)


def test_saved_adapters_are_loaded_by_peft(tmp_path):
    model = adapted()
    torch.manual_seed(0)
    base, other = hf_model("llama"), hf_model("llama")
    pipeline = wrapped(model)
    optimizer = torch.optim.Adam(pipeline.optim_parameters(), lr=0.01)
    batch = hf_batch()
    for _ in range(2):
        pipeline.forward_backward(input_kwargs=batch)
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
    pipeline.save_pretrained(tmp_path)
    found = pipeline.eval()(**batch).logits
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.allclose(loaded(**batch).logits, found, rtol=1e-6, atol=1e-9)
    again = wrapped(other)
    peft.PeftModel.from_pretrained(again, tmp_path)
    assert torch.allclose(again.eval()(**batch).logits, found, rtol=1e-6, atol=1e-9)


def test_frozen_parameters_cost_the_optimizer_nothing():
    model = adapted().to(torch.bfloat16)
    pipeline = wrapped(model, optim_dtype=torch.float32)
    named = dict(pipeline.optim_named_parameters())
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optim.Adam(named.values(), lr=0.01)
    for is_async in (False, True):
        pipeline.forward_backward(input_kwargs=hf_batch())
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    shadows = len(pipeline._rp_engine.store._shadows)
    pipeline.synchronize()
    assert shadows == 0
    assert {name for name, p in named.items() if p.untyped_storage().nbytes() > 4} == learning
    assert {name for name, p in named.items() if p in optimizer.state} == learning
    assert all(p.grad is None for name, p in named.items() if name not in learning)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert pipeline._rp_engine.store.masters().keys() == learning


def test_rows_with_different_adapters_are_refused():
    """PEFT would hook the layers, which are elsewhere."""
    pipeline = wrapped(adapted())
    with pytest.raises(ConfigError, match="set_adapter"):
        pipeline(**hf_batch(2), adapter_names=["default", "__base__"])


PROMPTS = {
    "prefix": (peft.PrefixTuningConfig, {}),
    "projected prefix": (peft.PrefixTuningConfig, {"prefix_projection": True, "encoder_hidden_size": 16}),
    "prompt": (peft.PromptTuningConfig, {}),
    "encoded prompt": (peft.PromptEncoderConfig, {"encoder_hidden_size": 16}),
}


# PEFT calls the cache `past_key_values`, which transformers 5.24 renamed
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
# and asks for gradient checkpointing by its former name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", PROMPTS)
@pytest.mark.parametrize("name", cases(["llama", "gpt2", "gemma3_text", "seq2seq:t5"], quick=["llama", "seq2seq:t5"]))
def test_learned_prompts_train_as_in_the_plain_model(name, method, old_names_said):
    torch.manual_seed(0)
    model = hf_model(name)
    model.config.decoder_start_token_id = 2
    kind, options = PROMPTS[method]
    config = kind(task_type="SEQ_2_SEQ_LM" if "t5" in name else "CAUSAL_LM", num_virtual_tokens=4, **options)
    model = without_dropout(peft.get_peft_model(model, config).double())
    batch = hf_batch()
    before = copy.deepcopy(batch)
    assert cache_of(assert_the_same(wrapped(model), copy.deepcopy(model), batch)) is None
    assert all(torch.equal(batch[key], before[key]) for key in batch)
