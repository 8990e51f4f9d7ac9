"""What the passes over a converted graph ask of a node."""

import onnx_ir as ir
import pytest

from yobx_flatten.export.onnx.rewrite.graph import copy_type, input_of, insert_before, type_of


def test_an_input_that_is_left_out_is_named():
    first = ir.val("first", ir.DataType.FLOAT, [2])
    node = ir.node("Add", [first, None], name="sum")
    assert input_of(node, 0) is first
    with pytest.raises(ValueError, match="the Add sum has no input 1"):
        input_of(node, 1)


def test_a_type_that_is_not_known_is_refused():
    """A guess would be written to the file."""
    assert type_of(ir.val("known", ir.DataType.FLOAT16, [2])) == ir.DataType.FLOAT16
    with pytest.raises(ValueError, match="the type of bare is not known"):
        type_of(ir.Value(name="bare"))


def test_a_copied_type_is_its_own():
    one, other = ir.val("one", ir.DataType.FLOAT, [2]), ir.Value(name="other")
    copy_type(other, one)
    other.dtype = ir.DataType.FLOAT16
    assert (one.dtype, other.dtype) == (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    copy_type(one, ir.Value(name="bare"))
    assert one.dtype == ir.DataType.FLOAT


def test_nodes_are_inserted_where_a_node_stands():
    value = ir.val("x", ir.DataType.FLOAT, [2])
    last = ir.node("Neg", [value], name="last")
    graph = ir.Graph([value], last.outputs, nodes=[last])
    insert_before(last, [ir.node("Abs", [value], name="first"), ir.node("Exp", [value], name="second")])
    assert [node.name for node in graph] == ["first", "second", "last"]
    with pytest.raises(ValueError, match="the Abs alone does not belong to a graph"):
        insert_before(ir.node("Abs", [value], name="alone"), [])
