"""Store the weights of projections in 8 or 4 bits: blocks of numbers with a scale and a zero point each.

.. code-block:: text

    x ── MatMul(x, W) ──> y      becomes      x ── MatMulNBits(x, bits of W, scales, zero points) ──> y
         4 bytes per weight                        block of 32 in 8 bits: 1.16, in 4 bits: 0.64 bytes per weight
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

from ..errors import InvalidArgumentError
from .bit_budget import Bits, Role
from .onnx_graph import attribute
from .onnx_weights import unmap
from .quantization import Quantization
from .quantized_table import share_table
from .report import ExportReport

__all__ = ["QuantizedWeights", "quantize_graph", "quantize_model", "remark_quantized"]


_INTEGERS = 4
"""The ``accuracy_level`` at which onnxruntime also rounds activations to 8 bits, in blocks, and multiplies integers.
Without it, 8 bits have no kernel of their own on the CPU and are 15 times slower."""


@dataclasses.dataclass
class QuantizedWeights:
    """What was stored in fewer bits.

    Attributes:
        count: number of weights, each of which is one matrix.
        float_bytes: their size before.
        bytes: their size with scales and zero points.
        tied: names of those that the file also has in full, since something else reads them.
        shared: names of those that an embedding also reads in these bits.
        roles: the weights by role, see :mod:`.bit_budget`.
    """

    count: int = 0
    float_bytes: int = 0
    bytes: int = 0
    tied: list[str] = dataclasses.field(default_factory=list)
    shared: list[str] = dataclasses.field(default_factory=list)
    roles: dict[str, Role] = dataclasses.field(default_factory=dict)


def quantize_graph(model: Any, quantization: Quantization, bits: Bits | None = None) -> QuantizedWeights:
    """Quantize the weights of all projections of a graph in place, one after the other, when they are written.

    Args:
        model: an ``onnx_ir.Model``.
        quantization: how.
        bits: bits by role, where these are others than those of the quantization; ``None``, the default, for nowhere.

    Returns:
        What was done; ``count`` is 0 where there was nothing to do.
    """
    found, made = QuantizedWeights(), {width: _Parts(_in_bits(quantization, width)) for width in (4, 8)}
    stored: dict[tuple[str, bool], list[Any]] = {}
    read: dict[str, tuple[Any, bool, Quantization]] = {}
    nodes = [
        (node, weight) for node in model.graph.all_nodes() if (weight := _weight_of(node, quantization.block_size))
    ]
    for node, (value, transposed) in nodes:
        key, name = (value.name, transposed), _role_of(node, value)
        if key not in stored:
            before = found.roles.get(name, Role(name, 0, 0, False))
            size, is_last = before.size + math.prod(value.const_value.shape), before.is_last or node is nodes[-1][0]
            found.roles[name] = Role(name, before.count + 1, size, is_last)
        width = quantization.bits if bits is None else bits.get(name, quantization.bits)
        if width not in made:
            stored.setdefault(key, [])
            continue
        own = _in_bits(quantization, width)
        if key not in stored:
            stored[key] = _quantized(model.graph, value, transposed, made[width], own)
            found.count += 1
            found.float_bytes += value.const_value.nbytes
            found.bytes += sum(part.const_value.nbytes for part in stored[key])
            read[value.name] = value, transposed, own
        _replace(node, stored[key], value, transposed, own)
    if found.count:
        model.opset_imports["com.microsoft"] = 1
    for name, (value, transposed, own) in read.items():
        if transposed and share_table(model.graph, value, stored[name, transposed], own):
            found.shared.append(name)
        if value.uses() or value.is_graph_output():
            found.tied.append(name)
        else:
            del model.graph.initializers[name]
    return found


def _in_bits(quantization: Quantization, bits: int) -> Quantization:
    return dataclasses.replace(quantization, weights="int4" if bits == 4 else "int8", perplexity_ratio=None)


def _role_of(node: Any, value: Any) -> str:
    """The name of the layer that a product is of, without the numbers of layers; else the shape of its weight."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    names = [name for name in re.findall(r"'([^']*)'", scopes)[:-1] if name]  # the last one is the operator
    if not names:
        return " x ".join(map(str, value.const_value.shape))
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", names[-1])


def quantize_model(
    model: Any, quantization: Quantization, report: ExportReport, bits: Bits | None = None
) -> QuantizedWeights:
    """Quantize the weights of a model, when they are written.

    Args:
        model: an ``onnx_ir.Model``; it is changed in place.
        quantization: how.
        report: names the model in errors.
        bits: see :func:`quantize_graph`.

    Returns:
        What was done.

    Raises:
        InvalidArgumentError: when the model multiplies with no weights.
    """
    found = quantize_graph(model, quantization, bits)
    if not found.roles:
        raise InvalidArgumentError(
            f"quantize={quantization.weights!r}: the file of {report.module} multiplies with no weights of "
            f"{quantization.block_size} or more rows and columns. Take a smaller block_size, or leave quantize out."
        )
    return found


