"""How many rows each microbatch has, worked out from packed data and from the parts of a function."""

import pytest
import torch

from roundpipe_runtime.batch.entries import rows_of_parts
from roundpipe_runtime.batch.spec import Replicate, RoundPipePackedData, TensorChunkSpec
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import SplitError
from yobx_flatten import make_dynamic_cache, register_flattening_functions

TABLE = torch.arange(30.0).reshape(5, 6)


def parts_of(sizes, **others):
    return [{"args": (torch.zeros(size, 4), *(make(size) for make in others.values()))} for size in sizes]


def test_what_is_one_object_in_all_parts_was_not_cut():
    """A table of five beside parts of one row: the part has one row and not five."""
    assert rows_of_parts(parts_of([1, 2, 1], table=lambda size: TABLE), {"args": (torch.zeros(4, 4), TABLE)}) == [
        1,
        2,
        1,
    ]


def test_of_what_was_made_anew_only_what_adds_up_to_the_batch_tells_rows():
    """A copy of the table in each part, and a triangle of each part's own."""
    whole = {"args": (torch.zeros(4, 4), TABLE)}
    assert rows_of_parts(parts_of([1, 2, 1], table=lambda size: TABLE.clone()), whole) == [1, 2, 1]
    assert rows_of_parts(parts_of([1, 1], mask=lambda size: torch.zeros(3, 3)), whole) == [None, None]


def test_the_labels_decide_where_the_inputs_do_not():
    made, whole = parts_of([1, 2], table=lambda size: TABLE.clone()), {}
    assert rows_of_parts(made, whole) == [None, None]
    assert rows_of_parts(made, whole, [{"label": torch.zeros(1)}, {"label": torch.zeros(2)}]) == [1, 2]


def test_parts_without_tensors_have_no_rows():
    assert rows_of_parts([{"args": (1,)}, {"args": (2,)}], {"args": ((1, 2),)}) == [None, None]


def test_packed_data_in_the_parts_tells_their_rows():
    packed = RoundPipePackedData(["a", "b"], rows=[3, 1])
    assert rows_of_parts([{"args": (packed, torch.zeros(9))}] * 2, {}) == [3, 1]


def test_a_split_function_weights_a_mean_by_the_rows_of_its_parts():
    """With the table in each part; five for each would have been a mean of equals."""

    def cut(args, kwargs, count):
        x, table = args
        return [(x[:1], table), (x[1:], table)], [kwargs, kwargs]

    assert [part.rows for part in split((torch.zeros(4, 2), TABLE), {}, None, 2, split_input=cut)] == [1, 3]


def test_packed_data_of_two_pipelines_must_have_the_same_rows():
    """Entry i goes to microbatch i, which has one number of rows."""
    one = RoundPipePackedData([torch.zeros(2), torch.zeros(1)], rows=[2, 1])
    other = RoundPipePackedData([torch.zeros(1), torch.zeros(2)], rows=[1, 2])
    with pytest.raises(
        SplitError, match=r"args\[0\], args\[1\] are split into different numbers of rows per microbatch"
    ):
        split((one, other), {}, None, 2)


def test_packed_data_of_one_entry_is_one_microbatch():
    (part,) = split((RoundPipePackedData(["a"]), torch.zeros(3)), {}, None, 2)
    assert (part.args[0], part.args[1].shape, part.rows) == ("a", (3,), 3)


def test_rows_that_packed_data_states_are_those_of_the_parts_of_a_function():
    """A function hands the packed data on; what is the same object in all parts states nothing."""
    packed, table = RoundPipePackedData(["a", "b"], rows=[2, 1]), torch.zeros(5, 6)
    assert rows_of_parts([{"x": packed, "table": table}] * 2, {}) == [2, 1]


def test_rows_of_packed_inputs_are_those_of_labels_that_a_function_cut():
    """The labels have no axis to count; the inputs know their rows."""
    packed = RoundPipePackedData([torch.zeros(2), torch.zeros(1)], rows=[2, 1])
    parts = split((packed,), {}, "ab", 2, split_label=lambda label, count: list(label))
    assert [(part.rows, part.label) for part in parts] == [(2, "a"), (1, "b")]


def test_rows_that_are_counted_in_packed_data_are_those_of_the_parts_of_a_function():
    packed = RoundPipePackedData([torch.zeros(2, 3), torch.zeros(1, 3)])
    assert rows_of_parts([{"x": packed}] * 2, {}) == [2, 1]


def test_a_class_that_declares_its_batch_axis_decides_over_copies_of_a_table():
    pytest.importorskip("transformers")
    parts = [{"past": cache_of(rows), "table": torch.zeros(length, 6)} for rows, length in ((2, 5), (1, 7))]
    with register_flattening_functions(patch_transformers=True):
        assert rows_of_parts(parts, {}) == [2, 1]


def cache_of(rows):
    return make_dynamic_cache([(torch.zeros(rows, 2, 3, 4), torch.zeros(rows, 2, 3, 4))])


CUT_APART = {"args[0]": Replicate, "args[1]": TensorChunkSpec(0), "args[2]": TensorChunkSpec(0)}


def test_labels_state_the_rows_of_packed_data_where_rules_cut_each_leaf_separately():
    """Leaves of four and of nine rows, and six labels: the batch is that of the labels."""
    inputs = (RoundPipePackedData(["a", "b"]), torch.zeros(4), torch.zeros(9))
    rules = {**CUT_APART, "label": TensorChunkSpec(0)}
    parts = split(inputs, {}, torch.zeros(6), 2, split_input=rules)
    assert [(part.rows, part.args[0], len(part.args[1]), len(part.args[2])) for part in parts] == [
        (3, "a", 2, 5),
        (3, "b", 2, 4),
    ]


def test_a_leaf_with_fewer_rows_than_packed_microbatches_is_refused():
    """A microbatch without a row of it would have nothing to compute."""
    inputs = (RoundPipePackedData(["a", "b", "c"]), torch.zeros(2), torch.zeros(9))
    with pytest.raises(SplitError, match=r"args\[1\] has only 2 rows, but the packed data has 3 microb"):
        split(inputs, {}, None, 3, split_input=CUT_APART)
