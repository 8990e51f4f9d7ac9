"""Whatever a dataclass derives from, and however it is declared, all of its fields and items come back."""

import collections
import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from yobx_flatten import check_recipe, load_nested, pytree_dataclass, register, save_nested, unregister_class_flattening

BASES = [object, dict, collections.OrderedDict, list, tuple]


def rebuild(cls, base, fields, items):
    obj = base.__new__(cls, items) if base is tuple else base.__new__(cls)
    for number, item in enumerate(items):
        if issubclass(base, dict):
            base.__setitem__(obj, (number, "k"), item)
        elif base is list:
            base.append(obj, item)
    for name, value in fields.items():
        object.__setattr__(obj, name, value)
    return obj


def content(obj, base, names):
    items = list(base.items(obj)) if issubclass(base, dict) else list(base.__iter__(obj)) if base is not object else []
    plain = [*[getattr(obj, name) for name in names], *items]
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(plain)]


@settings(max_examples=60, deadline=None)
@given(
    base=st.sampled_from(BASES),
    frozen=st.booleans(),
    slots=st.booleans(),
    statics=st.lists(st.booleans(), max_size=4),
    count=st.integers(0, 3),
    by=st.sampled_from([register, pytree_dataclass]),
)
def test_fields_and_items_come_back(tmp_path_factory, base, frozen, slots, statics, count, by):
    slots = slots and base is not tuple  # Python has no slots beside the items of a tuple
    fields = {f"f{i}": f"s{i}" if static else torch.full((i + 1,), float(i)) for i, static in enumerate(statics)}
    declared = [
        (name, Any, dataclasses.field(default=None, metadata={"static": isinstance(value, str)}))
        for name, value in fields.items()
    ]
    bases = () if base is object else (base,)
    cls = dataclasses.make_dataclass("Made", declared, bases=bases, frozen=frozen, slots=slots, eq=False)
    items = [torch.zeros(i + 1) for i in range(count if bases else 0)]
    obj = rebuild(cls, base, fields, items)
    by(cls, backends="torch")
    try:
        check_recipe(cls, obj)
        leaves, spec = pytree.tree_flatten(obj)
        expected = [*[value for value in fields.values() if not isinstance(value, str)], *items]
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        path = tmp_path_factory.mktemp("made") / "x.onnx"
        save_nested(path, obj)
        for rebuilt in (pytree.tree_unflatten(leaves, spec), load_nested(path)):
            assert type(rebuilt) is cls
            assert content(rebuilt, base, fields) == content(obj, base, fields)
        keys = [pytree.keystr(key) for key, _ in pytree.tree_flatten_with_path(obj)[0]]
        assert len(set(keys)) == len(leaves)
    finally:
        unregister_class_flattening(cls)
