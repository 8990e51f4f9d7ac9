"""Register classes with ``torch.fx._pytree``, by which a graph module flattens its inputs.

Without a rule here fx falls back to the Python pytree and compares whole specs. Another library's rule
(transformers' executorch registration has one for ``DynamicCache``) would silently flatten our programs' inputs in
another order; so ours is registered together with the rest, and reports where an input differs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..errors import SpecMismatchError, describe_class
from ..private_names.of_torch import fx_pytree, pytree
from ..recipe.contract import Recipe

_MISSING = object()


class _FoundRules(NamedTuple):
    flatten_spec: Any
    exact_match: Any


class TorchFx:
    """The tables of ``torch.fx._pytree``."""

    name = "torch_fx"

    def read(self, cls: type) -> _FoundRules | None:
        """Return both rules, or ``None``."""
        if cls not in fx_pytree.SUPPORTED_NODES:
            return None
        exact = fx_pytree.SUPPORTED_NODES_EXACT_MATCH.get(cls, _MISSING)
        return _FoundRules(fx_pytree.SUPPORTED_NODES[cls], exact)

    def holds(self, recipe: Recipe) -> bool:
        """Return whether fx's rule is the one made from this recipe."""
        rule = fx_pytree.SUPPORTED_NODES.get(recipe.cls)
        return isinstance(rule, functools.partial) and rule.func is _flatten_spec and rule.args[0] is recipe

    def write(self, recipe: Recipe) -> None:
        """Register a rule made from the recipe, replacing the current one."""
        fx_pytree.register_pytree_flatten_spec(recipe.cls, functools.partial(_flatten_spec, recipe))

    def restore(self, recipe: Recipe, found: _FoundRules | None) -> None:
        """Restore both rules, unless another library registered the class after us."""
        cls = recipe.cls
        if cls in fx_pytree.SUPPORTED_NODES and not self.holds(recipe):
            return
        if found is None:
            fx_pytree.SUPPORTED_NODES.pop(cls, None)
            fx_pytree.SUPPORTED_NODES_EXACT_MATCH.pop(cls, None)
            return
        fx_pytree.SUPPORTED_NODES[cls] = found.flatten_spec
        if found.exact_match is _MISSING:
            fx_pytree.SUPPORTED_NODES_EXACT_MATCH.pop(cls, None)
        else:
            fx_pytree.SUPPORTED_NODES_EXACT_MATCH[cls] = found.exact_match


def _flatten_spec(recipe: Recipe, obj: object, spec: pytree.TreeSpec) -> list[Any]:
    """Flatten ``obj`` as ``spec`` states, or raise and name where it differs."""
    if type(obj) is not recipe.cls:
        raise SpecMismatchError(
            f"The program was exported with {describe_class(recipe.cls)} here, and was called with "
            f"{describe_class(type(obj))}."
        )
    children, static = recipe.flatten(obj)
    if static != spec.context:
        raise SpecMismatchError(
            f"This {recipe.cls.__qualname__} does not have the structure the program was exported with.\n"
            f"  exported with: {spec.context}\n  called with:   {static}"
        )
    return children
