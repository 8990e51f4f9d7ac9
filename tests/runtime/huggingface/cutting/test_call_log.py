"""Tests of roundpipe_runtime.huggingface.cutting.call_log and .program."""

from collections import UserDict

import torch
from torch.utils import _pytree as pytree

from roundpipe_runtime.device.transfer import flatten_value
from roundpipe_runtime.huggingface.cutting.call_log import (
    BoxUse,
    CallLog,
    CallSpec,
    Observed,
    OutputSpec,
    Tree,
    box_content,
    fill_box,
    is_box,
    live,
)
from roundpipe_runtime.huggingface.cutting.cut_plan import CutPlan
from roundpipe_runtime.huggingface.cutting.stub import Key

A, B, C = Key(-1, 0), Key(0, 0), Key(-1, 1)


def tree(*leaves):
    return Tree(pytree.tree_structure([0] * len(leaves)), leaves)


def test_a_tree_is_built_with_its_tensors_and_boxes():
    """Keys become tensors, uses of boxes the boxes; all else is itself."""
    made = tree(A, 3, BoxUse(7, dict, tree(C)), None)
    assert made.build({A: "tensor", C: "other"}, {7: {"in": "box"}}) == ["tensor", 3, {"in": "box"}, None]
    assert made.keys() == {A, C}


def test_values_live_until_their_last_use():
    """What a later call takes, what phases keep and what hooks captured stays; the rest goes."""
    call_log = CallLog().record({0: CallSpec(tree(A)), 2: CallSpec(tree(B, C))})
    values = {A: torch.ones(1), B: torch.ones(2), C: torch.ones(3), Key(2, 0): torch.ones(4)}
    assert set(live(values, call_log, 0, frozenset())) == {B, C}
    assert set(live(values, call_log, 2, frozenset({A}))) == {A}
    assert set(live(values, call_log.made(2, tree(None), tree(Key(2, 0))), 2, frozenset())) == {Key(2, 0)}


def test_boxes_are_what_layers_could_write():
    """Dictionaries, lists and what is like them; their content is plain."""
    shared = UserDict({"a": 1})
    assert is_box(shared)
    assert is_box([])
    assert not is_box((1,))
    assert not is_box(torch.ones(1))
    assert box_content(shared) == {"a": 1}
    fill_box(shared, {"b": 2})
    assert dict(shared) == {"b": 2}
    held = [1]
    fill_box(held, [2, 3])
    assert held == [2, 3]


def test_a_call_log_is_passed_on_unchanged():
    """It holds no tensors, so it is a leaf on the way to a device."""
    call_log = CallLog().record({0: CallSpec(tree(A))})
    structure, tensors = flatten_value({"call_log": call_log, "value": torch.ones(1)})
    assert len(tensors) == 1
    assert structure.rebuild(tensors)["call_log"] is call_log


def test_a_program_names_its_pieces():
    """Phases and calls in the order in which they run; outputs unlike any input are extras."""
    form = OutputSpec(pytree.tree_structure([0, 0]), (0, -1))
    program = CutPlan([Observed("h.0", form), Observed("h.1", form)], [1, 2, 2])
    assert program.names() == ["phase 0", "h.0", "phase 1", "h.1", "phase 2"]
    assert [program.is_extra(0, leaf) for leaf in (0, 1, 2)] == [False, True, True]
