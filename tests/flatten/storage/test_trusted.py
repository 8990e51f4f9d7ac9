"""A file chooses neither what is imported nor what is called."""

import dataclasses
import enum
import functools
import sys

import pytest
import torch

from tests.flatten.storage.storage_values import Access, Mode, Pair
from yobx_flatten import DamagedFileError, NotRegisteredError
from yobx_flatten.recipe.static_codec import dump_static
from yobx_flatten.storage.structure import load_trusted


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
        {"!class": "logging:FileHandler"},
        {"!dataclass": ["tests.flatten.storage.test_trusted:Ends", {}]},
        {"!config": ["transformers:LlamaConfig", '{"auto_map": {"AutoConfig": "a--b.C"}}']},
        {"!config": ["tests.flatten.storage.test_trusted:Trap", "[]"]},
        {"!namedtuple": ["tests.flatten.storage.storage_values:Pair", [1]]},
    ],
    ids=repr,
)
def test_a_name_of_another_kind_and_what_could_act_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedFileError):
        load_trusted(data)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_not_imported_stays_so(tmp_path, monkeypatch):
    (tmp_path / "a_stranger.py").write_text("raise SystemExit('it was imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = r"d of the module a_stranger, which is not imported.*\n    import a_stranger"
    with pytest.raises(NotRegisteredError, match=wanted):
        load_trusted({"!enum": ["a_stranger:d", "a"]})
    assert "a_stranger" not in sys.modules


def test_a_known_library_without_the_module_is_named():
    name = "transformers.models.no_such_model.modeling_no_such_model"
    with pytest.raises(NotRegisteredError, match=rf"{name}.*\n    pip install transformers"):
        load_trusted({"!class": f"{name}:Thing"})


@pytest.mark.parametrize(
    "module",
    [
        "numpy.f2py.__main__", "numpy.no_such_part", "torch.utils.bottleneck.__main__", "transformers.commands.serving",
        "transformers.models.llama.convert_llama_weights_to_hf", "transformers.models.llama.modeling_mistral",
        "diffusers.commands.env", "diffusers.models.__main__", "antigravity",
    ],
)  # fmt: skip
def test_no_other_module_is_imported(module):
    """Not even one of a library that is installed: some act when they are imported."""
    with pytest.raises(NotRegisteredError, match="a file cannot cause an import"):
        load_trusted({"!class": f"{module}:Thing"})
    assert module not in sys.modules


@dataclasses.dataclass
class Options:
    mode: str = "a"


class Ends:
    def __del__(self):
        TRACES.append(self)


TRACES = []


@pytest.mark.parametrize("field", ["__class__", "__dict__", "other", "_mode"])
def test_a_dataclass_takes_its_fields_only(field):
    """`__class__` among them would make it an object of any class."""
    name = "tests.flatten.storage.test_trusted"
    assert load_trusted({"!dataclass": [f"{name}:Options", {"mode": "b"}]}) == Options("b")
    with pytest.raises(DamagedFileError, match=f"{field}.*no such fields"):
        load_trusted({"!dataclass": [f"{name}:Options", {field: {"!class": f"{name}:Ends"}}]})
    assert TRACES == []


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
