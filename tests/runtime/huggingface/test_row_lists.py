"""Tests of roundpipe_runtime.huggingface.batches: labels that are lists with one entry per row."""

import collections
import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

from roundpipe_runtime import SplitError
from roundpipe_runtime.huggingface.adapters import plain_rows
from roundpipe_runtime.huggingface.batches import split_lists
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from tests.cases import cases
from tests.runtime.huggingface.hf_small import worst_gradient, wrapped
from tests.runtime.huggingface.trainer.trainer_runs import TOLERANCE, arguments, history

# what a microbatch of such a loss is divided by is the number of objects in it
pytestmark = pytest.mark.filterwarnings(
    "ignore:The loss of .* cannot be computed from the losses:roundpipe_runtime.RoundPipeWarning"
)


class Detector(nn.Module):
    """Takes labels of both kinds; its signature states that those of masks are a list."""

    def forward(self, pixel_values, labels=None, mask_labels: list[torch.Tensor] | None = None, features=None):
        return pixel_values


def objects(*counts):
    return [
        {"class_labels": torch.full((count,), row), "boxes": torch.ones(count, 4)} for row, count in enumerate(counts)
    ]


def parts(count=3, inner=None, **kwargs):
    """The keyword arguments of each microbatch."""
    kwargs = {"pixel_values": torch.arange(4.0)[:, None], **kwargs}
    function = split_lists(Detector(), (), kwargs, inner)
    return function if function is None else function((), kwargs, count)[1]


def test_dictionaries_go_with_their_rows():
    made = parts(labels=objects(2, 1, 0, 3), scale=2)
    assert [part["pixel_values"].flatten().tolist() for part in made] == [[0.0, 1.0], [2.0], [3.0]]
    assert [[len(row["boxes"]) for row in part["labels"]] for part in made] == [[2, 1], [0], [3]]
    assert [row["class_labels"].tolist() for row in made[0]["labels"]] == [[0, 0], [1]]
    assert all(part["scale"] == 2 for part in made)


def test_tensors_of_different_sizes_go_with_their_rows():
    """Whatever the argument is called: they cannot be batches themselves."""
    values = [torch.ones(count, 2) for count in (4, 1, 4, 2)]
    assert [[len(value) for value in part["features"]] for part in parts(features=values)] == [[4, 1], [4], [2]]


def test_as_many_objects_as_rows_are_split_as_the_signature_states():
    """Four rows of four masks each: the signature states that masks are a list of rows."""
    made = parts(mask_labels=[torch.full((4, 2), float(row)) for row in range(4)])
    assert [[value[0, 0].item() for value in part["mask_labels"]] for part in made] == [[0.0, 1.0], [2.0], [3.0]]
    assert all(value.shape == (4, 2) for part in made for value in part["mask_labels"])


def test_labels_that_may_be_either_are_an_error():
    """Four labels of four rows each may be those of four heads."""
    with pytest.raises(SplitError, match="not clear whether entry i belongs to row i"):
        parts(labels=[torch.ones(4)] * 4)


def test_other_lists_are_left_to_the_split():
    assert parts(features=[torch.ones(4, 2)] * 4) is None
    assert parts(labels=[torch.ones(4)] * 2) is None
    assert parts(features=tuple(torch.ones(count) for count in (1, 2, 3, 4))) is None
    assert parts(features=[1, 2, 3, 4], labels=[]) is None
    assert parts(labels=objects(1, 1, 1, 1), other=torch.ones(3), another=torch.ones(5)) is None


def test_another_split_function_cuts_the_rest():
    def inner(args, kwargs, count):
        assert "labels" not in kwargs
        return [()] * count, [
            {"pixel_values": rows, "own": True} for rows in kwargs["pixel_values"].tensor_split(count)
        ]

    made = parts(2, inner, labels=objects(1, 2, 3, 4))
    assert [(len(part["labels"]), part["own"]) for part in made] == [(2, True), (2, True)]
    assert split_lists(Detector(), (), {"pixel_values": torch.ones(4, 1)}, inner) is inner


