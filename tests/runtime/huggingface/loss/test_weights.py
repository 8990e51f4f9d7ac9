"""Tests of huggingface.loss.own_loss: the loss that a model computes, of the whole batch."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional

from matrix.models import make_config
from roundpipe_runtime.huggingface.loss.own_loss import counting
from tests.runtime.huggingface.hf_small import assert_like_plain, hf_batch, hf_model, worst_gradient, wrapped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("compute", "counts", "sums"),
    [
        (lambda x, y: functional.cross_entropy(x, y), [3.0], 0),
        (lambda x, y: functional.cross_entropy(x, y.abs() % 3, ignore_index=1), [1.0], 0),
        (lambda x, y: functional.cross_entropy(x, y, weight=torch.tensor([0.5, 2.0, 1.0])), [4.5], 0),
        (lambda x, y: torch.nn.CrossEntropyLoss()(x, y), [3.0], 0),
        (lambda x, y: functional.cross_entropy(x, y, reduction="sum"), [], 1),
        (lambda x, y: functional.mse_loss(x[:, 0], y.float()), [4.0], 0),
        (lambda x, y: functional.binary_cross_entropy_with_logits(x, torch.ones(4, 3)), [4.0], 0),
        (lambda x, y: functional.nll_loss(functional.log_softmax(x, -1), y), [3.0], 0),
    ],
)
def test_items_of_a_mean_are_counted(compute, counts, sums):
    with counting() as items:
        compute(torch.randn(4, 3), torch.tensor([0, 1, 1, -100]))
    assert (items.counts, items.sums) == (counts, sums)


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": 100}], ids=["own", "given"])
@pytest.mark.parametrize("ignored", [0, 2, 5])
def test_rows_without_labels_count_nothing_and_num_items_in_batch_is_the_weight(ignored, items):
    model, batch = hf_model("llama"), {**hf_batch(), **items}
    batch["labels"][:ignored] = -100
    pipeline = wrapped(model)
    if ignored == 5:
        assert pipeline.forward_backward(input_kwargs=batch).item() == pipeline(**batch).loss.item() == 0.0
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
        return
    assert_like_plain(model, batch, pipeline=pipeline)
    with torch.no_grad():
        assert pipeline(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("problem", "labels"), [("classes", [0, 1, 1, 0, 1]), ("regression", [0.1, 0.5, 2.0, 3.0, 1.0])]
)
def test_sequence_classification(problem, labels):
    from transformers import BertForSequenceClassification

    config = make_config("bert")
    config.num_labels = 1 if problem == "regression" else 2
    config.is_decoder = False
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).double().eval()
    made = torch.tensor(labels, dtype=torch.float64 if problem == "regression" else torch.int64)
    example = {**hf_batch(2), "labels": made[:2]}
    assert_like_plain(model, {**hf_batch(), "labels": made}, rel=1e-9, example=example).close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "jetmoe"])
def test_experts_are_balanced_over_the_whole_batch(name):
    if name == "jetmoe" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("the plain JetMoE cannot be made in 5.0, and before it asks itself for num_experts, which it lacks")
    model = hf_model(name)
    model.config.output_router_logits = True
    plain = copy.deepcopy(model)
    batch = {**hf_batch(), "output_router_logits": True}  # JetMoE of before 5.23 asks for it here only
    expected = plain(**batch)
    expected.loss.backward()
    pipeline = wrapped(model)
    loss, found = pipeline.forward_backward(input_kwargs=batch, return_outputs=True)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-9)
    assert all(torch.allclose(a, b) for a, b in zip(found.router_logits, expected.router_logits, strict=True))
    assert worst_gradient(model, plain) < 1e-6


@pytest.mark.parametrize("labelled", [True, False])
def test_experts_are_balanced_in_a_tuple_and_without_labels(labelled):
    """Where outputs have no names, and where nothing is added to a loss, the auxiliary loss is that of the batch."""
    model = hf_model("qwen3_moe")
    plain = copy.deepcopy(model)
    batch = hf_batch()
    if not labelled:
        del batch["labels"]
    options = {"output_router_logits": True, "return_dict": False}
    pipeline = wrapped(model)
    with torch.no_grad():
        found, expected = pipeline(**batch, **options), plain(**batch, **options, use_cache=False)
        named = pipeline(**batch, output_router_logits=True)
    assert type(found) is tuple
    assert len(found) == len(expected)
    assert torch.allclose(found[0], expected[0].to(found[0].dtype), rtol=1e-6)
    if labelled:  # then it comes second
        assert found[1].item() == pytest.approx(expected[1].item(), rel=1e-9)
    aux = plain(**batch, output_router_logits=True, use_cache=False).aux_loss
    assert named.aux_loss.item() == pytest.approx(aux.item(), rel=1e-9)
    if labelled:
        loss = pipeline.forward_backward(input_kwargs={**batch, **options})
        plain(**batch, **options)[0].backward()
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-6)
        assert worst_gradient(model, plain) < 1e-6
