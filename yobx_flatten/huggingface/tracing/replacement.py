"""Versions of functions that a trace can follow, called however the original is called.

.. code-block:: text

    a model calls          forward(hidden, past_key_values=c, attention_mask=m)      the names of its release
    a version reads        forward(again, self, hidden_states, cache, **others)      one name for the cache
    what it does not do    again(), again(position_ids=p)                            the original, with its own names

A version states by its parameters what it reads. It stands for an original that has all of them which have no default,
and no other one: a parameter that it does not know could change the result. A version that asks for ``again`` and
``others`` hands everything on, so it may be called with more.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ...errors import ReplacedFunctionWarning
from ...errors.tried_versions import NEWEST_TRIED
from ..cache_names import argument_of

__all__ = ["misfit", "replacement"]

_Make = Callable[[Any], Any]
_CACHE = "cache"
_warned: set[str] = set()


def replacement(make: _Make) -> _Make:
    """Let a version be called as its original is.

    Args:
        make: returns a version for an original; the original itself where a release needs none.

    Returns:
        A function that returns for an original what takes its place: with the signature of the original. An original
        that the version does not fit stays, with a warning of :class:`~yobx_flatten.errors.ReplacedFunctionWarning`.
    """

    @functools.wraps(make)
    def made(original: Any) -> Any:
        version = make(original)
        if version is original:
            return original
        reason = misfit(version, original)
        if reason is not None:
            _warn(original, reason)
            return original
        return _called_as(version, original)

    return made


def misfit(version: Any, original: Any) -> str | None:
    """Return why a version cannot stand for an original; ``None`` where it can.

    Args:
        version: a function with one name for the cache.
        original: the function that it replaces.
    """
    own = {_CACHE if name == argument_of(original) else name for name in _named(original)}
    takes = inspect.signature(version).parameters
    reads = {name for name in _named(version) if name != "again"}
    hands_on = "again" in takes and any(one.kind is one.VAR_KEYWORD for one in takes.values())
    lacking = sorted(name for name in reads - own if takes[name].default is inspect.Parameter.empty)
    unknown = [] if hands_on else sorted(own - reads)
    if lacking:
        return f"it takes no {', '.join(lacking)}"
    return f"it takes {', '.join(unknown)}, whose meaning is not known here" if unknown else None


def _named(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]


def _called_as(version: Any, original: Any) -> Any:
    signature = inspect.signature(original)
    kinds = {one.kind: name for name, one in signature.parameters.items()}
    rest, more = kinds.get(inspect.Parameter.VAR_KEYWORD), kinds.get(inspect.Parameter.VAR_POSITIONAL)
    own, takes = argument_of(original), inspect.signature(version).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in takes.values())

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # an older word for the cache goes through what the release decorates its functions with
        if own is not None and own not in kwargs and not kwargs.keys() <= signature.parameters.keys():
            from ..cache_names import named_for

            kwargs = named_for(original, kwargs)
        given = signature.bind(*args, **kwargs).arguments
        others = given.pop(rest, {}) if rest is not None else {}
        positional = given.pop(more, ()) if more is not None else ()
        named = {_CACHE if name == own else name: value for name, value in given.items()}

        def again(**changes: Any) -> Any:
            if not changes:
                return original(*args, **kwargs)
            changed = {**given, **{own if name == _CACHE else name: value for name, value in changes.items()}}
            return original(**changed, **others) if not positional else original(*args, **{**kwargs, **changes})

        if takes_all:
            named |= others
        if "again" in takes:
            named["again"] = again
        return version(**named)

    return call
