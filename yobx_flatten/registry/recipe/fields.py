"""Make flatten functions for classes that declare their fields, such as dataclasses, attrs classes and mappings."""

# class                                  children                       static part
# pydantic model                         fields, extra values, private  fields with it in `json_schema_extra`, and
#                                        attributes                     which were set
# `tree_flatten`/`tree_unflatten`        as the methods return          as the methods return
# attrs class                            attributes                     those with metadata `static`
# mapping-like: `keys()`/`values()`      values                         keys
# dataclass on a `dict` or `list`        fields, then items             names, `static` fields, keys
# dataclass, of flax, equinox, chex too  fields                         those with metadata `static`, or flax's
#                                                                       `pytree_node=False`
# `__slots__` and no `__dict__`          slots

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MemberDescriptorType
from typing import Any

import torch

from ...core.private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey
from ...errors import InvalidRegistrationError, RoundTripError, describe_class
from . import contract
from .aliases import Static
from .attributes import builtin_base, checked, functions_from_fields, name_functions, require_content

JaxFlatten = Callable[[Any], tuple[Iterable[Any], Any]]
JaxFlattenWithKeys = Callable[[Any], tuple[Iterable[tuple[Any, Any]], Any]]
JaxUnflatten = Callable[[Any, tuple[Any, ...]], Any]


def functions_of(cls: type, caller: str = "make_flattening_function_for_dataclass") -> contract.FlattenFunctions:
    """Make ``flatten``, ``flatten_with_keys`` and ``unflatten`` functions for a class from its declared fields."""
    contract.require_node(cls, caller)
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


def recipe_of(cls: type) -> contract.Recipe:
    flatten, flatten_with_keys, unflatten = functions_of(cls)
    return contract.Recipe.from_functions(cls, flatten, unflatten, flatten_with_keys)


def _is_static(metadata: Mapping[Any, Any]) -> bool:
    # flax names it `pytree_node`; equinox, JAX and this package name it `static`
    return bool(metadata.get("static", False)) or metadata.get("pytree_node", True) is False


def _by_metadata(cls: type, fields: Iterable[Any]) -> contract.FlattenFunctions:
    metadata = {field.name: field.metadata for field in fields}
    static_names = [name for name in metadata if _is_static(metadata[name])]
    return functions_from_fields(cls, [name for name in metadata if name not in static_names], static_names)


def _jax_functions(cls: Any) -> contract.FlattenFunctions:
    plain, with_keys = getattr(cls, "tree_flatten", None), getattr(cls, "tree_flatten_with_keys", None)
    flatten, flatten_with_keys, unflatten = functions_of_jax(cls, plain, cls.tree_unflatten, with_keys)
    return contract.FlattenFunctions(flatten, flatten_with_keys or contract.with_positions(flatten), unflatten)


def functions_of_jax(
    cls: type, flatten: JaxFlatten | None, unflatten: JaxUnflatten, flatten_with_keys: JaxFlattenWithKeys | None
) -> tuple[contract.Flatten, contract.FlattenWithKeys | None, contract.Unflatten]:
    """Convert the functions that flatten and unflatten a class from the form that JAX expects to torch's form."""

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


def _pydantic_functions(cls: Any) -> contract.FlattenFunctions:
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
            for name, value in state.items():
                if name not in extras and not contract.is_derived(cls, name, value):
                    raise contract.lost_attribute(cls, name, extras)
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
        given.update(zip(static_names, map(contract.own_copy, static["static"]), strict=True))
        obj = object.__new__(cls)
        set_field(obj, "__dict__", {name: given[name] for name in extras})
        set_field(obj, "__pydantic_fields_set__", set(static["set"]))
        if not is_root:
            for place in ("extra", "private"):
                held = None if static[place] is None else {name: given[name] for name in static[place]}
                set_field(obj, f"__pydantic_{place}__", held)
        return obj

    return contract.FlattenFunctions(flatten, flatten_with_keys, unflatten)


# -- mappings ----------------------------------------------------------------------------------------------------------
#
# The constructor rebuilds an instance. So content outside of the items is refused, and the items that the constructor
# makes are compared with the given items.


def is_mapping_like(cls: type) -> bool:
    return all(callable(getattr(cls, name, None)) for name in ("keys", "values"))


def is_mapping(cls: type) -> bool:
    """Return whether a class is a mapping that stores all of its content as items."""
    if not is_mapping_like(cls):
        return False
    written = [value for base in _written(cls) for value in vars(base).values()]
    if issubclass(cls, dict) and any(type(value) is MemberDescriptorType for value in written):  # it has slots
        return False
    if not dataclasses.is_dataclass(cls):
        return True
    keeps_items = ("__post_init__", "__setitem__")  # as in a `ModelOutput` of transformers
    return issubclass(cls, dict) and any(name in vars(base) for base in _written(cls) for name in keeps_items)


