"""Named tuples among the inputs, and the other containers that torch wants to find again in ``dynamic_shapes``."""

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch.export import Dim

from yobx_flatten import (
    Case,
    DynamicShapesError,
    check_dynamic_shapes,
    dynamic_shapes,
    export_onnx,
    export_program,
    record_calls,
    register,
    unregister_class_flattening,
)

VARIES = {0: Dim.AUTO, 1: Dim.AUTO}


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Holder:
    pair: Any


class Adds(torch.nn.Module):
    def __init__(self, find) -> None:
        super().__init__()
        self.find = find

    def forward(self, given):
        x, y = self.find(given)
        return x + y


def _pair(rows: int) -> Pair:
    return Pair(torch.ones(rows, 3), torch.full((rows, 3), float(rows)))


def _default(rows: int):
    found = defaultdict(list)
    found["x"], found["y"] = _pair(rows)
    return found


INPUTS = {
    "a named tuple": (lambda rows: _pair(rows), lambda given: (given.x, given.y)),
    "in a dataclass": (lambda rows: Holder(_pair(rows)), lambda given: (given.pair.x, given.pair.y)),
    "in a dict and a list": (lambda rows: {"a": [_pair(rows)]}, lambda given: (given["a"][0].x, given["a"][0].y)),
    "what torch returns": (lambda rows: torch.max(torch.rand(rows, 3, 4), dim=1), lambda given: (given[0], given[1])),
    "an ordered dict": (lambda rows: OrderedDict(_pair(rows)._asdict()), lambda given: (given["x"], given["y"])),
    "a default dict": (_default, lambda given: (given["x"], given["y"])),
    "a deque": (lambda rows: deque(_pair(rows), 2), lambda given: (given[0], given[1])),
}


@pytest.fixture(autouse=True)
def registered():
    register(Holder)
    yield
    unregister_class_flattening(Holder)


@pytest.mark.parametrize("kind", INPUTS)
def test_an_export_takes(kind):
    make, find = INPUTS[kind]
    given = make(2)
    check_dynamic_shapes((given,), dynamic_shapes((given,)))
    exported = export_program(Adds(find), (given,), cases=[Case("five", (make(5),))])
    assert exported.report.ok
    other = make(7)
    assert torch.equal(exported(other), sum(find(other)))


@pytest.mark.parametrize("kind", ["a named tuple", "in a dataclass", "in a dict and a list"])
def test_so_do_an_onnx_file_and_recorded_calls(kind, tmp_path):
    make, find = INPUTS[kind]
    module = Adds(find)
    cases = [Case("five", (make(5),))]
    assert export_onnx(module, (make(2),), path=tmp_path / "pair.onnx", cases=cases).report.ok
    with record_calls(module) as calls:
        module(make(2))
        module(make(4))
    shapes = calls.dynamic_shapes()
    exported = export_program(calls.module(), kwargs=calls.example(), dynamic_shapes=shapes, cases=[])
    assert calls.replay(exported)


def test_the_specification_has_the_type_that_torch_wants():
    """The tuple's own, also in a registered class, which itself stands as a list."""
    assert dynamic_shapes((_pair(2),)) == (Pair(VARIES, VARIES),)
    (written,) = dynamic_shapes((Holder(_pair(2)),))
    assert type(written) is list
    assert type(written[0]) is Pair
    assert dynamic_shapes(({"size": torch.Size([2, 3])},)) == ({"size": (None, None)},)


def test_a_size_among_the_inputs():
    """torch makes a tuple of it."""

    class Expands(torch.nn.Module):
        def forward(self, x, size):
            return x.expand(size)

    exported = export_program(Expands(), (torch.ones(3), torch.Size([2, 3])), cases=[])
    assert exported(torch.ones(3), torch.Size([2, 3])).shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "shapes", "message"),
    [
        (_pair(2), [VARIES, VARIES], r"given: expected a Pair with 2 entries for \['x', 'y'\], found \["),
        ((1, 2), [None, None], "given: expected a tuple with 2 entries"),
        ([1, 2], (None, None), "given: expected a list with 2 entries"),
    ],
)
def test_another_container_is_refused_by_path(given, shapes, message):
    """torch refuses it, too, without the place."""
    with pytest.raises(DynamicShapesError, match=message):
        check_dynamic_shapes({"given": given}, {"given": shapes})
