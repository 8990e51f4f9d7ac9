"""Tests of roundpipe_runtime.huggingface.batches."""

import types

import pytest
import torch

from roundpipe_runtime.errors import SplitError
from roundpipe_runtime.huggingface.batches import join_outputs, split_pictures

CONFIG = types.SimpleNamespace(image_token_id=9)


def pictures():
    """Three rows: two pictures of 1 and 2 tokens, none, one of 3; a token is four patches."""
    ids = torch.tensor([[9, 1, 9, 9], [1, 1, 1, 1], [9, 9, 9, 1]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 6]])
    values = torch.arange(4 + 8 + 12)[:, None]
    return {"input_ids": ids, "image_grid_thw": grid, "pixel_values": values, "scale": 2}


def test_packed_pictures_go_with_their_rows():
    """Patches and sizes are cut where rows are; a microbatch without pictures has none."""
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


def test_without_packed_pictures_there_is_nothing_to_do():
    """Text, and pictures with one row each, are split as everything is."""
    assert split_pictures(CONFIG, {"input_ids": torch.ones(2, 2)}) is None
    assert split_pictures(CONFIG, {"input_ids": torch.ones(2, 2), "pixel_values": torch.ones(2, 3, 4, 4)}) is None


def test_pictures_that_do_not_fit_their_places_are_an_error():
    """Patches that are no multiple of the tokens, and pictures that reach into the next row."""
    kwargs = pictures()
    kwargs["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 1, 7]])
    with pytest.raises(SplitError, match="19 patches do not go with 6 tokens"):
        split_pictures(CONFIG, kwargs)((), kwargs, 3)
    kwargs["image_grid_thw"] = torch.tensor([[1, 2, 4], [1, 2, 4], [1, 2, 4]])
    with pytest.raises(SplitError, match="pictures do not end where rows do"):
        split_pictures(CONFIG, kwargs)((), kwargs, 3)


def test_rows_are_joined_wherever_they_are():
    """Rows times length along axis 0, and rows along another axis; averages are weighted."""
    parts = [
        {"flat": torch.arange(n * 4).reshape(n * 2, 2), "time": torch.ones(3, n, 5), "mean": torch.tensor(float(n))}
        for n in (2, 1)
    ]
    joined = join_outputs(parts, [2.0, 1.0], [2, 1])
    assert torch.equal(joined["flat"], torch.cat([part["flat"] for part in parts]))
    assert joined["time"].shape == (3, 3, 5)
    assert joined["mean"].item() == pytest.approx(5 / 3)
