"""Who holds which class, how often, and what every library held before. The only mutable object of the core.

A class that nobody holds is not mentioned here. The first claim on a class reads what each library holds (*found*) and
puts its recipe in force; the last claim to go brings *found* back. Claims may go in any order.

    claims on DynamicCache      in force        what happens
    -                           theirs          found = theirs
    block 1                     ours            written once
    block 1, block 2            ours            nothing (two threads, or nested)
             block 2            ours            nothing: block 1 left first
    -                           theirs          found brought back
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

from .backends.contract import Backend
from .backends.torch_cpp import TorchCpp
from .backends.torch_fx import TorchFx
from .backends.torch_python import TorchPython
from .errors import AlreadyRegisteredError, NotRegisteredError, describe_class
from .recipe import Recipe

__all__ = ["REGISTRY", "Claim", "Registry"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One holder's wish to have a recipe in force. Hand it to :meth:`Registry.release` to give it up."""

    recipe: Recipe
    by_user: bool


@dataclasses.dataclass(slots=True)
class _Slot:
    recipe: Recipe  # in force
    found: list[Any]  # per backend
    claims: list[Claim]


class Registry:
    """Claims on classes, over a fixed list of libraries; the first one decides whether a class is registered.

    No function of a user runs while the lock is held, so that a flatten function may register classes itself.
    """

    def __init__(self, backends: tuple[Backend, ...]) -> None:
        self._backends = backends
        self._slots: dict[type, _Slot] = {}
        self._retired: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def recipe_in_force(self, cls: type) -> Recipe | None:
        """Return our recipe for the class while somebody claims it."""
        with self._lock:
            slot = self._slots.get(cls)
            return None if slot is None else slot.recipe

    def remedy(self, cls: type) -> str | None:
        """Return the line that registers a class we hold or held, for error messages; ``None`` for other classes."""
        with self._lock:
            slot = self._slots.get(cls)
            return slot.recipe.remedy if slot is not None else self._retired.get(cls)

    def claim(self, recipe: Recipe) -> Claim | None:
        """Claim a class for a block.

        Returns:
            The claim, or ``None`` when the user registered the class herself: she keeps her functions.
        """
        with self._lock:
            slot = self._slots.get(recipe.cls)
            if slot is None:
                return self._open(recipe, by_user=False)
            if slot.claims[0].by_user:
                return None
            for backend in self._backends:
                if backend.read(recipe.cls) is None:  # taken away behind our back, by torch's own deregistration say
                    backend.write(slot.recipe)
            claim = Claim(slot.recipe, by_user=False)
            slot.claims.append(claim)
            return claim

    def claim_for_user(self, recipe: Recipe) -> Claim | None:
        """Claim a class for the user who called :func:`~yobx_flatten.register_class_flattening`.

        Returns:
            The claim, or ``None`` when the class is registered already: by us with the same functions, or by others.

        Raises:
            AlreadyRegisteredError: when it is registered by us with other functions.
        """
        with self._lock:
            slot, in_torch = self._slots.get(recipe.cls), self._backends[0].read(recipe.cls) is not None
            if slot is not None and slot.claims[0].by_user and not in_torch:
                self.release(slot.claims[0])  # torch's own deregistration took it away behind our back
                slot = None
            if slot is not None:
                if slot.recipe.same_functions(recipe):
                    return None
                raise AlreadyRegisteredError(_registered_twice(slot, recipe))
            return None if in_torch else self._open(recipe, by_user=True)

    def release(self, claim: Claim) -> None:
        """Give a claim up; the last one brings back what was found. Releasing twice does nothing."""
        with self._lock:
            slot = self._slots.get(claim.recipe.cls)
            if slot is None or not any(held is claim for held in slot.claims):
                return
            if len(slot.claims) > 1:
                slot.claims = [held for held in slot.claims if held is not claim]
                return
            for backend, found in zip(self._backends, slot.found, strict=True):
                backend.restore(slot.recipe, found)
            del self._slots[claim.recipe.cls]
            self._retired[claim.recipe.cls] = slot.recipe.remedy

    def release_user(self, cls: type) -> None:
        """Give up the user's claim on a class.

        Raises:
            NotRegisteredError: when she holds none.
        """
        with self._lock:
            slot = self._slots.get(cls)
            if slot is None or not slot.claims[0].by_user:
                raise NotRegisteredError(self._not_hers(cls, slot))
            self.release(slot.claims[0])

    def _open(self, recipe: Recipe, *, by_user: bool) -> Claim:
        """Put the recipe in force everywhere, or nowhere."""
        found = [backend.read(recipe.cls) for backend in self._backends]
        written: list[tuple[Backend, Any]] = []
        try:
            for backend, before in zip(self._backends, found, strict=True):
                backend.write(recipe)
                written.append((backend, before))
        except BaseException:
            for backend, before in reversed(written):
                backend.restore(recipe, before)
            raise
        claim = Claim(recipe, by_user)
        self._slots[recipe.cls] = _Slot(recipe, found, [claim])
        return claim

    def _not_hers(self, cls: type, slot: _Slot | None) -> str:
        start = f"unregister_class_flattening({cls.__qualname__}): {describe_class(cls)}"
        if slot is not None:
            return f"{start} is held by a block, which lets it go when it ends:\n    {slot.recipe.remedy}"
        holders = ", ".join(backend.name for backend in self._backends if backend.read(cls) is not None)
        if holders:
            return (
                f"{start} was registered by somebody else (in {holders}), not through register_class_flattening, and "
                "is left as it is."
            )
        return f"{start} is not registered. Register it first:\n    register_class_flattening({cls.__qualname__}, ...)"


def _registered_twice(slot: _Slot, recipe: Recipe) -> str:
    name = recipe.cls.__qualname__
    held = "by a block" if not slot.claims[0].by_user else "with register_class_flattening"
    way_out = (
        f"Unregister it first:\n    unregister_class_flattening({name})"
        if slot.claims[0].by_user
        else f"To keep your functions inside the block, register before you enter it:\n"
        f"    register_class_flattening({name}, ...)\n    {slot.recipe.remedy}"
    )
    return (
        f"{describe_class(recipe.cls)} is already registered {held}, with other functions "
        f"({_function_name(slot.recipe.flatten)} instead of {_function_name(recipe.flatten)}). {way_out}"
    )


def _function_name(function: Any) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__qualname__", repr(inner))


REGISTRY = Registry((TorchPython(), TorchCpp(), TorchFx()))
