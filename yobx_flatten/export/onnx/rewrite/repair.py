"""Repair errors of torch's exporter in a graph, before the file is written.

* An inner value may have the same name as an output, such as ``relu``.
* ``RotaryEmbedding`` may get cosines with one row and tokens with several rows. onnxruntime refuses different numbers
  of rows.
* ``RMSNormalization`` may get tokens in half precision and weights in single precision (Gemma). onnxruntime refuses
  different types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


def repair_graph(model: ir.Model) -> None:
    """Repair names, types and shapes in a graph that torch's exporter wrote, in place."""
    _name_apart(model.graph)
    _one_type(model.graph)
    if any(_rotates(node) for node in model.graph.all_nodes()):
        import onnx_ir.passes.common as passes

        passes.CommonSubexpressionEliminationPass()(model)  # each operator has its own cosines and sines
        _as_many_rows(model.graph)


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Return an attribute of a node, or a default if the node has none."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def input_of(node: ir.Node, place: int) -> ir.Value:
    """Return a required input of a node."""
    value = node.inputs[place]
    if value is None:
        raise ValueError(f"the {node.op_type} {node.name} has no input {place}")
    return value


def type_of(value: ir.Value) -> ir.DataType:
    """Return the element type of a value; raise an error if the type is not known."""
    if value.dtype is None:
        raise ValueError(f"the type of {value.name} is not known")
    return value.dtype


def text_of_size(dim: int | ir.SymbolicDim) -> int | str | None:
    """Return a number, or the text of a symbol."""
    return dim if isinstance(dim, int) else dim.value


def copy_type(value: ir.Value, like: ir.Value) -> None:
    """Copy the element type of one value to another, if the type is known."""
    if like.dtype is not None:
        value.dtype = like.dtype  # not `type`: both values would then share one mutable object


def sizes_of(tensor: ir.TensorProtocol) -> list[int]:
    """Return the sizes of a constant's axes as integers."""
    return [size for size in tensor.shape if isinstance(size, int)]


def insert_before(node: ir.Node, made: list[ir.Node]) -> None:
    """Insert nodes before another node, in that node's graph."""
    if node.graph is None:
        raise ValueError(f"the {node.op_type} {node.name} does not belong to a graph")
    node.graph.insert_before(node, made)


def _name_apart(graph: ir.Graph) -> None:
    """Rename inner values that have the name of an input or output."""
    given = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    computed = (value for node in graph.all_nodes() for value in node.outputs)
    values = [*graph.inputs, *graph.initializers.values(), *computed]
    taken = {value.name for value in values} | set(given)
    for value in values:
        owner = given.get(value.name)
        if owner is None or owner is value:
            continue
        number = 1
        while f"{value.name}_{number}" in taken:
            number += 1
        name = f"{value.name}_{number}"
        taken.add(name)
        value.name = name


def _one_type(graph: ir.Graph) -> None:
    """Cast the tokens of ``RMSNormalization`` to the type of its weights, which is also the type of its output."""
    import onnx_ir as ir

    for node in list(graph.all_nodes()):
        if node.op_type == "RMSNormalization" and node.domain in ("", "ai.onnx"):
            tokens, weights = input_of(node, 0), input_of(node, 1)
            if tokens.dtype is not None and weights.dtype is not None and tokens.dtype != weights.dtype:
                cast = ir.node("Cast", [tokens], attributes={"to": int(weights.dtype)})
                cast.outputs[0].dtype, cast.outputs[0].shape = weights.dtype, tokens.shape
                insert_before(node, [cast])
                node.replace_input_with(0, cast.outputs[0])


def _rotates(node: ir.Node) -> bool:
    """Return whether a node is a ``RotaryEmbedding`` without positions, whose cosines have a batch axis."""
    if node.op_type != "RotaryEmbedding" or node.domain not in ("", "ai.onnx"):
        return False
    return len(node.inputs) < 4 or node.inputs[3] is None


def _as_many_rows(graph: ir.Graph) -> None:
    """Expand the cosines and sines of ``RotaryEmbedding`` to the rows of its tokens, once for each number of rows."""
    import onnx_ir as ir

    known: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in list(graph.all_nodes()):
        if not _rotates(node):
            continue
        tokens = input_of(node, 0)
        count = None if tokens.shape is None else tokens.shape[0]
        for place in (1, 2):
            table = input_of(node, place)
            if count is not None and table.shape is not None and table.shape[0] == count:
                continue
            size = str(count if isinstance(count, int) or count is None else count.value)
            expanded = known.get((table, size))
            # a value of a subgraph cannot be read outside of the subgraph, and unknown sizes may differ
            if expanded is None or size == "None" or node.graph is not graph:
                # the shape of an input, if possible: the tokens may be computed after another reader of the result
                given = (value for value in graph.inputs if value.shape and value.shape[0] == count)
                rows = ir.node("Shape", [next(given, tokens)], attributes={"start": 0, "end": 1})
                rest = ir.node("Shape", [table], attributes={"start": 1})
                shape = ir.node("Concat", [rows.outputs[0], rest.outputs[0]], attributes={"axis": 0})
                expand = ir.node("Expand", [table, shape.outputs[0]])
                insert_before(node, [rows, rest, shape, expand])
                expanded = expand.outputs[0]
                if node.graph is graph:
                    known[table, size] = expanded
            node.replace_input_with(place, expanded)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, if it is the ONNX operator ``op_type``; else ``None``."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def only_reader(value: ir.Value, op_type: str | None = None) -> ir.Node | None:
    """Return the only node that reads a value, if it reads the value as first input; else ``None``."""
    # op_type: the operator of the node; `None` for any operator
    # the caller also reads outputs of the graph
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node, index = uses[0]
    return node if index == 0 and op_type in (None, node.op_type) else None


def number_of(value: ir.Value | None) -> float | None:
    """Return the value of a constant with one element; ``None`` for all other values."""
    constant = None if value is None else value.const_value
    if constant is None or constant.size != 1:
        return None
    found: float = constant.numpy().reshape(()).item()
    return found


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace a value by another one for all readers and graph outputs; the new value gets the old name."""
    new.shape, new.type = old.shape, old.type
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    # names in a file are unique, and callers read outputs by name
    old.name, new.name = f"{name}_before", name
