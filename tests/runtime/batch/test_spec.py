"""Rules are read from what a user writes, and hold for the path they are written for and all that is below."""

import pytest

from roundpipe_runtime.batch.spec import Replicate, Rule, TensorChunkSpec, is_below, read_rules, rule_for
from roundpipe_runtime.errors import JoinError, SplitError


def test_a_tree_of_marks_becomes_rules_by_path():
    """`None` says nothing; instances and classes mean the same."""
    spec = {"a": [TensorChunkSpec(1), None], "b": Replicate, "c": Replicate()}
    assert read_rules(spec, "kwargs") == {
        "kwargs['a'][0]": Rule(1),
        "kwargs['b']": Rule(None),
        "kwargs['c']": Rule(None),
    }


def test_a_mapping_from_paths_is_taken_as_it_is():
    assert read_rules({"label[0]": Replicate, "args": None}, "") == {"label[0]": Rule(None)}


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
