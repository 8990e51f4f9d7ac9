"""Functions of the user's own cut arguments or labels, and the other side follows their sizes."""

import re

import pytest

from roundpipe_runtime.batch.spec import RoundPipePackedData
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import SplitError
from tests.runtime.batch.rows import firsts, rows


def custom_split(args, kwargs, num_microbatch):
    images, masks = args
    chunks_images = images.chunk(num_microbatch)
    chunks_masks = masks.chunk(num_microbatch)
    args_list = [(img, mask) for img, mask in zip(chunks_images, chunks_masks, strict=True)]
    kwargs_list = [kwargs] * len(args_list)
    return args_list, kwargs_list


def test_labels_follow_the_sizes_of_a_split_function():
    """`chunk` makes 3, 3, 3, 1 of 10 rows where `tensor_split` makes 3, 3, 2, 2: the labels must not slip."""
    parts = split((rows(10, 2), rows(10)), {"k": 1}, rows(10), 4, split_input=custom_split)
    assert [part.rows for part in parts] == [3, 3, 3, 1]
    assert firsts(parts, lambda part: part.label) == firsts(parts, lambda part: part.args[0])


def test_inputs_follow_the_sizes_of_a_split_function_for_labels():
    parts = split((rows(5, 2),), {}, rows(5), 2, split_label=lambda label, n: [label[:1], label[1:]])
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1, 2, 3, 4]]


def test_a_split_function_whose_sizes_cannot_be_followed_is_refused():
    def drop_some(args, kwargs, n):
        return [(args[0][:2],), (args[0][2:4],)], [{}, {}]

    with pytest.raises(SplitError, match=r"label: 5 rows cannot be split into the sizes \[2, 2\]"):
        split((rows(5, 2),), {}, rows(5), 2, split_input=drop_some)


@pytest.mark.parametrize("made", [None, [(1,)], ([(1,)], []), ([], [])])
def test_a_split_function_that_returns_something_else_is_refused(made):
    with pytest.raises(SplitError, match="the function must return two lists of the same length"):
        split((rows(4),), {}, None, 2, split_input=lambda args, kwargs, n: made)


def test_both_sides_cut_by_functions_must_make_the_same_number():
    with pytest.raises(SplitError, match="split_input made 2 microbatches, but split_label 1"):
        split((rows(4), rows(4)), {}, rows(4), 2, split_input=custom_split, split_label=lambda label, n: [label])


def test_a_split_function_may_hand_packed_data_on():
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    parts = split((packed,), {}, rows(4), 2, split_input=lambda args, kwargs, n: ([args, args], [kwargs, kwargs]))
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]
    with pytest.raises(SplitError, match="made 3 microbatches, but the packed data has 2"):
        split((packed,), {}, None, 3, split_input=lambda args, kwargs, n: ([args] * 3, [kwargs] * 3))


def test_a_split_function_for_labels_is_asked_for_as_many_as_the_packed_data_has():
    packed = RoundPipePackedData([rows(1), rows(2), rows(1)], rows=[1, 2, 1])
    asked = []

    def split_label(label, n):
        asked.append(n)
        return list(label.split([1, 2, 1]))

    parts = split((packed,), {}, rows(4), 2, split_label=split_label)
    assert asked == [3]
    assert firsts(parts, lambda part: part.label) == [[0], [1, 2], [3]]


@pytest.mark.parametrize("told", [True, False])
def test_labels_that_a_function_cuts_at_other_rows_than_packed_data_are_refused(told):
    """[1, 2, 1] beside [2, 1, 1] would pair labels with the outputs of other rows."""
    packed = RoundPipePackedData([rows(1), rows(2), rows(1)], rows=[1, 2, 1] if told else ())
    with pytest.raises(SplitError, match=re.escape("args[0] has microbatches of [1, 2, 1] rows, but split_label made")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split([2, 1, 1])))
    with pytest.raises(SplitError, match=re.escape("args[0] has 3 microbatches, but split_label made 2")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split(2)))


def test_rows_that_only_packed_labels_state_are_those_of_the_microbatches():
    """The function cuts words, which have no rows."""
    labels = RoundPipePackedData(["first", "second"], rows=[2, 1])
    parts = split(("words",), {}, labels, 2, split_input=lambda args, kwargs, n: ([("a",), ("b",)], [{}, {}]))
    assert [(part.args, part.label, part.rows) for part in parts] == [(("a",), "first", 2), (("b",), "second", 1)]
