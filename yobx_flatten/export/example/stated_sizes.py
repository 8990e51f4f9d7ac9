"""Assert in the trace what the caller stated about sizes, so that programs and files check it.

.. code-block:: text

    ShapesSpec({"x": TensorSpec([B, STATIC]), "y": TensorSpec([B * 2, STATIC])}, assumptions=[B % 2 == 0])

    forward, while it is traced:    torch._check(y.shape[0] == 2 * x.shape[0])
                                    torch._check(x.shape[0] % 2 == 0)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DynamicShapesError
from ...private_names.of_torch import pytree
from ...runners.relations import COMPARISONS, Expression
from ...trace.dynamic_specs import attached_spec, forget_attached
from ...trees.dynamic_specs import Stated
from ...trees.naming import leaf_names
from .replaced_forward import replaced_forward
from .size_relations import as_expression

if TYPE_CHECKING:
    import sympy

Place = tuple[str, int | None]
"""The name of an input, and an axis; ``None`` for the number itself."""

Relation = tuple[Expression, Mapping[str, Place]]
"""A comparison, and the places of its names."""


def names_of(inputs: Mapping[str, Any], stated: Stated) -> dict[tuple[str, int], str]:
    """Return the names of axes in a specification; different variables with one name get different names."""
    chosen: dict[Any, str] = {}
    found: dict[tuple[str, int], str] = {}
    leaves = leaf_names(inputs)
    for size in stated.sizes:
        if size.axis is None or size.variable is None or size.variable.name == "anon":
            continue
        name = size.variable.name
        # two variables may have one name, and axes of one name are equal
        same = sum(other == name or other.startswith(f"{name}_") for other in chosen.values())
        found[leaves[size.leaf], size.axis] = chosen.setdefault(size.expression, f"{name}_{same}" if same else name)
    return found


def relations_of(inputs: Mapping[str, Any], stated: Stated) -> tuple[Relation, ...]:
    """Return the assertions: sizes of one variable are equal, others are as stated, and the assumptions hold."""
    leaves = leaf_names(inputs)
    places: dict[str, Place] = {}
    found: list[Expression] = []
    # the first place of a variable is what its name stands for; all others are compared with it
    for size in stated.sizes:
        if size.variable is not None and str(size.expression) not in places:
            places[str(size.expression)] = (leaves[size.leaf], size.axis)
            if size.axis is None:
                least, most = size.variable.min, size.variable.max
                found += [] if least is None else [("<=", least, str(size.expression))]
                found += [] if most is None else [("<=", str(size.expression), most)]
    for size in stated.sizes:
        place = (leaves[size.leaf], size.axis)
        if places.get(str(size.expression)) != place:
            name = f"{size.leaf}.{size.axis}"
            places[name] = place
            found.append(("==", name, _as_expression(size.expression, size.place)))
    found += [_as_expression(one, "assumptions") for one in stated.assumptions if one not in (True, False)]
    for one in found:
        if not isinstance(one, tuple) or one[0] not in COMPARISONS:
            raise DynamicShapesError(f"assumptions: expected comparisons of sizes (==, !=, <, <=, >, >=), found {one}.")
    return tuple((one, places) for one in found)


def _as_expression(expression: sympy.Basic, place: str) -> Expression:
    found = as_expression(expression)
    if found is None:
        raise DynamicShapesError(
            f"{place}: {expression} has an operator that sizes do not have. Use +, *, //, %, min, max of sizes, and "
            "comparisons of them."
        )
    return found


@contextlib.contextmanager
def asserted_in_forward(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    relations: Sequence[Relation],
) -> Iterator[None]:
    """Let ``forward`` assert relations of sizes inside, before anything else."""
    # relations: what to assert; nothing changes without any, and without shapes that torch would find at `forward`
    original = module.forward
    if not relations and attached_spec(original) is None:
        yield
        return
    order, numbers = list(kwargs), {name: number for number, name in enumerate(names)}
    checks = [_check_of(relation, places, numbers) for relation, places in relations]

    @functools.wraps(original)
    def forward(*given: Any, **named: Any) -> Any:
        leaves = pytree.tree_leaves((given, [named[name] for name in order]))
        for check in checks:
            torch._check(check(leaves))
        return original(*given, **named)

    forget_attached(forward)  # these are in dynamic_shapes now, and torch takes only one of the two
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined] # what inspect reads first
    with replaced_forward(module, forward):
        yield


_Value = Callable[[list[Any]], Any]

_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **COMPARISONS,
    "+": operator.add,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


def _check_of(found: Expression, places: Mapping[str, Place], numbers: Mapping[str, int]) -> _Value:
    """A function of the leaves that computes an expression."""
    if isinstance(found, tuple):
        function, parts = _FUNCTIONS[found[0]], [_check_of(part, places, numbers) for part in found[1:]]
        return lambda leaves: functools.reduce(function, [part(leaves) for part in parts])
    if isinstance(found, str):
        name, axis = places[found]
        number = numbers[name]
        return lambda leaves: leaves[number] if axis is None else leaves[number].shape[axis]
    return lambda leaves: found
