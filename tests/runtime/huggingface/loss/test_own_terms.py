"""Losses with terms of their own, labels that are smoothed as by the Trainer, and options of a call."""

import copy
import time

import pytest
import torch
import transformers
from transformers.trainer_pt_utils import LabelSmoother

from roundpipe_runtime import ConfigError, LossError, RoundPipe, RoundPipeRunConfig, RoundPipeWarning
from roundpipe_runtime.huggingface import SmoothedLoss, wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.loss.call_options import CALL_OPTIONS, split_options
from tests.runtime.huggingface import hf_small
from tests.runtime.huggingface.hf_small import assert_like_plain, hf_batch, hf_model, tokens, worst_gradient, wrapped
from tests.runtime.huggingface.trainer.trainer_runs import make_model
from tests.runtime.small import same_bits

CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100
)


def made():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG).double()
    ids = torch.randint(5, 100, (7, 10))
    labels = ids.masked_fill(torch.arange(10) < torch.tensor([0, 3, 5, 0, 8, 2, 9])[:, None], -100)
    return model, {"input_ids": ids, "labels": labels}


def piped(model, **options):
    return wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0, **options)


THREE = RoundPipeRunConfig(num_microbatch=3)


@pytest.mark.parametrize("adds", ["nothing", "a penalty"])
def test_multiples_and_penalties_are_those_of_the_plain_model(adds):
    model, batch = made()

    def loss_fn(of):
        return lambda outputs, _: (
            3 * outputs.loss + (0 if adds == "nothing" else of.lm_head.weight.square().sum() / 100)
        )

    pipeline = piped(model)
    for _ in range(2):
        model.zero_grad()
        call = {"loss_fn": loss_fn(model), "run_config": THREE}
        assert_like_plain(model, batch, lambda one: loss_fn(one)(one(**batch), None), call=call, pipeline=pipeline)


TERMS = {
    "of its own": lambda outputs, _: outputs.logits.square().mean(),
    "in addition": lambda outputs, _: outputs.loss + outputs.logits.square().mean(),
    "squared": lambda outputs, _: outputs.loss**2,
    "several": lambda outputs, _: [outputs.loss, outputs.logits.square().mean()],
    "of large losses": lambda outputs, _: outputs.loss * (2 if outputs.loss > 4.6 else 1),
}
in_addition = TERMS["in addition"]


@pytest.mark.parametrize("name", TERMS)
def test_anything_else_is_computed_once(name):
    plain, batch = made()
    model, loss_fn = copy.deepcopy(plain), TERMS[name]
    expected = loss_fn(plain(**batch), None)
    expected = sum(expected) if name == "several" else expected
    expected.backward()
    pipeline = piped(model)
    with pytest.warns(RoundPipeWarning, match="The loss of loss_fn cannot be computed from the losses of microbatches"):
        found = pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=THREE)
    assert (sum(found) if name == "several" else found).item() == pytest.approx(expected.item(), rel=1e-6)
    assert worst_gradient(model, plain) < 1e-6


def test_groups_of_rows_take_multiples_only():
    model, batch = made()
    pipeline = piped(model, replicas=2)
    with pytest.raises(LossError, match="does not return a multiple"):
        pipeline.forward_backward(input_kwargs=batch, loss_fn=in_addition)
    assert all(parameter.grad is None for parameter in model.parameters())
    twice = {"loss_fn": lambda outputs, _: 2 * outputs.loss}
    assert_like_plain(model, batch, lambda plain: 2 * plain(**batch).loss, call=twice, pipeline=pipeline)


class Curriculum:
    def __init__(self):
        self.calls, self.then = 0, None

    def __call__(self, outputs, labels):
        self.calls += 1
        return outputs.loss if self.then is None else self.then(outputs, labels)


