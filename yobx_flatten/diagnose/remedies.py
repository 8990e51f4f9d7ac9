"""Write the line that registers the class of an object."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..core.contents import Layouts, is_known_base
from ..errors import InvalidRegistrationError, NotRegisteredError
from ..recipe.codegen import builtin_base
from ..recipe.contract import is_constant_class
from ..recipe.fields import functions_of
from ..recipe.mappings import is_mapping
from ..registry.claims import REGISTRY
from ..trees.walk import class_name, torch_leaves


class Remedy(NamedTuple):
    """A remedy in words, and the line to type."""

    advice: str
    line: str


# package of arrays and tables -> how one becomes a tensor
_CONVERSIONS = {
    "numpy": "torch.from_numpy({})",
    "pandas": "torch.tensor({}.to_numpy())",
    **dict.fromkeys(("jax", "jaxlib", "tensorflow", "cupy"), "torch.from_dlpack({})"),
}

_CONSTANTS = (type, slice, range, types.FunctionType, types.BuiltinFunctionType)


def remedy_for(cls: type, obj: object, layouts: Layouts, path: str = "x") -> Remedy:
    """Return the remedy that registers a class, or makes that unnecessary."""
    # path: where the object is, for lines that convert it
    convert = _CONVERSIONS.get(cls.__module__.partition(".")[0])
    is_number = cls.__module__ == "numpy" and cls.__name__ != "ndarray"
    if is_number or (convert is None and layouts(cls).is_tensor):
        convert = "torch.as_tensor({})"
    if convert is not None:
        return Remedy("Pass a tensor instead", convert.format(path))
    if issubclass(cls, torch.nn.Module):
        return Remedy("A module is not an input: make it a submodule of the one that uses it", "self.part = part")
    if is_constant_class(cls) or issubclass(cls, _CONSTANTS):
        name = "type" if issubclass(cls, type) else cls.__qualname__.rpartition("<locals>.")[2]
        return Remedy(
            "A program is exported for one value of it: keep it in the module, or make it static data of its object",
            f'field: {"torch." * (cls.__module__ == "torch")}{name} = dataclasses.field(metadata={{"static": True}})',
        )
    if cls.__module__.partition(".")[0] in {*sys.stdlib_module_names, "builtins"} - {"__main__"}:
        return Remedy("torch flattens lists, tuples and dicts: pass one of these", "[...]")
    base = REGISTRY.registered_base(cls)
    why = "" if base is None else f" ({base.__qualname__} is registered, which does not count for its subclasses)"
    return Remedy(f"Register it first{why}", _block(cls) or _own(cls, obj, layouts))


def _own(cls: type, obj: object, layouts: Layouts) -> str:
    """The line for a class that no library brings a recipe for."""
    name = cls.__qualname__.rpartition("<locals>.")[2]
    if _is_registered_with_jax(cls):
        return f"mirror({name})"
    if _has(cls, "tree_flatten", "tree_unflatten"):
        return f"register_pytree_node_class({name})"
    try:
        functions_of(cls)
    except InvalidRegistrationError:
        return _by_attributes(name, obj, layouts)
    if isinstance(obj, dict) and is_mapping(cls) and not dataclasses.is_dataclass(cls):
        held = layouts(cls).names(obj)
        if any(dict.get(obj, key) is not value for key, value in held):  # an item for each, or they would be lost
            return _by_attributes(name, obj, layouts)
    return f"register({name})"


def registers_what_is_inside(cls: type) -> bool:
    """Return whether the line for a class is enough for the objects it is made of, as for a cache and its layers."""
    return _block(cls) is not None


def _block(cls: type) -> str | None:
    """The block that registers a class of transformers or diffusers, or one derived from them."""
    remedy = REGISTRY.remedy(cls)
    if remedy is not None and remedy.startswith("with "):
        return remedy
    if "transformers.cache_utils" in sys.modules and is_known_base(cls, ("transformers",)):
        from ..huggingface.recipes import transformers_recipes

        recipe = transformers_recipes().get(cls)
        return None if recipe is None else recipe.remedy
    if "diffusers.utils.outputs" in sys.modules and is_known_base(cls, ("diffusers",)):
        from ..huggingface.diffusers_outputs import diffusers_recipes

        return next((recipe.remedy for recipe in diffusers_recipes() if recipe.cls is cls), None)
    return None


def _has(cls: type, *names: str) -> bool:
    return all(any(name in vars(base) for base in cls.__mro__) for name in names)


def _is_registered_with_jax(cls: type) -> bool:
    registry = getattr(sys.modules.get("jax._src.tree_util"), "_registry", ())
    return cls in registry and REGISTRY.remedy(cls) is None  # JAX never forgets those that were registered


def _by_attributes(name: str, obj: object, layouts: Layouts) -> str:
    """The line for a class that is neither a dataclass nor like a dict, from what one instance holds."""
    cls = type(obj)
    layout = layouts(cls)
    attributes = [(key, value) for key, value in layout.names(obj) if type(key) is str and key.isidentifier()]
    if layout.items is not None and not attributes and not issubclass(cls, dict):
        return f"register_class_flattening({name}, lambda x: (list(x), None), lambda items, _: {name}(items), None)"
    if not attributes or (layout.items is not None and builtin_base(cls) not in (dict, OrderedDict, list, tuple)):
        return f"register_class_flattening({name}, f_flatten, f_unflatten, f_flatten_with_keys)"
    children = [key for key, value in attributes if _may_hold_tensors(value, obj, layouts)]
    static = [key for key, _ in attributes if key not in children]
    return f"register({name}, children={children}{f', static={static}' if static else ''})"


def _may_hold_tensors(value: object, owner: object, layouts: Layouts) -> bool:
    """Tensors, ``None`` in their place, and what holds some; an empty container, since it may be filled later.

    What is only reached through the owner is not the value's.
    """
    if value is None or (type(value) in (list, tuple, dict) and not value):
        return True
    seen, left = {id(value), id(owner)}, [] if value is owner else [value]
    while left:
        layout = layouts(type(left[-1]))
        if layout.is_tensor:
            return True
        obj = left.pop()
        if not layout.is_closed:
            below = [child for _, child in layout.children(obj) if id(child) not in seen]
            seen.update(map(id, below))
            left += below
    return False


# Find the object among the inputs that ``torch.export`` refuses.


def explain_leaf(inputs: Mapping[str, Any], refusal: str) -> NotRegisteredError | None:
    """Say where among the inputs the object is that torch refuses, and the line that registers its class."""
    # refusal: what `torch.export` states, which names the class and neither place nor remedy
    layouts = Layouts()
    for name, value in inputs.items():
        for path, leaf in torch_leaves(value, name):
            if str(type(leaf)) in refusal:
                remedy = remedy_for(type(leaf), leaf, layouts, path)
                line = remedy.line.replace("\n", "\n    ")
                return NotRegisteredError(
                    f"{path} is a {class_name(type(leaf))}, which torch does not know how to flatten. "
                    f"{remedy.advice}:\n    {line}"
                )
    return None
