"""Separate prefill from decode, and group calls of one structure: one program serves each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..huggingface.cache_names import has_read, is_cache, name_in
from ..recipe.aliases import TransformersCache
from .call import Call
from .snapshot import Fact, same_value


def cache_of(values: Mapping[str, Any]) -> TransformersCache | None:
    """The cache among arguments or outputs, ``None`` if there is none."""
    named = values.get(name_in(values) or "")
    if named is not None and not isinstance(named, torch.Tensor):
        return named
    # a model outside of transformers may have any word for it
    return next((value for value in values.values() if is_cache(value)), None)


def kind_of(cache: TransformersCache | None, past: int | None, makes_one: bool) -> str:
    """Return ``"prefill"``, ``"decode"`` and ``"forward"``."""
    if cache is None:
        return "prefill" if makes_one else "forward"
    return "decode" if past or has_read(cache) else "prefill"


def by_phase(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Gather calls of one kind and one structure, under a name that states what is special about it."""
    groups: list[list[Call]] = []
    for call in calls:
        alike = next((group for group in groups if _alike(group[0], call)), None)
        if alike is None:
            groups.append([call])
        else:
            alike.append(call)
    named: dict[str, list[Call]] = {}
    for group in groups:
        named[_name(group[0], named)] = group
    return named


def _alike(one: Call, other: Call) -> bool:
    return (
        one.kind == other.kind
        and one.snapshot.spec == other.snapshot.spec
        and all(_same_leaf(a, b) for a, b in zip(one.facts(), other.facts(), strict=True))
    )


def _same_leaf(one: Fact, other: Fact) -> bool:
    if one.is_tensor or other.is_tensor:
        return one.dtype is other.dtype and len(one.shape) == len(other.shape)
    if type(one.value) in (bool, str, float, complex, torch.dtype, torch.device):  # a program follows one of them
        return same_value(one, other)
    return type(one.value) is type(other.value)  # a number may vary, and is an input then


def _name(call: Call, taken: Mapping[str, list[Call]]) -> str:
    if call.kind not in taken:
        return call.kind
    first, mine = _arguments(taken[call.kind][0]), _arguments(call)
    more, less = [f"+{name}" for name in mine if name not in first], [f"-{name}" for name in first if name not in mine]
    name = "".join([call.kind, *more, *less])
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}#{number}", number + 1
    return unique


def _arguments(call: Call) -> Iterable[str]:
    """The arguments that are not None."""
    return dict.fromkeys(
        fact.path.partition(".")[0] for fact in call.facts() if fact.is_tensor or fact.value is not None
    )
