"""Batches of transformers' models: packed pictures, and labels that are lists with one entry per row."""

import copy
import types

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

from roundpipe_runtime import RoundPipePackedData, SplitError
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import JoinError
from roundpipe_runtime.huggingface.batches import join_outputs, split_lists, split_pictures
from roundpipe_runtime.huggingface.cutting.caches import HeldCache, split_held
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from tests.cases import cases
from tests.runtime.huggingface.hf_small import worst_gradient, wrapped
from tests.runtime.huggingface.trainer.trainer_runs import TOLERANCE, arguments, history

# what a microbatch of such a loss is divided by is the number of objects in it
pytestmark = pytest.mark.filterwarnings(
    "ignore:The loss of .* cannot be computed from the losses:roundpipe_runtime.RoundPipeWarning"
)


CONFIG = types.SimpleNamespace(image_token_id=9)


def pictures():
    """Three rows: two pictures of 1 and 2 tokens, none, one of 3; a token is four patches."""
    ids = torch.tensor([[9, 1, 9, 9], [1, 1, 1, 1], [9, 9, 9, 1]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 6]])
    values = torch.arange(4 + 8 + 12)[:, None]
    return {"input_ids": ids, "image_grid_thw": grid, "pixel_values": values, "scale": 2}


def test_packed_pictures_go_with_their_rows():
    kwargs = pictures()
    args, made = split_pictures(CONFIG, kwargs)((), kwargs, 3)
    assert args == [(), (), ()]
    assert [part["input_ids"][number].shape[0] for number, part in enumerate(made)] == [1, 1, 1]
    assert [part["image_grid_thw"].tolist() for part in (made[0], made[2])] == [[[1, 2, 2], [1, 2, 4]], [[1, 2, 6]]]
    values = [part["pixel_values"].flatten().tolist() for part in (made[0], made[2])]
    assert values == [list(range(12)), list(range(12, 24))]
    assert "pixel_values" not in made[1]
    assert made[1]["scale"] == 2
    halves = split((), kwargs, None, 2, split_input=split_pictures(CONFIG, kwargs))
    assert [(part.rows, part.kwargs["input_ids"].shape[0]) for part in halves] == [(2, 2), (1, 1)]
    cached = {**kwargs, "past_key_values": HeldCache(transformers.DynamicCache())}
    made = split_held(split_pictures(CONFIG, kwargs))((), cached, 3)[1]
    assert [part["input_ids"].shape[0] for part in made] == [1, 1, 1]
    packed = {**kwargs, "more": RoundPipePackedData([torch.zeros(1), torch.zeros(2)], rows=[1, 2])}
    parts = split((), packed, None, 2, split_input=split_pictures(CONFIG, packed))
    assert [(part.rows, len(part.kwargs["pixel_values"])) for part in parts] == [(1, 12), (2, 12)]
    assert split_pictures(CONFIG, {"input_ids": torch.ones(2, 2)}) is None
    assert split_pictures(CONFIG, {"input_ids": torch.ones(2, 2), "pixel_values": torch.ones(2, 3, 4, 4)}) is None


def test_pictures_whose_lines_end_with_a_token_go_with_their_rows():
    """As HunYuan has them: of four patches a token, and of each line of tokens another one."""
    config = types.SimpleNamespace(image_token_id=9, vision_config=types.SimpleNamespace(spatial_merge_size=2))
    # 4 x 4 patches in 2 lines of 2 + 1 tokens, 2 x 2 in one of 1 + 1, a video of two frames of 2 x 4 in 2 of 2 + 1
    grid = torch.tensor([[1, 4, 4], [1, 2, 2], [2, 2, 4]])
    ids = torch.tensor([[9] * 6 + [1, 1], [9, 9, 1, 9, 9, 9, 9, 9], [9] + [1] * 7])
    kwargs = {"input_ids": ids, "image_grid_thw": grid, "pixel_values": torch.arange(16 + 4 + 16)[:, None]}
    with pytest.raises(SplitError, match="a picture has image tokens in two rows"):
        split_pictures(config, kwargs)((), kwargs, 3)
    ids[1, 2] = 9
    ids[2, 0] = 1
    _, made = split_pictures(config, kwargs)((), kwargs, 3)
    assert [len(part.get("pixel_values", ())) for part in made] == [16, 20, 0]


