"""Make traced programs and exported files check the relations between input sizes in ``dynamic_shapes``."""

# ShapesSpec({"x": TensorSpec([B, STATIC]), "y": TensorSpec([B * 2, STATIC])}, assumptions=[B % 2 == 0])
#
# forward, while it is traced:    torch._check(y.shape[0] == 2 * x.shape[0])
#                                 torch._check(x.shape[0] % 2 == 0)

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from ..core.private_names.of_torch import pytree
from ..errors import DynamicShapesError
from ..runners.signature import COMPARISONS, FUNCTIONS, Expression, names_in
from ..trace.adapted_shapes import attached_spec, forget_attached
from ..trace.program import traced_inputs
from ..trees.arguments import Stated

Place = tuple[str, int | None]
"""An axis of an input, as (name of the input, axis); the axis is ``None`` if the input itself is a number."""

Relation = tuple[Expression, Mapping[str, Place]]
"""A constraint that compares sizes, and for each name of a size the input and axis that have this size."""


def names_of(rows: Sequence[tuple[str, Any, Any]], stated: Stated) -> dict[tuple[str, int], str]:
    """Return the name that ``dynamic_shapes`` gives to each dynamic axis, by input name and axis number."""
    # rows: the name, the value and the entry of each leaf of the inputs
    found: dict[tuple[str, int], str] = {}
    sizes: dict[str, tuple[str, int]] = {}
    for name, leaf, dims in rows:
        for axis, dim in (dims or {}).items():
            given = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
            if given is None or not isinstance(leaf, torch.Tensor):
                continue
            first, size = sizes.setdefault(given, (name, leaf.shape[axis]))
            if leaf.shape[axis] != size:
                raise DynamicShapesError(
                    f"{name}: axis {axis} is called {given!r} and has size {leaf.shape[axis]}, but {first} has size "
                    f"{size} under that name. Axes with one name must have one size: give this axis its own name."
                )
            found[name, axis] = given
    chosen: dict[Any, str] = {}
    for one in stated.sizes:
        if one.axis is None or one.variable is None or one.variable.name == "anon":
            continue
        name = one.variable.name
        # two variables may have the same name, but two axes with the same name have the same size
        same = sum(other == name or other.startswith(f"{name}_") for other in chosen.values())
        found[rows[one.leaf][0], one.axis] = chosen.setdefault(one.expression, f"{name}_{same}" if same else name)
    return found


# Read what a program asserts about the sizes of its inputs, for runtimes that drop assertions.
#
#     add = input_ids.shape[1] + past_key_values.0.key.shape[2]
#     eq = add == attention_mask.shape[1]                         ONNX has no assertions, and ExecuTorch removes them:
#     _assert_scalar(eq, "Runtime assertion failed ...")          the signature of a file states them


def relations_of(leaves: Sequence[str], stated: Stated) -> tuple[Relation, ...]:
    """Return the relations between sizes that ``dynamic_shapes`` contains, such as equal sizes."""
    places: dict[str, Place] = {}
    found: list[Expression] = []
    # the name of a variable means the size of its first axis; the sizes of all other axes are compared with this size
    for size in stated.sizes:
        if size.variable is not None and str(size.expression) not in places:
            places[str(size.expression)] = (leaves[size.leaf], size.axis)
            least, most = (size.variable.min, size.variable.max) if size.axis is None else (None, None)
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
    if found is not None:
        return found
    raise DynamicShapesError(
        f"{place}: {expression} has an operator that sizes do not support. Use +, *, //, %, min, max and comparisons."
    )


