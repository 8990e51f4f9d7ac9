"""Make an ONNX file, which cannot contain assertions, fail for input sizes that its ``ExportedProgram`` refuses.

If an asserted relation uses an operator that ONNX lacks, the file declares the sizes of the example as fixed.
"""

# asserted: 14 * (x.shape[2] // 14) == 70
#
# size = Shape(x)[2]                  not = Not(Equal(14 * (size // 14), 70))
# one = Gather([1], Cast(not))        fails if `not` is 1: [1] has no second entry
# x = Reshape(x, Shape(x) * one)      the graph reads this value instead of the input

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch

from ...core.compare import compare
from ...core.effects import undisturbed
from ...core.private_names.of_torch import pytree
from ...huggingface.cache_names import CACHE
from ...runners.signature import COMPARISONS, Expression, Signature, format_expression, holds, names_in, place_of_sizes
from ...trace.onnx_repairs import ir
from ...trees.walk import leaf_names, leaves_of
from ..example import Example
from ..proof.eager_runs import REFUSALS, Case, clone, written_parameters
from ..traced import Traced
from ..varied import arguments_with, resized_leaves
from .rewrite.graph import Nodes, copy_type, text_of_size


def refuse_sizes(model: ir.Model, signature: Signature, largest: Mapping[tuple[str, int], int]) -> list[str]:
    """Make an ONNX graph fail for input sizes that its ``ExportedProgram`` refuses; return the relations as strings."""
    # largest: upper bounds by input and axis, above which the model's code takes another branch
    # without the size of a cache, since cache memory that is shared between calls is longer than its contents
    places = {name: place for name, place in place_of_sizes(signature).items() if not place[0].startswith(CACHE)}
    inputs = {value.name: value for value in model.graph.inputs}
    refused = [
        one
        for one in signature.relations
        if isinstance(one, tuple)
        and one[0] in COMPARISONS
        and names_in(one) <= places.keys()
        # without sums of sizes, which operators that concatenate tokens check
        and not all(
            isinstance(side, str)
            or (isinstance(side, tuple) and side[0] == "+" and all(type(part) in (int, str) for part in side[1:]))
            for side in one[1:]
        )
    ]
    shown = {name: f"{given}.shape[{axis}]" for name, (given, axis) in places.items()}
    texts = [format_expression(one, shown) for one in refused]
    for name, place in places.items():
        if place in largest:
            refused.append(("==", ("min", name, largest[place]), name))
            texts.append(f"{shown[name]} <= {largest[place]}")
        if name in signature.smallest:
            refused.append(("<=", signature.smallest[name], name))
            texts.append(f"{signature.smallest[name]} <= {shown[name]}")
    by_input: dict[str, list[tuple[Expression, str]]] = {}
    for one, text in zip(refused, texts, strict=True):
        by_input.setdefault(places[min(names_in(one))][0], []).append((one, text))
    axes = {size: (inputs[given], axis) for size, (given, axis) in places.items()}
    for name, found in by_input.items():
        _guard(model.graph, inputs[name], found, axes)
    return texts


def fix_sizes(model: ir.Model, fixed: Mapping[tuple[str, int], int]) -> None:
    inputs = {value.name: value for value in model.graph.inputs}
    shapes = {name: value.shape for name, value in inputs.items() if value.shape is not None}
    sizes = {str(text_of_size(shapes[name][axis])): size for (name, axis), size in fixed.items()}
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    for value in values:
        if value.shape is not None and any(str(text_of_size(dim)) in sizes for dim in value.shape):
            value.shape = ir.Shape([sizes.get(str(text_of_size(dim)), text_of_size(dim)) for dim in value.shape])


