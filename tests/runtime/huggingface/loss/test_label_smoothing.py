"""Tests of huggingface.loss.call_options: what the Trainer computes of all logits, without all logits."""

import copy

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.errors import LossError
from roundpipe_runtime.huggingface import SmoothedLoss
from tests.runtime.huggingface.hf_small import assert_like_plain, hf_batch, hf_model, worst_gradient, wrapped
from tests.runtime.huggingface.trainer.trainer_runs import make_model

# A plain head; tied weights and a soft cap; experts; an encoder and a decoder, which shifts nothing
MODELS = {"llama": True, "gemma2": True, "mixtral": True, "t5": False}


def make(name: str) -> torch.nn.Module:
    return make_model("t5").double().eval() if name == "t5" else hf_model(name)


def make_batch(name: str) -> dict[str, torch.Tensor]:
    batch = hf_batch(padding=name != "gemma2")  # whose padding on the left is NaN
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    return batch


def plain_loss(model, batch, *, shifted, **options):
    """What the Trainer computes: the model without labels, its smoother behind it."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return LabelSmoother(0.1)(model(**inputs), batch["labels"], shift_labels=shifted, **options)


@pytest.mark.parametrize("items", [None, 17])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_trainer(name, items, everything_is_large, computed):
    batch, shifted = make_batch(name), MODELS[name]
    assert_like_plain(
        make(name),
        batch,
        lambda plain: plain_loss(plain, batch, shifted=shifted, num_items_in_batch=items),
        call={"loss_fn": SmoothedLoss(0.1, num_items_in_batch=items)},
    )
    assert not computed


@pytest.mark.parametrize("cut", [True, False])
def test_ignored_labels_count_nothing(cut):
    """With nothing else, the loss is zero and there is no gradient, where the mean over nothing is NaN."""
    batch, model = hf_batch(), hf_model("llama")
    batch["labels"][:2] = -100
    whole, labels = dict(batch), batch.pop("labels")
    pipeline = assert_like_plain(
        model,
        batch,
        lambda plain: plain_loss(plain, whole, shifted=True) * 8,  # which adds classes in float32
        call={"label": labels, "loss_fn": SmoothedLoss(0.1, scale=8.0)},
        use_sequential_preset=cut,
    )
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
    """An encoder-decoder that is given labels only has the inputs of its decoder from them, as it does itself."""
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
