"""Losses that are computed once for the whole batch, or depend on values."""

import copy
import warnings

import pytest
import torch
import transformers
from transformers.modeling_outputs import SequenceClassifierOutput

from roundpipe_runtime import RoundPipeRunConfig, RoundPipeWarning
from roundpipe_runtime.errors import LossError
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.runtime.huggingface.hf_small import assert_like_plain, worst_gradient, wrapped

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROWS = 5


def speech():
    """Its loss is a sum over rows, by default."""
    dropouts = ("hidden", "attention", "feat_proj", "activation", "final")
    config = transformers.Wav2Vec2Config(
        **SIZES, vocab_size=20, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2,
        layerdrop=0.0, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, pad_token_id=0,
        apply_spec_augment=False, **{f"{name}_dropout": 0.0 for name in dropouts},
    )  # fmt: skip
    batch = {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(1, 20, (ROWS, 3))}
    return transformers.Wav2Vec2ForCTC(config), batch


def pairs():
    """Each picture is compared with every text of the batch."""
    text = {**SIZES, "vocab_size": 100, "eos_token_id": 99, "bos_token_id": 98, "pad_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config={**SIZES, "image_size": 16, "patch_size": 8})
    batch = {"input_ids": torch.randint(5, 98, (ROWS, 8)), "pixel_values": torch.randn(ROWS, 3, 16, 16)}
    return transformers.CLIPModel(config), {**batch, "return_loss": True}


def masked_pictures():
    """It takes no labels."""
    decoder = {f"decoder_{name}": size for name, size in SIZES.items()}
    config = transformers.ViTMAEConfig(**SIZES, **decoder, image_size=16, patch_size=4, mask_ratio=0.5)
    return transformers.ViTMAEForPreTraining(config), {
        "pixel_values": torch.randn(ROWS, 3, 16, 16),
        "noise": torch.rand(ROWS, 16),
    }


def answers():
    """Two means, and one microbatch has no end of an answer."""
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES, **QUIET, vocab_size=100))
    places = {"start_positions": torch.arange(ROWS), "end_positions": torch.tensor([99, 99, 3, 5, 6])}
    return model, {"input_ids": torch.randint(5, 95, (ROWS, 8)), **places}


KINDS = {
    "sum over rows": (speech, "sum"),
    "pairs": (pairs, "joined"),
    "no labels": (masked_pictures, "rows"),
    "two means": (answers, "joined"),
}


def made(name):
    torch.manual_seed(0)
    model, batch = KINDS[name][0]()
    batch = {
        key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in batch.items()
    }
    return model.double().train(), batch


def first_rows(batch, rows=2):
    return {key: value[:rows] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize("way", ["forward_backward", "outputs", "loss_fn"])
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_are_those_of_the_whole_batch(name, way):
    plain, batch = made(name)
    model = copy.deepcopy(plain)
    try:
        expected = plain(**batch).loss
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        pytest.skip("4.56 fills CLIP's mask, in float32, with the least number of float64: the model itself fails")
    expected.backward()
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", example=first_rows(batch), lower_threshold=0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for microbatches in (1, 2, 3):
            config = RoundPipeRunConfig(num_microbatch=microbatches)
            model.zero_grad()
            if way == "outputs":
                loss = pipeline(**batch, roundpipe_run_config=config).loss
                loss.backward()
            else:
                own = {} if way == "forward_backward" else {"loss_fn": lambda outputs, _: outputs.loss * 1.0}
                if own and name in ("pairs", "no labels"):
                    own = {}  # without labels, a function's value is a loss of its microbatch
                loss = pipeline.forward_backward(input_kwargs=batch, run_config=config, **own)
            limit = 1e-6 if name == "sum over rows" else 1e-9  # transformers computes CTC in float32
            assert loss.item() == pytest.approx(expected.item(), rel=limit)
            assert worst_gradient(model, plain) < limit
    way = KINDS[name][1]
    assert {proof.way for proof in pipeline._rp_losses.proofs.values()} == {way}
    pipeline.close()
    said = [str(one.message) for one in heard if issubclass(one.category, RoundPipeWarning)]
    assert len(said) == (way in ("joined", "whole"))
    assert all(
        one.startswith(f"The loss of {type(plain).__name__} cannot be computed from the losses of microbatches:")
        for one in said
    )


def test_a_batch_does_not_change_how_the_next_one_is_computed():
    """Where only some batches have means over different numbers of labels, the bits of the others stay the same."""
    model, odd = made("two means")
    even = {**odd, "end_positions": torch.arange(ROWS)}
    losses = []
    for batches in ([even], [odd, even]):
        pipeline = wrap_model_to_roundpipe(
            copy.deepcopy(model), devices="virtual:2", example=first_rows(odd), lower_threshold=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundPipeWarning)
            found = [pipeline.forward_backward(input_kwargs=batch) for batch in batches]
        losses.append((found[-1].item(), len(pipeline._rp_losses.proofs)))
        pipeline.close()
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(model(**even).loss.item(), rel=1e-9)


def test_groups_of_rows_refuse_it():
    """Each group has a microbatch of its own: the numbers would be others, and nothing is changed."""
    model, batch = made("two means")
    pipeline = wrap_model_to_roundpipe(
        model, devices="virtual:2", example=first_rows(batch), lower_threshold=0, replicas=2
    )
    with pytest.raises(
        LossError, match=r"not known to be a mean .*, in one process:\n    RoundPipeRunConfig\(num_micro"
    ):
        pipeline.forward_backward(input_kwargs=batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    pipeline.close()


F = torch.nn.functional
CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100, num_labels=4,
    pad_token_id=0,
)  # fmt: skip


def each(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


# a loss of logits and labels, and how it is computed
LOSSES = {
    "of one class": (lambda x, y: each(x, y)[y == 1].mean(), "joined"),
    "by a product": (lambda x, y: (each(x, y) * (y == 1)).sum() / (y == 1).sum().clamp(min=1), "joined"),
    "with a term of one class": (
        lambda x, y: F.cross_entropy(x, y) + (x.square().mean() if (y == 2).any() else 0),
        "joined",
    ),
    "of confident rows": (lambda x, y: each(x, y)[x.softmax(-1).amax(-1) > 0.276].mean(), "joined"),
    "by a limit": (lambda x, y: F.cross_entropy(x, y) * (2 if y.max().item() > 2 else 1), "joined"),
    "of rows": (lambda x, y: torch.where(x.argmax(-1) == y, each(x, y), 2 * each(x, y)).mean(), "rows"),
    "of labels": (lambda x, y: F.cross_entropy(x, y), "items"),
}


class Classifier(transformers.LlamaForSequenceClassification):
    """It computes its loss with a function."""

    def __init__(self, config, loss_of):
        super().__init__(config)
        self.loss_of = loss_of

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
        return SequenceClassifierOutput(loss=None if labels is None else self.loss_of(logits, labels), logits=logits)


@pytest.mark.filterwarnings("ignore:The loss of:roundpipe_runtime.RoundPipeWarning")
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "in one piece"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_plain_model(name, is_cut):
    torch.manual_seed(0)
    loss_of, way = LOSSES[name]
    model = Classifier(CONFIG, loss_of).double()
    ids, labels = torch.randint(5, 100, (9, 10)), torch.tensor([1, 1, 1, 0, 2, 1, 0, 3, 1])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    pipeline = wrapped(model, use_sequential_preset=is_cut or False)
    assert_like_plain(model, batch, pipeline=pipeline)
    way = way if is_cut or way != "joined" else "whole"
    assert [proof.way for proof in pipeline._rp_losses.proofs.values()] == [way]
