"""Watch a method of one object: pass every call to observers, and restore the object afterwards.

::

    owner.forward(x)  ->  watcher.before(args, kwargs)  ->  the method itself  ->  watcher.after(token, result)
                                                              raises  ->  watcher.failed(token, error)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ..errors import InvalidArgumentError, describe_class
from ..registry.locking import LOCK
from ..registry.patches import AttributePatch


class Watcher(Protocol):
    """What is passed on of each call."""

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a token for this call; ``None`` if it is of no interest."""

    def after(self, token: Any, result: object) -> None:
        """The call returned."""

    def failed(self, token: Any, error: BaseException) -> None:
        """The call raised."""


class _Interception:
    """One method of one object, replaced while there are observers."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.watchers: tuple[Watcher, ...] = ()
        self.patch = AttributePatch(owner, name, self._replacement(getattr(owner, name)))

    def _replacement(self, original: Callable[..., Any]) -> Any:
        if not inspect.ismethod(original):  # a function that another library put on the object, as accelerate does

            @functools.wraps(original)
            def watched_function(*args: Any, **kwargs: Any) -> Any:
                return self._call(original, args, kwargs)

            return watched_function
        function = original.__func__

        @functools.wraps(function)
        def watched(owner: object, *args: Any, **kwargs: Any) -> Any:
            if owner is not self.owner:  # a deep copy of the object, made meanwhile
                return function(owner, *args, **kwargs)
            return self._call(original, args, kwargs)

        # a method, so that a deep copy of the object calls its own
        return types.MethodType(watched, self.owner)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # a trace calls with placeholders; what it calls is not a call of the model
        if torch.compiler.is_compiling() or not self.watchers:
            return original(*args, **kwargs)
        with contextlib.ExitStack() as failed:
            begun = []
            for watcher in self.watchers:
                token = watcher.before(args, kwargs)
                if token is not None:
                    begun.append((watcher, token))
                    failed.push(functools.partial(_pass_on, watcher, token))
            result = original(*args, **kwargs)
            failed.pop_all()
        for watcher, token in begun:
            watcher.after(token, result)
        return result


def _pass_on(watcher: Watcher, token: object, kind: object, error: BaseException | None, trace: object) -> None:
    assert error is not None
    watcher.failed(token, error)


_IN_FORCE: dict[tuple[int, str], _Interception] = {}


@contextlib.contextmanager
def watching(owner: object, name: str, watcher: Watcher) -> Iterator[None]:
    """Show every call of ``owner.name`` to a watcher. Several can watch, and leave in any order."""
    key = (id(owner), name)
    with LOCK:
        found = _IN_FORCE.get(key)
        if found is None:
            try:
                found = _Interception(owner, name)
                found.patch.acquire()
            except (TypeError, AttributeError) as error:
                raise InvalidArgumentError(
                    f"record_calls: {name} of {describe_class(type(owner))} cannot be replaced ({error}). Record a "
                    "module that it calls:\n    record_calls(module)"
                ) from error
            _IN_FORCE[key] = found
        found.watchers = (*found.watchers, watcher)
    try:
        yield
    finally:
        with LOCK:
            found.watchers = tuple(other for other in found.watchers if other is not watcher)
            if not found.watchers:
                found.patch.release()
                del _IN_FORCE[key]
