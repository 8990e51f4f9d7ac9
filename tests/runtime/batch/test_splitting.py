"""Arguments and labels are split into microbatches: what has the batch axis is cut, and nothing else."""

import pytest
import torch

from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import ConfigError
from tests.runtime.batch.rows import firsts, rows


@pytest.mark.parametrize("batch", range(1, 18))
@pytest.mark.parametrize("count", range(1, 9))
def test_sizes_are_those_of_tensor_split_without_empty_parts(batch, count):
    """As `torch.tensor_split` has them; a part without rows is no microbatch."""
    expected = [len(part) for part in torch.tensor_split(torch.arange(batch), count) if len(part)]
    assert [part.rows for part in split((rows(batch),), {}, None, count)] == expected


def test_a_batch_without_rows_is_one_microbatch_without_rows():
    (part,) = split((torch.zeros(0, 3),), {}, torch.zeros(0), 4)
    assert part.rows == 0
    assert part.args[0].shape == (0, 3)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_wrong_number_of_microbatches_is_refused(count):
    with pytest.raises(ConfigError, match="num_microbatch must be a number of at least 1"):
        split((rows(4),), {}, None, count)


def test_arguments_keyword_arguments_and_labels_are_cut_together():
    parts = split((rows(5, 2),), {"mask": rows(5)}, {"y": rows(5)}, 2)
    for pick in (lambda p: p.args[0], lambda p: p.kwargs["mask"], lambda p: p.label["y"]):
        assert firsts(parts, pick) == [[0, 1, 2], [3, 4]]


def test_parts_are_views_in_the_graph_of_the_input():
    x = torch.zeros(4, 2, requires_grad=True)
    parts = split((x,), {}, None, 2)
    assert parts[1].args[0].data_ptr() == x[2:].data_ptr()
    parts[1].args[0].sum().backward()
    assert x.grad.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_what_has_no_batch_axis_goes_to_every_microbatch_as_it_is():
    """0-d tensors, numbers, strings, None, tensors of size 1 and tensors without an axis of the batch's size."""
    whole = {
        "scale": torch.tensor(2.0),
        "step": 3,
        "mode": "train",
        "nothing": None,
        "mask": torch.zeros(1, 7),
        "weight": torch.zeros(3),
    }
    for part in split((rows(8, 2),), whole, rows(8), 3):
        assert all(part.kwargs[name] is value for name, value in whole.items())


def test_a_broadcast_tensor_does_not_make_the_batch_one_row():
    """`(1, S)` beside `(B, S)`: the other system collapses to one microbatch here."""
    parts = split((torch.zeros(1, 6), rows(8, 6)), {}, None, 4)
    assert [part.rows for part in parts] == [2, 2, 2, 2]
    assert [tuple(part.args[0].shape) for part in parts] == [(1, 6)] * 4


def test_class_weights_go_whole_when_labels_tell_the_batch():
    """Inputs and labels share one size, 8; the 3 of the weights is none."""
    weight = torch.zeros(3)
    parts = split((rows(8, 5), weight), {}, rows(8), 2)
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(part.args[1] is weight for part in parts)
    parts = split((rows(8, 5),), {}, (rows(8), weight), 2)
    assert all(part.label[1] is weight for part in parts)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_positions_of_multimodal_models_are_cut_along_axis_1(batch):
    """`position_ids` of shape `(3, B, S)`, also where the batch is 3."""
    positions = torch.arange(batch).reshape(1, batch, 1).expand(3, batch, 4)
    parts = split((), {"input_ids": rows(batch, 4), "position_ids": positions}, None, 2)
    for part in parts:
        assert part.kwargs["position_ids"].shape == (3, part.rows, 4)
        assert part.kwargs["position_ids"][0, :, 0].tolist() == part.kwargs["input_ids"][:, 0].tolist()


def test_positions_along_the_length_are_not_cut():
    parts = split((), {"input_ids": rows(4, 6), "cache_position": torch.arange(6)}, None, 2)
    assert [part.kwargs["cache_position"].shape for part in parts] == [(6,)] * 2


def test_no_tensor_at_all_is_one_microbatch():
    (part,) = split((3,), {"mode": "x"}, None, 4)
    assert part.args == (3,)
    assert part.rows == 1
