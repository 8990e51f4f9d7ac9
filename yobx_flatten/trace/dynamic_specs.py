"""Read the specifications of ``torch.fx.experimental.dynamic_spec``.

torch 2.13 has these classes, and ``torch.export`` takes them since 2.15.

This is the one file that reads private attributes of these classes. Where one is gone, see how
``torch.fx.experimental._spec_binding`` finds what is in a specification.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from ..errors import DynamicShapesError, describe_class
from ..private_names.of_torch import GetAttrKey
from ..recipe.aliases import DynamicShapes
from ..recipe.contract import Recipe

_CLASSES = ("DictSpec", "IntVar", "ObjectSpec", "ParamsSpec", "SeqSpec", "ShapesSpec", "TensorSpec")
_ATTACHED = "_dynamic_spec"


def spec_classes() -> types.ModuleType | None:
    """Return the module of the classes; ``None`` if it is not imported, or if torch is too old."""
    module = sys.modules.get("torch.fx.experimental.dynamic_spec")
    return module if all(hasattr(module, name) for name in _CLASSES) else None


def opened_spec(spec: DynamicShapes) -> tuple[Any, tuple[Any, ...]]:
    """Return the parameters and the assumptions of a ``ShapesSpec`` or ``ParamsSpec``.

    Anything else is returned as it is.
    """
    classes, assumptions = spec_classes(), ()
    if classes is not None and isinstance(spec, classes.ShapesSpec):
        assumptions = tuple(one.node.expr for one in spec.assumptions)
        spec = classes.ParamsSpec() if spec._params is None else spec._params
    if classes is not None and isinstance(spec, classes.ParamsSpec):
        rest = {"*args": spec._varargs, "**kwargs": spec._varkw}
        spec = {**spec._named_args, **{key: entry for key, entry in rest.items() if entry is not None}}
    return spec, assumptions


def elements_of(spec: DynamicShapes) -> list[Any]:
    """Return the entries of a ``SeqSpec``."""
    return list(spec._entries)


def attached_spec(forward: Callable[..., Any]) -> DynamicShapes:
    """Return what the decorator ``dynamic_spec`` attached to a function; ``None`` for nothing."""
    return getattr(forward, _ATTACHED, None)


def forget_attached(forward: Callable[..., Any]) -> None:
    """Take what the decorator attached from a function that wraps another one."""
    vars(forward).pop(_ATTACHED, None)


def refuse_specs_of_keys(
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    spec: DynamicShapes,
    recipe_of: Callable[[type], Recipe | None],
) -> None:
    """Refuse a specification for ``torch.export.export`` itself that has entries for an object known by its keys.

    torch finds what an ``ObjectSpec`` speaks of by names of attributes. The children of caches have keys.
    """
    # spec: as `torch.export.export` was given it; anything but a specification is left alone
    # recipe_of: our recipe of a class, `None` for a class that is not ours
    from ..private_names.of_torch import combine_args  # imports much

    classes = spec_classes()
    if classes is None or not isinstance(spec, (classes.ShapesSpec, classes.ParamsSpec)):
        return
    try:
        inputs = combine_args(module, args, kwargs)
    except TypeError:  # arguments that do not fit are torch's to report
        return
    containers = (classes.ObjectSpec, classes.DictSpec, classes.SeqSpec)
    for name, entry in opened_spec(spec)[0].items():
        found = inputs.get(name)
        recipe = recipe_of(type(found)) if isinstance(entry, containers) else None
        if recipe is None:
            continue
        keys = [key for key, _ in recipe.flatten_with_keys(found)[0]]
        if not all(isinstance(key, GetAttrKey) for key in keys):
            raise DynamicShapesError(
                f"{name}: torch.export takes no {type(entry).__name__} for {describe_class(type(found))}, whose "
                f"children are {[getattr(key, 'key', str(key)) for key in keys]}. export_program does:\n"
                "    export_program(module, args, kwargs, dynamic_shapes=spec)"
            )
