"""Tables of large vocabularies stay on the host: rows of the embedding and slices of the head travel instead."""

import copy

import pytest
import torch
import transformers
from torch import nn

from roundpipe_runtime import OptimizerCtx, PlanError, RoundPipeRunConfig, VirtualDevice, wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.loss.call_options import SmoothedLoss
from roundpipe_runtime.optim import layer_contents
from tests.runtime.huggingface.hf_small import hf_model
from tests.runtime.small import assert_same_gradients

VOCABULARY, WIDTH = 301, 32
CONFIG = RoundPipeRunConfig(num_microbatch=3)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """Tables of the small models count as large, and have several slices of 64 rows."""
    monkeypatch.setattr(layer_contents, "LARGE", VOCABULARY * WIDTH)
    monkeypatch.setattr(layer_contents, "_SMALLEST_SLICE", 2**10)
    monkeypatch.setattr(layer_contents, "_LARGEST_SLICE", 2**14)


def llama(*, tied=False, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": tied, "pad_token_id": 0, **changes})
    return transformers.LlamaForCausalLM(config).to(dtype)


def t5():
    model = hf_model("seq2seq:t5")
    model.config.decoder_start_token_id = 0
    return model


def gemma2():
    model = hf_model("gemma2")
    model.config.final_logit_softcapping = 0.5
    return model


def biased():
    model = hf_model("phi")
    nn.init.normal_(model.lm_head.bias)
    return model


MODELS = {
    "untied": llama, "tied": lambda: llama(tied=True), "encoder-decoder, one table for both": t5,
    "soft cap, scaled embedding": gemma2, "logit scale": lambda: hf_model("cohere"), "bias": biased,
}  # fmt: skip


def batch(rows=7, length=5, number=0):
    """Rows of which some have no label that counts, and the padding token."""
    ids = torch.randint(1, 120, (rows, length), generator=torch.Generator().manual_seed(number))
    ids[0, 0] = 0
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[rows - 1] = -100
    return {"input_ids": ids, "labels": labels}


def wrapped(model, devices, large_tables="slices", **options):
    return wrap_model_to_roundpipe(
        model, lower_threshold=0, devices=devices, large_tables=large_tables, check=False, name="x", **options
    )


def once(model, devices, large_tables="slices", config=CONFIG, loss_fn=None, **options):
    pipe = wrapped(copy.deepcopy(model), devices, large_tables, **options)
    call = {} if loss_fn is None else {"loss_fn": loss_fn}
    loss = pipe.forward_backward(input_kwargs=batch(), run_config=config, **call)
    with OptimizerCtx():
        found = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
    return loss, found


def eagerly(model):
    model = copy.deepcopy(model)
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_close(found, expected, *, tolerance=2e-6):
    """Models of transformers compute the loss in float32, whatever their weights are."""
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=tolerance, atol=0)
    for name, gradient in expected[1].items():
        if gradient is None:
            assert found[1][name] is None, name
            continue
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm().clamp(min=1e-9), name


def check_rounded(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 0.02 * gradient.norm(), name


def same_bits(found, expected):
    assert torch.equal(found[0], expected[0])
    assert_same_gradients(found[1], expected[1])


@pytest.fixture
def devices():
    return "virtual:2:check"


@pytest.mark.parametrize("name", MODELS)
def test_slices_give_the_loss_and_gradients_of_the_eager_model(name, devices):
    model = MODELS[name]()
    check_close(once(model, devices), eagerly(model))


@pytest.mark.parametrize("name", MODELS)
def test_rows_give_the_bits_of_the_whole_table(name, devices):
    model = MODELS[name]()
    same_bits(once(model, devices, "auto"), once(model, devices, "whole"))


@pytest.mark.parametrize("name", ["untied", "tied", "encoder-decoder, one table for both"])
def test_bits_do_not_depend_on_devices_and_placement(name):
    model, found = MODELS[name](), []
    for count in (1, 2, 4):
        for changes in ({}, {"recompute_grain": "layer"}, {"keep_parameters": "auto"}, {"last_stage_copies": count}):
            config = RoundPipeRunConfig(num_microbatch=3, **changes)
            found.append(once(model, f"virtual:{count}:check", config=config))
    for other in found[1:]:
        same_bits(other, found[0])


@pytest.mark.parametrize("tied", [False, True])
def test_master_weights_get_sums_in_their_own_dtype(tied, devices):
    model = llama(tied=tied, dtype=torch.bfloat16)
    options = {"optim_dtype": torch.float32}
    whole = once(model, devices, "whole", **options)
    same_bits(once(model, devices, "auto", **options), whole)
    sliced = once(model, devices, **options)
    assert sliced[1]["model.embed_tokens.weight"].dtype == torch.float32
    check_rounded(sliced, whole)


def test_frozen_tables_get_no_gradient(devices):
    model = llama()
    for parameter in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        parameter.requires_grad_(False)
    found = once(model, devices)
    assert found[1]["model.embed_tokens.weight"] is None
    assert found[1]["lm_head.weight"] is None
    check_close(found, eagerly(model))


def test_adapters_train_on_frozen_tables(devices):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        llama(), LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    ).double()
    check_close(once(adapted, devices), eagerly(adapted))


