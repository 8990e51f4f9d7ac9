"""The common walk: objects that hold themselves."""

import dataclasses
from typing import Any

import pytest
import torch

from yobx_flatten import (
    InvalidArgumentError,
    check_dynamic_shapes,
    check_inputs,
    dynamic_shapes,
    export_program,
    record_calls,
    register_class_flattening,
    unregister_class_flattening,
)
from yobx_flatten.trees.walk import find_cycle


@dataclasses.dataclass
class Linked:
    """A node that may point at anything, itself as well."""

    x: Any
    parent: Any = None


@pytest.fixture
def linked():
    register_class_flattening(
        Linked,
        lambda obj: ([obj.x, obj.parent], None),
        lambda children, static: Linked(*children),
        lambda obj: (
            [(torch.utils._pytree.GetAttrKey("x"), obj.x), (torch.utils._pytree.GetAttrKey("parent"), obj.parent)],
            None,
        ),
    )
    yield
    unregister_class_flattening(Linked)


def _cyclic() -> Linked:
    node = Linked([torch.ones(2), Linked(torch.zeros(2))])
    node.x[1].parent = node
    return node


class Adds(torch.nn.Module):
    def forward(self, node):
        return node.x[0] + 1


def test_an_object_that_stands_in_two_places_is_no_cycle():
    """Shared is not cyclic: only what holds itself has no end."""
    shared = [1, [2]]
    assert find_cycle([shared, {"again": shared}, shared[1]]) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda node: dynamic_shapes({"node": node}),
        lambda node: check_dynamic_shapes({"node": node}, {"node": [[{0: "n"}, None], None]}),
        lambda node: export_program(Adds(), (node,)),
        lambda node: export_program(Adds(), kwargs={"node": node}, dynamic_shapes=None),
    ],
)
def test_an_object_that_holds_itself_is_refused_by_path(linked, call):
    """Not a RecursionError: the place, what stands there, and the line to type."""
    with pytest.raises(InvalidArgumentError, match=r"(?s)node.*\.x\[1\]\.parent is .*node.* itself.*\.parent = None"):
        call(_cyclic())


def test_recorded_calls_refuse_an_object_that_holds_itself(linked):
    """`record_calls` copies what goes in and comes out, which has no end either."""
    module = Adds()
    with pytest.raises(InvalidArgumentError, match=r"\.x\[1\]\.parent is .* itself"), record_calls(module):
        module(_cyclic())


def test_check_inputs_lists_an_object_that_holds_itself(linked):
    """As an error, since the export fails."""
    (finding,) = check_inputs(Adds(), (_cyclic(),)).errors
    assert finding.path == "node.x[1].parent"
    assert "node.x[1].parent is node itself" in finding.message
