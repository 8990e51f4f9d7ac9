"""A nested object as JSON and back."""

import collections
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.flatten.storage.storage_values import Mode, State
from yobx_flatten import DamagedFileError, register_class_flattening, unregister_class_flattening
from yobx_flatten.storage.structure import flatten_tree, unflatten_tree, unique


def test_the_json_names_classes_and_leaves():
    """As the guide shows it."""
    found = flatten_tree({"x": torch.ones(2, 3), "state": State(1.5, None, Mode.EVAL)})
    assert found.json == {
        "node": "builtins:dict",
        "static": ["x", "state"],
        "children": [
            {"leaf": "torch", "name": "x", "dtype": "float32", "shape": [2, 3]},
            {
                "node": "tests.flatten.storage.storage_values:State",
                "static": {"!tuple": [{"!enum": ["tests.flatten.storage.storage_values:Mode", "EVAL"]}]},
                "children": [{"leaf": "float", "name": "state.hidden"}, {"leaf": "static", "value": None}],
            },
        ],
    }


def test_the_json_is_json():
    """Also for keys, text and numbers that JSON does not have."""
    values = {1: float("nan"), (2, "\ud800"): collections.OrderedDict(), None: 2**100}
    json_ = json.loads(json.dumps(flatten_tree({"static only": values}).json))
    assert json_["node"] == "builtins:dict"


def test_a_name_is_given_once():
    taken = set()
    assert [unique(name, taken) for name in ["a", "a", "a#2", "b", "\ud800"]] == ["a", "a#2", "a#2#2", "b", "?"]


@dataclass
class Strict:
    x: Any


def strict_unflatten(children, static):
    if static != "new":
        raise KeyError(static)
    return Strict(*children)


def test_a_registration_that_changed_is_named():
    """What it raises is in the message."""
    register_class_flattening(Strict, lambda obj: ([obj.x], "old"), strict_unflatten, None)
    try:
        json_ = flatten_tree(Strict(None)).json
        with pytest.raises(DamagedFileError, match=r"Strict cannot be rebuilt.*KeyError: 'old'.*Register the class"):
            unflatten_tree(json_, None, "cpu")
    finally:
        unregister_class_flattening(Strict)
