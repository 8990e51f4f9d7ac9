"""Find out whether a program that is called with sizes which it refuses computes what the model does.

torch asserts what the model's code decided, and in the same form what it asked of sizes of one (``s - 1 != 1`` of
tokens that are shifted by one). A file without the second kind is right, and without the first one it is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch

from ...core.compare import compare
from ...core.effects import undisturbed
from ...private_names.of_torch import pytree
from ...runners.relations import Expression, holds, names_in
from ...runners.signature import Signature, place_of_sizes
from ...storage.matching import leaves_of
from ..example.example import Example
from ..example.resized import arguments_with, resized_leaves
from ..program.traced import Traced
from ..proof.case import clone
from ..proof.module_state import written_parameters

_TRIES = 3
_REFUSALS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, AttributeError, ArithmeticError)


class OtherSizes:
    """Calls a program without its assertions, next to the model."""

    def __init__(self, example: Example, traced: Traced, signature: Signature) -> None:
        self.example, self.traced, self.signature = example, traced, signature
        self.sizes = None if example.no_data else _sizes_of(example, signature)

    def are_right_without(self, relation: Expression) -> bool:
        """Whether it computes what the model does at sizes that do not meet a relation; ``False`` if not known."""
        if self.sizes is None or not names_in(relation) <= self.sizes.keys():
            return False
        tried = list(_breaking(relation, self.sizes))
        return bool(tried) and all(map(self._same, tried))

    @functools.cached_property
    def _graph(self) -> torch.nn.Module:
        made = self.traced.program.module(check_guards=False)
        for node in [*made.graph.nodes]:
            if node.target is torch.ops.aten._assert_scalar.default:
                made.graph.erase_node(node)
        made.recompile()
        for key, hook in [*made._forward_pre_hooks.items()]:
            if getattr(hook, "__name__", "") == "_check_input_constraints_pre_hook":  # which checks the sizes once more
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
        except _REFUSALS:
            return False
        expected, returned = pytree.tree_leaves(wanted), pytree.tree_leaves(found)
        return len(expected) == len(returned) and all(
            compare(one, other, "sums") for one, other in zip(expected, returned, strict=True)
        )


def _sizes_of(example: Example, signature: Signature) -> dict[str, int] | None:
    leaves = dict(zip(example.names, leaves_of(example.inputs), strict=True))
    found = {name: leaves.get(given) for name, (given, _) in place_of_sizes(signature).items()}
    if not all(isinstance(leaf, torch.Tensor) for leaf in found.values()):
        return None
    return {name: leaves[given].shape[axis] for name, (given, axis) in place_of_sizes(signature).items()}


def _breaking(relation: Expression, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes near those of the example that do not meet a relation: one of them is another."""
    count = 0
    for name in sorted(names_in(relation)):
        own = sizes[name]
        near = [size for step in range(1, 2 * own + 4) for size in (own - step, own + step) if size > 1]
        for size in near:
            other = {**sizes, name: size}
            if not holds(relation, other):
                yield other
                count += 1
                if count == _TRIES:
                    return
