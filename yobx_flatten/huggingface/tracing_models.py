"""Which functions of which models are computed in another form while they are traced.

A function is replaced only if its module is imported, and only if it takes what the version to trace takes: a release
of transformers that changed it keeps its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .tracing_experts import EXPERTS
from .tracing_recurrences import RECURRENCES
from .tracing_sparse import SPARSE

__all__ = ["model_replacements"]


def model_replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield owner, attribute and replacement for the models that are imported and need one."""
    for models, owner, name, make in (*EXPERTS, *RECURRENCES, *SPARSE):
        for model in models:
            target: Any = sys.modules.get(f"transformers.models.{model}.modeling_{model}")
            target = getattr(target, owner, None) if owner is not None else target
            if target is not None and name in vars(target):
                yield target, name, _if_it_takes_the_same(make)


def _if_it_takes_the_same(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def made(original: Any) -> Any:
        version = make(original)
        takes = inspect.signature(original).parameters
        wanted = inspect.signature(version).parameters.values()
        named = [one.name for one in wanted if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return version if all(name in takes for name in named) else original

    return made
