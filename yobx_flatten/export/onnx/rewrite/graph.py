"""Read and change nodes of an ONNX graph; repair errors of torch's exporter, and simplify the graph."""

from __future__ import annotations

import functools
import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy

from ....huggingface.cache_names import CACHE
from ....registry.patches import AttributePatch
from ....runners.ports import KEPT_SCORES, is_present
from ....trace.onnx_repairs import ir, passes

if TYPE_CHECKING:
    from onnxscript.rewriter import RewriteRule


class Nodes(list["ir.Node"]):
    """New ONNX nodes, in order, that are not part of a graph yet."""

    def add(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", name: str | None = None, **attributes: Any
    ) -> ir.Value:
        self.append(ir.node(op_type, inputs, attributes, domain=domain, name=name))
        return self[-1].outputs[0]

    def reshape(self, value: ir.Value | None, *shape: int) -> ir.Value:
        return self.add("Reshape", value, self.add("Constant", value_ints=list(shape)))


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    found = node.attributes.get(name)
    return default if found is None else found.value


def input_of(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    if value is None:
        raise ValueError(f"the {node.op_type} node {node.name} has no input {place}")
    return value


def type_of(value: ir.Value) -> ir.DataType:
    if value.dtype is None:
        raise ValueError(f"the dtype of the ONNX value {value.name} is not known")
    return value.dtype


def text_of_size(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def copy_type(value: ir.Value, like: ir.Value) -> None:
    if like.dtype is not None:
        value.dtype = like.dtype  # not `type`: both values would then share one mutable object


def sizes_of(tensor: ir.TensorProtocol) -> list[int]:
    return [size for size in tensor.shape if isinstance(size, int)]


def insert_before(node: ir.Node, made: list[ir.Node]) -> None:
    if node.graph is None:
        raise ValueError(f"the {node.op_type} node {node.name} does not belong to a graph")
    node.graph.insert_before(node, made)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, if the node has the operator ``op_type``; else ``None``."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def only_reader(value: ir.Value, op_type: str | None = None) -> ir.Node | None:
    """Return the only node that reads a value, if the value is the first input of this node; else ``None``."""
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
    """Replace a value by a new value for all consumers and graph outputs; the new value gets the old value's name."""
    new.shape, new.type = old.shape, old.type
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    # names in a file are unique, and callers read outputs by name
    old.name, new.name = f"{name}_before", name


def repair_graph(model: ir.Model) -> None:
    # rename intermediate values that have the name of a graph input or output, such as `relu`
    graph = model.graph
    given = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    computed = (value for node in graph.all_nodes() for value in node.outputs)
    values = [*graph.inputs, *graph.initializers.values(), *computed]
    taken = {value.name for value in values} | set(given)
    for value in values:
        if given.get(value.name, value) is not value:
            numbered = (f"{value.name}_{number}" for number in itertools.count(1))
            value.name = next(name for name in numbered if name not in taken)
            taken.add(value.name)
    for node in list(graph.all_nodes()):
        if node.op_type == "RMSNormalization" and node.domain in ("", "ai.onnx"):
            tokens, weights = input_of(node, 0), input_of(node, 1)
            if tokens.dtype is not None and weights.dtype is not None and tokens.dtype != weights.dtype:
                # onnxruntime refuses different types (half precision with weights in float32, Gemma); the type of the
                # weights is also the type of the output
                cast = ir.node("Cast", [tokens], attributes={"to": int(weights.dtype)})
                cast.outputs[0].dtype, cast.outputs[0].shape = weights.dtype, tokens.shape
                insert_before(node, [cast])
                node.replace_input_with(0, cast.outputs[0])
    if any(_rotates(node) for node in graph.all_nodes()):
        passes.CommonSubexpressionEliminationPass()(model)  # each operator has its own cosines and sines
    # expand cosines and sines to the batch size of the tokens, since onnxruntime refuses different batch sizes
    known: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in [node for node in graph.all_nodes() if _rotates(node)]:
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
                alike = (value for value in graph.inputs if value.shape and value.shape[0] == count)
                made = Nodes()
                rows = made.add("Shape", next(alike, tokens), start=0, end=1)
                shape = made.add("Concat", rows, made.add("Shape", table, start=1), axis=0)
                expanded = made.add("Expand", table, shape)
                insert_before(node, made)
                if node.graph is graph:
                    known[table, size] = expanded
            node.replace_input_with(place, expanded)


def _rotates(node: ir.Node) -> bool:
    """Return whether a node is a ``RotaryEmbedding`` without position ids, whose cosines have a batch axis."""
    if node.op_type != "RotaryEmbedding" or node.domain not in ("", "ai.onnx"):
        return False
    return len(node.inputs) < 4 or node.inputs[3] is None


def optimize_graph(model: ir.Model) -> None:
    """Fold constants, apply onnxscript's rewrite rules and fusions, and remove unused and duplicate nodes, in place."""
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    with _quick_rules():
        optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)


@functools.cache
def _quick_rules() -> AbstractContextManager[None]:
    """Return a context manager in which onnxscript tries each rewrite rule only at nodes with the rule's operator."""
    # `optimize_ir` tries 47 rules at each node, and a rule with two outputs lists all nodes of the graph each time: its
    # time grows with the square of the number of layers. A rule can match only at the last operator of its pattern.
    from onnxscript import rewriter

    name = "_DEFAULT_REWRITE_RULES"
    if name not in vars(rewriter):
        return nullcontext()  # another release of onnxscript
    return AttributePatch(rewriter, name, tuple(_RuleOfOperator(rule) for rule in vars(rewriter)[name]))


class _RuleOfOperator:
    def __init__(self, rule: RewriteRule) -> None:
        self._rule = rule
        operator = getattr(rule._matcher.pattern.output_nodes[0].op, "value", None)
        self._operator = operator() if callable(operator) else None  # None: a pattern for several operators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, **options: Any) -> Any:
        if self._operator is not None and node.op_type != self._operator:
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


# operators that may be between a projection and the attention, with the projection's output as first input
_BETWEEN = ("RotaryEmbedding", "RMSNormalization", "Reshape", "Transpose", "Add")


def join_projections(model: ir.Model) -> None:
    """Join the matrix products that compute queries, keys and values, because one product is faster when decoding."""
    for node in list(model.graph):
        if node.op_type in ("Attention", "GroupQueryAttention"):
            products = [made for value in node.inputs[:3] if (made := _product(value)) is not None]
            sources = {id(one.inputs[0]) for one in products}
            types = {input_of(one, 1).dtype for one in products}
            # a matrix with another reader would be stored twice
            unshared = all(len(list(input_of(one, 1).uses())) == 1 for one in products)
            if len({id(one) for one in products}) == 3 and len(sources) == len(types) == 1 and unshared:
                _join(model.graph, products)


def _product(value: ir.Value | None) -> ir.Node | None:
    """Return the projection (a ``MatMul`` with a weight) from which ``value`` is computed, or ``None``."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _BETWEEN:
        node = input_of(node, 0).producer()
    if node is None or node.op_type != "MatMul" or not input_of(node, 1).is_initializer():
        return None
    matrix = input_of(node, 1).const_value
    return node if matrix is not None and len(matrix.shape) == 2 else None


def _join(graph: ir.Graph, products: list[ir.Node]) -> None:
    unused = [input_of(one, 1) for one in products]
    matrices = [matrix for value in unused if (matrix := value.const_value) is not None]
    rows, widths = sizes_of(matrices[0])[0], [sizes_of(matrix)[1] for matrix in matrices]
    name = f"{unused[0].name}_joined"

    def joined() -> ir.TensorProtocol:
        return ir.tensor(numpy.concatenate([matrix.numpy() for matrix in matrices], axis=1))

    # computed when the file is written, so that no matrix is in memory twice
    tensor = ir.LazyTensor(joined, dtype=matrices[0].dtype, shape=ir.Shape([rows, sum(widths)]), name=name)
    joint = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(joint)
    made = Nodes()
    product = made.add("MatMul", products[0].inputs[0], joint)
    made[0].metadata_props.update(products[0].metadata_props)  # the name of the layer
    split = ir.node("Split", [product, made.add("Constant", value_ints=widths)], {"axis": -1}, num_outputs=3)
    graph.insert_before(min(products, key=list(graph).index), [*made, split])
    for old, new in zip(products, split.outputs, strict=True):
        new.shape, new.type = old.outputs[0].shape, old.outputs[0].type
        old.outputs[0].replace_all_uses_with(new)
    graph.remove(products, safe=True)
    for value in unused:
        graph.initializers.pop(str(value.name), None)


# elementwise operators that may be between the head and the logits
_ON_THE_WAY = ("Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Identity")
_AXIS = "kept_sequence_length"


def keep_last_scores(model: ir.Model) -> None:
    """Add, in place, an optional graph input: the number of last positions for which a decoder returns logits."""
    # The decoder of an encoder-decoder model reads few tokens at the start, so its file gets no such input. A file that
    # does not return its cache (`loop=False`) scores texts, and needs all logits.
    graph = model.graph
    scores = next((value for value in graph.outputs if value.name == "logits"), None)
    names = [str(value.name) for value in graph.inputs]
    generates = any(is_present(str(value.name)) for value in graph.outputs)
    takes_cache = any(name.startswith(f"{CACHE}.") for name in names)
    if scores is None or not generates or not takes_cache or any("encoder" in name for name in names):
        return
    path = _path_to_head(scores)
    if not path:
        return
    hidden = input_of(path[-1], 0)
    none = ir.tensor(numpy.array(0, dtype=numpy.int64), name=KEPT_SCORES)
    kept = ir.Value(name=KEPT_SCORES, type=ir.TensorType(none.dtype), shape=ir.Shape([]), const_value=none)
    graph.inputs.append(kept)
    graph.register_initializer(kept)
    made = Nodes()
    zero, end, axis = (made.add("Constant", value_ints=[number]) for number in (0, 2**63 - 1, 1))
    start = made.add("Unsqueeze", made.add("Neg", kept), zero)
    cut = made.add("Slice", hidden, start, end, axis, name="last_scores")
    graph.insert_before(path[-1], made)
    cut.type, cut.shape = ir.TensorType(type_of(hidden)), hidden.shape
    path[-1].replace_input_with(0, cut)
    # onnxruntime assumes that axes with the same name have the same size when it plans memory
    for value in (cut, *(node.outputs[0] for node in path)):
        assert value.shape is not None  # see `_path_to_head`
        value.shape = ir.Shape([value.shape[0], _AXIS, *value.shape[2:]])


def _path_to_head(scores: ir.Value) -> list[ir.Node]:
    """Return the nodes from the logits back to the LM head's ``MatMul``; no nodes if the LM head is not found."""
    path: list[ir.Node] = []
    value: ir.Value | None = scores
    while value is not None and _is_of_tokens(value):
        node = value.producer()
        # another reader of the value would get fewer tokens
        if node is None or node.domain or (path and (len(list(value.uses())) != 1 or value.is_graph_output())):
            return []
        path.append(node)
        if node.op_type == "MatMul":
            hidden, turned = input_of(node, 0), producer(node.inputs[1], "Transpose")
            matrix = input_of(node, 1) if turned is None else input_of(turned, 0)
            is_weight = matrix.is_initializer() and matrix.shape is not None and len(matrix.shape) == 2
            return path if is_weight and hidden.dtype is not None and _is_of_tokens(hidden) else []
        others = [None if other is None else other.const_value for other in node.inputs[1:]]
        are_fixed = all(one is not None and (one.size == 1 or len(one.shape) == 1) for one in others)
        if node.op_type not in _ON_THE_WAY or not are_fixed:
            return []
        value = node.inputs[0]
    return []


def _is_of_tokens(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 3 and not isinstance(value.shape[1], int)
