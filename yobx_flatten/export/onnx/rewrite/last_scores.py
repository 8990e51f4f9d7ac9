"""Let a caller ask a decoder for the scores of its last tokens, by an input that has a value of its own.

.. code-block:: text

    hidden ── MatMul(head) ──> logits         hidden ── Slice(last num_logits_to_keep) ── MatMul(head) ──> logits

A prompt of 1,000 tokens needs one row of scores, and the head of a small model is a fifth of all multiplications. The
input is also an initializer, so that runtimes neither list nor ask for it: 0, its value, stands for all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....huggingface.cache_names import CACHE
from ....runners.ports import KEPT_SCORES, is_present
from .matching import producer
from .repair import input_of, type_of

if TYPE_CHECKING:
    import onnx_ir as ir

# what may be between the head and the scores: works on each score by itself, with numbers or weights of the file
_BETWEEN = ("Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Identity")
_AXIS = "kept_sequence_length"


def keep_last_scores(model: ir.Model) -> None:
    """Cut what the head of a decoder with a cache multiplies by a new input, in place; other graphs stay.

    A decoder with an encoder begins with one token or a few, so there is nothing to save. A file that does not return
    its cache (``loop=False``) scores a text, and generates none.
    """
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
    kept = _kept_scores()
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
    # onnxruntime takes axes of one name for one size, and plans memory by that
    for value in (cut.outputs[0], *(node.outputs[0] for node in path)):
        assert value.shape is not None  # see `_path_to_head`
        value.shape = ir.Shape([value.shape[0], _AXIS, *value.shape[2:]])


def _kept_scores() -> ir.Value:
    import numpy
    import onnx_ir as ir

    tensor = ir.tensor(numpy.array(0, dtype=numpy.int64), name=KEPT_SCORES)
    return ir.Value(name=KEPT_SCORES, type=ir.TensorType(tensor.dtype), shape=ir.Shape([]), const_value=tensor)


def _path_to_head(scores: ir.Value) -> list[ir.Node]:
    """The nodes from scores of shape (batch, tokens, vocabulary) back to the head; none where it is not found."""
    path: list[ir.Node] = []
    value: ir.Value | None = scores
    while value is not None and _is_of_tokens(value):
        node = value.producer()
        # something else may read what is before the last of them: it would get fewer tokens
        if node is None or node.domain or (path and (len(list(value.uses())) != 1 or value.is_graph_output())):
            return []
        path.append(node)
        if node.op_type == "MatMul":
            hidden = input_of(node, 0)
            is_matrix = _is_weight(input_of(node, 1)) and hidden.dtype is not None
            return path if is_matrix and _is_of_tokens(hidden) else []
        if node.op_type not in _BETWEEN or not all(_is_fixed(other) for other in node.inputs[1:]):
            return []
        value = node.inputs[0]
    return []


def _is_of_tokens(value: ir.Value) -> bool:
    """Whether a value has a row for each token of a call, whose number varies."""
    return value.shape is not None and len(value.shape) == 3 and not isinstance(value.shape[1], int)


def _is_weight(value: ir.Value) -> bool:
    turned = producer(value, "Transpose")
    found = value if turned is None else input_of(turned, 0)
    return found.is_initializer() and found.shape is not None and len(found.shape) == 2


def _is_fixed(value: ir.Value | None) -> bool:
    """Whether a value is a number or a vector of the file, the same for each token."""
    constant = None if value is None else value.const_value
    return constant is not None and (constant.size == 1 or len(constant.shape) == 1)