@pytest.mark.parametrize(("name", "after"), [("in addition", 1), ("squared", 2), ("in addition", 3)])
def test_a_function_that_becomes_another_one_is_shown_again(name, after):
    model, batch = made()
    pipeline, loss_fn = piped(model), Curriculum()
    for _ in range(after):
        pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=THREE)
    assert loss_fn.calls == 3 * after
    loss_fn.then = then = TERMS[name]
    model.zero_grad()
    call = {"loss_fn": loss_fn, "run_config": THREE}
    with pytest.warns(RoundPipeWarning, match="loss_fn"):
        assert_like_plain(model, batch, lambda plain: then(plain(**batch), None), call=call, pipeline=pipeline)


@pytest.mark.filterwarnings("ignore::roundpipe_runtime.RoundPipeWarning")
def test_a_function_that_reads_what_its_calls_change_is_called_once_in_a_step():
    class Warmed:
        calls = 0

        def __call__(self, outputs, labels):
            self.calls += 1
            return outputs.loss * self.calls

    model, batch = made()
    plain, pipeline = copy.deepcopy(model), piped(model)
    loss_fn, own = Warmed(), Warmed()
    for _ in range(2):
        expected = own(plain(**batch), None)
        found = pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=THREE)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["of its own", "in addition", "squared"])
def test_joined_it_is_that_of_the_plain_model(name):
    model, batch = made()
    call = {"loss_fn": TERMS[name], "run_config": RoundPipeRunConfig(num_microbatch=3, loss_reduction="joined")}
    assert_like_plain(model, batch, lambda plain: TERMS[name](plain(**batch), None), call=call, pipeline=piped(model))


