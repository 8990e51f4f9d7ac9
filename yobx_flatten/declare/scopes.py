"""Register one class, or all known classes until the end of a ``with`` block."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ..core.interrupts import DeferredSignals
from ..errors import InvalidRegistrationError, RoundTripError, describe_class, require
from ..errors.failures import say, undone_on_failure, verbosity
from ..registry.claims import REGISTRY, TORCH
from ..registry.patches import LOCK, ImportHook
from ..registry.recipe.contract import (
    Flatten,
    FlattenFunctions,
    FlattenWithKeys,
    Recipe,
    Unflatten,
    require_callable,
    require_class,
    require_node,
)
from ..registry.recipe.fields import functions_of
from ..registry.recipe.roundtrip import check_round_trip
from ..trace.hook import EXPORT_HOOK
from ..trace.trace_settings import TraceSupport


def register_class_flattening(
    cls: type,
    f_flatten: Flatten | FlattenFunctions,
    f_unflatten: Unflatten | None = None,
    f_flatten_with_keys: FlattenWithKeys | None = None,
    f_check: Callable[[], Any] | None = None,
    verbose: int = 0,
    *,
    backends: str | Iterable[str] = TORCH,
    axes: Mapping[str, Mapping[int, str]] | None = None,
) -> bool:
    """Register one class with torch: with the Python pytree, the C++ pytree and ``torch.fx``.

    The guide describes :ref:`each argument <arguments-of-register>`.

    Args:
        cls: the class; subclasses need their own registration.
        f_flatten: a function ``obj -> (children, static)``: the list of an object's tensors and containers, and its
            other data. A tuple of all functions, from :func:`~yobx_flatten.functions_from_fields`, is also accepted.
        f_unflatten: a function ``(children, static) -> obj``.
        f_flatten_with_keys: a function ``obj -> ([(key, child), ...], static)`` with keys of ``torch.utils._pytree``.
            With ``None``, the keys are numbers.
        f_check: a function that makes an instance; if the instance differs after flatten and unflatten, the class is
            not registered.
        verbose: 1 or more logs each registration (logger ``yobx_flatten``); 0 by default.
        backends: library names, such as ``"torch"`` or ``["optree", "jax"]``; ``"all"`` for all installed libraries.
        axes: names of the axes that vary between calls, by key of the child: ``{"hidden": {1: "batch"}}``.

    Returns:
        ``True`` if this call registered the class with at least one library; ``False`` if each library already had a
        registration of the class, by other code or with the same functions.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class, is a named tuple or an enum, or when a function does not
            accept its arguments.
        InvalidArgumentError, MissingDependencyError: when ``backends`` names an unknown or a missing library.
        AlreadyRegisteredError: when this package has already registered the class with different functions.
        RoundTripError: when the instance of ``f_check`` differs after flatten and unflatten.

    >>> import torch
    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> flatten, unflatten = lambda pair: ([pair.a, pair.b], None), lambda children, static: Pair(*children)
    >>> register_class_flattening(Pair, flatten, unflatten, None, f_check=lambda: Pair(torch.zeros(2), torch.ones(2)))
    True
    >>> torch.utils._pytree.tree_leaves(Pair(1, 2))
    [1, 2]
    >>> unregister_class_flattening(Pair)
    """
    require_node(cls, "register_class_flattening")
    if isinstance(f_flatten, FlattenFunctions):
        if f_unflatten is not None or f_flatten_with_keys is not None:
            raise InvalidRegistrationError(
                f"register_class_flattening({cls.__qualname__}): FlattenFunctions contains all functions. Omit "
                f"f_unflatten and f_flatten_with_keys:\n    register_class_flattening({cls.__qualname__}, functions)"
            )
        f_flatten, f_flatten_with_keys, f_unflatten = f_flatten
    recipe = Recipe.from_functions(cls, f_flatten, f_unflatten, f_flatten_with_keys)  # type: ignore[arg-type] # refused
    if axes is not None:
        recipe = dataclasses.replace(recipe, axes={key: dict(meaning) for key, meaning in axes.items()}.get)
    libraries = REGISTRY.libraries(backends, "register_class_flattening")
    with verbosity(verbose):
        if f_check is not None:
            require_callable(cls, "f_check", f_check, 0)
        claim = REGISTRY.claim_for_user(recipe, libraries)
        if claim is not None and f_check is not None:
            with undone_on_failure(functools.partial(REGISTRY.release, claim)):  # also after Ctrl-C during the check
                sample = f_check()
                if sample is False:
                    raise RoundTripError(f"f_check returned False, so {cls.__qualname__} is not registered.")
                if sample is not None and sample is not True:
                    check_round_trip(recipe, sample)
        is_new = claim is not None
        level, text = (logging.INFO, "registered %s") if is_new else (logging.DEBUG, "%s is registered already")
        say(level, text, describe_class(cls))
    return is_new


def unregister_class_flattening(cls: type, verbose: int = 0) -> None:
    """Undo :func:`register_class_flattening`: restore the former registration of the class in each library.

    JAX cannot unregister a class, and continues to use the functions that were registered last.

    Args:
        cls: the class.
        verbose: 1 or more logs each change of a registration; 0 by default.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class.
        NotRegisteredError: when the class was not registered with :func:`register_class_flattening`.

    >>> import torch
    >>> class Box(dict): ...
    >>> flatten, flatten_with_keys, unflatten = make_flattening_function_for_dataclass(Box, set())
    >>> register_class_flattening(Box, flatten, unflatten, flatten_with_keys)
    True
    >>> torch.utils._pytree.tree_leaves(Box(x=1))
    [1]
    >>> unregister_class_flattening(Box)
    >>> torch.utils._pytree.tree_leaves(Box(x=1))  # a leaf again
    [{'x': 1}]
    """
    require_class(cls, "unregister_class_flattening")
    with verbosity(verbose):
        REGISTRY.release_user(cls)
        say(logging.INFO, "unregistered %s", describe_class(cls))


def make_flattening_function_for_dataclass(cls: type, supported_classes: set[type]) -> FlattenFunctions:
    """Make the three functions that :func:`register_class_flattening` needs for a class with named fields.

    Args:
        cls: a dataclass (also of flax, chex or equinox), an attrs class, a pydantic model, a mapping such as a ``dict``
            subclass or a ``ModelOutput``, a class with JAX's ``tree_flatten`` and ``tree_unflatten``, or a class with
            ``__slots__`` and no ``__dict__``. A field with ``metadata={"static": True}`` or flax's
            ``pytree_node=False`` becomes static data.
        supported_classes: a set of classes, to which ``cls`` is added.

    Returns:
        A named tuple of functions ``flatten_<class>``, ``flatten_with_keys_<class>`` and ``unflatten_<class>``.

    Raises:
        InvalidRegistrationError: when the fields of ``cls`` cannot be determined.

    >>> class HiddenState(dict):
    ...     pass
    >>> [f.__name__ for f in make_flattening_function_for_dataclass(HiddenState, set())]
    ['flatten_hidden_state', 'flatten_with_keys_hidden_state', 'unflatten_hidden_state']
    """
    functions = functions_of(cls)
    supported_classes.add(cls)
    return functions


class Undo(dict[type, bool]):
    """The result of :func:`register_cache_flattening`: a dict that maps each class to whether the call registered it.

    To undo the registrations, pass the ``Undo`` object to :func:`unregister_cache_flattening`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._undone = False

    def _add(self, cls: type, recipe: Recipe | None) -> None:
        with LOCK:
            if self._undone:  # a module whose import began inside the block was imported after the block
                return
            held_before = REGISTRY.recipe_in_force(cls) is not None
            claim = None if recipe is None else REGISTRY.claim(recipe)
            self[cls] = claim is not None and not held_before
            if claim is not None:
                self._stack.callback(REGISTRY.release, claim)

    def _add_imports(self, wanted: Callable[[str], bool], recipes_of: Callable[[ModuleType], list[Recipe]]) -> None:
        def action(module: ModuleType) -> None:
            for recipe in recipes_of(module):
                self._add(recipe.cls, recipe)

        hook = ImportHook(wanted, action)
        hook.install()
        self._stack.callback(hook.remove)

    def _add_hook(self, support: TraceSupport | None) -> None:
        EXPORT_HOOK.acquire(support)
        self._stack.callback(EXPORT_HOOK.release, support)

    def _undo(self) -> None:
        with LOCK:
            self._undone = True
            stack = self._stack.pop_all()  # a second call, also from another thread, does nothing
        stack.close()


