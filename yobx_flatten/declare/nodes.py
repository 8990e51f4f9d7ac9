"""Register a class as a pytree node with decorators in the style of JAX, or copy a registration between libraries.

The static part of a flattened object is called *aux* in JAX and *context* in torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar, cast, dataclass_transform, overload

from ..core.private_names.of_torch import pytree
from ..errors import InvalidArgumentError, InvalidRegistrationError, NotRegisteredError, describe_class, require
from ..errors.failures import undone_on_failure
from ..registry.claims import REGISTRY
from ..registry.recipe import contract
from ..registry.recipe.aliases import Static
from ..registry.recipe.attributes import functions_from_fields, names_of
from ..registry.recipe.fields import (
    JaxFlatten,
    JaxFlattenWithKeys,
    JaxUnflatten,
    functions_of,
    functions_of_jax,
    torch_key,
)
from ..registry.recipe.roundtrip import check_round_trip

C = TypeVar("C", bound=type)
Backends = str | Iterable[str]
_Functions = tuple[contract.Flatten, contract.FlattenWithKeys | None, contract.Unflatten]


def register(
    cls: type, *, children: Iterable[str] | None = None, static: Iterable[str] = (), backends: Backends = "all"
) -> bool:
    """Register a class as a pytree node that is flattened by its fields, by its methods, or by the given attributes.

    Args:
        cls: a class that :func:`~yobx_flatten.make_flattening_function_for_dataclass` accepts; any class if
            ``children`` is given.
        children: names of the attributes that become children, as for :func:`~yobx_flatten.functions_from_fields`.
        static: names of the attributes that become static data; none by default.
        backends: library names, such as ``"torch"`` or ``["optree", "jax"]``; ``"all"`` for all installed libraries.

    Returns:
        ``True`` if this call registered the class, ``False`` if it was registered already.
        :func:`~yobx_flatten.unregister_class_flattening` undoes the registration.

    Raises:
        InvalidRegistrationError: when the class is not supported, a name is invalid, or ``children`` is missing.
        AlreadyRegisteredError: when this package has already registered the class with different functions.
        InvalidArgumentError, MissingDependencyError: when ``backends`` names an unknown or a missing library.

    >>> import dataclasses, torch, yobx_flatten
    >>> @dataclasses.dataclass
    ... class Pair:
    ...     a: object
    ...     b: object
    >>> register(Pair)
    True
    >>> torch.utils._pytree.tree_leaves([Pair(1, Pair(2, 3))])
    [1, 2, 3]
    >>> yobx_flatten.unregister_class_flattening(Pair)
    """
    contract.require_node(cls, "register")
    if children is not None:
        return _claim(cls, functions_from_fields, (names_of(children), names_of(static)), "register", backends)
    if static := list(static):
        raise InvalidRegistrationError(
            f"register({cls.__qualname__}): static= was given without children=. Name all attributes:\n"
            f"    register({cls.__qualname__}, children=[...], static={static})"
        )
    return _claim(cls, functions_of, ("register",), "register", backends)


def register_pytree_node(
    cls: type,
    flatten: JaxFlatten,
    unflatten: JaxUnflatten,
    flatten_with_keys: JaxFlattenWithKeys | None = None,
    *,
    backends: Backends = "all",
) -> bool:
    """Register a class by flatten and unflatten functions with the arguments and results that JAX expects.

    Args:
        cls: the class; subclasses need their own registration.
        flatten: a function ``obj -> (children, static)``.
        unflatten: a function ``(static, children) -> obj`` (torch: ``(children, static)``); ``children`` is a tuple.
        flatten_with_keys: a function ``obj -> ([(key, child), ...], static)`` with keys of JAX or torch. With
            ``None``, the keys are numbers.
        backends: library names, such as ``"torch"`` or ``["optree", "jax"]``; ``"all"`` for all installed libraries.

    Returns:
        ``True`` if this call registered the class, ``False`` if it was registered already.
        :func:`~yobx_flatten.unregister_class_flattening` undoes the registration.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class, is a named tuple or an enum, or when a function does not
            accept its arguments.
        AlreadyRegisteredError: when this package has already registered the class with different functions.
        InvalidArgumentError, MissingDependencyError: when ``backends`` names an unknown or a missing library.

    >>> import torch, yobx_flatten
    >>> class Dense:
    ...     def __init__(self, weights, activation):
    ...         self.weights, self.activation = weights, activation
    >>> register_pytree_node(
    ...     Dense, lambda d: ((d.weights,), d.activation), lambda activation, c: Dense(*c, activation)
    ... )
    True
    >>> torch.utils._pytree.tree_map(lambda w: 2 * w, Dense(3, "relu")).activation
    'relu'
    >>> yobx_flatten.unregister_class_flattening(Dense)
    """
    return _register_functions(cls, flatten, unflatten, flatten_with_keys, "register_pytree_node", backends)


def register_pytree_with_keys(
    cls: type,
    flatten_with_keys: JaxFlattenWithKeys,
    unflatten: JaxUnflatten,
    flatten: JaxFlatten | None = None,
    *,
    backends: Backends = "all",
) -> bool:
    """Register a class by functions with JAX's arguments and results; the flatten function gives each child a key.

    Args:
        cls: the class; subclasses need their own registration.
        flatten_with_keys: a function ``obj -> ([(key, child), ...], static)`` with keys of JAX or torch.
        unflatten: a function ``(static, children) -> obj`` whose ``children`` is a tuple.
        flatten: a faster function ``obj -> (children, static)`` for calls that need no keys. If ``flatten`` is
            ``None``, ``flatten_with_keys`` is called and its keys are dropped.
        backends: see :func:`register_pytree_node`.

    Returns:
        ``True`` if this call registered the class, ``False`` if it was registered already.

    Raises:
        FlattenError: when :func:`register_pytree_node` would raise an error.

    >>> import torch, yobx_flatten
    >>> class Pair:
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> key = torch.utils._pytree.GetAttrKey
    >>> register_pytree_with_keys(
    ...     Pair,
    ...     lambda pair: ([(key("left"), pair.left), (key("right"), pair.right)], None),
    ...     lambda static, children: Pair(*children),
    ... )
    True
    >>> [torch.utils._pytree.keystr(path) for path, _ in torch.utils._pytree.tree_flatten_with_path(Pair(1, 2))[0]]
    ['.left', '.right']
    >>> yobx_flatten.unregister_class_flattening(Pair)
    """
    return _register_functions(cls, flatten, unflatten, flatten_with_keys, "register_pytree_with_keys", backends)


@overload
def register_pytree_node_class(cls: C, *, backends: Backends = "all") -> C: ...
@overload
def register_pytree_node_class(cls: None = None, *, backends: Backends = "all") -> Callable[[C], C]: ...
def register_pytree_node_class(cls: C | None = None, *, backends: Backends = "all") -> C | Callable[[C], C]:
    """Register the decorated class, which has the methods ``tree_flatten`` and ``tree_unflatten`` of JAX.

    Args:
        cls: a class with ``tree_flatten(self) -> (children, static)`` and the class method
            ``tree_unflatten(cls, static, children) -> obj``.
        backends: see :func:`register_pytree_node`.

    Returns:
        The decorated class; a decorator if ``cls`` is not given.

    Raises:
        InvalidRegistrationError: when a method is missing, or ``tree_unflatten`` is not a class method.
        AlreadyRegisteredError: when this package has already registered the class with different functions.

    >>> import torch, yobx_flatten
    >>> @register_pytree_node_class
    ... class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    ...     def tree_flatten(self):
    ...         return (self.a, self.b), None
    ...     @classmethod
    ...     def tree_unflatten(cls, static, children):
    ...         return cls(*children)
    >>> torch.utils._pytree.tree_leaves({"pair": Pair(1, 2)})
    [1, 2]
    >>> yobx_flatten.unregister_class_flattening(Pair)
    """
    return _register_methods(cls, caller="register_pytree_node_class", backends=backends)


@overload
def register_pytree_with_keys_class(cls: C, *, backends: Backends = "all") -> C: ...
@overload
def register_pytree_with_keys_class(cls: None = None, *, backends: Backends = "all") -> Callable[[C], C]: ...
def register_pytree_with_keys_class(cls: C | None = None, *, backends: Backends = "all") -> C | Callable[[C], C]:
    """Register the decorated class, which has JAX's methods ``tree_flatten_with_keys`` and ``tree_unflatten``.

    Args:
        cls: a class with ``tree_flatten_with_keys(self) -> ([(key, child), ...], static)`` with keys of JAX or torch,
            the class method ``tree_unflatten(cls, static, children) -> obj`` and, optionally, ``tree_flatten``.
        backends: see :func:`register_pytree_node`.

    Returns:
        The decorated class; a decorator if ``cls`` is not given.

    Raises:
        InvalidRegistrationError: when a method is missing, or ``tree_unflatten`` is not a class method.
        AlreadyRegisteredError: when this package has already registered the class with different functions.

    >>> import torch, yobx_flatten
    >>> @register_pytree_with_keys_class
    ... class Scaled:
    ...     def __init__(self, weight, power):
    ...         self.weight, self.power = weight, power
    ...
    ...     def tree_flatten_with_keys(self):
    ...         return [(torch.utils._pytree.GetAttrKey("weight"), self.weight)], self.power
    ...
    ...     @classmethod
    ...     def tree_unflatten(cls, static, children):
    ...         return cls(*children, static)
    >>> torch.utils._pytree.tree_map(lambda weight: weight + 1, Scaled(3, power=2)).weight
    4
    >>> yobx_flatten.unregister_class_flattening(Scaled)
    """
    return _register_methods(cls, caller="register_pytree_with_keys_class", backends=backends)


def static_field(**options: Any) -> Any:
    """Declare that a field of a :func:`pytree_dataclass` is static: part of the tree spec, not a leaf.

    Static data is compared, and hashed by JAX, at every call. An exported program refuses inputs whose static data
    differs from that of the example inputs. Static data may be strings, numbers, tuples, dtypes, enums, and lists and
    dicts of them; tensors must be children.

    Args:
        options: keyword arguments of :func:`dataclasses.field`.

    Returns:
        The field to assign in the body of the dataclass.

    >>> import torch, yobx_flatten
    >>> @pytree_dataclass
    ... class Norm:
    ...     weight: object
    ...     eps: float = static_field(default=1e-5)
    >>> torch.utils._pytree.tree_leaves(Norm(1))
    [1]
    >>> yobx_flatten.unregister_class_flattening(Norm)
    """
    return dataclasses.field(**{**options, "metadata": {**(options.get("metadata") or {}), "static": True}})


@overload
def pytree_dataclass(cls: C, *, backends: Backends = "all", **options: Any) -> C: ...
@overload
def pytree_dataclass(cls: None = None, *, backends: Backends = "all", **options: Any) -> Callable[[C], C]: ...
@dataclass_transform(field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass(cls: C | None = None, *, backends: Backends = "all", **options: Any) -> C | Callable[[C], C]:
    """Make a class a dataclass and a pytree node: its fields are flattened, except each :func:`static_field`.

    Unflatten calls neither ``__init__`` nor ``__post_init__``, which may refuse the placeholders of a trace. A value
    that ``__post_init__`` computes is restored only if it is a field (``dataclasses.field(init=False)``).

    A subclass inherits the fields, but not the registration: instances of a subclass without the decorator are leaves.

    Args:
        cls: the class, which may be a dataclass already.
        backends: see :func:`register_pytree_node`.
        options: arguments of :func:`dataclasses.dataclass`, such as ``frozen=True``, ``slots=True``, ``kw_only=True``.

    Returns:
        The class; with ``slots=True`` a new class of the same name, as from :func:`dataclasses.dataclass`.
        A decorator is returned if ``cls`` is not given.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class, or its base class stores data outside of the fields.
        AlreadyRegisteredError: when this package has already registered the class with different functions.

    >>> import torch, yobx_flatten
    >>> @pytree_dataclass(frozen=True)
    ... class Dense:
    ...     weights: object
    ...     activation: str = static_field(default="relu")
    >>> leaves, spec = torch.utils._pytree.tree_flatten(Dense(1, "gelu"))
    >>> leaves, torch.utils._pytree.tree_unflatten([2], spec)
    ([1], Dense(weights=2, activation='gelu'))
    >>> yobx_flatten.unregister_class_flattening(Dense)
    """
    if cls is None:
        return functools.partial(pytree_dataclass, backends=backends, **options)
    contract.require_node(cls, "pytree_dataclass")
    # a subclass of a dataclass is not itself a dataclass
    is_made = not options and "__dataclass_fields__" in vars(cls)
    made = cls if is_made else cast("C", dataclasses.dataclass(**options)(cls))
    _claim(made, _functions_of_fields, (), "pytree_dataclass", backends)
    return made


def _functions_of_fields(cls: type) -> contract.FlattenFunctions:
    fields = dataclasses.fields(cls)
    static = [field.name for field in fields if field.metadata.get("static", False)]
    children = [field.name for field in fields if field.name not in static]
    return functions_from_fields(cls, children, static, names_in_static=False)


def _register_functions(
    cls: type,
    flatten: JaxFlatten | None,
    unflatten: JaxUnflatten,
    flatten_with_keys: JaxFlattenWithKeys | None,
    caller: str,
    backends: Backends,
) -> bool:
    contract.require_node(cls, caller)
    for argument, function in (("flatten", flatten), ("flatten_with_keys", flatten_with_keys)):
        if function is not None or (argument == "flatten") is (caller == "register_pytree_node"):
            contract.require_callable(cls, argument, function, 1, caller=caller)
    contract.require_callable(cls, "unflatten", unflatten, 2, caller=caller, needed="(static, children)")
    first = ""
    with contextlib.suppress(TypeError, ValueError):  # builtins have no signature
        first = next(iter(inspect.signature(unflatten).parameters), "")
    if first in ("children", "values", "leaves"):  # the argument order of torch
        raise InvalidRegistrationError(
            f"{caller}({cls.__qualname__}): unflatten is called as f(static, children), the order of JAX, but its "
            f"first parameter is {first!r}. Define unflatten(static, children), or register torch's order, (children, "
            f"static):\n    register_class_flattening({cls.__qualname__}, flatten, unflatten, flatten_with_keys)"
        )
    return _claim(cls, functions_of_jax, (flatten, unflatten, flatten_with_keys), caller, backends)


def _register_methods(cls: C | None, *, caller: str, backends: Backends) -> C | Callable[[C], C]:
    if cls is None:
        return cast("Callable[[C], C]", functools.partial(_register_methods, caller=caller, backends=backends))
    contract.require_node(cls, caller)
    flatten, keyed = getattr(cls, "tree_flatten", None), getattr(cls, "tree_flatten_with_keys", None)
    wanted = "tree_flatten_with_keys" if caller == "register_pytree_with_keys_class" else "tree_flatten"
    for name in (wanted, "tree_unflatten"):
        if not callable(getattr(cls, name, None)):
            raise InvalidRegistrationError(
                f"{caller}({cls.__qualname__}): the class has no method {name}. Write the method, or flatten the "
                "class by its fields:\n"
                f"    @pytree_dataclass\n    class {cls.__name__}: ..."
            )
    if isinstance(inspect.getattr_static(cls, "tree_unflatten"), FunctionType):
        raise InvalidRegistrationError(
            f"{caller}({cls.__qualname__}): tree_unflatten creates the object, so it must be a class method:\n"
            "    @classmethod\n    def tree_unflatten(cls, static, children): ..."
        )
    unflatten = cls.tree_unflatten  # type: ignore[attr-defined] # checked above
    _claim(cls, functions_of_jax, (flatten, unflatten, keyed), caller, backends)
    return cls


def _claim(
    cls: type, make: Callable[..., _Functions], written: tuple[Any, ...], caller: str, backends: Backends
) -> bool:
    """Register ``cls`` with the functions that ``make`` returns; return ``False`` if ``cls`` has them already."""
    libraries = REGISTRY.libraries(backends, caller)
    source = (make, written)
    for library in libraries:
        recipe = REGISTRY.recipe_in_force(cls, library)
        if recipe is not None and getattr(recipe.unflatten, "_source", None) == source:
            break
    else:
        flatten, flatten_with_keys, unflatten = make(cls, *written)
        unflatten._source = source  # type: ignore[attr-defined] # a function, made for this class alone
        more = ""
        if make is functions_from_fields:
            more = ", children={}, static={}".format(*written)
        elif make is functions_of_jax and "class" not in caller:
            more = ", ..."
        remedy = f"{caller}({cls.__qualname__}{more})"
        recipe = contract.Recipe.from_functions(cls, flatten, unflatten, flatten_with_keys, remedy=remedy)
    return REGISTRY.claim_for_user(recipe, libraries) is not None


def mirror(
    cls: type,
    *,
    source: str = "jax",
    to: str | Iterable[str] = ("torch",),
    namespace: str = "",
    f_check: Callable[[], Any] | None = None,
) -> bool:
    """Copy the flatten functions of a class from one library, with which the class is registered, to other libraries.

    Args:
        cls: a class that is registered with ``source``, such as a class of flax, equinox, chex or transformers.
        source: the library from which the functions are copied: ``"jax"``, ``"torch"`` (its Python pytree) or
            ``"optree"``.
        to: name or names of the libraries that get the functions: ``"torch"``, ``"jax"`` or ``"optree"``.
        namespace: optree namespace in which the class is registered, for ``source="optree"``; ``""`` is global.
        f_check: a function that makes an instance of the class. If the instance differs after flatten and unflatten, or
            its static data cannot be stored, the registration is undone. ``None`` checks nothing.

    Returns:
        ``True`` if this call registered the class, ``False`` if it was registered already with each library of ``to``.
        :func:`~yobx_flatten.unregister_class_flattening` undoes the registration.

    Raises:
        InvalidArgumentError: when a library is unknown, or ``to`` contains ``source``.
        MissingDependencyError: when a library is not installed.
        NotRegisteredError: when the class is not registered with ``source``.
        AlreadyRegisteredError: when this package registered different functions for the class with a target library.
        RoundTripError: when the instance of ``f_check`` differs after flatten and unflatten.

    >>> import optree, torch, yobx_flatten
    >>> class Pair:
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> flatten = lambda pair: ((pair.left, pair.right), None)
    >>> cls = optree.register_pytree_node(Pair, flatten, lambda _, values: Pair(*values), namespace="pairs")
    >>> mirror(Pair, source="optree", namespace="pairs")
    True
    >>> torch.utils._pytree.tree_leaves(Pair(1, 2))
    [1, 2]
    >>> yobx_flatten.unregister_class_flattening(Pair)
    >>> cls = optree.unregister_pytree_node(Pair, namespace="pairs")
    """
    contract.require_node(cls, "mirror")
    targets = (to,) if isinstance(to, str) else tuple(to)
    for name in (source, *targets):
        if name not in _SOURCES:
            raise InvalidArgumentError(
                f"mirror: expected one of the libraries {', '.join(map(repr, _SOURCES))}, found "
                f'{describe_class(name)}.\n    mirror(MyClass, source="jax", to=("torch",))'
            )
        require(name, purpose="mirror")
    if source in targets or not targets:
        raise InvalidArgumentError(
            f"mirror: to= must name libraries other than source=; found source={source!r} and to={targets!r}.\n"
            '    mirror(MyClass, source="jax", to=("torch",))'
        )
    start = f"mirror({cls.__qualname__}, source={source!r}, "
    recipe = REGISTRY.recipe_in_force(cls, source)
    if recipe is None:  # the functions that an earlier `mirror` from this source copied are copied again
        held = [REGISTRY.recipe_in_force(cls, library) for library in _SOURCES]
        recipe = next((one for one in held if one is not None and one.remedy.startswith(start)), None)
    if recipe is None:
        functions = _SOURCES[source](cls, namespace)
        if functions is None:
            library = {"jax": "JAX", "optree": f"optree (namespace {namespace!r})"}.get(source, source)
            raise NotRegisteredError(
                f"mirror({cls.__qualname__}): {describe_class(cls)} is not registered with {library}. Register the "
                f"class with {library} first, or with all libraries at once:\n    register({cls.__qualname__})"
            )
        flatten, flatten_with_keys, unflatten = functions
        recipe = contract.Recipe.from_functions(
            cls, flatten, unflatten, flatten_with_keys, remedy=f"{start}to={targets!r})"
        )
    if f_check is not None:
        contract.require_callable(cls, "f_check", f_check, 0)
    claim = REGISTRY.claim_for_user(recipe, targets)
    if claim is None:
        return False
    if f_check is not None:
        with undone_on_failure(functools.partial(REGISTRY.release, claim)):
            check_round_trip(recipe, f_check())
    return True


def _from_torch(cls: type, namespace: str) -> _Functions | None:
    node = pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.flatten_with_keys_fn, node.unflatten_fn)


def _from_jax(cls: type, namespace: str) -> _Functions | None:
    # JAX has no registrations before its import
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None or not tree_util.default_registry.is_node(cls):
        return None
    registry, leaf = tree_util.default_registry, tree_util.tree_structure(0)

    def flatten(obj: object) -> tuple[list[Any], Any]:
        children, static = registry.flatten_one_level(obj)
        return list(children), static

    # the static part of one level is plain data, unlike a whole tree definition, so `torch.export.save` can store it
    def flatten_with_keys(obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        pairs, definition = tree_util.tree_flatten_with_path(obj, is_leaf=lambda part: part is not obj)
        return [(torch_key(path[0]), child) for path, child in pairs], definition.node_data()[1]

    def unflatten(children: Iterable[Any], static: Static) -> Any:
        children = list(children)
        definition = tree_util.PyTreeDef.from_node_data_and_children(registry, (cls, static), [leaf] * len(children))
        return definition.unflatten(children)

    return flatten, flatten_with_keys, unflatten


def _from_optree(cls: type, namespace: str) -> _Functions | None:
    optree = sys.modules.get("optree")
    entry = None if optree is None else optree.register_pytree_node.get(cls, namespace=namespace)
    if entry is None or optree is None:
        return None
    flatten_func, unflatten_func, kind = entry.flatten_func, entry.unflatten_func, entry.path_entry_type
    torch_keys = {
        optree.GetAttrEntry: pytree.GetAttrKey,
        optree.SequenceEntry: pytree.SequenceKey,
        optree.MappingEntry: pytree.MappingKey,
    }
    key_of = next((key for known, key in torch_keys.items() if issubclass(kind, known)), torch_key)

    def flatten(obj: object) -> tuple[list[Any], Any]:
        children, static, *_ = flatten_func(obj)
        return list(children), static

    def flatten_with_keys(obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        children, static, *rest = flatten_func(obj)
        children = list(children)
        entries = range(len(children)) if not rest or rest[0] is None else rest[0]
        return [(key_of(entry), child) for entry, child in zip(entries, children, strict=True)], static

    def unflatten(children: Iterable[Any], static: Static) -> Any:
        return unflatten_func(static, tuple(children))

    return flatten, flatten_with_keys, unflatten


_SOURCES = {"torch": _from_torch, "jax": _from_jax, "optree": _from_optree}
