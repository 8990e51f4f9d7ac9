"""Match parts of a graph: the node that makes a value, the only one that reads it, the number that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that makes a value, where it is this operator of ONNX."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def only_reader(value: ir.Value, op_type: str | None = None) -> ir.Node | None:
    """Return the only node that reads a value, as its first input; ``None`` where another one does, or the caller."""
    # op_type: its operator; `None`, the default, for any
    # an output of the graph is read by the caller: a rewrite that only one node sees would change it
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node, index = uses[0]
    return node if index == 0 and op_type in (None, node.op_type) else None


def number_of(value: ir.Value | None) -> float | None:
    """Return the number that a value always is; ``None`` where it is computed, or holds several."""
    constant = None if value is None else value.const_value
    if constant is None or constant.size != 1:
        return None
    found: float = constant.numpy().reshape(()).item()
    return found


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of a value, and the graph's outputs, read another one, which gets its name."""
    new.shape, new.type = old.shape, old.type
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    # names of a file are unique, and callers know outputs by theirs
    old.name, new.name = f"{name}_before", name
