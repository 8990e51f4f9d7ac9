"""What kind of model a type is, so that a few types can stand for all: by its configuration, and by how it was cut."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from .models import layer_classes_of, make_config, split_name
from .results import Results
from .runner import sample

__all__ = ["kind_of", "quiet_sample"]


def kind_of(name: str, recorded: Results | None = None) -> tuple[str, ...]:
    """Return what a type is, as words: its family, and what is in it that a cut has to get right.

    Args:
        name: the name of the type.
        recorded: results of the cut matrix; how many phases a type was cut into is part of its kind then.

    >>> kind_of("llama"), kind_of("image:qwen3_5_moe")
    (('causal',), ('image', 'experts', 'states'))
    """
    words = [split_name(name)[0]]
    try:
        config = make_config(name)
        text = config.get_text_config(decoder=True)
    except Exception:  # there is no small configuration: the column "built" states why
        return (*words, "not built")
    if any("expert" in field and type(value) is int and value > 1 for field, value in vars(text).items()):
        words.append("experts")
    if getattr(text, "num_kv_shared_layers", 0):
        words.append("shared keys")
    if any("Linear" in layer for layer in layer_classes_of(config)):
        words.append("states")
    columns = recorded.types.get(name, {}).get("columns", {}) if recorded is not None else {}
    if "phases" in columns.get("cut", {}):
        words.append(f"{columns['cut']['phases']} phases")
    return tuple(words)


def quiet_sample(names: list[str], kind: Callable[[str], Any], count: int) -> list[str]:
    """Return ``count`` names, spread over their kinds; configurations that are made for that say nothing.

    Args:
        names: to choose from.
        kind: the kind of a name.
        count: how many.
    """
    with _silence():
        return sample(names, kind, count)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
