"""Copy registrations of classes between torch, JAX and optree."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InvalidArgumentError, NotRegisteredError, describe_class
from ..errors.dependencies import require
from ..errors.failures import undone_on_failure
from ..private_names.of_torch import pytree
from ..recipe.aliases import Static
from ..recipe.contract import Flatten, FlattenWithKeys, Recipe, Unflatten, require_callable, require_node
from ..recipe.fields import torch_key
from ..recipe.roundtrip import check_round_trip
from ..registry.claims import REGISTRY

_Functions = tuple[Flatten, FlattenWithKeys | None, Unflatten]


def mirror(
    cls: type,
    *,
    source: str = "jax",
    to: str | Iterable[str] = ("torch",),
    namespace: str = "",
    f_check: Callable[[], Any] | None = None,
) -> bool:
    """Copy the flatten functions that are registered for a class with one library to other libraries.

    Args:
        cls: a class that is registered with the source, such as a class of flax, equinox, chex or transformers.
        source: the library that flattens the class already: ``"jax"``, ``"torch"`` (its Python pytree) or
            ``"optree"``.
        to: the names of the libraries to register with.
        namespace: optree's namespace to read from if optree is the source; ``""`` is the global namespace.
        f_check: a function that makes an instance. The instance is flattened and rebuilt at once, and its static part
            is stored; if the check fails, nothing is registered. ``None`` checks nothing.

    Returns:
        ``True`` if this call registered the class, ``False`` if it was registered already with each library of ``to``.
        :func:`~yobx_flatten.unregister_class_flattening` undoes the registration.

    Raises:
        InvalidArgumentError: when a library is unknown, or ``to`` contains the source.
        MissingDependencyError: when a library is not installed.
        NotRegisteredError: when the class is not registered with the source.
        AlreadyRegisteredError: when this package registered the class with a library of ``to``, with other functions.
        RoundTripError: when the rebuilt instance of ``f_check`` differs from the original.

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
    require_node(cls, "mirror")
    targets = _targets(source, to)
    start = f"mirror({cls.__qualname__}, source={source!r}, "
    recipe = REGISTRY.recipe_in_force(cls, source) or _mirrored_before(cls, start)
    if recipe is None:
        flatten, flatten_with_keys, unflatten = _SOURCES[source](cls, namespace)
        recipe = Recipe.from_functions(cls, flatten, unflatten, flatten_with_keys, remedy=f"{start}to={targets!r})")
    if f_check is not None:
        require_callable(cls, "f_check", f_check, 0)
    claim = REGISTRY.claim_for_user(recipe, targets)
    if claim is None:
        return False
    if f_check is not None:
        with undone_on_failure(functools.partial(REGISTRY.release, claim)):
            check_round_trip(recipe, f_check())
    return True


def _targets(source: str, to: str | Iterable[str]) -> tuple[str, ...]:
    names = (to,) if isinstance(to, str) else tuple(to)
    known = ", ".join(map(repr, _SOURCES))
    for name in (source, *names):
        if name not in _SOURCES:
            raise InvalidArgumentError(
                f"mirror: expected one of the libraries {known}, found {describe_class(name)}.\n"
                '    mirror(MyClass, source="jax", to=("torch",))'
            )
        require(name, purpose="mirror")
    if source in names or not names:
        raise InvalidArgumentError(
            f"mirror: expected a library in source=, and others in to=; found source={source!r} and to={names!r}.\n"
            '    mirror(MyClass, source="jax", to=("torch",))'
        )
    return names


def _mirrored_before(cls: type, start: str) -> Recipe | None:
    """Return the flatten functions that an earlier :func:`mirror` from this source copied, to copy them again."""
    held = [REGISTRY.recipe_in_force(cls, library) for library in _SOURCES]
    return next((recipe for recipe in held if recipe is not None and recipe.remedy.startswith(start)), None)


def _unknown(cls: type, library: str, line: str) -> NotRegisteredError:
    return NotRegisteredError(
        f"mirror({cls.__qualname__}): {describe_class(cls)} is not registered with {library}. Register the class there "
        f"first, or with all libraries at once:\n    {line}"
    )


def _from_torch(cls: type, namespace: str) -> _Functions:
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        raise _unknown(cls, "torch", f"register({cls.__qualname__})")
    return node.flatten_fn, node.flatten_with_keys_fn, node.unflatten_fn


def _from_jax(cls: type, namespace: str) -> _Functions:
    # JAX has no registrations before its import
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None or not tree_util.default_registry.is_node(cls):
        raise _unknown(cls, "JAX", f"register({cls.__qualname__})")
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


def _from_optree(cls: type, namespace: str) -> _Functions:
    optree = sys.modules.get("optree")
    entry = None if optree is None else optree.register_pytree_node.get(cls, namespace=namespace)
    if entry is None or optree is None:
        raise _unknown(cls, f"optree (namespace {namespace!r})", f"register({cls.__qualname__})")
    flatten_func, unflatten_func = entry.flatten_func, entry.unflatten_func

    def flatten(obj: object) -> tuple[list[Any], Any]:
        children, static, *_ = flatten_func(obj)
        return list(children), static

    def flatten_with_keys(obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        children, static, *rest = flatten_func(obj)
        children = list(children)
        entries = range(len(children)) if not rest or rest[0] is None else rest[0]
        return [(_torch_key(optree, entry, e), child) for e, child in zip(entries, children, strict=True)], static

    def unflatten(children: Iterable[Any], static: Static) -> Any:
        return unflatten_func(static, tuple(children))

    return flatten, flatten_with_keys, unflatten


def _torch_key(optree: Any, entry: Any, key: Any) -> Any:
    kind = entry.path_entry_type
    if issubclass(kind, optree.GetAttrEntry):
        return pytree.GetAttrKey(key)
    if issubclass(kind, optree.SequenceEntry):
        return pytree.SequenceKey(key)
    return pytree.MappingKey(key) if issubclass(kind, optree.MappingEntry) else torch_key(key)


_SOURCES: dict[str, Callable[[type, str], _Functions]] = {
    "torch": _from_torch,
    "jax": _from_jax,
    "optree": _from_optree,
}
