"""Static data comes back from JSON as it went in, and what cannot come back is refused on the way in."""

import enum
import json
import re
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yobx_flatten.errors import StaticDataError
from yobx_flatten.static_codec import dump_static, load_static


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


Named = namedtuple("Named", ["a"])


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
    return left == right


numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.booleans()
optional_integers = st.none() | st.integers()
atoms = (
    st.none()
    | numbers
    | st.text()
    | st.text().map("!{}".format)
    | st.binary()
    | st.sampled_from([Color.RED, Level.HIGH, Permission.READ, Outer.Inner, int, torch.nn.Linear])
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
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=12,
)


@given(static_data)
def test_static_data_comes_back_from_json(value):
    """Values, types and the order of keys are kept."""
    assert same(through_json(value), value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_what_json_keeps_stays_plain(value):
    """A saved program is readable: lists, strings and numbers are stored as they are."""
    assert dump_static(value) == value


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
        (Color.RED, {"!enum": ["tests.flatten.test_static_codec:Color", "RED"]}),
        (Outer.Inner, {"!class": "tests.flatten.test_static_codec:Outer.Inner"}),
        (b"\x00\xff", {"!bytes": "00ff"}),
    ],
    ids=repr,
)
def test_the_stored_form_is_fixed(value, stored):
    """Programs saved by this version are read by the next one: what is written does not change."""
    assert dump_static(value) == stored
    assert load_static(stored) == value


def test_a_set_is_stored_in_one_order():
    """The same set gives the same text, so that equal programs are equal files."""
    assert dump_static({"b", "a", "c"}) == {"!set": ["a", "b", "c"]}


def test_a_combination_of_flags_comes_back():
    """Flags joined with `|` have no single name, and none of them is lost."""
    assert through_json(Permission.READ | Permission.WRITE) is Permission.READ | Permission.WRITE
    assert through_json(re.IGNORECASE | re.MULTILINE) is re.IGNORECASE | re.MULTILINE


def test_a_flag_without_a_bit_comes_back():
    """Zero is a flag, too."""
    assert through_json(Permission(0)) is Permission(0)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        torch.nn.Parameter(torch.zeros(2)),
        object(),
        len,
        lambda: None,
        Named(1),
        OrderedDict(a=1),
        type("Text", (str,), {})("a"),
        json,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"a": (v,)}], ids=["bare", "list", "nested"])
def test_what_cannot_come_back_is_refused(value, wrap):
    """Anything else is named with its type, wherever it stands, and the message says what to do."""
    with pytest.raises(StaticDataError) as caught:
        dump_static(wrap(value))
    assert f"Static data holds the {type(value).__name__} " in str(caught.value)
    assert "Return it among the children if it may change between calls" in str(caught.value)


def test_a_key_that_cannot_come_back_is_refused():
    """Keys are static data like values."""
    with pytest.raises(StaticDataError, match="Static data holds"):
        dump_static({object(): 1})


def test_what_nobody_can_find_by_its_name_is_refused():
    """A local class or enum could be stored by name, and never be loaded: it is refused at once."""

    class Local:
        pass

    class LocalEnum(enum.Enum):
        ONE = 1

    for value in (Local, LocalEnum.ONE, type(None), type(lambda: None)):
        with pytest.raises(StaticDataError, match="Static data holds"):
            dump_static(value)


def test_data_of_a_newer_version_is_refused():
    """An unknown kind is named, with the line that updates."""
    with pytest.raises(StaticDataError, match=r"kind 'quaternion'.*\n?.*pip install --upgrade yobx-flatten"):
        load_static([{"!quaternion": [1, 2, 3, 4]}])
