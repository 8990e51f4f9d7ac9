"""Tests of roundpipe_runtime.huggingface.batches."""

import types

import pytest
import torch

from roundpipe_runtime.errors import JoinError, SplitError
from roundpipe_runtime.huggingface.batches import join_outputs, split_pictures

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
    assert [part["input_ids"].shape[0] for part in made] == [1, 1, 1]
    assert [part["image_grid_thw"].tolist() for part in (made[0], made[2])] == [[[1, 2, 2], [1, 2, 4]], [[1, 2, 6]]]
    assert [part["pixel_values"].flatten().tolist() for part in (made[0], made[2])] == [
        list(range(12)),
        list(range(12, 24)),
    ]
    assert "pixel_values" not in made[1]
    assert made[1]["scale"] == 2


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


def test_without_packed_pictures_there_is_nothing_to_do():
    assert split_pictures(CONFIG, {"input_ids": torch.ones(2, 2)}) is None
    assert split_pictures(CONFIG, {"input_ids": torch.ones(2, 2), "pixel_values": torch.ones(2, 3, 4, 4)}) is None


def test_pictures_that_do_not_fit_their_places_are_an_error():
    kwargs = pictures()
    kwargs["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 1, 7]])
    with pytest.raises(SplitError, match="19 patches do not fit the 6 image tokens"):
        split_pictures(CONFIG, kwargs)((), kwargs, 3)
    kwargs["image_grid_thw"] = torch.tensor([[1, 2, 4], [1, 2, 4], [1, 2, 4]])
    with pytest.raises(SplitError, match="a picture has image tokens in two rows"):
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
    some = join_outputs(
        [
            {"image_hidden_states": torch.ones(7, 2)},
            {"image_hidden_states": None},
            {"image_hidden_states": torch.ones(3, 2)},
        ],
        [1.0, 1.0, 1.0],
        [1, 1, 1],
    )
    assert some["image_hidden_states"].shape == (10, 2)


def encoded(*pictures: torch.Tensor, **more) -> dict:
    """What an encoder returns of pictures, each (patches, width), in one tensor for all of them."""
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
    with pytest.raises(JoinError, match=r"'an item of attentions' of pictures: tensors of shapes .*\n.*merge_output"):
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
