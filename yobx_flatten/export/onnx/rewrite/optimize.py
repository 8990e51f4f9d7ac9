"""Simplify a converted graph with onnxscript's passes, and try each rewrite rule where it can match.

``onnxscript.optimizer.optimize_ir`` tries each of its 47 rules at each node, and a rule with two outputs lists all
nodes of the graph each time: the time grows with the square of the number of layers. A rule can match only at the
operator that its pattern ends with, so each rule is tried only at nodes of this operator. The resulting graph is the
same.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ....huggingface.cache_names import CACHE
from ....registry.patches import AttributePatch
from ....runners.ports import KEPT_SCORES, is_present
from .repair import input_of, producer, sizes_of, type_of

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxscript.rewriter import RewriteRule


def optimize_graph(model: ir.Model) -> None:
    """Fold constants, apply onnxscript's rewrite rules and fusions, and remove unused and duplicate nodes, in place."""
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    with _quick_rules():
        optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)


@functools.cache
def _quick_rules() -> AbstractContextManager[None]:
    """Return a ``with`` block in which onnxscript tries each rule only at nodes of its operator."""
    from onnxscript import rewriter

    name = "_DEFAULT_REWRITE_RULES"
    if name not in vars(rewriter):
        return nullcontext()  # another release of onnxscript
    return AttributePatch(rewriter, name, tuple(_RuleOfOperator(rule) for rule in vars(rewriter)[name]))


class _RuleOfOperator:
    """A rewrite rule of onnxscript that is tried at nodes of one operator."""

    def __init__(self, rule: RewriteRule) -> None:
        self._rule = rule
        operator = getattr(rule._matcher.pattern.output_nodes[0].op, "value", None)
        self._operator = operator() if callable(operator) else None  # None: a pattern for several operators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, **options: Any) -> Any:
        """Return the rule's replacement for a node; ``None`` if the rule does not match."""
        if self._operator is not None and node.op_type != self._operator:
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


# operators that may be between a projection and the attention, with the projection's output as first input
_BETWEEN = ("RotaryEmbedding", "RMSNormalization", "Reshape", "Transpose", "Add")


def join_projections(model: ir.Model) -> None:
    """Join the projections for queries, keys and values to one product, in place; this is faster for one token."""
    for node in list(model.graph):
        if node.op_type in ("Attention", "GroupQueryAttention"):
            products = [made for value in node.inputs[:3] if (made := _product(value)) is not None]
            if _same_input(products):
                _join(model.graph, products)


def _product(value: ir.Value | None) -> ir.Node | None:
    """Return the ``MatMul`` with a weight whose output a value is, possibly reshaped; ``None`` if there is none."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _BETWEEN:
        node = input_of(node, 0).producer()
    if node is None or node.op_type != "MatMul" or not input_of(node, 1).is_initializer():
        return None
    matrix = input_of(node, 1).const_value
    return node if matrix is not None and len(matrix.shape) == 2 else None


def _same_input(products: list[ir.Node]) -> bool:
    sources, types = ({id(one.inputs[0]) for one in products}, {input_of(one, 1).dtype for one in products})
    # a matrix with another reader would be stored twice
    unshared = all(len(list(input_of(one, 1).uses())) == 1 for one in products)
    return len({id(one) for one in products}) == 3 and len(sources) == len(types) == 1 and unshared


def _join(graph: ir.Graph, products: list[ir.Node]) -> None:
    import numpy
    import onnx_ir as ir

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
    product = ir.node("MatMul", [products[0].inputs[0], joint])
    product.metadata_props.update(products[0].metadata_props)  # the name of the layer
    sizes = ir.node("Constant", [], {"value_ints": widths})
    split = ir.node("Split", [product.outputs[0], sizes.outputs[0]], {"axis": -1}, num_outputs=3)
    first = min(products, key=list(graph).index)
    graph.insert_before(first, [product, sizes, split])
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
    """Add an optional input that limits the logits of a decoder to the last positions, in place.

    The decoder of an encoder-decoder model reads few tokens at the start, so its file gets no such input. A file that
    does not return its cache (``loop=False``) scores texts, and needs all logits.
    """
    import numpy
    import onnx_ir as ir

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
    numbers = {"zero": [0], "end": [2**63 - 1], "axis": [1]}
    given = {name: ir.node("Constant", [], {"value_ints": value}) for name, value in numbers.items()}
    zero, end, axis = (node.outputs[0] for node in given.values())
    from_end = ir.node("Neg", [kept])
    start = ir.node("Unsqueeze", [from_end.outputs[0], zero])
    cut = ir.node("Slice", [hidden, start.outputs[0], end, axis], name="last_scores")
    graph.insert_before(path[-1], [*given.values(), from_end, start, cut])
    cut.outputs[0].type, cut.outputs[0].shape = ir.TensorType(type_of(hidden)), hidden.shape
    path[-1].replace_input_with(0, cut.outputs[0])
    # onnxruntime assumes that axes with the same name have the same size when it plans memory
    for value in (cut.outputs[0], *(node.outputs[0] for node in path)):
        assert value.shape is not None  # see `_path_to_head`
        value.shape = ir.Shape([value.shape[0], _AXIS, *value.shape[2:]])


def _path_to_head(scores: ir.Value) -> list[ir.Node]:
    """Return the nodes from the logits (batch, tokens, vocabulary) back to the head; none if there is no head."""
    path: list[ir.Node] = []
    value: ir.Value | None = scores
    while value is not None and _is_of_tokens(value):
        node = value.producer()
        # another reader of the value would get fewer tokens
        if node is None or node.domain or (path and (len(list(value.uses())) != 1 or value.is_graph_output())):
            return []
        path.append(node)
        if node.op_type == "MatMul":
            hidden = input_of(node, 0)
            is_matrix = _is_weight(input_of(node, 1)) and hidden.dtype is not None
            return path if is_matrix and _is_of_tokens(hidden) else []
        if node.op_type not in _ON_THE_WAY or not all(_is_fixed(other) for other in node.inputs[1:]):
            return []
        value = node.inputs[0]
    return []


def _is_of_tokens(value: ir.Value) -> bool:
    """Return whether a value has a row for each token of a call."""
    return value.shape is not None and len(value.shape) == 3 and not isinstance(value.shape[1], int)


def _is_weight(value: ir.Value) -> bool:
    turned = producer(value, "Transpose")
    found = value if turned is None else input_of(turned, 0)
    return found.is_initializer() and found.shape is not None and len(found.shape) == 2


def _is_fixed(value: ir.Value | None) -> bool:
    """Return whether a value is a constant number or vector."""
    constant = None if value is None else value.const_value
    return constant is not None and (constant.size == 1 or len(constant.shape) == 1)
