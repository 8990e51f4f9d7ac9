"""Rules by key path or by structure state where to cut; a rule holds for its path and all that is below."""

import re

import numpy
import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate, sum_reducer

from roundpipe_runtime.batch.spec import Replicate, Rule, TensorChunkSpec, is_below, read_rules, rule_for
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import JoinError, SplitError
from tests.runtime.batch.rows import firsts, rows


def test_a_rule_by_key_path_says_where_to_cut():
    parts = split((rows(8, 5), torch.zeros(3, 8, 5)), {}, None, 2, split_input={"args[1]": TensorChunkSpec(1)})
    assert [tuple(part.args[1].shape) for part in parts] == [(3, 4, 5)] * 2


def test_a_rule_holds_for_all_that_is_below_it():
    tables = {"a": torch.zeros(3, 2), "b": [torch.zeros(4)]}
    parts = split((rows(8, 5), tables), {}, None, 2, split_input={"args[1]": Replicate})
    assert all(part.args[1]["a"] is tables["a"] and part.args[1]["b"][0] is tables["b"][0] for part in parts)


def test_a_longer_path_wins():
    rules = {"args[0]": Replicate, "args[0]['x']": TensorChunkSpec(0)}
    parts = split(({"x": rows(4), "t": torch.zeros(4)},), {}, None, 2, split_input=rules)
    assert firsts(parts, lambda part: part.args[0]["x"]) == [[0, 1], [2, 3]]
    assert parts[0].args[0]["t"].shape == (4,)


def test_rules_may_speak_of_labels():
    parts = split((rows(4, 2),), {}, [rows(4), torch.zeros(3)], 2, split_input={"label[1]": Replicate})
    assert [part.label[1].shape for part in parts] == [(3,), (3,)]


@pytest.mark.parametrize(("chunk", "whole"), [(TensorChunkSpec, Replicate), (TorchChunkSpec, _Replicate)])
def test_specs_have_the_structure_of_the_arguments(chunk, whole):
    parts = split((rows(4, 2), torch.zeros(4)), {"y": rows(4)}, None, 2, split_input=((chunk(0), whole), None))
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2, 3]]
    assert parts[0].args[1].shape == (4,)
    assert firsts(parts, lambda part: part.kwargs["y"]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("whole", [Replicate, _Replicate])
def test_one_mark_may_stand_for_all_labels(whole):
    label = torch.zeros(9)
    parts = split((rows(4),), {}, label, 2, split_label=whole)
    assert all(part.label is label for part in parts)


def test_the_example_of_the_documentation_on_labels():
    """A scalar, a tensor to cut along axis 1, an integer."""
    label = (torch.tensor(1.0), torch.zeros(3, 12, 4), 5)
    spec = (_Replicate, TorchChunkSpec(1), _Replicate)
    parts = split((rows(12, 2),), {}, label, 4, split_label=spec)
    assert [tuple(part.label[1].shape) for part in parts] == [(3, 3, 4)] * 4
    assert all(part.label[0] is label[0] and part.label[2] == 5 for part in parts)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"args[3]": Replicate},
            "split_input: 'args[3]' is not among the inputs. The key paths of inputs are:\n    ['args[0]', 'label']",
        ),
        ({"args[0]": TensorChunkSpec(2)}, "args[0]: the rule is TensorChunkSpec(2), but this tensor has shape (4, 2)"),
        ({"args[0]": 1}, "args[0]: expected TensorChunkSpec(dim), Replicate or None, found 1."),
        (7, "split_input must be (spec of args, spec of kwargs), a mapping from key paths or a function, found 7."),
    ],
)
def test_wrong_rules_are_refused(rules, message):
    with pytest.raises(SplitError, match=re.escape(message)):
        split((rows(4, 2),), {}, None, 2, split_input=rules)


def test_a_rule_that_cuts_a_number_is_refused():
    with pytest.raises(
        SplitError, match=r"kwargs\['n'\]: the rule is TensorChunkSpec\(0\), but there is no axis to split in 5"
    ):
        split((rows(4),), {"n": 5}, None, 2, split_input={"kwargs['n']": TensorChunkSpec(0)})


