"""Packed data goes entry by entry, and the rest follows its rows."""

import re

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec

from roundpipe_runtime.batch.spec import Replicate, RoundPipePackedData, TensorChunkSpec
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import SplitError
from tests.runtime.batch.rows import firsts, rows


def test_packed_data_goes_entry_by_entry_and_the_rest_follows_its_rows():
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    parts = split((packed,), {}, rows(4), 8)
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]


def test_packed_data_of_different_lengths_is_refused():
    one, two = RoundPipePackedData([rows(2)], rows=[2]), RoundPipePackedData([rows(1), rows(1)], rows=[1, 1])
    with pytest.raises(SplitError, match="These arguments were split into different numbers of microbatches"):
        split((one, two), {}, None, 2)


def test_labels_that_do_not_fit_packed_data_are_refused():
    """Handed on whole they would be wrong without a word."""
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    with pytest.raises(SplitError, match=re.escape("axis 0 has 4 in args[0]; 5 in label")):
        split((packed,), {}, rows(5), 2)


def test_packed_data_whose_rows_are_not_told_is_counted():
    packed = RoundPipePackedData([rows(2), rows(1)])
    assert [part.label.tolist() for part in split((packed,), {}, rows(3), 8)] == [[0, 1], [2]]


def test_packed_data_in_which_nothing_can_be_counted_does_not_say_where_to_cut():
    """As even as possible would be wrong without a word where a function had cut it otherwise."""
    with pytest.raises(SplitError, match=r"args\[0\]: the number of rows in each of the 2 microbatches is unknown"):
        split((RoundPipePackedData([1.0, 2.0]),), {}, rows(3), 8)
    parts = split((RoundPipePackedData([1.0, 2.0]),), {}, None, 8)
    assert [(part.args[0], part.rows) for part in parts] == [(1.0, None), (2.0, None)]


def test_a_table_beside_packed_data_is_not_taken_for_the_batch():
    table = rows(5, 6)
    parts = split((RoundPipePackedData([rows(2, 6)] * 4), table), {}, None, 4)
    assert [part.args[1] is table for part in parts] == [True] * 4
    assert [part.rows for part in parts] == [2] * 4


def test_of_several_packed_leaves_the_one_that_others_agree_with_counts():
    """(rows, width) beside (length, length): the labels tell which is the batch; without them, nobody guesses."""
    hidden, bias = RoundPipePackedData([rows(2, 6), rows(1, 6)]), RoundPipePackedData([rows(4, 4), rows(4, 4)])
    assert [part.label.tolist() for part in split((hidden, bias), {}, rows(3), 2)] == [[0, 1], [2]]
    with pytest.raises(SplitError, match=r"axis 0 has 3 in args\[0\]; 8 in args\[1\]"):
        split((hidden, bias), {}, None, 2)


@pytest.mark.parametrize("rule", [TensorChunkSpec(0), TorchChunkSpec(0), Replicate])
def test_a_rule_for_packed_data_is_taken(rule):
    packed = RoundPipePackedData([rows(2, 3), rows(1, 3)])
    spec = ((TensorChunkSpec(0), rule), None)
    parts = split((rows(3), packed), {}, None, 2, split_input=spec)
    assert [part.args[1] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2]]


def test_a_rule_says_along_which_axis_packed_data_is_counted():
    packed = RoundPipePackedData([torch.zeros(7, 1), torch.zeros(7, 2)])
    parts = split((packed,), {}, rows(3), 2, split_input=((TensorChunkSpec(1),), None))
    assert [part.label.tolist() for part in parts] == [[0], [1, 2]]


def test_packed_labels_are_taken_entry_by_entry():
    packed = RoundPipePackedData([rows(1), rows(2), rows(1)])
    parts = split((rows(4),), {}, packed, 2)
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1, 2], [3]]
    assert [part.label is entry for part, entry in zip(parts, packed, strict=True)] == [True] * 3


@pytest.mark.parametrize("told", [True, False])
def test_packed_labels_of_other_rows_than_packed_inputs_are_refused(told):
    packed = RoundPipePackedData([rows(3), rows(1)], rows=[3, 1] if told else ())
    with pytest.raises(
        SplitError, match=re.escape("are split into different numbers of rows per microbatch: [[2, 2], [3, 1]]")
    ):
        split((packed,), {}, RoundPipePackedData([rows(2), rows(2)]), 2)
    with pytest.raises(SplitError, match="3 in label"):
        split((packed,), {}, RoundPipePackedData([rows(2), rows(1)]), 2)


def test_packed_data_that_was_made_shorter_is_counted_anew():
    packed = RoundPipePackedData([rows(3), rows(1), rows(2)], rows=[3, 1, 2])
    packed.pop(0)
    assert [part.label.tolist() for part in split((packed,), {}, rows(3), 2)] == [[0], [1, 2]]


def test_packed_data_waits_once():
    calls = []
    packed = RoundPipePackedData([1], wait=lambda: calls.append(1))
    assert packed.synchronize().synchronize() is packed
    assert calls == [1]
