"""Store which ``with`` blocks need a class registered; after the last block, restore its earlier registration.

A *library* is torch (three pytree tables), optree or JAX. Two ``with`` blocks for one class can end in either order.
"""

# claims on DynamicCache      registered      what happens
# -                           theirs          found = theirs
# block 1                     ours            written once
# block 1, block 2            ours            nothing (two threads, or nested)
#          block 2            ours            nothing (block 1 ended first)
# -                           theirs          found is restored

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .. import errors
from ..errors import require
from .patches import LOCK
from .recipe.contract import Recipe
from .tables import Jax, Optree, TorchCpp, TorchFx, TorchPython

TORCH = ("torch",)  # the libraries that the documented functions use by default


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A request to keep a class registered, made by a ``with`` block or by the user."""

    recipe: Recipe
    by_user: bool
    libraries: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Slot:
    recipe: Recipe  # registered
    found: list[Any]  # per table of the library
    claims: list[Claim]

    @property
    def by_user(self) -> bool:
        return self.claims[0].by_user


class Registry:
    """Keeps each class registered with a library until the last :class:`Claim` on the class is released."""

    def __init__(self, libraries: Mapping[str, tuple[Backend, ...]]) -> None:
        self._libraries = dict(libraries)
        self._slots: dict[tuple[str, type], _Slot] = {}
        self._retired: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()

    def recipe_in_force(self, cls: type, library: str = "torch") -> Recipe | None:
        """Return the functions that this package registered for a class with a library; ``None`` if there are none."""
        with LOCK:
            slot = self._slots.get((library, cls))
            return None if slot is None else slot.recipe

    def remedy(self, cls: type) -> str | None:
        """Return the code line that registers a class, for error messages; ``None`` for an unknown class."""
        with LOCK:
            for library in self._libraries:
                if (library, cls) in self._slots:
                    return self._slots[library, cls].recipe.remedy
            return self._retired.get(cls)

    def registered_base(self, cls: type) -> type | None:
        """Return the nearest base class that the user registered; ``None`` if the user registered no base class."""
        with LOCK:
            held = {key[1] for key, slot in self._slots.items() if slot.by_user}
            return next((base for base in cls.__mro__[1:] if base in held), None)

    def libraries(self, backends: str | Iterable[str], function: str) -> tuple[str, ...]:
        """Return the libraries that ``backends`` names; raise an error if a library is unknown or not installed."""
        names = (backends,) if isinstance(backends, str) else tuple(backends)
        unknown = [name for name in names if name != "all" and name not in self._libraries]
        if unknown or not names:
            known = ", ".join(map(repr, self._libraries))
            found = errors.describe_class(unknown[0]) if unknown else "none"
            raise errors.InvalidArgumentError(
                f"{function}: backends= must be 'all' or name libraries among {known}; found {found}.\n"
                f"    {function}(..., backends=({', '.join(map(repr, TORCH))},))"
            )
        for name in names:
            if name != "all":
                require(name, purpose=f"{function}(..., backends={name!r})")
        return tuple(name for name in self._libraries if name in names or "all" in names)

    def claim(self, recipe: Recipe) -> Claim | None:
        """Register a class with torch for a ``with`` block, unless the user has registered the class."""
        with LOCK:
            slot = self._slots.get(("torch", recipe.cls))
            if slot is None:
                return self._open(recipe, TORCH, by_user=False)
            if slot.by_user:
                return None
            for backend in self._libraries["torch"]:
                if backend.read(recipe.cls) is None:  # other code has unregistered the class
                    backend.write(slot.recipe)
            claim = Claim(slot.recipe, False, TORCH)
            slot.claims.append(claim)
            return claim

    def claim_for_user(self, recipe: Recipe, libraries: tuple[str, ...] = TORCH) -> Claim | None:
        """Register a class until the user unregisters it, in those of ``libraries`` that have not registered it yet."""
        with LOCK:
            free, refused = [], None
            for library in libraries:
                slot = self._slots.get((library, recipe.cls))
                known = self._libraries[library][0].read(recipe.cls) is not None
                if slot is not None and slot.by_user and not known:
                    self._release(library, slot.claims[0])  # other code has unregistered the class
                    slot = None
                if slot is None and not known:
                    free.append(library)
                elif slot is not None and not slot.recipe.same_functions(recipe):
                    refused = slot
            if refused is None:
                return self._open(recipe, tuple(free), by_user=True) if free else None
        # outside of the lock: the message can call a user's `__repr__`
        name = recipe.cls.__qualname__
        held = "with register_class_flattening" if refused.by_user else "by a block"
        way_out = (
            f"Unregister it first:\n    unregister_class_flattening({name})"
            if refused.by_user
            else f"To keep your functions inside the block, register before you enter it:\n"
            f"    register_class_flattening({name}, ...)\n    {refused.recipe.remedy}"
        )
        functions = [getattr(one.flatten, "func", one.flatten) for one in (refused.recipe, recipe)]  # of a partial
        before, now = (getattr(function, "__qualname__", repr(function)) for function in functions)
        differs = f" ({before} instead of {now})" if before != now else ""
        start = f"{errors.describe_class(recipe.cls)} is already registered {held}"
        raise errors.AlreadyRegisteredError(f"{start}, with other functions{differs}. {way_out}")

    def release(self, claim: Claim) -> None:
        """Release a claim, and undo the registration of its class if no other claim on the class is left."""
        with LOCK:
            for library in claim.libraries:
                self._release(library, claim)

    def release_user(self, cls: type) -> None:
        """Unregister, in all libraries, a class that the user registered; raise an error for any other class."""
        with LOCK:
            slots = [self._slots[library, cls] for library in self._libraries if (library, cls) in self._slots]
            claims = [claim for slot in slots for claim in slot.claims if claim.by_user]
            for claim in claims:
                self.release(claim)
            tables = [backend for library in self._libraries.values() for backend in library]
            holders = [] if claims or slots else [one.name for one in tables if one.read(cls) is not None]
        if claims:
            return
        start = f"unregister_class_flattening({cls.__qualname__}): {errors.describe_class(cls)}"
        if slots:
            raise errors.NotRegisteredError(
                f"{start} was registered by a with block that unregisters it at its end:\n    {slots[0].recipe.remedy}"
            )
        if holders:
            raise errors.NotRegisteredError(
                f"{start} was registered by other code (in {', '.join(holders)}), not through "
                "register_class_flattening. It stays registered."
            )
        raise errors.NotRegisteredError(
            f"{start} is not registered. To register it:\n    register_class_flattening({cls.__qualname__}, ...)"
        )

    def _release(self, library: str, claim: Claim) -> None:
        key = library, claim.recipe.cls
        slot = self._slots.get(key)
        if slot is None or not any(held is claim for held in slot.claims):
            return
        if len(slot.claims) > 1:
            slot.claims = [held for held in slot.claims if held is not claim]
            return
        for backend, found in zip(self._libraries[library], slot.found, strict=True):
            backend.restore(slot.recipe, found)
        del self._slots[key]
        self._retired[claim.recipe.cls] = slot.recipe.remedy

    def _open(self, recipe: Recipe, libraries: tuple[str, ...], *, by_user: bool) -> Claim:
        """Register a class in all pytree tables of the libraries, or in none of the tables if an error occurs."""
        found = {library: [b.read(recipe.cls) for b in self._libraries[library]] for library in libraries}
        written: list[tuple[Backend, Any]] = []
        try:
            for library in libraries:
                for backend, before in zip(self._libraries[library], found[library], strict=True):
                    backend.write(recipe)
                    written.append((backend, before))
        except BaseException:  # also Ctrl-C; raised again
            for backend, before in reversed(written):
                backend.restore(recipe, before)
            raise
        claim = Claim(recipe, by_user, libraries)
        for library in libraries:
            self._slots[library, recipe.cls] = _Slot(recipe, found[library], [claim])
        return claim


REGISTRY = Registry({"torch": (TorchPython(), TorchCpp(), TorchFx()), "optree": (Optree(),), "jax": (Jax(),)})


class Backend(Protocol):
    """A library's table of registered classes. If a method raises an error, the table is unchanged."""

    name: str

    def read(self, cls: type) -> Any: ...  # the entry of a class; `None` if the class is not registered

    def write(self, recipe: Recipe) -> None: ...  # replaces the entry of the class

    def restore(self, recipe: Recipe, found: Any) -> None: ...  # undoes `write`: `found` is the entry from before
