"""Flatten outputs of transformers and diffusers models, and objects that tokenizers and processors return.

A flattened ``ModelOutput`` omits fields that are ``None``; in a plain dataclass, such a field is a leaf. A flattened
``BatchEncoding`` omits the ``Encoding`` objects of fast tokenizers, which no model reads. A rebuilt ``BatchEncoding``
has ``is_fast == False`` and cannot map tokens to words. Numbers and texts in a ``BatchFeature`` are leaves.

transformers registers each ``ModelOutput`` class only once, when the class is created, and would not restore a removed
registration. This package does not replace a registration by transformers that contains the names of the fields.
transformers before 5.17 registers classes without field names: :mod:`.tracing.support` adds these names inside
``register_flattening_functions``. Before transformers 5.17, this package registers only the output class
``BaseModelOutput``, because a new process could not load a program with any other output class.
"""

# class                 children                 keys                     static
# `ModelOutput` family  the fields that are set  `['last_hidden_state']`  their names
# `BatchEncoding`       the values of `.data`    `['input_ids']`          the keys
# `BatchFeature`        the values of `.data`    `['pixel_values']`       the keys, `skip_tensor_conversion`
# plain dataclasses     every field              `.token_embeds`          the names

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from ..core.private_names.of_torch import MappingKey, pytree
from ..errors import describe_class
from ..registry.recipe.aliases import ModelOutput
from ..registry.recipe.contract import Recipe
from ..registry.recipe.fields import functions_of, is_mapping_like
from ..trace.trace_settings import TraceSupport

REMEDY = "with register_flattening_functions(patch_transformers=True): ..."
"""The line of code that registers the transformers classes."""


def classes_of(module: ModuleType) -> list[type]:
    return [cls for cls in list(vars(module).values()) if inspect.isclass(cls) and cls.__module__ == module.__name__]


def subclasses_of(cls: Any) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses_of(child)


class ModelClasses:
    """A cached list of those classes in imported ``transformers.models`` modules for which a function returns true."""

    def __init__(self, fits: Callable[[Any], bool]) -> None:
        self._fits = fits
        self._by_module: dict[str, list[type]] = {}
        self._modules_then = 0
        self._found: list[type] = []

    def __call__(self) -> list[type]:
        if self._modules_then != len(sys.modules):  # blocks are entered often, models imported rarely
            # dict.copy is one step: another thread may import a module during a loop over the items
            imported = sys.modules.copy()
            modules = [item for item in imported.items() if item[0].startswith("transformers.models.")]
            for name, module in modules:
                if name not in self._by_module:
                    self._by_module[name] = [cls for cls in classes_of(module) if self._fits(cls)]
            self._modules_then = len(imported)
            self._found = [cls for name, _ in modules for cls in self._by_module[name]]
        return self._found.copy()


def flatten_base_model_output(output: ModelOutput) -> tuple[list[Any], list[str]]:
    """Flatten a ``BaseModelOutput`` into the fields that are set, and their names.

    Args:
        output: a ``transformers.modeling_outputs.BaseModelOutput``, or any other ``ModelOutput``.

    Returns:
        The values of the fields that are not ``None``, and the names of the fields.
    """
    return list(output.values()), list(output.keys())


