"""Merge the three projections of an attention into one product, which is faster for one token.

.. code-block:: text

    hidden ──┬── MatMul (576, 576) ── queries            hidden ── MatMul (576, 960) ── Split ──┬── queries
             ├── MatMul (576, 192) ── keys                                                      ├── keys
             └── MatMul (576, 192) ── values                                                    └── values
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .repair import input_of, sizes_of

if TYPE_CHECKING:
    import onnx_ir as ir

# what may be between a product and the attention, with the product's rows as its first input
_BETWEEN = ("RotaryEmbedding", "RMSNormalization", "Reshape", "Transpose", "Add")


def join_projections(model: ir.Model) -> None:
    """Join the products that make queries, keys and values of the same input, in place."""
    for node in list(model.graph):
        if node.op_type in ("Attention", "GroupQueryAttention"):
            products = [made for value in node.inputs[:3] if (made := _product(value)) is not None]
            if _same_input(products):
                _join(model.graph, products)


def _product(value: ir.Value | None) -> ir.Node | None:
    """The product with a matrix of the file that a value is made of."""
    node = None if value is None else value.producer()
    # biases, norms and rotations work on what comes out of the Split as they did on the product
    while node is not None and node.op_type in _BETWEEN:
        node = input_of(node, 0).producer()
    if node is None or node.op_type != "MatMul" or not input_of(node, 1).is_initializer():
        return None
    matrix = input_of(node, 1).const_value
    return node if matrix is not None and len(matrix.shape) == 2 else None


def _same_input(products: list[ir.Node]) -> bool:
    sources, types = ({id(one.inputs[0]) for one in products}, {input_of(one, 1).dtype for one in products})
    # a matrix that something else reads stays in the file, and would be there twice
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

    # made when it is written, so that no matrix is in memory twice
    tensor = ir.LazyTensor(joined, dtype=matrices[0].dtype, shape=ir.Shape([rows, sum(widths)]), name=name)
    joint = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(joint)
    product = ir.node("MatMul", [products[0].inputs[0], joint])
    product.metadata_props.update(products[0].metadata_props)  # which layer it is of
    sizes = ir.node("Constant", [], {"value_ints": widths})
    split = ir.node("Split", [product.outputs[0], sizes.outputs[0]], {"axis": -1}, num_outputs=3)
    # before all of their readers
    first = min(products, key=list(graph).index)
    graph.insert_before(first, [product, sizes, split])
    for old, new in zip(products, split.outputs, strict=True):
        new.shape, new.type = old.outputs[0].shape, old.outputs[0].type
        old.outputs[0].replace_all_uses_with(new)
    graph.remove(products, safe=True)
    # the matrices are in the joint one: a file would hold them twice
    for value in unused:
        graph.initializers.pop(str(value.name), None)
