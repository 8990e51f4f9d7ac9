"""The static part of a program is the program's own."""

import dataclasses
from typing import Any

import pytest
import torch

from yobx_flatten import (
    export_program,
    register,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)

pytestmark = pytest.mark.slow

X = torch.ones(2, 3)


@dataclasses.dataclass
class Options:
    scale: float


class Named:
    """Its functions are written by hand and hand out the object's own list."""

    def __init__(self, x, names) -> None:
        self.x, self.names = x, names


@dataclasses.dataclass
class Listed:
    x: Any
    names: list = dataclasses.field(default_factory=list, metadata={"static": True})


@dataclasses.dataclass
class Configured:
    x: Any
    names: Options = dataclasses.field(default=None, metadata={"static": True})


class Counts(torch.nn.Module):
    def forward(self, named):
        return named.x * (len(named.names) if isinstance(named.names, list) else named.names.scale), named


@pytest.fixture(autouse=True)
def registered():
    register_class_flattening(Named, lambda o: ([o.x], o.names), lambda children, names: Named(*children, names), None)
    register(Listed)
    register(Configured)
    yield
    for cls in (Named, Listed, Configured):
        unregister_class_flattening(cls)


def _grow(names) -> None:
    if isinstance(names, list):
        names.append("b")
    else:
        names.scale = 2.0


@pytest.mark.parametrize(
    ("cls", "names"),
    [(Listed, ["a"]), (Named, ["a"]), (Configured, Options(1.0))],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_change_after_the_export_is_refused(cls, names):
    given = cls(X, names)
    exported = export_program(Counts(), (given,), cases=[])
    _grow(given.names)
    assert torch.equal(Counts()(given)[0], 2 * X)
    with pytest.raises(ValueError, match="input tree spec"):
        exported(given)


def test_a_plain_export_with_a_registered_class_is_safe_too():
    given = Listed(X, ["a"])
    module = torch.export.export(Counts(), (given,)).module()
    given.names.append("b")
    with pytest.raises(ValueError, match="input tree spec"):
        module(given)


def test_what_a_program_returns_is_the_callers_own():
    exported = export_program(Counts(), (Listed(X, ["a"]),), cases=[])
    first = exported(Listed(X, ["a"]))[1]
    first.names.append("b")
    assert exported(Listed(X, ["a"]))[1].names == ["a"]


class _Missing:
    """A sentinel: there is one, and it equals nothing else."""


MISSING = _Missing()


def test_a_sentinel_stays_the_one_that_everybody_uses():
    """A copy of it would equal no input."""
    with register_flattening_functions():
        module = torch.export.export(Counts(), (Named(X, [MISSING]),)).module()
    assert torch.equal(module(Named(X, [MISSING]))[0], X)