def remark_quantized(
    found: QuantizedWeights, quantization: Quantization, report: ExportReport, bits: Bits | None = None
) -> None:
    """Note in a report what was stored how.

    Args:
        found: what was done.
        quantization: what was asked for.
        report: gets the notes.
        bits: see :func:`quantize_graph`.
    """
    report.remark(
        f"{found.count} weights are stored in {quantization.weights}"
        f"{' or more' if bits and set(bits.values()) != {quantization.bits} else ''}, {found.bytes / 1e6:.2f} MB "
        f"instead of {found.float_bytes / 1e6:.2f} MB; embeddings and norms as they are."
    )
    for width, stored in ((8, "int8"), (32, "full")):
        others = [role for role in found.roles.values() if bits and bits[role.name] == width != quantization.bits]
        if others:
            report.remark(
                f"stored in {stored}, since the perplexity asks for it: "
                + ", ".join(f"{role.name} ({role.count} of {role.size / 1e6:.3g} million weights)" for role in others)
            )
    if found.shared:
        report.remark(f"{', '.join(found.shared)} is in the file once: the embedding reads the projection's.")
    if found.tied:
        report.remark(
            f"{', '.join(found.tied)} is in the file twice, in full for the embedding and in {quantization.weights} "
            "for the projection that is tied to it."
        )


def _weight_of(node: Any, block_size: int) -> tuple[Any, bool] | None:
    """The initializer that a product multiplies with, and whether it is transposed; ``None`` where there is none."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        return None
    value, transposed = node.inputs[1], False
    if node.op_type == "Gemm":
        numbers = {name: attribute(node, name, usual) for name, usual in (("alpha", 1.0), ("beta", 1.0))}
        if set(numbers.values()) != {1.0} or attribute(node, "transA", 0):
            return None
        transposed = bool(attribute(node, "transB", 0))
    before = value.producer()
    if before is not None and before.op_type == "Transpose" and list(attribute(before, "perm", [1, 0])) == [1, 0]:
        value, transposed = before.inputs[0], not transposed
    tensor = value.const_value
    if not value.is_initializer() or tensor is None or len(tensor.shape) != 2:
        return None
    # of less than a block there is nothing to gain: gates and heads of few classes
    if min(tensor.shape) < block_size or tensor.dtype.name not in ("FLOAT", "FLOAT16"):
        return None
    return value, transposed


class _Parts:
    """The parts of one weight after the other, made when they are written; those of the last weight are kept."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._weight: Any = None
        self._parts: tuple[Any, ...] = ()

    def part(self, tensor: Any, transposed: bool, index: int) -> Any:
        """Return bits, scales or zero points of a weight."""
        import numpy
        import onnx_ir as ir

        if self._weight != (id(tensor), transposed):
            array = tensor.numpy()
            self._parts = self._quantization.quantize(numpy.ascontiguousarray(array.T if transposed else array))
            self._weight = id(tensor), transposed
            del array
            unmap(tensor)
        return ir.tensor(self._parts[index])


def _quantized(graph: Any, value: Any, transposed: bool, parts: _Parts, quantization: Quantization) -> list[Any]:
    """Return the values that take the place of a weight, quantised with onnxruntime's own kernel when they are read."""
    import onnx_ir as ir

    tensor, packed = value.const_value, 8 // quantization.bits
    columns, rows = tensor.shape if transposed else reversed(tensor.shape)
    blocks = -(-rows // quantization.block_size)
    shapes = [[columns, blocks, quantization.block_size // packed], [columns, blocks], [columns, -(-blocks // packed)]]
    types = [ir.DataType.UINT8, tensor.dtype, ir.DataType.UINT8]
    values = []
    for index, suffix in enumerate((f"_Q{quantization.bits}", "_scales", "_zero_points")):
        name, shape = f"{value.name}{'_T' if transposed else ''}{suffix}", ir.Shape(shapes[index])
        read = functools.partial(parts.part, tensor, transposed, index)
        lazy = ir.LazyTensor(read, dtype=types[index], shape=shape, name=name)
        made = ir.Value(name=name, const_value=lazy)
        made.shape, made.type = shape, ir.TensorType(types[index])
        graph.register_initializer(made)
        values.append(made)
    return values


def _replace(node: Any, parts: list[Any], value: Any, transposed: bool, quantization: Quantization) -> None:
    """Put the operator for quantised weights in the place of a product."""
    import onnx_ir as ir

    columns, rows = value.const_value.shape if transposed else reversed(value.const_value.shape)
    sizes = {"K": int(rows), "N": int(columns), "bits": quantization.bits, "block_size": quantization.block_size}
    sizes["accuracy_level"] = _INTEGERS
    output = node.outputs[0]
    product = ir.node("MatMulNBits", [node.inputs[0], *parts], sizes, domain="com.microsoft", name=node.name)
    made = [product]
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        product.outputs[0].type = output.type
        product.outputs[0].name = f"{output.name}_product"
        made.append(ir.node("Add", [product.outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
    last = made[-1].outputs[0]
    before = node.inputs[1].producer()
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [last])
    if before is not None and not before.outputs[0].uses():
        before.graph.remove(before, safe=True)
