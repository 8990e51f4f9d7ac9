"""Noise, running statistics and masks: a wrapped model trains exactly as the plain one."""

import copy
import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from matrix.models import make_model
from roundpipe_runtime import RoundPipeRunConfig, StageError, WeightedLoss, wrap_model_to_roundpipe
from tests.runtime.huggingface import hf_small
from tests.runtime.huggingface.hf_small import WIDTH, Toy, hf_batch, hf_model, squares, tokens, worst_gradient, wrapped
from tests.runtime.small import near_gradients

# Windows; experts with a loss of their own; recurrent layers; hidden states put together by hand
NAMES = ["gemma3_text", "qwen3_moe", "jamba", "gptj"]


def drawn(model, seed: int) -> tuple[dict, dict, int]:
    """A call, what it asks for beside, and how many microbatches."""
    draw = random.Random(seed)
    rows, length = draw.randint(1, 6), draw.randint(4, 12)
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask, labels = torch.ones_like(ids), ids.clone()
    side = draw.choice(["left", "right", "none"])
    for row in range(rows if side != "none" else 0):
        count = draw.randint(0, length - 3)
        mask[row, slice(0, count) if side == "left" else slice(length - count, length)] = 0
    labels[mask == 0] = -100
    for row in range(rows - 1):
        labels[row, : draw.choice([0, 0, length // 2, length])] = -100
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if draw.random() < 0.3:
        call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids")).detach()
    if draw.random() < 0.3:
        call["num_items_in_batch"] = draw.randint(5, 50)
    flags = {
        "output_hidden_states": draw.random() < 0.4,
        "output_router_logits": "moe" in model.config.model_type and draw.random() < 0.5,
        "return_dict": draw.random() < 0.7,
    }
    return call, {name: value for name, value in flags.items() if value or name == "return_dict"}, draw.randint(1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_calls_drawn_at_random(name):
    base = hf_model(name)
    for seed in range(3):
        model, plain = copy.deepcopy(base), copy.deepcopy(base)
        call, flags, microbatches = drawn(base, seed)
        pipeline = wrapped(model, microbatches=microbatches, check=False)
        for _ in range(2):
            expected = plain(**copy.deepcopy(call), **flags, use_cache=False)
            expected[0].backward()
            loss, found = pipeline.forward_backward(input_kwargs=copy.deepcopy(call) | flags, return_outputs=True)
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-6), seed
        assert type(found) is type(expected), seed
        pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
        for one, other in pairs:
            if isinstance(other, torch.Tensor):
                # some models attend in float32 whatever their dtype, and its rounding depends on the number of rows
                largest = other.nan_to_num(0, 0, 0).abs().amax().item() if other.numel() else 0.0
                assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * largest, equal_nan=True), seed
        assert worst_gradient(model, plain) < 1e-6, seed


@pytest.mark.slow
def test_noise_is_the_same_forward_and_backward():
    base = make_model("seq2seq:bart").double()
    base.config.decoder_start_token_id = 2
    for module in base.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.2
    for part in (base.model.encoder, base.model.decoder):
        part.layerdrop = 0.2
    base.config.encoder_layerdrop = base.config.decoder_layerdrop = 0.2
    batch = hf_batch()
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(labels)
    torch.manual_seed(1)
    way = {name: torch.randn_like(parameter) for name, parameter in base.named_parameters()}
    way["model.shared.weight"][base.config.pad_token_id] = 0  # which never has a gradient

    def loss_fn(output, wanted):
        flat = output.logits.flatten(0, 1)
        return WeightedLoss(functional.cross_entropy(flat, wanted.flatten(), reduction="sum"), (wanted >= 0).sum())

    def run(step):
        model = copy.deepcopy(base).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(way[name], alpha=step)
        pipeline = wrapped(model, check=False)
        torch.manual_seed(7)
        loss = pipeline.forward_backward(input_kwargs=batch, label=labels, loss_fn=loss_fn).item()
        return loss, sum((p.grad * way[n]).sum().item() for n, p in model.named_parameters() if p.grad is not None)

    slope = (run(1e-5)[0] - run(-1e-5)[0]) / 2e-5
    loss, found = run(0.0)
    with torch.no_grad():
        without_noise = base.eval()(**batch, labels=labels).loss.item()
    assert loss != pytest.approx(without_noise, rel=1e-3)
    assert found == pytest.approx(slope, rel=1e-5)


@pytest.mark.slow
def test_a_model_may_be_wrapped_under_autocast():
    """The proof is made without it; a batch in one microbatch is then computed as the plain model computes it."""
    model = make_model("llama").eval()
    plain, batch = copy.deepcopy(model), hf_batch()
    with torch.autocast("cpu", torch.bfloat16):
        pipeline = wrapped(model)
        found = pipeline.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=1))
        expected = plain(**batch).loss
    assert pipeline.cut.report.equivalence.outputs == 0.0
    assert found.item() == expected.item()