@contextlib.contextmanager
def traceable_forward(
    module: torch.nn.Module,
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    relations: Sequence[Relation],
    swallowed: Sequence[str],
) -> Iterator[None]:
    """Replace ``forward``, in a ``with`` block, by a function that asserts the relations between input sizes."""
    # swallowed: names of arguments in `**kwargs`, which get parameters. `torch.export` takes dynamic shapes by the
    # parameters of `forward`, and accepts none for arguments in `**kwargs`, where Hugging Face models take half of
    # their arguments (https://github.com/pytorch/pytorch/issues/150371).
    original = module.forward
    if not relations and not swallowed and attached_spec(original) is None:
        yield
        return
    order, numbers = list(kwargs), {name: number for number, name in enumerate(names)}
    checks = [_check_of(relation, places, numbers) for relation, places in relations]

    @functools.wraps(original)
    def forward(*given: Any, **named: Any) -> Any:
        leaves = pytree.tree_leaves((given, [named[name] for name in order])) if checks else []
        for check in checks:
            torch._check(check(leaves))
        return original(*given, **named)

    forget_attached(forward)  # torch refuses attached shapes next to dynamic_shapes, which contains them already
    signature = inspect.signature(original)
    if swallowed:
        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in swallowed]
        signature = inspect.Signature([*kept, *added])
    forward.__signature__ = signature  # type: ignore[attr-defined] # inspect reads it first
    held = module.__dict__  # avoids `Module.__setattr__`, which a class may override
    before = {"forward": held["forward"]} if "forward" in held else {}
    held["forward"] = forward
    try:
        yield
    finally:
        del held["forward"]
        held.update(before)


_Value = Callable[[list[Any]], Any]