def register_cache_flattening(
    patch_transformers: bool = False, patch_diffusers: bool = False, verbose: int = 0
) -> Undo:
    """Register flattening functions for Hugging Face caches and outputs; undo with :func:`unregister_cache_flattening`.

    Registrations of cache classes by other libraries are replaced (see :data:`WRONG_REGISTRATIONS`). A class that you
    registered with :func:`register_class_flattening` keeps your functions.

    Args:
        patch_transformers: whether to register every cache class of transformers and of its models, including models
            imported later, and to patch transformers so that exported programs accept inputs of all lengths. Subclasses
            of ``ModelOutput`` keep the registration that transformers makes. ``False`` by default.
        patch_diffusers: whether to register the output classes of diffusers' models and pipelines, including modules
            imported later. ``False`` by default.
        verbose: 1 or more logs each change of a registration; 0 by default.

    Returns:
        A dict that maps each class to ``True`` if this call registered the class, or ``False`` if an earlier
        registration stays. To undo the registrations, pass the returned dict to :func:`unregister_cache_flattening`.

    Raises:
        MissingDependencyError: when transformers or diffusers is requested, but not installed.

    >>> from transformers import DynamicCache
    >>> undo = register_cache_flattening(patch_transformers=True)
    >>> undo[DynamicCache]
    True
    >>> unregister_cache_flattening(undo)
    """
    undo = Undo()
    try:
        _put_in_force(undo, patch_transformers, patch_diffusers, verbose)
        return undo
    except BaseException:  # also Ctrl-C; raised again
        with DeferredSignals():
            undo._undo()
        raise


