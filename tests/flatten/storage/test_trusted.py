"""A file chooses neither what is imported nor what is called."""

import enum
import functools
import sys

import pytest
import torch

from tests.flatten.storage.storage_values import Access, Mode, Pair
from yobx_flatten import DamagedFileError, NotRegisteredError
from yobx_flatten.recipe.static_codec import dump_static
from yobx_flatten.storage.safe_static import load_trusted


@pytest.mark.parametrize(
    "value",
    [
        None, {1: (2, [3.5])}, Mode.EVAL, Access.READ | Access.WRITE, Pair(1, Mode.TRAIN), torch.bfloat16, int,
        torch.nn.functional.relu, {"a": {"b": frozenset({1})}}, torch.device("cpu"), slice(1, None), {"!": 1},
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)  # fmt: skip
def test_what_is_written_is_read(value):
    assert load_trusted(dump_static(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        {"!flag": ["os:system", "touch broken"]},
        {"!flag": ["tests.flatten.storage.test_trusted:trap", 1]},
        {"!enum": ["os:environ", "HOME"]},
        {"!namedtuple": ["subprocess:Popen", [["touch", "broken"]]]},
        {"!namedtuple": ["builtins:tuple", [1]]},
        {"!config": ["tests.flatten.storage.test_trusted:Trap", "{}"]},
        {"!dataclass": ["subprocess:Popen", {}]},
        {"!class": "os:system"},
        {"!function": "os:system"},
        {"!function": "builtins:eval"},
        {"!function": "tests.flatten.storage.test_trusted:sys.exit"},
        {"!function": "torch.serialization:os.system"},
        {"!constant": "os:environ"},
        {"!numpy": ["os:system", "00"]},
        {"!numpy_dtype": "os:system"},
        {"!dtype": "load"},
        {"!dtype": ["float32"]},
        {"!enum": []},
        {"!enum": 3},
        {"!tuple": 3},
        {"!device": "nowhere"},
        {"a": [{"b": {"!flag": ["os:system", "touch broken"]}}]},
        {"!tuple": [{"!flag": ["os:system", "touch broken"]}]},
        {"!no_such_kind": 1},
    ],
    ids=repr,
)
def test_a_name_of_another_kind_is_refused(data, tmp_path, monkeypatch):
    """Nothing of it is called."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedFileError):
        load_trusted(data)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_not_imported_stays_so(tmp_path, monkeypatch):
    """The message says what to import."""
    (tmp_path / "a_stranger.py").write_text("raise SystemExit('it was imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = r"d of the module a_stranger, which is not imported.*\n    import a_stranger"
    with pytest.raises(NotRegisteredError, match=wanted):
        load_trusted({"!enum": ["a_stranger:d", "a"]})
    assert "a_stranger" not in sys.modules


def test_a_served_library_without_the_module_is_named():
    with pytest.raises(NotRegisteredError, match=r"numpy\.no_such_part.*\n    pip install numpy"):
        load_trusted({"!class": "numpy.no_such_part:Thing"})


def trap(value):
    raise AssertionError("called")


class Trap:
    """No class of configurations: it cannot be stored, only made."""

    @classmethod
    def from_dict(cls, values):
        raise AssertionError("called")


def test_a_borrowed_name_is_refused():
    """A module also holds what it imported: `functools.partial` is none of this module's."""
    assert functools.partial
    assert enum.Enum
    with pytest.raises(DamagedFileError):
        load_trusted({"!class": "tests.flatten.storage.test_trusted:functools.partial"})
