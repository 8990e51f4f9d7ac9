"""Multiply in 8 bits with one scale for each token, and one for each output of a matrix.

.. code-block:: text

    x ── Mul(1 / s) ──┬── Abs ── ReduceMax ── largest ─────────────────────────────┐
                      └── Div by it ── QuantizeLinear ── MatMulIntegerToFloat ── Mul ──> y
                                                         integers of W * s, scales

Blocks with a scale each are summed one by one; a whole row of integers is one sum, and many tokens take half the time.
But a few channels are much larger than the others, and decide the scale of their token. So each channel is divided by
a number, and its weights are multiplied with it (SmoothQuant, Xiao et al. 2022): large channels become smaller, and
their weights larger.

Weights have 7 bits. Without instructions for it (VNNI), x86-64 adds two products in 16 bits, which holds
2 * 255 * 64 and not 2 * 255 * 127: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ..quantization.options import Quantization
from ..quantization.text_cases import rounding_calls
from ..source import Source
from .file import UnprovenFile
from .quantize import QuantizedWeights, products_of
from .rounding.error_feedback import round_with_feedback
from .rounding.input_moments import input_moments
from .stored_matrix import new_value
from .weights import unmap

if TYPE_CHECKING:
    import onnx_ir as ir

_BITS = 7

_ALPHA = 0.6
"""How much of a channel's size its weights take over. Of embeddings of all-MiniLM-L6-v2 0.5 to 0.7 differ by 1e-4."""

_LEAST = 1e-12  # what a token of zeros is divided by

_STEPS, _MIDDLE = 127, 128  # of a number, which is stored in 8 bits without a sign


@dataclasses.dataclass
class _Group:
    """Matrices that multiply the same inputs, which are divided by the same numbers."""

    nodes: list[Any] = dataclasses.field(default_factory=list)
    weights: dict[tuple[str, bool], Any] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    moments: torch.Tensor | None = None  # of the inputs that were read, summed

    def add(self, other: _Group) -> None:
        """Add the members of another group."""
        self.nodes += other.nodes
        self.weights |= other.weights
        self.inputs |= other.inputs


def products_by_token(
    file: UnprovenFile, model: ir.Model, quantization: Quantization, source: Source
) -> QuantizedWeights:
    """Replace the products of a model in place; those whose weights something else reads stay. The block must be open.

    Channels are divided, and weights rounded, by the text that the quantization has; without one neither is.
    """
    # file: the file of the model, in float
    found = QuantizedWeights()
    groups = _grouped(products_of(model, quantization))
    for group in _with_moments(groups, file, model.graph, quantization, source):
        _replace(group, model, found)
    return found


def _grouped(products: list[tuple[Any, tuple[Any, bool]]]) -> list[_Group]:
    """Join the products that have inputs or weights in common: layers can share their weights (ALBERT)."""
    groups: list[_Group] = []
    products = [(node, weight) for node, weight in products if weight[0].uses() and _is_own(weight[0])]
    for node, (value, transposed) in products:
        x = node.inputs[0]
        joined = _Group([node], {(value.name, transposed): value}, {x.name: x})
        for group in [one for one in groups if one.weights.keys() & joined.weights or x.name in one.inputs]:
            joined.add(group)
            groups.remove(group)
        groups.append(joined)
    return groups


def _is_own(value: Any) -> bool:
    """Whether only products read a weight, as it is or turned; a tied table is also read by the embedding."""
    readers = [use.node.op_type for use in value.uses()]
    return set(readers) <= {"MatMul", "Gemm"} or readers == ["Transpose"]


def _with_moments(
    groups: list[_Group], file: UnprovenFile, graph: ir.Graph, quantization: Quantization, source: Source
) -> Iterator[_Group]:
    """Yield all groups, those first whose inputs a text shows."""
    calls = rounding_calls(source.example, quantization)
    names = {name: group for group in groups for name in group.inputs}
    sizes = {
        name: _rows(group)
        for name, group in names.items()
        # what a product in a loop or a branch reads cannot be shown
        if group.inputs[name].producer() is not None and group.inputs[name].producer().graph is graph
    }
    done: list[_Group] = []
    if calls is not None and sizes:
        missing = dict.fromkeys(sizes)
        for name, moments in input_moments(file, sizes, calls.cases, source.example.names, calls.tokens):
            group = names[name]
            group.moments = moments if group.moments is None else group.moments + moments
            del missing[name]
            if not missing.keys() & group.inputs:
                done.append(group)
                yield group
                group.moments = None
    yield from (group for group in groups if group not in done)


def _rows(group: _Group) -> int:
    """The number of inputs of its matrices."""
    (_, transposed), value = next(iter(group.weights.items()))
    return int(value.const_value.shape[1 if transposed else 0])


