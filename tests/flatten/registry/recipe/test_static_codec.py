"""Static data comes back from JSON as it went in, or is refused on the way in. Static data becomes a cache key."""

import dataclasses
import enum
import json
import math
import os
import re
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import fresh_process
from yobx_flatten.errors import StaticDataError
from yobx_flatten.registry.recipe.contract import HeldStatic, hashable, original
from yobx_flatten.registry.recipe.static_codec import check_static, dump_static, is_array, load_static
from yobx_flatten.trees import walk


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Permission(enum.Flag):
    READ = 1
    WRITE = 2


class Outer:
    class Inner:
        pass


Named = namedtuple("Named", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Config:
    size: Any
    mode: Any = None


@dataclasses.dataclass(eq=False)
class WithoutEqual:
    size: int = 1


class Sentinel:
    pass


MISSING = Sentinel()


def through_json(value):
    return load_static(json.loads(json.dumps(dump_static(value))))


def same(left, right):
    """Equal, and of equal types all the way down: `True == 1` and `(1,) != [1]` are both told apart."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple) and not isinstance(left, torch.Size):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, set | frozenset):
        return len(left) == len(right) and all(any(same(mine, theirs) for theirs in right) for mine in left)
    if isinstance(left, slice):
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if isinstance(left, Config):
        return same((left.size, left.mode), (right.size, right.mode))
    if isinstance(left, float):  # -0.0 and 0.0 are equal, NaN and NaN are not
        return repr(left) == repr(right)
    return left == right


numbers = st.integers() | st.floats() | st.complex_numbers(allow_nan=False) | st.booleans()
optional_integers = st.none() | st.integers()
atoms = (
    st.none()
    | numbers
    | st.text()
    | st.text().map("!{}".format)
    | st.binary()
    | st.sampled_from([Color.RED, Level.HIGH, Permission.READ, Outer.Inner, int, torch.nn.Linear])
    | st.sampled_from([len, json.dumps, torch.nn.functional.relu, MISSING, torch.strided, torch.channels_last, ...])
    | st.sampled_from([np.dtype("float32"), np.dtype("bool"), np.float32(1.5), np.int8(-3), np.bool_(True)])
    | st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
    | st.sampled_from(["cpu", "cuda", "cuda:1", "meta"]).map(torch.device)
    | st.lists(st.integers(0, 9)).map(torch.Size)
    | st.builds(range, st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
)
hashables = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4
)
static_data = st.recursive(
    hashables | st.builds(slice, optional_integers, optional_integers, optional_integers),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(Named, inner, inner)
        | st.builds(Config, inner, inner)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=12,
)


@given(static_data)
def test_static_data_comes_back_from_json(value):
    assert same(through_json(value), value)
    if "nan" not in repr(value):
        check_static(value)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (["key_D_0", "value_D_0"], ["key_D_0", "value_D_0"]),
        ({"a": 1}, {"a": 1}),
        ((1, 2), {"!tuple": [1, 2]}),
        ({1: "a"}, {"!dict": [[1, "a"]]}),
        ({"!tuple": 1}, {"!dict": [["!tuple", 1]]}),
        (torch.float16, {"!dtype": "float16"}),
        (torch.device("cuda:1"), {"!device": "cuda:1"}),
        (torch.Size([2, 3]), {"!size": [2, 3]}),
        (slice(1, None), {"!slice": [1, None, None]}),
        (Color.RED, {"!enum": [f"{__name__}:Color", "RED"]}),
        (Outer.Inner, {"!class": f"{__name__}:Outer.Inner"}),
        (b"\x00\xff", {"!bytes": "00ff"}),
        (Named(1, (2,)), {"!namedtuple": [f"{__name__}:Named", [1, {"!tuple": [2]}]]}),
        (Config(1), {"!dataclass": [f"{__name__}:Config", {"size": 1, "mode": None}]}),
        (OrderedDict(b=1, a=2), {"!ordered": [["b", 1], ["a", 2]]}),
        (len, {"!function": "builtins:len"}),
        (MISSING, {"!constant": f"{__name__}:MISSING"}),
        ({"b", "a", "c"}, {"!set": ["a", "b", "c"]}),
        (np.dtype("int16"), {"!numpy_dtype": "numpy:int16"}),
        (np.float32(1.5), {"!numpy": ["numpy:float32", "0000c03f"]}),
    ],
    ids=lambda value: (
        type(value).__name__ if value is MISSING or type(value) is set else repr(value)
    ),  # in every process
)
def test_the_stored_form_is_fixed(value, stored):
    assert dump_static(value) == stored
    assert load_static(stored) == value


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        torch.nn.Parameter(torch.zeros(2)),
        object(),
        [].append,
        lambda: None,
        np.zeros(2),
        np.datetime64("2026-01-01"),
        np.dtype(">f4"),
        np.dtype([("a", "f4")]),
        type("Text", (str,), {})("a"),
        type("Items", (dict,), {})(a=1),
        json,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"a": (v,)}], ids=["bare", "list", "nested"])
def test_what_cannot_come_back_is_refused(value, wrap):
    with pytest.raises(StaticDataError) as caught:
        dump_static(wrap(value))
    assert f"Static data holds the {type(value).__name__} " in str(caught.value)
    assert "Flatten the value as a child if it changes between calls" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, torch.zeros(1)]}, "static['a'][1]"),
        ([(1, {2: object()})], "static[0][1][2]"),
        (Named(1, [object()]), "static.b[0]"),
        (Config({"x": object()}), "static.size['x']"),
        ({object(): 1}, "static key <object"),
        (slice(object()), "static.stop"),
    ],
    ids=["list", "dict", "named tuple", "dataclass", "key", "slice"],
)
def test_the_place_of_what_cannot_come_back_is_named(value, path):
    with pytest.raises(StaticDataError) as caught:
        dump_static(value)
    assert f" at {path}" in str(caught.value)
    with pytest.raises(StaticDataError, match=re.escape(f" at {path.replace('static', 'State.config', 1)}")):
        dump_static(value, where="State.config")


def test_a_combination_of_flags_comes_back_and_nan_as_the_one_that_everybody_uses():
    """Specs are compared with `==`, and of all NaNs only the very same object passes: `math.nan`, `torch.nan`."""
    for flags in (Permission(0), Permission.READ | Permission.WRITE, re.IGNORECASE | re.MULTILINE):
        assert through_json(flags) is flags
    assert through_json([math.nan]) == [math.nan]
    assert through_json({"a": (torch.nan,)}) == {"a": (torch.nan,)}
    assert math.copysign(1, through_json(-0.0)) == -1
    assert through_json([math.inf, -math.inf]) == [math.inf, -math.inf]


def test_a_dtype_of_another_library_comes_back():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="JAX brings it")
    assert through_json(np.dtype(ml_dtypes.bfloat16)) == np.dtype(ml_dtypes.bfloat16)
    scalar = through_json(ml_dtypes.bfloat16(1.5))
    assert (type(scalar), float(scalar)) == (ml_dtypes.bfloat16, 1.5)


def test_arrays_are_told_from_numbers_also_under_a_trace_of_jax():
    values = torch.zeros(1), np.zeros(1), np.float32(1), [1], 1
    assert [is_array(value) for value in values] == [True, True, False, False, False]
    jax = pytest.importorskip("jax", reason="the arrays are JAX's")
    seen = []
    jax.jit(lambda x: seen.append(is_array(x)))(1.0)
    assert (is_array(jax.numpy.zeros(1)), seen) == (True, [True])


@pytest.mark.parametrize(
    "value", [WithoutEqual(), [float("nan") * -1], Config(WithoutEqual())], ids=lambda v: type(v).__name__
)
def test_what_is_not_equal_to_itself_later_is_refused_by_the_check(value):
    """It compares by identity, or to an array: a loaded program would refuse its own inputs."""
    with pytest.raises(StaticDataError, match=r" at State.mode, which is not equal to itself after it is stored"):
        check_static(value, where="State.mode")


def test_static_data_is_read_in_a_fresh_process():
    value = {1: (torch.float16, slice(1, None)), "f": torch.nn.functional.relu, "d": np.dtype("int8"), "x": [1, True]}
    code = (
        "import json, sys; from yobx_flatten.registry.recipe.static_codec import load_static\n"
        "print(load_static(json.loads(sys.argv[1])))"
    )
    done = fresh_process.run("-c", code, json.dumps(dump_static(value)))
    assert re.sub("0x[0-9a-f]+", "", done.stdout) == re.sub("0x[0-9a-f]+", "", f"{value}\n")


def test_what_nobody_can_find_by_its_name_is_refused():

    class Local:
        pass

    class LocalEnum(enum.Enum):
        ONE = 1

    for value in (Local, LocalEnum.ONE, type(None), type(lambda: None)):
        with pytest.raises(StaticDataError, match="Static data holds"):
            dump_static(value)


def test_data_of_a_newer_version_is_refused():
    with pytest.raises(StaticDataError, match=r"kind 'quaternion'.*\n?.*pip install --upgrade yobx-flatten"):
        load_static([{"!quaternion": [1, 2, 3, 4]}])


CALLED = []


def note_a_call():
    CALLED.append("called")
    return []


@pytest.mark.parametrize("kind", ["dict", "ordered"])
def test_items_of_a_dict_are_not_read_from_an_object_that_a_file_names(kind):
    """`dict(obj)` calls `obj.keys()`, and a file may name a named tuple with a field `keys`."""
    node = {"!namedtuple": [f"{walk.__name__}:Node", [{"!function": f"{__name__}:note_a_call"}, [], None]]}
    assert load_static(node).keys is note_a_call
    with pytest.raises(ValueError, match="unpack"):
        load_static({f"!{kind}": node})
    assert CALLED == []


@pytest.mark.parametrize("kind", ["flag", "enum", "namedtuple"])
def test_a_function_is_not_called_for_a_class(kind, monkeypatch):
    """A spec from elsewhere may name anything; only a class of the kind it says is called."""
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it was called"))
    with pytest.raises(StaticDataError, match=f"names 'os:system', which is not a {kind} that a file may use"):
        load_static({f"!{kind}": ["os:system", "exit"]})


@pytest.mark.parametrize("static", [{"a": [1, 2], "b": {"c": None}}, ([1], "x"), [slice(1, 2), {3}]], ids=repr)
def test_what_does_not_hash_is_held_and_what_hashes_stays_as_it_is(static):
    for plain in (None, "relu", 3, (1, "a"), frozenset({1})):
        assert hashable(plain) is original(plain) is plain
    key, again = hashable(static), hashable(static)
    assert type(key) is HeldStatic
    assert key == again
    assert hash(key) == hash(again)
    assert original(key) == static
    assert repr(key) == repr(static)


def test_other_data_is_another_key_and_changing_the_data_does_not_change_the_key():
    for one, other in [([1], [2]), ([1], (1,)), ({"a": 1}, {"a": 2}), ([1], {1})]:
        assert hashable(one) != hashable(other)
    static = {"names": ["a"]}
    key = hashable(static)
    static["names"].append("b")
    original(key)["names"].append("c")
    assert original(key) == {"names": ["a"]}
    assert key == hashable({"names": ["a"]})
    one, other = hashable({"a": [1], "b": [2]}), hashable({"b": [2], "a": [1]})  # the order does not count
    assert (one, hash(one)) == (other, hash(other))