_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {**COMPARISONS, "max": torch.sym_max, "min": torch.sym_min}
_FUNCTIONS |= {"+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


def _check_of(found: Expression, places: Mapping[str, Place], numbers: Mapping[str, int]) -> _Value:
    if isinstance(found, tuple):
        function, parts = _FUNCTIONS[found[0]], [_check_of(part, places, numbers) for part in found[1:]]
        return lambda leaves: functools.reduce(function, [part(leaves) for part in parts])
    if isinstance(found, str):
        name, axis = places[found]
        number = numbers[name]
        return lambda leaves: leaves[number] if axis is None else leaves[number].shape[axis]
    return lambda leaves: found


# by the name of the class in sympy, or in torch.utils._sympy
_OPERATORS = {"Add": "+", "Mul": "*", "Max": "max", "Min": "min", "Equality": "==", "Unequality": "!="}
_OPERATORS |= {"LessThan": "<=", "StrictLessThan": "<"}
_OPERATORS |= {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"}
_TURNED = {"GreaterThan": "<=", "StrictGreaterThan": "<"}


def relations_in_program(program: ExportedProgram, sizes: Collection[str]) -> tuple[Expression, ...]:
    # sizes: names of sizes that are the size of an input axis; constraints with other sizes are left out
    asserted, environment = list(_in_graph(program)), environment_of(program)
    if environment is not None:  # of a trace that defers no assertions, and of decompositions
        others = (*itertools.chain(*environment.deferred_runtime_asserts.values()), *environment.guards)
        asserted += [environment.replace(one.expr) for one in others]
    found = dict.fromkeys(as_expression(one) for expression in asserted for one in _one_by_one(expression))
    return tuple(
        one for one in found if isinstance(one, tuple) and one[0] in COMPARISONS and set() < names_in(one) <= {*sizes}
    )


def _one_by_one(expression: sympy.Basic) -> Iterator[sympy.Basic]:
    kind = type(expression).__name__
    if kind == "And":
        for part in expression.args:
            yield from _one_by_one(part)
    elif kind == "Or":  # at least one condition holds, so the product of their violations is 0
        yield sympy.Eq(sympy.Mul(*map(_violation, expression.args), evaluate=False), 0, evaluate=False)
    else:
        yield expression


def _violation(expression: sympy.Basic) -> sympy.Expr:
    """Return an expression that is 0 if a comparison holds, and positive otherwise."""
    kind = type(expression).__name__
    if kind in ("And", "Or"):
        joined = sympy.Add if kind == "And" else sympy.Mul
        return joined(*map(_violation, expression.args), evaluate=False)
    left, right = expression.args
    if kind in ("Equality", "Unequality"):
        apart = sympy.Min(1, sympy.Max(left - right, right - left))
        return apart if kind == "Equality" else 1 - apart
    if kind in ("GreaterThan", "StrictGreaterThan"):
        left, right = right, left
    if kind.startswith("Strict"):
        left = left + 1
    return left - sympy.Min(left, right)


def unasserted_sizes(program: ExportedProgram, names: Sequence[str]) -> dict[tuple[str, int], int]:
    """Return the input sizes that must be the same as in the example, although the program does not check them."""
    # torch cannot write a comparison with a rounded number into a graph, and silently leaves the comparison out: for
    # `int(x.shape[1] * 0.5)` the program has the value of its example, but accepts all other sizes
    environment, sizes = environment_of(program), sizes_by_input(program, names)
    examples = {size.node.expr: int(size.node.hint) for size in sizes.values() if size.node.hint is not None}
    fixed: set[Any] = set()
    for one in [] if environment is None else itertools.chain(*environment.deferred_runtime_asserts.values()):
        expression = environment.replace(one.expr)
        symbols = expression.free_symbols
        if not _is_of_sizes(expression) and symbols <= examples.keys() and _restricts(expression, examples):
            fixed |= symbols
    return {place: examples[size.node.expr] for place, size in sizes.items() if size.node.expr in fixed}


def _is_of_sizes(expression: sympy.Basic) -> bool:
    """Return whether all comparisons in a condition compare only sizes."""
    if type(expression).__name__ in ("Or", "And", "Not"):
        return all(map(_is_of_sizes, expression.args))
    return as_expression(expression) is not None


def _restricts(expression: sympy.Basic, examples: Mapping[Any, int]) -> bool:
    """Return whether some sizes violate a comparison that the sizes of the example satisfy."""
    kind = type(expression).__name__
    if kind == "Unequality":  # torch only excludes sizes of 1, which the program handles correctly
        return False
    for symbol in expression.free_symbols:
        size = examples[symbol]
        larger = [size + 1, size + 2, size + 3, 2 * size, 3 * size + 1, 10 * size]
        # smaller sizes are tried only for equations: an inequality may only exclude small sizes such as 1
        smaller = [size // 2, size - 2, size - 1] if kind == "Equality" else []
        for other in (*larger, *(one for one in smaller if one > 1)):
            sizes = {**examples, symbol: other}
            if expression.xreplace({name: sympy.Integer(found) for name, found in sizes.items()}) == sympy.false:
                return True
    return False


def asserts_values(program: ExportedProgram, names: Sequence[str]) -> bool:
    """Return whether a program asserts equalities of sizes that depend on the values of tensors."""
    known = {size.node.expr for size in sizes_by_input(program, names).values()}
    return any(isinstance(one, sympy.Eq) and one.free_symbols - known for one in _in_graph(program))


def sizes_by_input(program: ExportedProgram, names: Sequence[str]) -> dict[tuple[str, int], Any]:
    """Return the dynamic size of each input axis, by input name and axis; sizes that are expressions are left out."""
    found: dict[tuple[str, int], Any] = {}
    for name, value in zip(names, traced_inputs(program), strict=True):
        axes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for axis, size in enumerate(axes):
            if type(size) is torch.SymInt and size.node.expr.is_Symbol:
                found[name, axis] = size
    return found


def environment_of(program: ExportedProgram) -> Any:
    """Return the ``ShapeEnv`` of a program; ``None`` if all input sizes are fixed."""
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    sizes = (size for value in values for size in getattr(value, "shape", (value,)))
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def _in_graph(program: ExportedProgram) -> Iterator[Any]:
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        asserted = getattr(node.args[0], "meta", {}).get("val")
        if isinstance(asserted, torch.SymBool):
            yield asserted.node.expr


def as_expression(expression: sympy.Basic) -> Expression | None:
    """Return a sympy expression as nested tuples; ``None`` if an operator of the expression is not supported.

    >>> import sympy
    >>> as_expression(sympy.Eq(sympy.Symbol("a") + 2, sympy.Symbol("b")))
    ('==', ('+', 2, 'a'), 'b')
    """
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    kind = type(expression).__name__
    name = _OPERATORS.get(kind, _TURNED.get(kind))
    parts = [as_expression(part) for part in expression.args]
    if name is None or any(part is None for part in parts):
        return None
    of_numbers = all(not isinstance(part, tuple) or part[0] in FUNCTIONS for part in parts)
    return (name, *(reversed(parts) if kind in _TURNED else parts)) if of_numbers else None