def _replace(group: _Group, model: ir.Model, found: QuantizedWeights) -> None:
    """Replace the products of a group."""
    weights = {key: _read(value, key[1]) for key, value in group.weights.items()}
    channels, moments = torch.ones(_rows(group)), group.moments
    if moments is None:
        moments = torch.eye(len(channels))  # to nearest
    else:
        channels = _channels(moments, [one.abs().amax(1) for one in weights.values()])
        moments = moments / channels[:, None] / channels
    graph, stored = model.graph, {}
    for (name, transposed), weight in weights.items():
        grid = round_with_feedback(weight * channels[:, None], moments, len(channels), torch.float32, _BITS)
        numbers = grid.numbers.reshape(len(grid.numbers), -1).T.astype(numpy.int16) - grid.middle
        parts = numpy.ascontiguousarray(numbers.astype(numpy.int8)), grid.scales[:, 0]
        stem, value = f"{name}{'_T' if transposed else ''}", group.weights[name, transposed]
        stored[name, transposed] = [
            _constant(graph, f"{stem}_{kind}", part) for kind, part in zip(("Q8", "scales"), parts, strict=True)
        ]
        found.add(value, sum(part.nbytes for part in parts))
        found.blocks[0] = found.blocks.get(0, 0) + numbers.size
        found.by_token += 1
    divided: dict[Any, Any] = {}
    for node in group.nodes:
        value, transposed = _weight_of(node, group)
        made = _divided(node, channels, graph, divided)
        _put(node, made, divided[node.graph, node.inputs[0]], stored[value.name, transposed], graph)
    for (name, _), value in group.weights.items():
        if not value.uses() and name in graph.initializers:
            del graph.initializers[name]


def _weight_of(node: Any, group: _Group) -> tuple[Any, bool]:
    value = node.inputs[1]
    before = value.producer()
    value = value if before is None else before.inputs[0]
    return next((found, key[1]) for key, found in group.weights.items() if found is value)


def _read(value: Any, transposed: bool) -> torch.Tensor:
    """A matrix of shape (inputs, outputs)."""
    array = value.const_value.numpy()
    matrix = torch.from_numpy(numpy.array(array.T if transposed else array))
    del array
    unmap(value.const_value)
    return matrix


def _channels(moments: torch.Tensor, sizes: list[torch.Tensor]) -> torch.Tensor:
    """Divisors of the channels, of geometric mean 1."""
    # sizes: largest weight of each channel in each matrix
    inputs, weights = moments.diagonal().sqrt(), torch.stack(sizes).amax(0)
    least = [one.max().clamp(min=1e-30) * 1e-5 for one in (inputs, weights)]
    logs = _ALPHA * inputs.clamp(min=least[0]).log() - (1 - _ALPHA) * weights.clamp(min=least[1]).log()
    return (logs - logs.mean()).exp()


def _constant(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    import onnx_ir as ir

    known = graph.initializers.get(name)
    found: ir.Value = new_value(graph, name, ir.tensor(array)) if known is None else known
    return found


def _divided(node: Any, channels: torch.Tensor, graph: ir.Graph, known: dict[Any, Any]) -> list[ir.Node]:
    """The nodes that make integers of inputs, and the largest number of each token; none where they are there."""
    import onnx_ir as ir

    x = node.inputs[0]
    if (node.graph, x) in known:
        return []
    made = []
    if not bool((channels == 1).all()):
        by = _constant(graph, f"{x.name}_channels", channels.reciprocal().numpy())
        made.append(ir.node("Mul", [x, by]))
    smooth = made[-1].outputs[0] if made else x
    last = _constant(graph, "last_axis", numpy.array([-1], numpy.int64))
    least = _constant(graph, "least_of_a_token", numpy.float32(_LEAST))
    size = ir.node("Abs", [smooth])
    largest = ir.node("ReduceMax", [size.outputs[0], last], {"keepdims": 1})
    positive = ir.node("Max", [largest.outputs[0], least])
    parts = ir.node("Div", [smooth, positive.outputs[0]])
    whole = ir.node("QuantizeLinear", [parts.outputs[0], *_steps(graph)])
    known[node.graph, x] = whole.outputs[0], positive.outputs[0]
    return [*made, size, largest, positive, parts, whole]


def _steps(graph: ir.Graph) -> list[ir.Value]:
    """The step of what is multiplied, and the number that stands for 0."""
    numbers = {"step_of_a_token": numpy.float32(1 / _STEPS), "zero_of_a_token": numpy.uint8(_MIDDLE)}
    return [_constant(graph, name, number) for name, number in numbers.items()]


def _put(node: Any, made: list[ir.Node], inputs: tuple[Any, Any], stored: list[Any], graph: ir.Graph) -> None:
    """Replace a product by one of integers."""
    import onnx_ir as ir

    (whole, largest), (numbers, scales) = inputs, stored
    step, zero = _steps(graph)
    given, output = [whole, numbers, step, scales, zero], node.outputs[0]
    product = ir.node("MatMulIntegerToFloat", given, domain="com.microsoft", name=node.name)
    made = [*made, product, ir.node("Mul", [product.outputs[0], largest])]
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
    before = node.inputs[1].producer()
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [made[-1].outputs[0]])
    if before is not None and not before.outputs[0].uses():
        before.graph.remove(before, safe=True)
