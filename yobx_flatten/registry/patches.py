"""Replace attributes, also of modules that are imported later, and restore them; all threads share one lock."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

_MISSING = object()


class AttributePatch:
    """Replaces an attribute or dict entry while at least one ``with`` block or other caller has acquired the patch.

    A patch can be acquired and released in any order, from any thread. If other code replaces a patched attribute, the
    release of the patch does not restore the attribute.
    """

    def __init__(self, owner: object, name: object, replacement: object) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        # vars(), not getattr: an inherited attribute must not be copied to the subclass at the restoration
        self._entries: Mapping[Any, Any] = owner if isinstance(owner, dict) else vars(owner)
        self._found: Any = _MISSING
        self._holders = 0

    def acquire(self) -> None:
        with LOCK:
            if self._holders == 0:
                self._found = self._entries.get(self._name, _MISSING)
                self._set(self._replacement)
            self._holders += 1

    def release(self, *_: object) -> None:
        with LOCK:
            self._holders -= 1
            if self._holders == 0 and self._entries.get(self._name) is self._replacement:
                self._set(self._found)

    __enter__, __exit__ = acquire, release

    def _set(self, value: object) -> None:
        if isinstance(self._owner, dict):
            if value is _MISSING:
                del self._owner[self._name]
            else:
                self._owner[self._name] = value
        elif value is _MISSING:
            delattr(self._owner, str(self._name))
        else:  # a class's own dict is read-only
            setattr(self._owner, str(self._name), value)


class _Traces(threading.local):
    count = 0  # `tracing_here` blocks that the thread is in


_TRACES = _Traces()


@contextlib.contextmanager
def tracing_here() -> Iterator[None]:
    """Context manager for tracing a model: every acquired :class:`TracePatch` applies to the current thread."""
    _TRACES.count += 1
    try:
        yield
    finally:
        _TRACES.count -= 1


class TracePatch(AttributePatch):
    """A patch that replaces a function only for threads inside :func:`tracing_here`."""

    def __init__(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        self._original = vars(owner)[name]
        super().__init__(owner, name, _in_traces(self._original, make(self._original)))

    @property
    def is_current(self) -> bool:
        """Whether the patch is applied, or can be applied because no other code has replaced the original function."""
        return self._holders > 0 or self._entries.get(self._name) is self._original


def _in_traces(original: Any, version: Any) -> Any:
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(_in_traces(original.__func__, getattr(version, "__func__", version)))

    def asked(*args: Any, **kwargs: Any) -> Any:
        return (version if _TRACES.count else original)(*args, **kwargs)

    # `wraps` cannot copy attributes of a class
    return functools.update_wrapper(asked, original, updated=("__dict__",) if type(original) is FunctionType else ())


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls a function right after the first import of a module, so that a patch need not import the module early."""

    def __init__(self, wanted: Callable[[str], bool], action: Callable[[ModuleType], None]) -> None:
        self._wanted, self._action = wanted, action

    def install(self) -> None:
        with LOCK:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        # a new list: an import in another thread iterates over the old one, and would skip the next finder
        with LOCK:
            sys.meta_path = [finder for finder in sys.meta_path.copy() if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._wanted(fullname):
            return None
        others = (one for one in sys.meta_path if not isinstance(one, ImportHook) and hasattr(one, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None and spec.loader is not None), None)
        if spec is None:
            return None
        # Python calls the first hook only: it acts for all hooks of this module
        hooks = [hook for hook in sys.meta_path if isinstance(hook, ImportHook) and hook._wanted(fullname)]
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for hook in hooks:
                hook._action(module)

        loader.exec_module = exec_module  # on this module's own loader object, until it is used
        return spec


class ImportedPatch:
    """A patch of a module. If the module is not imported yet, the patch is applied after the import."""

    # make: makes the patch; returns `None` if the module does not define the attribute

    def __init__(self, module: str, make: Callable[[ModuleType], AttributePatch | None]) -> None:
        self._module, self._make = module, make
        self._hook = ImportHook(module.__eq__, self._on_import)
        self._patch: AttributePatch | None = None
        self._wanted = False

    def acquire(self) -> None:
        with LOCK:
            self._wanted = True
            self._hook.install()
            being_imported = self._module in sys.modules
        if being_imported:  # wait for an import in another thread, without our lock, which the import may need
            self._on_import(importlib.import_module(self._module))

    def release(self) -> None:
        with LOCK:
            self._wanted = False
            self._hook.remove()
            if self._patch is not None:
                self._patch.release()
                self._patch = None

    def _on_import(self, module: ModuleType) -> None:
        with LOCK:
            if self._wanted and self._patch is None:
                self._patch = self._make(module)
                if self._patch is not None:
                    self._patch.acquire()


# The only lock of the registry. A fork acquires the lock first: a forked child has only the forking thread, so a lock
# of another thread would never be released in the child, and the state would stay incomplete. No import and no code of
# a user runs under the lock, since these could wait for a thread that waits for the lock.
LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
