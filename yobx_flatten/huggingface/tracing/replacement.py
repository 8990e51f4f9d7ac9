"""Replace functions of transformers by traceable functions with the signature of the original function.

A function is replaced only if it has each required parameter of its replacement. A function with further parameters,
which can change results, needs a replacement with ``**others`` and ``again`` (a function that calls the original).
"""

# a model calls          forward(hidden, cache_of_its_release=c, attention_mask=m)
# a version receives     forward(again, self, hidden_states, cache, **others)      one name for the cache
# any other case         again(), again(position_ids=p)                            the original, with its own names

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from ...errors import NEWEST_TRIED, ReplacedFunctionWarning
from ..cache_names import argument_of, named_for

Function: TypeAlias = Callable[..., Any]
"""A function or method of a model, or its replacement."""
Make: TypeAlias = Callable[[Function], Function]
"""A function that returns the replacement for a function."""
Replacement: TypeAlias = tuple[ModuleType | type, str, Make]
"""A module or a class, the name of its function, and a function that makes the replacement."""
_CACHE = "cache"
_warned: set[str] = set()


def replacement(make: Make) -> Make:
    """Decorate a function that makes replacements: each replacement gets the signature of the replaced function."""
    # make: returns a version for an original, or the original if a release of transformers needs no replacement

    @functools.wraps(make)
    def made(original: Function) -> Function:
        version = make(original)
        if version is original:
            return original
        own = {_CACHE if name == argument_of(original) else name for name in _named(original)}
        takes = inspect.signature(version).parameters
        reads = {name for name in _named(version) if name != "again"}
        hands_on = "again" in takes and any(one.kind is one.VAR_KEYWORD for one in takes.values())
        lacking = ", ".join(sorted(name for name in reads - own if takes[name].default is inspect.Parameter.empty))
        unknown = "" if hands_on else ", ".join(sorted(own - reads))
        if not lacking and not unknown:
            return _called_as(version, original)
        reason = f"it takes no {lacking}" if lacking else f"it takes {unknown}, whose meaning is not known here"
        name = f"{original.__module__}.{original.__qualname__}"
        if name not in _warned:  # once per process for each function
            _warned.add(name)
            warnings.warn(
                f"{name} is traced unchanged, since {reason}: its traceable replacement does not fit this version. The "
                "comparison with the model shows whether this matters. The newest tested transformers is "
                f"{NEWEST_TRIED['transformers']}.",
                ReplacedFunctionWarning,
                stacklevel=1,
            )
        return original

    return made


def always(version: Function) -> Make:
    return lambda original: version


def traceable(version: Function) -> Make:
    """Decorate a replacement; return a function that gives it the signature of the function to replace."""
    return replacement(always(version))


def _named(function: Function) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]


def _called_as(version: Function, original: Function) -> Function:
    signature = inspect.signature(original)
    own, takes = argument_of(original), inspect.signature(version).parameters
    places = list(signature.parameters)
    takes_others = any(one.kind is one.VAR_KEYWORD for one in takes.values())

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # the signature of the undecorated function: a decorator may accept older names
        kwargs = named_for(original, kwargs)
        bound = signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value if takes_others else {}
            elif kind is not inspect.Parameter.VAR_POSITIONAL:
                named[_CACHE if name == own else name] = value

        def again(**changes: Any) -> Any:
            # arguments as in the call: a decorator may search the keyword arguments
            given, others = list(args), dict(kwargs)
            for name, value in changes.items():
                name = own if own is not None and name == _CACHE else name
                place = places.index(name)
                if place < len(given):
                    given[place] = value
                else:
                    others[name] = value
            return original(*given, **others)

        return version(again=again, **named) if "again" in takes else version(**named)

    return call
