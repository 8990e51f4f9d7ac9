"""Which functions of which models are computed in another form while they are traced.

A function is replaced only if its module is imported, and only if it takes what the version to trace takes, and caches
answer what that version asks: a release of transformers that wrote it otherwise keeps its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .chunk_scans import CHUNK_SCANS
from .experts import EXPERTS
from .positions import POSITIONS
from .recurrences import RECURRENCES
from .sparse import SPARSE

__all__ = ["model_replacements"]


def model_replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield owner, attribute and replacement for the models that are imported and need one."""
    for models, owner, name, make in (*CHUNK_SCANS, *EXPERTS, *POSITIONS, *RECURRENCES, *SPARSE):
        for model in models:
            target: Any = sys.modules.get(f"transformers.models.{model}.modeling_{model}")
            target = getattr(target, owner, None) if owner is not None else target
            if target is not None and name in vars(target):
                yield target, name, _if_it_fits(make)


# what versions to trace ask caches for; those of 5.23 answer, those of 5.17 do not
_QUESTIONS = {"get_conv_state", "get_recurrent_state"}


def _if_it_fits(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def made(original: Any) -> Any:
        version = make(original)
        takes = inspect.signature(original).parameters
        wanted = inspect.signature(version).parameters.values()
        named = [one.name for one in wanted if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        answers = vars(sys.modules["transformers.cache_utils"].Cache)
        asked = _QUESTIONS.intersection(version.__code__.co_names)
        return version if takes.keys() >= set(named) and answers.keys() >= asked else original

    return made