def test_the_check_leaves_the_masks_of_layers_that_run_meanwhile_on_other_devices(monkeypatch):
    """It puts the generator back, which another thread draws from: its masks were others in the recomputation."""
    ids = torch.randint(5, 100, (6, 10), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    own = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def slow_layer(self, x):
        for _ in range(10):  # as the check begins and ends anywhere
            x = torch.nn.functional.dropout(x, 0.1, self.training)
            time.sleep(0.002)
        return own(self, x)

    def loss_fn(outputs, _):
        time.sleep(0.003)
        return outputs.loss

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", slow_layer)
    found = []
    for devices in ("virtual:1", "virtual:3"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(CONFIG).train()
        pipeline = wrap_model_to_roundpipe(model, devices=devices, lower_threshold=0)
        torch.manual_seed(3)
        run_config = RoundPipeRunConfig(num_microbatch=6)
        loss = pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=run_config)
        found.append((float(loss), [parameter.grad.clone() for parameter in model.parameters()]))
    (one_device, expected), (three_devices, gradients) = found
    assert three_devices == one_device
    assert same_bits(gradients, expected)


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_model_never_sees_options(is_cut):
    seen = []

    class Any(hf_small.Toy):
        def forward(self, input_ids, **kwargs):
            seen.append(set(kwargs))
            return super().forward(input_ids)

    pipeline = wrapped(Any(), example={"input_ids": tokens(2)}, use_sequential_preset=None if is_cut else False)
    with torch.no_grad():
        pipeline(input_ids=tokens(), flag=torch.ones(5))
    assert len(pipeline.cut.pieces) == (5 if is_cut else 1)
    assert {"flag"} in seen
    assert not any(CALL_OPTIONS in names for names in seen)


# A plain head; tied weights and a soft cap; experts; an encoder and a decoder, which shifts nothing
MODELS = {"llama": True, "gemma2": True, "mixtral": True, "t5": False}


def make(name: str) -> torch.nn.Module:
    return make_model("t5").double().eval() if name == "t5" else hf_model(name)


def plain_loss(model, batch, *, shifted, **options):
    """What the Trainer computes: the model without labels, its smoother behind it."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return LabelSmoother(0.1)(model(**inputs), batch["labels"], shift_labels=shifted, **options)


@pytest.mark.parametrize("items", [None, 17])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_trainer(name, items, everything_is_large, computed):
    batch, shifted = hf_batch(padding=name != "gemma2"), MODELS[name]  # whose padding on the left is NaN
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    call, options = {"loss_fn": SmoothedLoss(0.1, num_items_in_batch=items)}, {"num_items_in_batch": items}
    assert_like_plain(make(name), batch, lambda one: plain_loss(one, batch, shifted=shifted, **options), call=call)
    assert not computed


@pytest.mark.parametrize("cut", [True, False])
def test_ignored_labels_count_nothing(cut):
    """With nothing else, the loss is zero and there is no gradient, where the mean over nothing is NaN."""
    batch, model = hf_batch(), hf_model("llama")
    batch["labels"][:2] = -100
    whole, labels = dict(batch), batch.pop("labels")

    def expected(plain):
        return plain_loss(plain, whole, shifted=True) * 8  # which adds classes in float32

    call = {"label": labels, "loss_fn": SmoothedLoss(0.1, scale=8.0)}
    pipeline = assert_like_plain(model, batch, expected, call=call, use_sequential_preset=cut)
    model.zero_grad()
    none = {**batch, "labels": torch.full_like(labels, -100)}
    assert pipeline.forward_backward(input_kwargs=none, loss_fn=SmoothedLoss(0.1)).item() == 0.0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_whoever_asks_for_outputs_gets_logits(everything_is_large):
    """And the loss of the batch beside them, to which experts add nothing: the Trainer's loss has nothing of theirs."""
    model = hf_model("mixtral")
    model.config.output_router_logits = True
    plain = copy.deepcopy(model)
    batch = hf_batch()
    expected = plain_loss(plain, batch, shifted=True)
    expected.backward()
    pipeline = wrapped(model)
    loss, outputs = pipeline.forward_backward(input_kwargs=batch, loss_fn=SmoothedLoss(0.1), return_outputs=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert outputs.logits.shape == (5, 10, 128)
    assert worst_gradient(model, plain) < 1e-6


def test_decoders_begin_with_what_their_model_makes_of_labels():
    batch = hf_batch()

    def expected(plain):
        own = plain.prepare_decoder_input_ids_from_labels(batch["labels"])
        return plain_loss(plain, {**batch, "decoder_input_ids": own}, shifted=False)

    assert_like_plain(make("t5"), batch, expected, call={"loss_fn": SmoothedLoss(0.1)})


@pytest.mark.parametrize("items", [None, 3])
def test_any_pipeline_takes_it(items):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 9)).double()
    plain = copy.deepcopy(model)
    x, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([1, -100, 3, 8, -100, -100])
    expected = LabelSmoother(0.2)((plain(x),), labels, num_items_in_batch=items)
    expected.backward()

    def loss_fn(output, wanted):
        return SmoothedLoss(0.2, shift_labels=False, num_items_in_batch=items)((output,), wanted)

    pipeline = RoundPipe(model, devices="virtual:2")
    config = RoundPipeRunConfig(num_microbatch=3, loss_reduction="sum")
    loss = pipeline.forward_backward((x,), label=labels, loss_fn=loss_fn, run_config=config)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert worst_gradient(model, plain) < 1e-6


def test_wrong_arguments_are_errors():
    with pytest.raises(LossError, match=r"from 0 to 1, found 1\.5"):
        SmoothedLoss(1.5)
    with pytest.raises(LossError, match="shift_labels=True"):
        SmoothedLoss(0.1)({"logits": torch.ones(2, 3)}, torch.ones(2))
    with pytest.raises(LossError, match="no logits"):
        SmoothedLoss(0.1, shift_labels=False)({"loss": torch.ones(())}, torch.ones(2))
    with pytest.raises(LossError, match=r"torch\.float32"):
        SmoothedLoss(0.1, shift_labels=False)((torch.ones(2, 3),), torch.ones(2))
    pipeline = wrapped(hf_model("llama"))
    with pytest.raises(LossError, match="needs labels"):
        pipeline.forward_backward(input_kwargs={"input_ids": torch.ones(2, 4).long()}, loss_fn=SmoothedLoss())
    with pytest.raises(ConfigError, match=r"kwargs\['roundpipe_call_options'\]: expected CallOptions, found str"):
        split_options({CALL_OPTIONS: "loss only"})
