"""A model whose own loss chooses rows by values: computed once for the whole batch, also if the first rows hide it."""

import copy
import warnings

import pytest
import torch
import transformers
from transformers.modeling_outputs import SequenceClassifierOutput

from roundpipe_runtime import RoundPipeRunConfig, RoundPipeWarning
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.runtime.huggingface.hf_small import worst_gradient

pytestmark = pytest.mark.slow

F = torch.nn.functional
CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100, num_labels=4,
    pad_token_id=0,
)  # fmt: skip


def each(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def of_one_class(logits, labels):
    return each(logits, labels)[labels == 1].mean()


def by_product(logits, labels):
    weights = (labels == 1).double()
    return (each(logits, labels) * weights).sum() / weights.sum().clamp(min=1)


def with_a_term_of_one_class(logits, labels):
    loss = F.cross_entropy(logits, labels)
    return loss + logits.square().mean() if (labels == 2).any() else loss


def of_confident_rows(logits, labels):
    return each(logits, labels)[logits.softmax(-1).amax(-1) > 0.276].mean()


def by_a_limit(logits, labels):
    loss = F.cross_entropy(logits, labels)
    return loss * 2 if labels.max().item() > 2 else loss


def of_rows(logits, labels):
    return torch.where(logits.argmax(-1) == labels, each(logits, labels), 2 * each(logits, labels)).mean()


def of_labels(logits, labels):
    return F.cross_entropy(logits, labels)


class Classifier(transformers.LlamaForSequenceClassification):
    """It computes its loss with a function."""

    def __init__(self, config, loss_of):
        super().__init__(config)
        self.loss_of = loss_of

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
        return SequenceClassifierOutput(loss=None if labels is None else self.loss_of(logits, labels), logits=logits)


WAYS = {
    of_one_class: "joined",
    by_product: "joined",
    with_a_term_of_one_class: "joined",
    of_confident_rows: "joined",
    by_a_limit: "joined",
    of_rows: "rows",
    of_labels: "items",
}


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "in one piece"])
@pytest.mark.parametrize("loss_of", WAYS)
def test_loss_and_gradients_are_those_of_the_plain_model(loss_of, is_cut):
    torch.manual_seed(0)
    plain = Classifier(CONFIG, loss_of).double()
    model = copy.deepcopy(plain)
    ids = torch.randint(5, 100, (9, 10))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([1, 1, 1, 0, 2, 1, 0, 3, 1]),
    }
    expected = plain(**batch).loss
    expected.backward()
    options = {} if is_cut else {"use_sequential_preset": False}
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundPipeWarning)
        loss = pipeline.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=3))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert worst_gradient(model, plain) < 1e-6
    way = WAYS[loss_of] if is_cut or WAYS[loss_of] != "joined" else "whole"
    assert [proof.way for proof in pipeline._rp_losses.proofs.values()] == [way]