def test_mappings_of_image_processors_become_dictionaries():
    row = collections.UserDict(boxes=torch.ones(1, 4))
    kwargs = {"labels": [row], "other": (row,), "text": ["a"]}
    found = plain_rows(kwargs)
    assert type(found["labels"][0]) is dict
    assert found["labels"][0]["boxes"] is row["boxes"]
    assert found["other"] is kwargs["other"]


def yolos():
    config = transformers.YolosConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=[16, 16],
        patch_size=4, num_detection_tokens=5, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.YolosForObjectDetection(config)


SMALL_DETR = {
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "d_model": 32, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "num_queries": 5, "dropout": 0.0, "num_labels": 3,
}  # fmt: skip


def resnet():
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )


def detr():
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(**SMALL_DETR, backbone_config=resnet(), auxiliary_loss=True)
    )


def conditional_detr():
    return transformers.ConditionalDetrForObjectDetection(
        transformers.ConditionalDetrConfig(**SMALL_DETR, backbone_config=resnet())
    )


def maskformer():
    backbone = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2,
        out_features=[f"stage{number}" for number in range(1, 5)], drop_path_rate=0.0,
    )  # fmt: skip
    config = transformers.MaskFormerConfig(
        backbone_config=backbone, decoder_config=transformers.DetrConfig(**SMALL_DETR), fpn_feature_size=32,
        mask_feature_size=32,
    )  # fmt: skip
    return transformers.MaskFormerForInstanceSegmentation(config)


MODELS = {make.__name__: make for make in (yolos, detr, conditional_detr, maskformer)}


def pictures(name, counts):
    """A batch of pictures with so many objects each."""
    generator = torch.Generator().manual_seed(1)
    size = 16 if name == "yolos" else 32
    batch = {"pixel_values": torch.randn(len(counts), 3, size, size, generator=generator)}
    kinds = [torch.randint(0, 3, (count,), generator=generator) for count in counts]
    if name == "maskformer":
        masks = [(torch.rand(count, size, size, generator=generator) > 0.5).float() for count in counts]
        return batch | {"mask_labels": masks, "class_labels": kinds}
    boxes = [torch.rand(count, 4, generator=generator) * 0.4 + 0.1 for count in counts]
    rows = [{"class_labels": kind, "boxes": box} for kind, box in zip(kinds, boxes, strict=True)]
    return batch | {"labels": rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(MODELS, quick=["yolos", "maskformer"]))
def test_models_of_objects_train_as_without_a_pipeline(name):
    torch.manual_seed(0)
    base = MODELS[name]().train()
    model = copy.deepcopy(base)
    pipeline = wrapped(model, example=pictures(name, [1, 2]))
    for counts in ([1, 3, 2, 1], [4] * 4, [1, 2, 1, 1] if name == "maskformer" else [1, 0, 2, 0]):
        plain, batch = copy.deepcopy(base), pictures(name, counts)
        expected = plain(**batch).loss
        expected.backward()
        model.zero_grad()
        assert pipeline.forward_backward(input_kwargs=batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert worst_gradient(model, plain) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_trainer_trains_a_detector(tmp_path, microbatches):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    batch = pictures("yolos", [1, 2, 3, 1, 2, 3, 1, 2])
    rows = [
        {"pixel_values": pixels, "labels": transformers.BatchFeature(labels)}
        for pixels, labels in zip(batch["pixel_values"], batch["labels"], strict=True)
    ]

    def collate(some):
        pixels = torch.stack([row["pixel_values"] for row in some])
        return {"pixel_values": pixels, "labels": [row["labels"] for row in some]}

    pair = []
    for kind, more in ((Trainer, {}), (RoundPipeTrainer, {"devices": "virtual:2", "microbatches": microbatches})):
        torch.manual_seed(0)
        args = arguments(tmp_path / kind.__name__, 3, eval_strategy="no", remove_unused_columns=False)
        trainer = kind(model=yolos(), args=args, train_dataset=rows, data_collator=collate, **more)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        pair.append(trainer)
    plain, ours = pair
    assert not ours.pipeline.cut.report.is_whole
    for key in ("loss", "grad_norm"):
        assert history(ours, key) == pytest.approx(history(plain, key), rel=1e-5, abs=TOLERANCE)
    ours.pipeline.close()