@pytest.mark.parametrize("name", MODELS)
def test_logits_that_are_asked_for_are_those_of_the_model(name, devices):
    model = MODELS[name]()
    given = {"input_ids": batch()["input_ids"]}
    if name.startswith("encoder"):
        given["decoder_input_ids"] = given["input_ids"]
    own = copy.deepcopy(model)
    expected = own(**given).logits
    expected.pow(2).sum().backward()
    pipe = wrapped(model, devices)
    with torch.no_grad():
        evaluated = pipe(**batch(), roundpipe_run_config=CONFIG)
        wanted = own(**batch())
    torch.testing.assert_close(evaluated.loss, wanted.loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(evaluated.logits, wanted.logits, rtol=1e-10, atol=1e-10)
    found = pipe(**given, roundpipe_run_config=CONFIG).logits
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    found.pow(2).sum().backward()
    for parameter, other in zip(model.parameters(), own.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() <= 2e-6 * other.grad.norm()  # norms of some are in float32


def test_label_smoothing_is_that_of_the_model(devices):
    whole, sliced = (once(llama(), devices, way, loss_fn=SmoothedLoss(0.1)) for way in ("whole", "slices"))
    check_close(sliced, whole)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_next_to_runs_read_the_right_version_of_a_table(tied, dtype, devices):
    options = {"optim_dtype": torch.float32} if dtype == torch.bfloat16 else {}
    model, results = llama(tied=tied, dtype=dtype), {}
    for way, is_async in [("slices", False), ("slices", "exact"), ("whole", True), ("auto", True)]:
        pipe = wrapped(copy.deepcopy(model), devices, way, **options)
        with OptimizerCtx():
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        results[way, is_async] = losses = []
        for number in range(4):
            losses.append(pipe.forward_backward(input_kwargs=batch(number=number), run_config=CONFIG))
            pipe.step(lambda opt=optimizer: (opt.step(), opt.zero_grad()), is_async=is_async)
        pipe.synchronize()
        losses += [p.detach().clone() for p in pipe.parameters()]
    for one, other in [(("slices", "exact"), ("slices", False)), (("auto", True), ("whole", True))]:
        assert all(torch.equal(a, b) for a, b in zip(results[one], results[other], strict=True))


@pytest.mark.parametrize("way", ["copy_in", "copy_out"])
def test_an_error_half_way_leaves_no_trace(way, devices, monkeypatch):
    model = llama()
    expected = once(model, devices)
    pipe = wrapped(copy.deepcopy(model), devices)
    kind = type(pipe.devices[0])
    original, calls = getattr(kind, way), []

    def failing(self, tensor, *args, **kwargs):
        if tensor.dim() == 2 and tensor.shape[1] == WIDTH and tensor.shape[0] == 64:
            calls.append(1)
            if len(calls) == 9:
                raise RuntimeError("no copy")
        return original(self, tensor, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(kind, way, failing)
        with pytest.raises(RuntimeError, match="no copy"):
            pipe.forward_backward(input_kwargs=batch(), run_config=CONFIG)
    assert all(p.grad is None for p in pipe.parameters())
    loss = pipe.forward_backward(input_kwargs=batch(), run_config=CONFIG)
    same_bits((loss, {name: p.grad for name, p in pipe.named_parameters()}), expected)


def test_a_device_that_cannot_hold_the_head_trains():
    model = llama(vocab_size=3001, dtype=torch.float32)
    limit = 300_000
    assert model.lm_head.weight.nbytes > limit
    refused, device = (VirtualDevice(f"d{number}", check=True, memory_limit=limit) for number in range(2))
    pipe = wrapped(copy.deepcopy(model), [refused], "whole")
    with pytest.raises(PlanError, match="layer 0 has"):
        pipe.forward_backward(input_kwargs=batch(), run_config=RoundPipeRunConfig(num_microbatch=1))
    check_close(once(model, [device], "auto"), eagerly(model), tolerance=1e-5)
    assert device.peak < 0.5 * model.lm_head.weight.nbytes


def test_only_large_tables_stay_on_the_host(devices, monkeypatch):
    model = llama()
    nbytes = model.lm_head.weight.nbytes
    for threshold, count in [(nbytes, 1), (nbytes + 1, 0)]:
        monkeypatch.setattr(layer_contents, "LARGE", threshold)
        pipe = wrapped(copy.deepcopy(model), devices)
        contents = pipe._rp_engine.planner.rule.mark(layer_contents.scan(pipe.cut.pieces))
        assert [len(layer.tables) for layer in contents] == [count, 0, 0, count]


def test_code_that_reads_the_whole_weight_gets_it(devices):
    class PenalizedLlama(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            found = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            if labels is not None:
                found.loss = found.loss + 0.5 * self.lm_head.weight.pow(2).mean()
            return found

    model = llama()
    model.__class__ = PenalizedLlama
    check_close(once(model, devices, config=RoundPipeRunConfig(num_microbatch=1)), eagerly(model))


def test_code_that_writes_a_table_is_refused(devices):
    model = llama()
    original = type(model.lm_head).forward

    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2.0)
            return original(self, x)

    model.lm_head.__class__ = Writes
    pipe = wrapped(model, devices)
    with pytest.raises(Exception, match="writes a parameter"):
        pipe.forward_backward(input_kwargs=batch(), run_config=RoundPipeRunConfig(num_microbatch=1))


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_numbers_outside_of_the_vocabulary_are_refused(name, devices):
    """A token or a label that no row belongs to is an error, as in torch; a label on an accelerator makes NaN."""
    given = batch()
    given[name][2, 2] = VOCABULARY
    pipe = wrapped(llama(), devices)
    one = RoundPipeRunConfig(num_microbatch=1)
    if name == "labels" and pipe.devices[0].torch_device.type != "cpu":  # which would wait for an answer
        assert pipe.forward_backward(input_kwargs=given, run_config=one).isnan()
    else:
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            pipe.forward_backward(input_kwargs=given, run_config=one)


def test_autocast_rounds_slices_as_it_rounds_the_whole_head(devices):
    model, config = llama(dtype=torch.float32), RoundPipeRunConfig(num_microbatch=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, sliced = (once(model, devices, way, config) for way in ("whole", "slices"))
    check_rounded(sliced, whole)
