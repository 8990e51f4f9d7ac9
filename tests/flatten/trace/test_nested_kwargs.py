"""Nested values in `**kwargs`: what torch exports and cannot call is refused before the export."""

import pytest
import torch
from torch.export import Dim

from yobx_flatten import InvalidArgumentError, export_program, register_flattening_functions

ROWS = {0: Dim.AUTO}
SHAPES = {"x": ROWS, "extra": {"a": ROWS}}


class Takes(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x + kwargs["extra"]["a"]


def inputs(rows):
    return (torch.ones(rows, 3),), {"extra": {"a": torch.ones(rows, 3)}}


@pytest.fixture
def has_defect():
    """Whether torch makes such programs, found without our code."""
    args, kwargs = inputs(4)
    try:
        program = torch.export.export(Takes(), args, kwargs, dynamic_shapes=SHAPES)
    except Exception:  # versions before 2.14 refuse the shapes
        return False
    try:
        program.module()(*args, **kwargs)
    except NameError:
        return True
    return False


def test_it_is_refused_with_its_name_where_torch_has_the_defect(has_defect):
    args, kwargs = inputs(4)
    with register_flattening_functions():
        if has_defect:
            refused = r"Takes\.forward takes extra in its \*\*kwargs(.|\n)*, extra,"
            with pytest.raises(InvalidArgumentError, match=refused):
                torch.export.export(Takes(), args, kwargs, dynamic_shapes=SHAPES)
        else:
            with pytest.raises((AssertionError, torch._dynamo.exc.UserError)):  # torch's own, before 2.14
                torch.export.export(Takes(), args, kwargs, dynamic_shapes=SHAPES)
        # sizes that are fixed have no such guards
        program = torch.export.export(Takes(), args, kwargs)
        assert torch.equal(program.module()(*args, **kwargs), torch.full((4, 3), 2.0))


def test_export_program_takes_them():
    args, kwargs = inputs(4)
    exported = export_program(Takes(), args, kwargs)
    more, others = inputs(6)
    assert torch.equal(exported.program.module()(*more, **others), torch.full((6, 3), 2.0))