def test_pictures_that_do_not_fit_their_places_are_an_error():
    kwargs = pictures()
    kwargs["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 1, 7]])
    with pytest.raises(SplitError, match="19 patches do not fit the 6 image tokens"):
        split_pictures(CONFIG, kwargs)((), kwargs, 3)


def test_rows_are_joined_wherever_they_are():
    parts = [
        {"flat": torch.arange(n * 4).reshape(n * 2, 2), "time": torch.ones(3, n, 5), "mean": torch.tensor(float(n))}
        for n in (2, 1)
    ]
    joined = join_outputs(parts, [2.0, 1.0], [2, 1])
    assert torch.equal(joined["flat"], torch.cat([part["flat"] for part in parts]))
    assert joined["time"].shape == (3, 3, 5)
    assert joined["mean"].item() == pytest.approx(5 / 3)


def test_lists_have_an_item_for_each_picture():
    parts = [
        {"image_hidden_states": [torch.ones(1, 4), torch.ones(2, 4)], "inside": 1},
        {"image_hidden_states": None, "inside": 1},
        {"image_hidden_states": [torch.ones(3, 4)], "inside": 1},
    ]
    joined = join_outputs(parts, [2.0, 1.0, 1.0], [2, 1, 1])
    assert [picture.shape[0] for picture in joined["image_hidden_states"]] == [1, 2, 3]
    assert parts[1]["image_hidden_states"] is None
    alike = join_outputs([parts[0], parts[0]], [2.0, 2.0], [2, 2])
    assert [picture.shape[0] for picture in alike["image_hidden_states"]] == [1, 2, 1, 2]


def test_pictures_within_outputs_of_their_encoder():
    inner = [
        {"last_hidden_state": torch.ones(n, 5), "pooler_output": tuple(torch.full((1,), float(i)) for i in range(n))}
        for n in (2, 1)
    ]
    joined = join_outputs([{"video_hidden_states": part} for part in inner], [2.0, 1.0], [2, 1])["video_hidden_states"]
    assert joined["last_hidden_state"].shape == (3, 5)
    assert [picture.item() for picture in joined["pooler_output"]] == [0.0, 1.0, 0.0]
    some = [{"image_hidden_states": found} for found in (torch.ones(7, 2), None, torch.ones(3, 2))]
    assert join_outputs(some, [1.0] * 3, [1] * 3)["image_hidden_states"].shape == (10, 2)


def encoded(*pictures: torch.Tensor, **more) -> dict:
    return {"last_hidden_state": torch.stack(pictures), "pooler_output": [one[:1] for one in pictures], **more}


def picture(number: float, patches: int = 4) -> torch.Tensor:
    return torch.full((patches, 5), number)


def test_outputs_of_an_encoder_have_an_item_for_each_picture():
    parts = []
    for pictures in ([picture(1.0), picture(2.0)], [], [picture(3.0), picture(4.0)]):
        inner = encoded(*pictures, hidden_states=(None, torch.stack(pictures))) if pictures else None
        parts.append({"logits": torch.ones(max(len(pictures), 1), 7), "image_outputs": inner, "last": 1})
    joined = join_outputs(parts, [2.0, 1.0, 2.0], [2, 1, 2])
    assert joined["logits"].shape == (5, 7)
    found = joined["image_outputs"]
    assert list(found) == ["last_hidden_state", "pooler_output", "hidden_states"]
    assert found["last_hidden_state"][:, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [one[0, 0].item() for one in found["pooler_output"]] == [1.0, 2.0, 3.0, 4.0]
    assert found["hidden_states"][0] is None
    assert torch.equal(found["hidden_states"][1], found["last_hidden_state"])
    assert parts[1]["image_outputs"] is None


def test_pictures_in_one_sequence_are_joined_along_it():
    for sizes in ((4, 6), (4, 4)):
        parts = []
        for number, patches in enumerate(sizes):
            pictures = [picture(number, patches // 2), picture(number, patches // 2)]
            inner = encoded(*pictures) | {"last_hidden_state": torch.cat(pictures)[None]}
            parts.append({"image_outputs": inner})
        found = join_outputs(parts, [1.0, 1.0], [1, 1])["image_outputs"]["last_hidden_state"]
        assert found[0, :, 0].tolist() == [0.0] * sizes[0] + [1.0] * sizes[1]
        assert found.shape[0] == 1
    for part in parts:
        part["image_outputs"]["attentions"] = (torch.rand(1, 2, 4, 4),)
    with pytest.raises(
        JoinError, match=r"for pictures, 'an item of attentions', cannot be concatenated: .*\n.*merge_output"
    ):
        join_outputs(parts, [1.0, 1.0], [1, 1])


def test_a_table_beside_the_pictures_stays_one():
    table = torch.ones(3, 5)
    parts = [{"image_outputs": encoded(picture(number), table=table.clone())} for number in (1.0, 2.0)]
    found = join_outputs(parts, [1.0, 1.0], [1, 1])["image_outputs"]
    assert torch.equal(found["table"], table)
    assert found["last_hidden_state"].shape == (2, 4, 5)
    alike = join_outputs([parts[0], parts[0]], [1.0, 1.0], [1, 1])["image_outputs"]
    assert alike["last_hidden_state"].shape == (2, 4, 5)


def test_memories_have_rows_second():
    """Those of XLNet, also where one row of four steps could be four rows."""
    joined = join_outputs([{"mems": [torch.full((4, 1, 2), float(i))]} for i in range(3)], [1.0] * 3, [1, 1, 1])
    assert joined["mems"][0][0, :, 0].tolist() == [0.0, 1.0, 2.0]


class Detector(nn.Module):
    """Takes labels of both kinds; its signature states that those of masks are a list."""

    def forward(self, pixel_values, labels=None, mask_labels: list[torch.Tensor] | None = None, features=None):
        return pixel_values


def objects(*counts):
    return [
        {"class_labels": torch.full((count,), row), "boxes": torch.ones(count, 4)} for row, count in enumerate(counts)
    ]


def parts(count=3, inner=None, **kwargs):
    kwargs = {"pixel_values": torch.arange(4.0)[:, None], **kwargs}
    function = split_lists(Detector(), (), kwargs, inner)
    return function if function is None else function((), kwargs, count)[1]


def test_lists_with_an_entry_for_each_row_go_with_their_rows():
    """Dictionaries; tensors of different sizes, whatever they are called; masks, which the signature states as rows."""
    made = parts(labels=objects(2, 1, 0, 3), scale=2)
    assert [part["pixel_values"].flatten().tolist() for part in made] == [[0.0, 1.0], [2.0], [3.0]]
    assert [[len(row["boxes"]) for row in part["labels"]] for part in made] == [[2, 1], [0], [3]]
    assert [row["class_labels"].tolist() for row in made[0]["labels"]] == [[0, 0], [1]]
    assert all(part["scale"] == 2 for part in made)
    values = [torch.ones(count, 2) for count in (4, 1, 4, 2)]
    assert [[len(value) for value in part["features"]] for part in parts(features=values)] == [[4, 1], [4], [2]]
    made = parts(mask_labels=[torch.full((4, 2), float(row)) for row in range(4)])
    assert [[value[0, 0].item() for value in part["mask_labels"]] for part in made] == [[0.0, 1.0], [2.0], [3.0]]
    assert all(value.shape == (4, 2) for part in made for value in part["mask_labels"])
    with pytest.raises(SplitError, match="not clear whether each entry is for one row"):
        parts(labels=[torch.ones(4)] * 4)  # may be those of four heads


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


def detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(**SMALL_DETR, backbone_config=backbone, auxiliary_loss=True)
    return transformers.DetrForObjectDetection(config)


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


MODELS = {make.__name__: make for make in (yolos, detr, maskformer)}


def pictures_of(name, counts):
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
    pipeline = wrapped(model, example=pictures_of(name, [1, 2]))
    for counts in ([1, 3, 2, 1], [4] * 4, [1, 2, 1, 1] if name == "maskformer" else [1, 0, 2, 0]):
        plain, batch = copy.deepcopy(base), pictures_of(name, counts)
        expected = plain(**batch).loss
        expected.backward()
        model.zero_grad()
        assert pipeline.forward_backward(input_kwargs=batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert worst_gradient(model, plain) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_trainer_trains_a_detector(tmp_path, microbatches):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    batch = pictures_of("yolos", [1, 2, 3, 1, 2, 3, 1, 2])
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
