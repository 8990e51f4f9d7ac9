"""Packed data, and the rows of parts that were split elsewhere."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec
from torch.utils._pytree import register_pytree_node, tree_unflatten

from roundpipe_runtime import RoundPipe, RoundPipePackedData, RoundPipeRunConfig
from roundpipe_runtime.batch.entries import FlatBatch, rows_of_parts
from roundpipe_runtime.batch.spec import Replicate, TensorChunkSpec
from roundpipe_runtime.batch.splitting import split, split_flat
from roundpipe_runtime.errors import SplitError
from tests.modules import module_of
from tests.runtime.small import firsts, rows, without_row_check
from yobx_flatten import make_dynamic_cache, register_flattening_functions


def test_packed_data_goes_entry_by_entry_and_the_rest_follows_its_rows():
    waits = []
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1], wait=lambda: waits.append(1))
    assert packed.synchronize().synchronize() is packed
    assert waits == [1]
    parts = split((packed,), {}, rows(4), 8)
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]
    labels = RoundPipePackedData([rows(1), rows(2), rows(1)])
    parts = split((rows(4),), {}, labels, 2)
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1, 2], [3]]
    assert [part.label is entry for part, entry in zip(parts, labels, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("args", "label", "message"),
    [
        (([2], [1, 1]), None, "These arguments were split into different numbers of microbatches"),
        # entry i goes to microbatch i, which has one number of rows
        (([2, 1], [1, 2]), None, "args[0], args[1] have different numbers of rows per microbatch"),
        (([3, 1],), rows(5), "numbers of rows: 4 in args[0]; 5 in label"),  # labels of other rows give a wrong loss
    ],
)
def test_packed_data_that_does_not_fit_is_refused(args, label, message):
    packed = [RoundPipePackedData(map(rows, sizes), rows=sizes) for sizes in args]
    with pytest.raises(SplitError, match=re.escape(message)):
        split(tuple(packed), {}, label, 2)


def test_packed_data_whose_rows_are_not_told_is_counted():
    packed = RoundPipePackedData([rows(2), rows(1)])
    assert [part.label.tolist() for part in split((packed,), {}, rows(3), 8)] == [[0, 1], [2]]
    packed = RoundPipePackedData([rows(3), rows(1), rows(2)], rows=[3, 1, 2])
    packed.pop(0)
    assert [part.label.tolist() for part in split((packed,), {}, rows(3), 2)] == [[0], [1, 2]]
    packed = RoundPipePackedData([torch.zeros(7, 1), torch.zeros(7, 2)])
    parts = split((packed,), {}, rows(3), 2, split_input=((TensorChunkSpec(1),), None))
    assert [part.label.tolist() for part in parts] == [[0], [1, 2]]
    (part,) = split((RoundPipePackedData(["a"]), torch.zeros(3)), {}, None, 2)
    assert (part.args[0], part.args[1].shape, part.rows) == ("a", (3,), 3)


def test_packed_data_in_which_nothing_can_be_counted_does_not_say_where_to_cut():
    """As even as possible would be wrong without a word where a function had cut it otherwise."""
    with pytest.raises(SplitError, match=r"args\[0\]: the number of rows in each of the 2 microbatches is unknown"):
        split((RoundPipePackedData([1.0, 2.0]),), {}, rows(3), 8)
    parts = split((RoundPipePackedData([1.0, 2.0]),), {}, None, 8)
    assert [(part.args[0], part.rows) for part in parts] == [(1.0, None), (2.0, None)]


def test_of_several_packed_leaves_the_one_that_others_agree_with_counts():
    """(rows, width) beside (length, length): the labels tell which is the batch; without them, nobody guesses."""
    hidden, bias = RoundPipePackedData([rows(2, 6), rows(1, 6)]), RoundPipePackedData([rows(4, 4), rows(4, 4)])
    assert [part.label.tolist() for part in split((hidden, bias), {}, rows(3), 2)] == [[0, 1], [2]]
    with pytest.raises(SplitError, match=r"axis 0: 3 in args\[0\]; 8 in args\[1\]"):
        split((hidden, bias), {}, None, 2)


@pytest.mark.parametrize("rule", [TensorChunkSpec(0), TorchChunkSpec(0), Replicate])
def test_a_rule_for_packed_data_is_taken(rule):
    packed = RoundPipePackedData([rows(2, 3), rows(1, 3)])
    spec = ((TensorChunkSpec(0), rule), None)
    parts = split((rows(3), packed), {}, None, 2, split_input=spec)
    assert [part.args[1] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2]]


@pytest.mark.parametrize("told", [True, False])
def test_packed_labels_of_other_rows_than_packed_inputs_are_refused(told):
    packed = RoundPipePackedData([rows(3), rows(1)], rows=[3, 1] if told else ())
    with pytest.raises(SplitError, match=re.escape("have different numbers of rows per microbatch: [[2, 2], [3, 1]]")):
        split((packed,), {}, RoundPipePackedData([rows(2), rows(2)]), 2)
    with pytest.raises(SplitError, match="3 in label"):
        split((packed,), {}, RoundPipePackedData([rows(2), rows(1)]), 2)


TABLE = torch.arange(30.0).reshape(5, 6)


def parts_of(sizes, make):
    return [{"args": (torch.zeros(size, 4), make(size))} for size in sizes]


def test_rows_of_the_parts_of_a_function():
    """One tensor in all parts was not split; new tensors whose sizes add up to the batch have its rows."""
    whole = {"args": (torch.zeros(4, 4), TABLE)}
    assert rows_of_parts(parts_of([1, 2, 1], lambda size: TABLE), whole) == [1, 2, 1]
    assert rows_of_parts(parts_of([1, 2, 1], lambda size: TABLE.clone()), whole) == [1, 2, 1]
    assert rows_of_parts(parts_of([1, 1], lambda size: torch.zeros(3, 3)), whole) == [None, None]
    copies = parts_of([1, 2], lambda size: TABLE.clone())
    assert rows_of_parts(copies, {}) == [None, None]
    assert rows_of_parts(copies, {}, [{"label": torch.zeros(1)}, {"label": torch.zeros(2)}]) == [1, 2]
    assert rows_of_parts([{"args": (1,)}, {"args": (2,)}], {"args": ((1, 2),)}) == [None, None]
    stated, counted = RoundPipePackedData(["a", "b"], rows=[2, 1]), RoundPipePackedData([rows(2, 3), rows(1, 3)])
    for packed in (stated, counted):
        assert rows_of_parts([{"args": (packed, TABLE)}] * 2, {}) == [2, 1]


def test_rows_of_packed_inputs_are_those_of_labels_that_a_function_cut():
    """The labels have no axis to count; the inputs know their rows."""
    packed = RoundPipePackedData([torch.zeros(2), torch.zeros(1)], rows=[2, 1])
    parts = split((packed,), {}, "ab", 2, split_label=lambda label, count: list(label))
    assert [(part.rows, part.label) for part in parts] == [(2, "a"), (1, "b")]


def test_a_class_that_declares_its_batch_axis_decides_over_copies_of_a_table():
    pytest.importorskip("transformers")

    def cache_of(rows):
        return make_dynamic_cache([(torch.zeros(rows, 2, 3, 4), torch.zeros(rows, 2, 3, 4))])

    parts = [{"past": cache_of(rows), "table": torch.zeros(length, 6)} for rows, length in ((2, 5), (1, 7))]
    with register_flattening_functions(patch_transformers=True):
        assert rows_of_parts(parts, {}) == [2, 1]


CUT_APART = {"args[0]": Replicate, "args[1]": TensorChunkSpec(0), "args[2]": TensorChunkSpec(0)}


def test_labels_state_the_rows_of_packed_data_where_rules_cut_each_leaf_separately():
    """Leaves of four and of nine rows, and six labels: the batch is that of the labels."""
    inputs = (RoundPipePackedData(["a", "b"]), torch.zeros(4), torch.zeros(9))
    parts = split(inputs, {}, torch.zeros(6), 2, split_input={**CUT_APART, "label": TensorChunkSpec(0)})
    assert [(part.rows, part.args[0], len(part.args[1]), len(part.args[2])) for part in parts] == [
        (3, "a", 2, 5),
        (3, "b", 2, 4),
    ]


def test_a_leaf_with_fewer_rows_than_packed_microbatches_is_refused():
    """A microbatch without a row of it would have nothing to compute."""
    inputs = (RoundPipePackedData(["a", "b", "c"]), torch.zeros(2), torch.zeros(9))
    with pytest.raises(SplitError, match=r"args\[1\] has 2 rows, too few for the 3 microbatches of args\[0\]"):
        split(inputs, {}, None, 3, split_input=CUT_APART)


FLATTENED = []


class Batch:
    """A batch that notes each time that it is flattened."""

    def __init__(self, logits, hidden_states):
        self.logits, self.hidden_states = logits, hidden_states


def flatten(batch):
    FLATTENED.append(batch)
    return [batch.logits, batch.hidden_states], None


register_pytree_node(Batch, flatten, lambda children, context: Batch(*children))


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_the_batch_is_flattened_for_its_leaves_and_for_its_structure(microbatches):
    torch.manual_seed(0)
    batch, labels = Batch(torch.randn(8, 3), torch.randn(8, 4)), torch.randn(8, 2)

    def forward(self, given):
        return self.linear(given.logits) + given.hidden_states.sum(1, keepdim=True)

    layer = module_of(forward, linear=nn.Linear(3, 2)).train()
    expected = torch.autograd.grad(nn.functional.mse_loss(layer(batch), labels), [*layer.parameters()])
    FLATTENED.clear()
    pipe = without_row_check(RoundPipe(nn.Sequential(layer), devices="virtual:2"))
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean")
    pipe.forward_backward((batch,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
    assert [obj is batch for obj in FLATTENED] == [True, True]
    torch.testing.assert_close([parameter.grad for parameter in layer.parameters()], list(expected))


def test_leaves_of_microbatches_are_those_of_the_split_trees():
    x, packed = torch.arange(4), RoundPipePackedData([(torch.zeros(2), 1), (torch.ones(2), 1)], rows=[2, 2])
    halves = {"split_input": lambda args, kwargs, count: ([(part,) for part in args[0].chunk(2)], [{}, {}])}
    for args, options in (((x, 3), {}), ((x,), halves), ((x, packed), {})):
        trees = split(args, {}, x, 2, **options)
        flat = split_flat(FlatBatch.of(args, {}, x), 2, **options)
        assert [part.rows for part in flat] == [part.rows for part in trees] == [2, 2]
        for part, tree in zip(flat, trees, strict=True):
            torch.testing.assert_close(tree_unflatten(part.inputs, part.spec), (tree.args, tree.kwargs))
            torch.testing.assert_close(tree_unflatten(part.labels, part.label_spec), tree.label)
            assert not any(isinstance(leaf, tuple) for leaf in part.inputs)