def flatten_with_keys_base_model_output(output: ModelOutput) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Flatten a ``BaseModelOutput`` into the fields that are set, each with its pytree key.

    Args:
        output: see :func:`flatten_base_model_output`.

    Returns:
        Pairs of a pytree key (``['last_hidden_state']``) and a value, and the names of the fields.
    """
    values, names = flatten_base_model_output(output)
    return [(MappingKey(name), value) for name, value in zip(names, values, strict=True)], names


def unflatten_base_model_output(
    values: Iterable[Any], context: list[str], output_type: type | None = None
) -> ModelOutput:
    """Unflatten a ``BaseModelOutput``, or another output class given as ``output_type``.

    Args:
        values: the values of the fields, or placeholders for the values.
        context: the names of the fields, in the order of ``values``.
        output_type: the class to make; ``None`` for ``BaseModelOutput``.

    Returns:
        The output.

    Raises:
        ValueError: when the number of values is not the number of names in ``context``.
    """
    if output_type is None:
        from transformers.modeling_outputs import BaseModelOutput

        output_type = BaseModelOutput
    return output_type(**dict(zip(context, values, strict=True)))


def output_recipes() -> dict[type, Recipe | None]:
    recipes: dict[type, Recipe | None] = {}
    # no instance exists before the module is imported, and the import registers 70 classes permanently
    modeling_outputs = sys.modules.get("transformers.modeling_outputs")
    if modeling_outputs is not None:
        base = modeling_outputs.BaseModelOutput
        # all classes share the flatten functions, as in transformers
        unflatten = functools.partial(unflatten_base_model_output, output_type=base)
        functions = flatten_base_model_output, flatten_with_keys_base_model_output, unflatten
        recipes[base] = _recipe(base, lambda cls: functions)
    for module, name in _CONTAINERS.items():
        container = getattr(sys.modules.get(module), name, None)
        for cls in () if container is None else (container, *subclasses_of(container)):
            recipes[cls] = _recipe(cls, _container)
    for cls in _DATACLASSES():
        recipes[cls] = _recipe(cls, functions_of)
    return recipes


def output_recipes_of_module(module: ModuleType) -> list[Recipe]:
    recipes = [_recipe(cls, functions_of) for cls in classes_of(module) if _is_plain_output(cls)]
    return [recipe for recipe in recipes if recipe is not None]


_CONTAINERS = {
    "transformers.tokenization_utils_base": "BatchEncoding",
    "transformers.feature_extraction_utils": "BatchFeature",
}
# attributes of a BatchEncoding that are dropped
_DROPPED = ("_encodings", "_n_sequences")

_Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
_RECIPES: dict[type, Recipe] = {}


def _recipe(cls: type, functions: Callable[[type], _Functions]) -> Recipe | None:
    """Return the flatten functions of an output class; ``None`` if the class is already registered with pytree keys."""
    # read each once, the node first: other threads write the recipe before the node, and remove the node
    in_force = pytree.SUPPORTED_NODES.get(cls)
    recipe = _RECIPES.get(cls)
    is_ours = recipe is not None and in_force is not None and in_force.flatten_fn is recipe.flatten
    if in_force is not None and not is_ours and in_force.flatten_with_keys_fn is not None:
        return None
    if recipe is None:
        flatten, flatten_with_keys, unflatten = functions(cls)
        short = cls.__name__ if cls.__module__ == "transformers.modeling_outputs" else describe_class(cls)
        name = f"yobx_flatten.transformers:{short}"
        recipe = Recipe(cls, flatten, unflatten, flatten_with_keys, name, REMEDY)
        recipe = _RECIPES.setdefault(cls, recipe)  # one for all threads
    return recipe


def _container(cls: type) -> _Functions:
    """Return flatten functions for a class whose leaves are the values of its dict ``data``."""
    dropped = dict.fromkeys(_DROPPED) if any(base.__name__ == "BatchEncoding" for base in cls.__mro__) else {}

    def flatten(obj: object) -> tuple[list[Any], list[Any]]:
        held = vars(obj)
        attributes = {name: value for name, value in held.items() if name != "data" and name not in _DROPPED}
        return list(held["data"].values()), [list(held["data"]), attributes]

    def flatten_with_keys(obj: object) -> tuple[list[tuple[Any, Any]], list[Any]]:
        values, static = flatten(obj)
        return [(MappingKey(key), value) for key, value in zip(static[0], values, strict=True)], static

    def unflatten(values: Iterable[Any], static: list[Any], output_type: type | None = None) -> ModelOutput:
        obj: Any = object.__new__(cls)  # the constructor may convert its arguments
        data = dict(zip(static[0], values, strict=True))
        obj.__dict__.update({"data": data, **dropped, **static[1]})
        return obj

    return flatten, flatten_with_keys, unflatten


def _is_plain_output(cls: type) -> bool:
    """Return whether a class, such as ``EsmFold2DenoiserConditioning``, is a dataclass of tensors and not a mapping."""
    if is_mapping_like(cls) or not dataclasses.is_dataclass(cls):
        return False
    return any("Tensor" in str(field.type) for field in dataclasses.fields(cls))


_DATACLASSES = ModelClasses(_is_plain_output)


# diffusers registers its outputs with torch without keys, so that an exported program cannot name its outputs. The
# flatten functions here add the keys. Names and static parts are stored as diffusers' registration stores them: a
# program that was saved inside the block loads outside, and vice versa.

_DIFFUSERS_REMEDY = "with register_flattening_functions(patch_diffusers=True): ..."


def diffusers_recipes(module: str | None = None) -> list[Recipe]:
    """Return the flatten functions of diffusers' output classes in one module, or in all imported modules."""
    base = sys.modules["diffusers.utils.outputs"].BaseOutput
    recipes = []
    for cls in subclasses_of(base):
        if module is None or cls.__module__ == module:
            flatten, flatten_with_keys, unflatten = functions_of(cls)
            name = f"{cls.__module__}.{cls.__name__}"
            recipes.append(
                Recipe(cls, flatten, unflatten, flatten_with_keys, name, _DIFFUSERS_REMEDY, plain_static=True)
            )
    return recipes


DIFFUSERS = TraceSupport("diffusers")  # nothing for a trace, and imports of named classes for a load