class Normed(Toy):
    def __init__(self, kind):
        super().__init__()
        options = {} if kind is nn.BatchNorm1d else {"track_running_stats": True, "affine": True}
        self.norms = nn.ModuleList([kind(WIDTH, **options) for _ in range(4)])

    def between(self, number, layer, x):
        return self.norm(1 + number, layer(self.norm(0, x) if number == 0 else x))

    def norm(self, number, x):
        return self.norms[number](x.transpose(1, 2)).transpose(1, 2)


def assert_same_buffers(model, plain):
    for (name, found), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_each_norm_counts_a_microbatch_once(kind, microbatches):
    model = Normed(kind).double().train()
    model.norms[1].eval()
    plain = copy.deepcopy(model)
    pipeline = wrapped(model, example={"input_ids": tokens(2)}, microbatches=microbatches)
    for step in range(2):
        ids = tokens(7, seed=step)
        for rows in ids.tensor_split(microbatches):
            (plain(rows).square().sum() / 7).backward()
        pipeline.forward_backward((ids,), loss_fn=squares)
        assert_same_buffers(model, plain)
        assert worst_gradient(model, plain) < 1e-9
    assert not model.norms[1].running_mean.any()


@pytest.mark.slow
def test_a_norm_behind_a_random_mask_has_the_statistics_of_what_went_into_the_layers():
    """And not those of the mask that the phase after the layers draws when it runs the code before them again."""

    def masked_at_first(self, number, layer, x):
        x = functional.dropout(x, 0.5, self.training) if number == 0 else x
        return layer(self.norm(x.transpose(1, 2)).transpose(1, 2) if number == 0 else x)

    model = hf_small.toy(masked_at_first).double().train()
    model.norm = nn.BatchNorm1d(WIDTH).double()
    pipeline = wrapped(model, example={"input_ids": tokens(2)}, microbatches=1)
    seen = []
    model.norm.register_forward_hook(lambda norm, args, out: seen.append(args[0].detach()))
    pipeline.forward_backward((tokens(7),), loss_fn=squares)
    assert any(not torch.equal(one, seen[0]) for one in seen)
    torch.testing.assert_close(model.norm.running_mean, 0.1 * seen[0].mean((0, 2)))
    assert model.norm.num_batches_tracked == 1


@pytest.mark.slow
def test_a_norm_that_two_layers_share_is_refused():
    """Each would have to see what the other wrote."""
    model = Toy()
    model.norm = nn.BatchNorm1d(6)
    for layer in list(model.layers)[:2]:
        layer.linear = nn.Sequential(layer.linear, model.norm)
    pipeline = wrapped(model.train(), example={"input_ids": tokens(2)})
    with pytest.raises(StageError, match="both write its buffer"):
        pipeline.forward_backward((tokens(7),), loss_fn=squares)
    assert not model.norm.running_mean.any()


MODELS = {
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    ),
    "segformer": lambda: transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            num_encoder_blocks=2, depths=[2, 2], sr_ratios=[4, 2], hidden_sizes=[8, 16], patch_sizes=[7, 3],
            strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
            hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        )
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
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


@pytest.fixture
def model():
    before = np.random.get_state()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    features = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 20}
    dropouts = ["layerdrop", "hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout"]
    none = dict.fromkeys([*dropouts, "final_dropout"], 0.0)
    masks = {"mask_time_prob": 0.5, "mask_time_length": 4, "ctc_loss_reduction": "mean"}
    yield Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **features, **positions, **none, **masks)).double().train()
    np.random.set_state(before)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return {"input_values": torch.randn(4, 800).double(), "labels": torch.randint(1, 20, (4, 5))}


def test_one_microbatch_is_masked_as_the_model_is(model, batch):
    plain = copy.deepcopy(model)
    pipe = wrap_model_to_roundpipe(model, devices="virtual:2", example={k: v[:2] for k, v in batch.items()})
    np.random.seed(7)
    expected = plain(**batch).loss
    expected.backward()
    after = np.random.rand()
    np.random.seed(7)
    found = pipe.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=1))
    assert np.random.rand() == after
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert near_gradients(model, plain, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_the_masks_of_the_loss(model, batch):
    """Two microbatches with outputs alone: the derivative is that of a central difference with the same seed."""
    pipe = wrap_model_to_roundpipe(model, devices="virtual:2", example={k: v[:2] for k, v in batch.items()})
    inputs, config = {"input_values": batch["input_values"]}, RoundPipeRunConfig(num_microbatch=2)
    embed = model.wav2vec2.masked_spec_embed
    along = torch.randn(embed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss():
        np.random.seed(7)
        torch.manual_seed(1)
        return pipe(**inputs, roundpipe_run_config=config).logits.square().sum()

    loss().backward()
    found = (embed.grad * along).sum().item()
    sides = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            embed.add_(along, alpha=step)
            sides.append(loss().item())
            embed.sub_(along, alpha=step)
    assert found == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4)
