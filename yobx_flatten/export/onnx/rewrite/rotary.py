"""Replace the rotation of queries and keys by one ``RotaryEmbedding`` operator.

.. code-block:: text

    MatMul ── Split ──┬── RotaryEmbedding ──┬── GroupQueryAttention
                      ├── RotaryEmbedding ──┤
                      └─────────────────────┘

    MatMul ── RotaryEmbedding (each head a token, those of values by an angle of 0) ── GroupQueryAttention

``GroupQueryAttention`` takes all three in one piece. It could rotate them itself, but in a first call it gives every
row of the batch the positions of the first one (onnxruntime 1.31, CPU), which is wrong where rows are padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .repair import attribute, input_of

if TYPE_CHECKING:
    import onnx_ir as ir


def rotate_together(model: ir.Model) -> None:
    """Rotate what one product made for a ``GroupQueryAttention`` in one piece, in place."""
    import onnx_ir.passes.common as passes

    tables = _Tables(model.graph)
    changed = [_rotate(node, tables) for node in list(model.graph) if node.op_type == "GroupQueryAttention"]
    if any(changed):
        model.graph.sort()
        passes.RemoveUnusedNodesPass()(model)


def _rotate(node: ir.Node, tables: _Tables) -> bool:
    queries, keys = (_rotation(value) for value in node.inputs[:2])
    if queries is None or keys is None:
        return False
    interleaved = attribute(queries, "interleaved", 0)
    # one rotation for both has one table of angles
    if list(queries.inputs[1:]) != list(keys.inputs[1:]) or interleaved != attribute(keys, "interleaved", 0):
        return False
    heads, kv_heads = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0)
    split = input_of(queries, 0).producer()
    # the three in this order are what the operator takes as one
    if split is None or list(split.outputs) != [queries.inputs[0], keys.inputs[0], node.inputs[2]]:
        return False
    widths = [value.shape[2] for value in split.outputs if value.shape is not None and len(value.shape) == 3]
    size = widths[0] // heads if widths and isinstance(widths[0], int) else 0
    if split.op_type != "Split" or not size or widths != [heads * size, kv_heads * size, kv_heads * size]:
        return False
    make = tables.make
    # each head as a token of its own, since a row of angles is for one token
    apart = make("Reshape", split.inputs[0], tables.shape(size))
    given = tables.of(input_of(queries, 1), input_of(queries, 2), heads + kv_heads, kv_heads, size)
    turned = make("RotaryEmbedding", apart, *given, num_heads=1, interleaved=interleaved)
    joined = make("Reshape", turned, tables.shape((heads + 2 * kv_heads) * size))
    # without keys and values the operator splits the queries itself
    for place, value in enumerate((joined, None, None)):
        node.replace_input_with(place, value)
    return True


def _rotation(value: ir.Value | None) -> ir.Node | None:
    """The ``RotaryEmbedding`` of all elements of each head that makes a value."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "RotaryEmbedding" or node.domain != "" or node.inputs[3:]:
        return None
    # a head of which a part is turned has columns of another kind
    return None if attribute(node, "rotary_embedding_dim", 0) else node


class _Tables:
    """Cosines and sines for each head of each token, made once for all layers."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[ir.Value, ir.Value, int, int], list[ir.Value]] = {}
        self._shapes: dict[int, ir.Value] = {}

    def of(self, cosines: ir.Value, sines: ir.Value, turned: int, kept: int, size: int) -> list[ir.Value]:
        """Return both, of shape (batch, tokens * heads, size / 2)."""
        key = cosines, sines, turned, kept
        if key not in self._known:
            import numpy
            import onnx_ir as ir

            # an angle of 0 (cosine 1, sine 0) leaves values as they are
            stays = ir.tensor(numpy.arange(turned + kept)[:, None] >= turned)
            axis = self.make("Constant", value_ints=[2])
            made = []
            for table, number in ((cosines, 1), (sines, 0)):
                constant = self.make("Constant", value_float=float(number))
                each = self.make("Unsqueeze", table, axis)
                like = self.make("CastLike", constant, table)
                chosen = self.make("Where", self.make("Constant", value=stays), like, each)
                made.append(self.make("Reshape", chosen, self.shape(size // 2)))
            self._known[key] = made
        return self._known[key]

    def shape(self, width: int) -> ir.Value:
        """Return (batch, as many as there are, width) for a ``Reshape``."""
        if width not in self._shapes:
            self._shapes[width] = self.make("Constant", value_ints=[0, -1, width])
        return self._shapes[width]

    def make(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add an operator; return its output."""
        import onnx_ir as ir

        node = ir.node(op_type, inputs, attributes)
        self._graph.append(node)
        return node.outputs[0]