def mapping_functions(cls: type) -> contract.FlattenFunctions:
    check_items = _check_of(cls)
    rebuild = _rebuilding(cls)

    def flatten(obj: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
        check_items(obj)
        return list(obj.values()), list(obj.keys())

    def flatten_with_keys(obj: Mapping[Any, Any]) -> tuple[list[tuple[Any, Any]], list[Any]]:
        children, keys = flatten(obj)
        return [(MappingKey(k), child) for k, child in zip(keys, children, strict=True)], keys

    def unflatten(children: Iterable[Any], keys: list[Any], output_type: type | None = None) -> Any:
        return rebuild(dict(zip(keys, children, strict=True)))

    return contract.FlattenFunctions(flatten, flatten_with_keys, unflatten)


def _written(cls: type) -> list[type]:
    """Return a class and its base classes, without base classes that are written in C."""
    return list(cls.__mro__[: cls.__mro__.index(builtin_base(cls))])


def _check_of(cls: type) -> Callable[[Any], None]:
    """Return a function that raises an error for a mapping with attributes that an export would lose."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        declared = frozenset(names)

        def check_fields(obj: Any) -> None:
            for name in names:
                value = getattr(obj, name, None)  # a field without an item must be None
                if value is not dict.get(obj, name):
                    raise _not_an_item(obj, name, [name])
            if not vars(obj).keys() <= declared:
                _check_attributes(obj)

        return check_fields
    if not cls.__dictoffset__:
        return lambda obj: None
    if issubclass(cls, (dict, collections.UserDict)):
        return _check_attributes
    rebuild, known = _rebuilding(cls), set[str]()  # known: the attributes that the constructor sets

    def check_attributes(obj: Any) -> None:
        if obj.__dict__.keys() <= known:
            return
        known.update(rebuild(dict(zip(obj.keys(), obj.values(), strict=True))).__dict__)
        more = [
            name for name, value in obj.__dict__.items() if not (name in known or contract.is_derived(cls, name, value))
        ]
        if more:
            raise _not_an_item(obj, more[0], more)

    return check_attributes


def _check_attributes(obj: Any) -> None:
    held = obj.__dict__
    if not held or held is obj:
        return
    is_dict = isinstance(obj, dict)
    more = [
        name
        for name, value in held.items()
        if not (is_dict and dict.get(obj, name, obj) is value)
        and not (name == "data" and not is_dict)
        and not contract.is_derived(type(obj), name, value)
    ]
    if more:
        raise _not_an_item(obj, more[0], more)


def _not_an_item(obj: object, name: str, names: list[str]) -> RoundTripError:
    cls = type(obj)
    if isinstance(obj, dict):
        line = f"register({cls.__qualname__}, children={names})"
    else:
        line = f"register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
    return RoundTripError(
        f"{cls.__qualname__}: its attribute {name!r} would be lost, because only the items of a mapping are exported. "
        f"Store it as an item, or register the class with the attribute (static data in static=[...]):\n    {line}"
    )


def _rebuilding(cls: type) -> Callable[[dict[Any, Any]], Any]:
    make: Callable[..., Any] = cls
    if dataclasses.is_dataclass(cls):
        # the value of a field without an item is None, not its default
        absent = {field.name: None for field in dataclasses.fields(cls) if field.init and field.default is not None}
        return lambda items: make(**{**absent, **items})
    if not issubclass(cls, dict):
        return lambda items: make(**items)
    base: Any = builtin_base(cls)
    if not any(name in vars(written) for written in _written(cls) for name in ("__init__", "__new__")):
        return make  # `make(**items)` would accept only names as keys

    def rebuild(items: Mapping[Any, Any]) -> Any:
        obj = make(items)
        found = dict(base.items(obj))
        # some constructors convert nested containers to their own class
        pairs = zip(found.values(), items.values(), strict=False)
        is_kept = all(one is given or isinstance(given, (dict, list, tuple)) for one, given in pairs)
        if list(found) != list(items) or not is_kept:
            made, given = (
                ", ".join(f"{key!r}: {type(value).__name__}" for key, value in held.items()) for held in (found, items)
            )
            raise RoundTripError(
                f"{cls.__qualname__}: its constructor got the items {{{given}}}, but the instance has {{{made}}}. To "
                f"rebuild instances without the constructor:\n    register({cls.__qualname__}, children=[])"
            )
        return obj

    return rebuild


# The first matching row is used: the author's own methods come before generated ones.
_READERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], contract.FlattenFunctions]], ...] = (
    (lambda cls: hasattr(cls, "__pydantic_fields__") and hasattr(cls, "model_construct"), _pydantic_functions),
    (
        lambda cls: (
            hasattr(cls, "tree_unflatten") and (hasattr(cls, "tree_flatten") or hasattr(cls, "tree_flatten_with_keys"))
        ),
        _jax_functions,
    ),
    # by attribute name (`_x`), not by the name of the constructor's parameter (`x`): no constructor is called
    (lambda cls: hasattr(cls, "__attrs_attrs__"), lambda cls: _by_metadata(cls, cls.__attrs_attrs__)),
    (is_mapping, mapping_functions),
    (dataclasses.is_dataclass, lambda cls: _by_metadata(cls, dataclasses.fields(cls))),
    (
        lambda cls: cls.__dictoffset__ == 0 and cls.__itemsize__ == 0 and bool(contract.slots_of(cls)),
        lambda cls: functions_from_fields(cls, contract.slots_of(cls)),
    ),
)


def torch_key(key: object) -> KeyEntry:
    # key: `GetAttrKey`, `DictKey`, `SequenceKey` or `FlattenedIndexKey` of `jax.tree_util`, a key of torch, or a bare
    # value: an integer is a position, any other value a key of a mapping
    if isinstance(key, (GetAttrKey, MappingKey, SequenceKey)):
        return key
    # by attribute, not by class, so that JAX is not imported
    if hasattr(key, "idx"):
        return SequenceKey(key.idx)
    if hasattr(key, "name"):
        return GetAttrKey(key.name)
    own: Any = getattr(key, "key", key)
    return SequenceKey(own) if type(key).__name__ == "FlattenedIndexKey" or type(key) is int else MappingKey(own)