def _put_in_force(undo: Undo, patch_transformers: bool, patch_diffusers: bool, verbose: int) -> None:
    # slow work first, where Ctrl-C can stop it
    if patch_transformers:
        require("transformers", purpose="patch_transformers=True")
        from ..huggingface.recipes import transformers_recipes, transformers_recipes_of_module
        from ..huggingface.tracing.support import TRANSFORMERS_TRACING
    if patch_diffusers:
        require("diffusers", purpose="patch_diffusers=True")
        importlib.import_module("diffusers.utils.outputs")
        from ..huggingface.outputs import DIFFUSERS, diffusers_recipes
    with DeferredSignals(), verbosity(verbose):
        if patch_transformers:
            for cls, recipe in transformers_recipes().items():
                undo._add(cls, recipe)
            undo._add_imports(
                lambda name: name.startswith("transformers.models.") and name.count(".") == 3,
                transformers_recipes_of_module,
            )
            undo._add_hook(TRANSFORMERS_TRACING)
        if patch_diffusers:
            for recipe in diffusers_recipes():
                undo._add(recipe.cls, recipe)
            undo._add_imports(
                lambda name: name.startswith("diffusers."), lambda module: diffusers_recipes(module.__name__)
            )
            undo._add_hook(DIFFUSERS)
        undo._add_hook(None)
        names = ", ".join(cls.__name__ for cls, done in undo.items() if done)
        say(logging.INFO, "registered: %s", names or "nothing new")


