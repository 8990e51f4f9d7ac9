"""Make flatten functions for a class that declares its fields.

=====================================  ================================  ===============================================
class                                  children                          static part
=====================================  ================================  ===============================================
pydantic model                         fields, extra values, private     fields with it in ``json_schema_extra``, and
                                       attributes                        which were set
``tree_flatten``/``tree_unflatten``    as the methods return             as the methods return
attrs class                            attributes                        those with metadata ``static``
mapping-like: ``keys()``/``values()``  values                            keys
dataclass on a ``dict`` or ``list``    fields, then items                names, ``static`` fields, keys
dataclass, of flax, equinox, chex too  fields                            those with metadata ``static``, or flax's
                                                                         ``pytree_node=False``
``__slots__`` and no ``__dict__``      slots
=====================================  ================================  ===============================================

None of these libraries is imported: a class is recognized by its attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidRegistrationError, describe_class
from ..private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey
from .aliases import Static
from .attributes import checked, functions_from_fields, name_functions, require_content
from .contract import (
    Flatten,
    FlattenFunctions,
    FlattenWithKeys,
    Recipe,
    Unflatten,
    is_derived,
    lost_attribute,
    own_copy,
    require_node,
    slots_of,
    with_positions,
)
from .mappings import is_mapping, mapping_functions

JaxFlatten = Callable[[Any], tuple[Iterable[Any], Any]]
JaxFlattenWithKeys = Callable[[Any], tuple[Iterable[tuple[Any, Any]], Any]]
JaxUnflatten = Callable[[Any, tuple[Any, ...]], Any]


def functions_of(cls: type, caller: str = "make_flattening_function_for_dataclass") -> FlattenFunctions:
    """Make the flatten, keyed flatten and unflatten functions of a class from its declared fields."""
    require_node(cls, caller)
    for fits, read in _READERS:
        if fits(cls):
            if read is not _jax_functions:  # the author's own methods may store content anywhere
                require_content(cls, caller)
            return name_functions(cls, read(cls))
    if cls in (torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes):
        raise InvalidRegistrationError(f"{caller}: {describe_class(cls)} is always a leaf and cannot be registered.")
    raise InvalidRegistrationError(
        f"{caller}: {describe_class(cls)} does not declare its fields: it is not a dataclass, an attrs class, a "
        "pydantic model, a mapping, a class with tree_flatten() and tree_unflatten(), or one with only __slots__. "
        "Name the attributes that hold tensors, and the fixed attributes:\n"
        f"    register({cls.__qualname__}, children=['x', 'y'], static=['name'])"
    )


def recipe_of(cls: type) -> Recipe:
    """Make a ``Recipe`` for a class that declares its fields, such as a dataclass, with :func:`functions_of`."""
    flatten, flatten_with_keys, unflatten = functions_of(cls)
    return Recipe.from_functions(cls, flatten, unflatten, flatten_with_keys)


def _is_static(metadata: Mapping[Any, Any]) -> bool:
    # flax names it `pytree_node`; equinox, JAX and this package name it `static`
    return bool(metadata.get("static", False)) or metadata.get("pytree_node", True) is False


def _by_metadata(cls: type, fields: Iterable[Any]) -> FlattenFunctions:
    metadata = {field.name: field.metadata for field in fields}
    static_names = [name for name in metadata if _is_static(metadata[name])]
    return functions_from_fields(cls, [name for name in metadata if name not in static_names], static_names)


def _dataclass_functions(cls: type) -> FlattenFunctions:
    return _by_metadata(cls, dataclasses.fields(cls))


def _attrs_functions(cls: type) -> FlattenFunctions:
    # by attribute name (`_x`), not by the name of the constructor's parameter (`x`): no constructor is called
    return _by_metadata(cls, cls.__attrs_attrs__)  # type: ignore[attr-defined] # attrs writes it


def _is_written_for_jax(cls: type) -> bool:
    return hasattr(cls, "tree_unflatten") and (hasattr(cls, "tree_flatten") or hasattr(cls, "tree_flatten_with_keys"))


def _jax_functions(cls: Any) -> FlattenFunctions:
    plain, with_keys = getattr(cls, "tree_flatten", None), getattr(cls, "tree_flatten_with_keys", None)
    flatten, flatten_with_keys, unflatten = functions_of_jax(cls, plain, cls.tree_unflatten, with_keys)
    return FlattenFunctions(flatten, flatten_with_keys or with_positions(flatten), unflatten)


def functions_of_jax(
    cls: type, flatten: JaxFlatten | None, unflatten: JaxUnflatten, flatten_with_keys: JaxFlattenWithKeys | None
) -> tuple[Flatten, FlattenWithKeys | None, Unflatten]:
    """Convert functions with JAX's order of arguments to torch's order; either flatten function may be ``None``."""

    def torch_flatten(obj: object) -> tuple[list[Any], Any]:
        children, static = flatten(obj)  # type: ignore[misc] # returned only if it is not None
        return list(children), static

    def torch_flatten_without_keys(obj: object) -> tuple[list[Any], Any]:
        pairs, static = flatten_with_keys(obj)  # type: ignore[misc] # not None if `flatten` is None
        return [child for _, child in pairs], static

    def torch_flatten_with_keys(obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        pairs, static = flatten_with_keys(obj)  # type: ignore[misc] # returned only if it is not None
        return [(torch_key(key), child) for key, child in pairs], static

    def torch_unflatten(children: Iterable[Any], static: Static, output_type: type | None = None) -> Any:
        return unflatten(static, tuple(children))

    return (
        torch_flatten_without_keys if flatten is None else torch_flatten,
        None if flatten_with_keys is None else torch_flatten_with_keys,
        torch_unflatten,
    )


def _is_pydantic_model(cls: type) -> bool:
    return hasattr(cls, "__pydantic_fields__") and hasattr(cls, "model_construct")


def _pydantic_functions(cls: Any) -> FlattenFunctions:
    extras = {name: field.json_schema_extra for name, field in cls.__pydantic_fields__.items()}
    static_names = [name for name, extra in extras.items() if isinstance(extra, dict) and _is_static(extra)]
    names = [name for name in extras if name not in static_names]
    # fields, extra values and private attributes are set as `model_construct` does, without validation
    is_root = cls.__pydantic_root_model__  # a root model has no extra values and no private attributes
    set_field = object.__setattr__
    count = len(extras)

    def flatten(obj: Any) -> tuple[list[Any], Any]:
        state = obj.__dict__
        if len(state) != count:
            _check_state(cls, state, extras)
        extra = None if is_root else obj.__pydantic_extra__
        private = None if is_root else obj.__pydantic_private__
        static = {
            "names": names,
            "static": [checked(state[name], f"{cls.__qualname__}.{name}") for name in static_names],
            "set": sorted(obj.__pydantic_fields_set__),
            "extra": None if extra is None else list(extra),
            "private": None if private is None else list(private),
        }
        return [*(state[name] for name in names), *(extra or {}).values(), *(private or {}).values()], static

    def flatten_with_keys(obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        children, static = flatten(obj)
        everything = [*names, *(static["extra"] or ()), *(static["private"] or ())]
        return [(GetAttrKey(name), child) for name, child in zip(everything, children, strict=True)], static

    def unflatten(children: Iterable[Any], static: Static, output_type: type | None = None) -> Any:
        given = dict(zip([*names, *(static["extra"] or ()), *(static["private"] or ())], children, strict=True))
        given.update(zip(static_names, map(own_copy, static["static"]), strict=True))
        obj = object.__new__(cls)
        set_field(obj, "__dict__", {name: given[name] for name in extras})
        set_field(obj, "__pydantic_fields_set__", set(static["set"]))
        if not is_root:
            for place in ("extra", "private"):
                held = None if static[place] is None else {name: given[name] for name in static[place]}
                set_field(obj, f"__pydantic_{place}__", held)
        return obj

    return FlattenFunctions(flatten, flatten_with_keys, unflatten)


def _check_state(cls: type, state: Mapping[str, Any], declared: Collection[str]) -> None:
    for name, value in state.items():
        if name not in declared and not is_derived(cls, name, value):
            raise lost_attribute(cls, name, declared)


def _has_only_slots(cls: type) -> bool:
    return cls.__dictoffset__ == 0 and cls.__itemsize__ == 0 and bool(slots_of(cls))


def _slots_functions(cls: type) -> FlattenFunctions:
    return functions_from_fields(cls, slots_of(cls))


# The first matching row is used: the author's own methods come before generated ones.
_READERS: tuple[tuple[Callable[[type], bool], Callable[[type], FlattenFunctions]], ...] = (
    (_is_pydantic_model, _pydantic_functions),
    (_is_written_for_jax, _jax_functions),
    (lambda cls: hasattr(cls, "__attrs_attrs__"), _attrs_functions),
    (is_mapping, mapping_functions),
    (dataclasses.is_dataclass, _dataclass_functions),
    (_has_only_slots, _slots_functions),
)


_TORCH = (GetAttrKey, MappingKey, SequenceKey)


def torch_key(key: object) -> KeyEntry:
    """Convert a pytree key of JAX, or of a library with similar keys, to a pytree key of torch.

    >>> torch_key("a"), torch_key(0)
    (MappingKey(key='a'), SequenceKey(idx=0))
    """
    # key: `GetAttrKey`, `DictKey`, `SequenceKey` or `FlattenedIndexKey` of `jax.tree_util`, a key of torch, or a bare
    # value: an integer is a position, any other value a key of a mapping
    if isinstance(key, _TORCH):
        return key
    # by attribute, not by class, so that JAX is not imported
    if hasattr(key, "idx"):
        return SequenceKey(key.idx)
    if hasattr(key, "name"):
        return GetAttrKey(key.name)
    own: Any = getattr(key, "key", key)
    return SequenceKey(own) if type(key).__name__ == "FlattenedIndexKey" or type(key) is int else MappingKey(own)
