"""Choose an example among recorded calls of a phase, and the dynamic shapes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from ..errors import RecordError
from ..private_names.of_torch import pytree
from ..trees.shapes import dynamic_shapes
from .axes import Axes, Place
from .call import Call
from .snapshot import Fact, same_value

_GROWING = ("batch", "past", "total", "kept", "source")  # sizes that a call with 1 of them is an example of any of


def constants_of(calls: Sequence[Call]) -> dict[str, Any]:
    """The arguments of these calls that hold no tensor and never change."""
    found = {}
    for name, spec, facts in _arguments(calls[0]):
        fixed = _is_plain(spec) and not any(fact.is_tensor for fact in facts)
        if fixed and all(_same(facts, _facts_of(call, name)) for call in calls[1:]):
            found[name] = pytree.tree_unflatten([fact.value for fact in facts], spec)
    return found


def varying_in(calls: Sequence[Call], axes: Axes, sizes: Mapping[str, int]) -> dict[Place, str]:
    """The places of these calls whose size is to vary.

    A number of new tokens that is 1 in every call of the phase stays 1: that is what a program for decoding is given.
    A model that counts no past has no name for that number, so a size that is 1 here and more elsewhere also stays 1:
    some models take another way with several tokens. An axis of size 0 in every call is one that holds nothing yet.
    """
    # sizes: sizes that the caller named; they vary
    paths = {fact.path for fact in calls[0].facts()}
    found = {}
    for (path, axis), name in axes.names.items():
        seen = axes.seen(name, calls)
        stays = seen == [0] or (seen == [1] and not name.startswith(_GROWING))
        if path in paths and (not stays or name in sizes):
            found[path, axis] = name
    return found


def choose_example(calls: Sequence[Call], axes: Axes, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Inputs of the call that suits best, without the constants, resized where torch would fix a size."""
    varying = varying_in(calls, axes, sizes)
    _check_sizes(sizes, set(axes.names.values()))
    names = sorted(set(varying.values()))

    def unfit(call: Call) -> tuple[int, int, int]:
        of_call = [axes.sizes[name].get(call.index, 2) for name in names]
        elements = sum(torch.Size(fact.shape).numel() for fact in call.facts() if fact.is_tensor)
        return sum(size < 2 for size in of_call), len(of_call) - len(set(of_call)), elements

    call = min(calls, key=unfit)
    wanted = {name: max(2, axes.sizes[name].get(call.index, 2)) for name in names}
    wanted = {**wanted, **sizes}
    if "past" in sizes:  # a sliding layer keeps no more than there was
        kept = [name for name in wanted if name.startswith("kept")]
        wanted.update({name: min(sizes["past"], max(axes.sizes[name].values())) for name in kept})
    if "total" in wanted and "total" not in sizes and call.past is not None and call.new is not None:
        past = wanted.get("past", call.past)
        wanted["total"] = past + wanted.get("new", call.new)
    leaves = [
        _resized(leaf, {axis: wanted[name] for (path, axis), name in varying.items() if path == fact.path})
        for leaf, fact in zip(call.snapshot.leaves(), call.facts(), strict=True)
    ]
    placed = [
        leaf.to(device=fact.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, fact in zip(leaves, call.facts(), strict=True)
    ]
    constants = constants_of(calls)
    inputs = call.snapshot.restore(placed)
    return {name: value for name, value in inputs.items() if name not in constants}


def shapes_of(calls: Sequence[Call], axes: Axes, sizes: Mapping[str, int]) -> dict[str, Any]:
    """``Dim.AUTO`` where a size varies, in the form that torch wants."""
    # sizes: sizes that the caller named; they vary
    varying = varying_in(calls, axes, sizes)
    _check_sizes(sizes, set(axes.names.values()))
    wanted: dict[str, Any] = {}
    for fact in calls[0].facts():
        places = {axis: Dim.AUTO for (path, axis) in varying if path == fact.path}
        wanted[fact.path] = places.get(None) if not fact.is_tensor else places
    constants = constants_of(calls)
    inputs = {name: value for name, value in calls[0].inputs.items() if name not in constants}
    wanted = {path: shape for path, shape in wanted.items() if path.partition(".")[0] in inputs}
    written: dict[str, Any] = dynamic_shapes(inputs, wanted)
    return written


def _arguments(call: Call) -> list[tuple[str, Any, list[Any]]]:
    """Name, structure and leaves of each argument."""
    spec, facts = call.snapshot.spec, list(call.facts())
    found = []
    for name, child in zip(spec.context, spec.children(), strict=True):
        found.append((name, child, facts[: child.num_leaves]))
        del facts[: child.num_leaves]
    return found


def _facts_of(call: Call, name: str) -> list[Any]:
    return next((facts for found, _, facts in _arguments(call) if found == name), [])


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """A number, string or the like, or a built-in container: an empty cache is none, since the call fills it."""
    return spec.is_leaf() or (spec.type in (list, tuple, dict) and all(map(_is_plain, spec.children())))


def _same(facts: Sequence[Fact], others: Sequence[Fact]) -> bool:
    return len(facts) == len(others) and all(map(same_value, facts, others))


def _resized(leaf: object, sizes: Mapping[int | None, int]) -> object:
    """Repeat or drop elements along some axes; a number that varies becomes the size itself."""
    if not isinstance(leaf, torch.Tensor):
        return sizes.get(None, leaf)
    for axis, size in sizes.items():
        if axis is not None and leaf.shape[axis] not in (0, size):
            leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) % leaf.shape[axis])
    return leaf


def _check_sizes(sizes: Mapping[str, int], known: set[str]) -> None:
    for name, size in sizes.items():
        if name not in known or name == "total":
            raise RecordError(f"There is no size {name!r} to choose. There are {sorted(known - {'total'})}.")
        if type(size) is not int or size < 1:
            raise RecordError(f"{name}: expected a number of 1 or more, found {size!r}.")