def unregister_cache_flattening(undo: dict[type, bool], verbose: int = 0) -> None:
    """Undo one call of :func:`register_cache_flattening`; a second call with the same argument does nothing.

    Args:
        undo: the result of :func:`register_cache_flattening`.
        verbose: 1 or more logs each change of a registration; 0 by default.

    Raises:
        InvalidRegistrationError: when ``undo`` is not a result of :func:`register_cache_flattening`.

    >>> import torch
    >>> undo = register_cache_flattening(patch_transformers=True)
    >>> unregister_cache_flattening(undo)
    >>> from transformers import DynamicCache
    >>> torch.utils._pytree.tree_flatten(DynamicCache())[1].is_leaf()
    True
    """
    if not isinstance(undo, Undo):
        raise InvalidRegistrationError(
            "unregister_cache_flattening: expected the result of register_cache_flattening, found "
            f"{describe_class(undo)}.\n    undo = register_cache_flattening(patch_transformers=True)\n"
            "    unregister_cache_flattening(undo)"
        )
    with DeferredSignals(), verbosity(verbose):
        undo._undo()
        say(logging.INFO, "released: %s", ", ".join(c.__name__ for c in undo) or "nothing")


def register_flattening_functions(
    patch_transformers: bool = False, patch_diffusers: bool = False, verbose: int = 0
) -> Block:
    """Return a context manager in whose block ``torch.export`` accepts KV caches and outputs of Hugging Face models.

    At the end of the block, also after an exception, all registrations and patched attributes are restored. ``with``
    blocks can be nested, and can be active in several threads at once.

    Args:
        patch_transformers: see :func:`register_cache_flattening`; ``False`` by default.
        patch_diffusers: see :func:`register_cache_flattening`; ``False`` by default.
        verbose: 1 or more logs each change of a registration; 0 by default.

    Returns:
        A context manager (*the block*), which can also decorate a function.
        In ``with ... as undo``, ``undo`` is the dict that :func:`register_cache_flattening` returns.

    Raises:
        MissingDependencyError: on entering the block, when transformers or diffusers is requested, but not installed.

    >>> import torch
    >>> from transformers import DynamicCache
    >>> cache = DynamicCache()
    >>> _ = cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    >>> with register_flattening_functions(patch_transformers=True):
    ...     leaves, spec = torch.utils._pytree.tree_flatten(cache)
    >>> [tuple(leaf.shape) for leaf in leaves], spec.context
    ([(1, 2, 3, 4), (1, 2, 3, 4)], ['key_0', 'value_0'])
    """
    return Block(patch_transformers, patch_diffusers, verbose)


class Block(contextlib.ContextDecorator, contextlib.AbstractContextManager[Undo]):
    """The result of :func:`register_flattening_functions`: a context manager that can also decorate functions."""

    _undo: Undo | None = None
    _guard: Iterator[None] | None = None

    def __init__(self, patch_transformers: bool, patch_diffusers: bool, verbose: int) -> None:
        self._options = patch_transformers, patch_diffusers, verbose

    def _recreate_cm(self) -> Block:  # called by ContextDecorator at each call of the decorated function
        return Block(*self._options)

    # A signal handler can raise before any line. If it raises before the first line of `__exit__`, the guard undoes the
    # registrations when the last reference to the block is gone.

    def __enter__(self) -> Undo:
        try:
            self._undo = undo = Undo()
            self._guard = _undone_when_dropped(undo)
            next(self._guard)
            _put_in_force(undo, *self._options)
            return undo
        except BaseException:  # also Ctrl-C; raised again
            self._end()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            if self._undo is not None:
                unregister_cache_flattening(self._undo, self._options[-1])
            self._end()
        except BaseException:  # also Ctrl-C; raised again
            self._end()
            raise

    def _end(self) -> None:
        with DeferredSignals():
            if self._undo is not None:
                self._undo._undo()
            self._guard = None


def _undone_when_dropped(undo: Undo) -> Iterator[None]:
    # a generator, not __del__, which would run after every block and swallow exceptions
    try:
        yield
    finally:
        undo._undo()


def options_in_use() -> dict[str, bool]:
    return {f"patch_{library}": library in sys.modules for library in ("transformers", "diffusers")}
