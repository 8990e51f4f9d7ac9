"""Norms with running statistics outside of the layers that are cut: written as by plain accumulation."""

import copy

import pytest
import torch
import transformers
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig, StageError, WeightedLoss
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.cases import cases
from tests.runtime.huggingface.hf_small import WIDTH, Toy, tokens, worst_gradient, wrapped

pytestmark = pytest.mark.slow


class Normed(Toy):
    """A toy with norms before, between and after its layers; a random mask before the first one."""

    def __init__(self, kind=nn.BatchNorm1d, dropout=0.0):
        super().__init__()
        options = {} if kind is nn.BatchNorm1d else {"track_running_stats": True, "affine": True}
        self.norms = nn.ModuleList([kind(WIDTH, **options) for _ in range(4)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids):
        x = self.norm(0, self.dropout(self.embed(input_ids)))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number < 2:
                x = self.norm(1 + number, x)
        return self.head(self.norm(3, x))

    def norm(self, number, x):
        return self.norms[number](x.transpose(1, 2)).transpose(1, 2)


def accumulated(plain, batches, loss):
    """Gradients and statistics of a loop over microbatches."""
    for rows in batches:
        loss(plain, rows).backward()


def assert_same_buffers(model, plain):
    for (name, found), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_each_norm_counts_a_microbatch_once(kind, microbatches):
    model = Normed(kind).double().train()
    model.norms[1].eval()
    plain = copy.deepcopy(model)
    pipeline = wrapped(model, example={"input_ids": tokens(2)}, microbatches=microbatches)
    for step in range(2):
        ids = tokens(7, seed=step)
        accumulated(plain, ids.tensor_split(microbatches), lambda one, rows: one(rows).square().sum() / 7)
        pipeline.forward_backward((ids,), loss_fn=lambda out, _: WeightedLoss(out.square().sum(), len(out)))
        assert_same_buffers(model, plain)
        assert worst_gradient(model, plain) < 1e-9
    assert not model.norms[1].running_mean.any()
    pipeline.close()


class Masked(Toy):
    """A toy with a random mask and a norm before its layers; no norm between them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids):
        x = nn.functional.dropout(self.embed(input_ids), 0.5, self.training)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_norm_behind_a_random_mask_has_the_statistics_of_what_went_into_the_layers():
    """And not those of the mask that the phase after the layers draws when it runs the code before them again."""
    model = Masked().double().train()
    pipeline = wrapped(model, example={"input_ids": tokens(2)}, microbatches=1)
    seen = []
    model.norm.register_forward_hook(lambda norm, args, out: seen.append(args[0].detach()))
    pipeline.forward_backward((tokens(7),), loss_fn=lambda out, _: WeightedLoss(out.square().sum(), len(out)))
    assert any(not torch.equal(one, seen[0]) for one in seen)
    torch.testing.assert_close(model.norm.running_mean, 0.1 * seen[0].mean((0, 2)))
    assert model.norm.num_batches_tracked == 1
    pipeline.close()


def test_a_norm_that_two_layers_share_is_refused():
    """Each would have to see what the other wrote."""
    model = Toy()
    model.norm = nn.BatchNorm1d(6)
    for layer in list(model.layers)[:2]:
        layer.linear = nn.Sequential(layer.linear, model.norm)
    pipeline = wrapped(model.train(), example={"input_ids": tokens(2)})
    with pytest.raises(StageError, match="both write its buffer"):
        pipeline.forward_backward((tokens(7),), loss_fn=lambda out, _: WeightedLoss(out.square().sum(), len(out)))
    assert not model.norm.running_mean.any()
    pipeline.close()


MODELS = {
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    ),
    "regnet": lambda: transformers.RegNetForImageClassification(
        transformers.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], groups_width=4)
    ),
    "mobilenet_v1": lambda: transformers.MobileNetV1ForImageClassification(
        transformers.MobileNetV1Config(depth_multiplier=0.25, image_size=32, classifier_dropout_prob=0.0)
    ),
    "mobilenet_v2": lambda: transformers.MobileNetV2ForImageClassification(
        transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=32, classifier_dropout_prob=0.0)
    ),
    "mobilevit": lambda: transformers.MobileViTForImageClassification(
        transformers.MobileViTConfig(
            image_size=32, hidden_sizes=[16] * 3, neck_hidden_sizes=[8] * 4 + [16] * 3, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
        )
    ),
    "segformer": lambda: transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            num_encoder_blocks=2, depths=[2, 2], sr_ratios=[4, 2], hidden_sizes=[8, 16], patch_sizes=[7, 3],
            strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
            hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(MODELS, quick=["resnet", "segformer"]))
def test_models_of_pictures_train_as_by_accumulation(name):
    torch.manual_seed(0)
    base = MODELS[name]().double().train()
    batch = {"pixel_values": torch.randn(7, 3, 32, 32).double(), "labels": torch.randint(0, 2, (7,))}
    if name == "segformer":
        batch["labels"] = torch.randint(0, 2, (7, 32, 32))
    for microbatches in (1, 3):
        plain, model = copy.deepcopy(base), copy.deepcopy(base)
        expected = 0.0
        for rows in torch.arange(7).tensor_split(microbatches):
            loss = plain(**{key: value[rows] for key, value in batch.items()}).loss * len(rows) / 7
            loss.backward()
            expected += loss.item()
        example = {key: value[:2] for key, value in batch.items()}
        pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0, example=example)
        assert not pipeline.cut.report.is_whole
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        assert pipeline.forward_backward(input_kwargs=batch, run_config=config).item() == pytest.approx(expected)
        assert worst_gradient(model, plain) < 1e-9
        assert_same_buffers(model, plain)
        pipeline.close()