def _guard(
    graph: ir.Graph, given: ir.Value, relations: list[tuple[Expression, str]], sizes: Mapping[str, tuple[ir.Value, int]]
) -> None:
    """Insert, between an input and its consumers, a ``Reshape`` that fails if the sizes violate a relation."""
    readers = list(given.uses())
    made = Nodes()
    add = made.add

    def number(found: Expression) -> ir.Value:
        """Add nodes that compute an expression of input sizes; return its value, int64 of shape (1,)."""
        if isinstance(found, int):
            return add("Constant", value_ints=[found])
        if isinstance(found, str):
            value, axis = sizes[found]
            return add("Shape", value, start=axis, end=axis + 1)
        kind, first, *others = found[0], number(found[1]), *map(number, found[2:])
        for other in others:
            if kind == "//":  # ONNX's Div rounds towards zero
                first = add("Div", add("Sub", first, add("Mod", first, other)), other)
            else:
                first = add(_OPERATORS[kind], first, other)
        return first

    whole = add("Shape", given)
    entry = add("Constant", value_ints=[1])
    for relation, text in relations:
        assert isinstance(relation, tuple)
        kind, first, second = relation
        met = add(_COMPARISONS[kind], number(first), number(second))
        place = add("Cast", met if kind == "!=" else add("Not", met), to=int(ir.DataType.INT64))
        whole = add("Mul", whole, add("Gather", entry, place, name=f"these sizes are refused, expected {text}"))
    same = add("Reshape", given, whole)
    same.shape = given.shape
    copy_type(same, given)
    for reader, index in readers:
        reader.replace_input_with(index, same)
    graph.insert_before(next(iter(graph)), made)


_COMPARISONS = {"==": "Equal", "!=": "Equal", "<=": "LessOrEqual", "<": "Less"}
_OPERATORS = {"+": "Add", "*": "Mul", "%": "Mod", "max": "Max", "min": "Min"}


_TRIES = 3


class OtherSizes:
    """Compares a program without its assertions with the model, for input sizes that violate the assertions."""

    def __init__(self, example: Example, traced: Traced, signature: Signature) -> None:
        self.example, self.traced, self.signature = example, traced, signature
        self.sizes = {} if example.no_data else sizes_in(example.case(1), example, signature)

    def are_right_without(self, relation: Expression) -> bool:
        """Return whether program and model agree at input sizes that violate ``relation``; ``False`` if unknown."""
        if not names_in(relation) <= self.sizes.keys():
            return False
        near = (  # each differs in one size from the example inputs
            {**self.sizes, name: size}
            for name in sorted(names_in(relation))
            for step in range(1, 2 * self.sizes[name] + 4)
            for size in (self.sizes[name] - step, self.sizes[name] + step)
            if size > 1
        )
        tried = list(itertools.islice((sizes for sizes in near if not holds(relation, sizes)), _TRIES))
        return bool(tried) and all(map(self._same, tried))

    @functools.cached_property
    def _graph(self) -> torch.nn.Module:
        made = self.traced.program.module(check_guards=False)
        for node in [*made.graph.nodes]:
            if node.target is torch.ops.aten._assert_scalar.default:
                made.graph.erase_node(node)
        made.recompile()
        for key, hook in [*made._forward_pre_hooks.items()]:
            if getattr(hook, "__name__", "") == "_check_input_constraints_pre_hook":  # this hook also checks the sizes
                del made._forward_pre_hooks[key]
        return made

    def _same(self, sizes: Mapping[str, int]) -> bool:
        made, module = resized_leaves(self.example, self.signature, sizes), self.example.module
        if made is None:
            return False
        try:
            written = written_parameters(module, self.traced.written)
            with torch.no_grad(), undisturbed(seed=0, module=module, parameters=written):
                args, kwargs = arguments_with(self.example, made)
                wanted = clone(module(*args, **kwargs))
            with torch.no_grad(), undisturbed(seed=0):
                args, kwargs = arguments_with(self.example, made)
                found = self._graph(*args, **kwargs)
        except REFUSALS:
            return False
        expected, returned = pytree.tree_leaves(wanted), pytree.tree_leaves(found)
        return len(expected) == len(returned) and all(
            compare(one, other, "sums") for one, other in zip(expected, returned, strict=True)
        )


def sizes_in(case: Case, example: Example, signature: Signature) -> dict[str, int]:
    inputs = example.of_call(case.args, case.kwargs)
    leaves = dict(zip(leaf_names(inputs), leaves_of(inputs), strict=True))
    return {
        name: leaves[given].shape[axis]
        for name, (given, axis) in place_of_sizes(signature).items()
        if isinstance(leaves.get(given), torch.Tensor) and axis < leaves[given].ndim
    }