def test_two_rules_that_contradict_each_other_are_refused():
    """A third leaf, without a rule, could follow either."""
    rules = {"args[0]": TensorChunkSpec(0), "args[1]": TensorChunkSpec(0)}
    with pytest.raises(SplitError, match=re.escape("different numbers of rows: 3 in args[1]; 4 in args[0]")) as caught:
        split((rows(4), rows(3), rows(4)), {}, None, 2, split_input=rules)
    assert "also give a rule to each of these: args[2]." in str(caught.value)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_rule_for_every_leaf_is_taken_at_its_word(count):
    """12 rows of one and 10 of the other: each is cut for itself, as `torch.tensor_split` cuts it."""
    x, y, label = rows(12, 2), rows(10), torch.arange(36).reshape(3, 12)
    spec = ((TensorChunkSpec(0), Replicate), {"y": TensorChunkSpec(0), "name": Replicate})
    parts = split((x, 5), {"y": y, "name": "n"}, label, count, split_input=spec, split_label=TensorChunkSpec(1))
    for pick, whole, axis in (
        (lambda part: part.args[0], x, 0),
        (lambda part: part.kwargs["y"], y, 0),
        (lambda part: part.label, label, 1),
    ):
        expected = torch.tensor_split(whole, count, axis)
        assert all(torch.equal(pick(part), one) for part, one in zip(parts, expected, strict=True))
    assert [part.rows for part in parts] == [12 // count] * count  # those of the labels


def test_leaves_that_are_cut_each_for_itself_have_as_many_microbatches_as_the_shortest():
    spec = ((TensorChunkSpec(0), TensorChunkSpec(0)), None)
    parts = split((rows(7), rows(2)), {}, None, 4, split_input=spec)
    assert [part.args[0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [part.args[1].tolist() for part in parts] == [[0], [1]]
    assert [part.rows for part in parts] == [None, None]


def test_an_array_that_a_rule_hands_on_whole_is_the_same_object_in_all_parts():
    """Only an array that would have to be cut is refused."""
    table = numpy.arange(4)
    parts = split((torch.zeros(4, 2), table), {}, None, 2, split_input={"args[1]": Replicate})
    assert [part.args[1] is table for part in parts] == [True, True]


def test_a_reducer_is_no_rule_for_inputs():
    """torch has one class of marks for both sides."""
    with pytest.raises(SplitError, match="a reducing rule, which is for outputs"):
        split((torch.zeros(4),), {}, None, 2, split_input={"args[0]": sum_reducer})


def test_a_tree_of_marks_becomes_rules_by_path():
    """`None` says nothing; instances and classes mean the same."""
    spec = {"a": [TensorChunkSpec(1), None], "b": Replicate, "c": Replicate()}
    assert read_rules(spec, "kwargs") == {
        "kwargs['a'][0]": Rule(1),
        "kwargs['b']": Rule(None),
        "kwargs['c']": Rule(None),
    }


def test_the_error_is_of_the_class_that_fits_the_place():
    for error in (SplitError, JoinError):
        with pytest.raises(error, match=r"x: expected TensorChunkSpec\(dim\), Replicate or None, found 'batch'"):
            read_rules("batch", "x", error)


def test_the_longest_path_above_a_leaf_counts():
    rules = {"args": Rule(0), "args[0]": Rule(None), "args[0].x": Rule(2)}
    assert rule_for("args[0].x[3]", rules) == Rule(2)
    assert rule_for("args[0].y", rules) == Rule(None)
    assert rule_for("args[1]", rules) == Rule(0)
    assert rule_for("kwargs['args']", rules) is None


@pytest.mark.parametrize(
    ("path", "above", "expected"),
    [("a", "a", True), ("a[0]", "a", True), ("a.b", "a", True), ("ab", "a", False), ("a[10]", "a[1]", False)],
)
def test_a_path_ends_at_a_step(path, above, expected):
    assert is_below(path, above) is expected
