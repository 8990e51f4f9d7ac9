"""Find the tensor sizes that vary between recorded calls, name them, and find relations between the sizes."""

# call            0   1   2   3            name
# past            0   8   9  10            the cache states it
# new             8   1   1   1            the cache states it, after the call
# input_ids[1]    8   1   1   1            new
# mask[1]         8   9  10  11            total, which is past + new
# input_ids[0]    2   2   2   2            batch, which the registration of the cache names

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.private_names.of_torch import pytree
from ...errors import RecordError
from .call import Call, same_value

Place = tuple[str, int | None]
"""An axis of a recorded input: the path of the tensor, and the axis, which is ``None`` for an integer."""

_Sizes = dict[int, int]  # by the index of the call


@dataclasses.dataclass
class Axes:
    """The axes of recorded inputs whose sizes vary, with a name for each size and relations between the sizes."""

    # the name of the size at each place that varies; a place without a name is fixed
    names: dict[Place, str] = dataclasses.field(default_factory=dict)
    # the sizes under each name, by the index of the call
    sizes: dict[str, _Sizes] = dataclasses.field(default_factory=dict)
    relations: list[str] = dataclasses.field(default_factory=list)  # how the names are related: `total = past + new`
    # assumptions, which the calls neither confirm nor contradict
    remarks: list[str] = dataclasses.field(default_factory=list)

    def seen(self, name: str, calls: Iterable[Call]) -> list[int]:
        return sorted({self.sizes[name][call.index] for call in calls if call.index in self.sizes[name]})


def read_axes(calls: Sequence[Call]) -> Axes:
    """Find and name the axes whose sizes vary between recorded calls, such as a prefill call and decode calls."""
    reading = _AxisReading(calls)
    reading.match_known()
    reading.find_batch()
    reading.match_known()  # the batch size found above also applies to calls without a cache
    reading.name_the_rest()
    reading.describe()
    names = reading.axes.names
    reading.axes.names = {place: names[place] for place in reading.places if place in names}
    return reading.axes


class _AxisReading:
    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls, self.axes = calls, Axes()
        self.places: dict[Place, _Sizes] = {}
        self.declared: dict[Place, str] = {}
        self.fixed: set[Place] = set()  # sizes that a registration declares fixed
        self.counts: set[str] = set()  # paths of integers and of tensors of integers
        for call in calls:
            for fact in call.facts():
                sizes: list[tuple[int | None, int]] = [*enumerate(fact.shape)]
                for axis, size in [(None, fact.value)] if type(fact.value) is int else sizes:
                    self.places.setdefault((fact.path, axis), {})[call.index] = size
                    if fact.axes is not None and axis in fact.axes:
                        self.declared[fact.path, axis] = fact.axes[axis]
                    elif fact.axes is not None and axis is not None:
                        self.fixed.add((fact.path, axis))
                if fact.dtype is None or not (fact.dtype.is_floating_point or fact.dtype.is_complex):
                    self.counts.add(fact.path)

        known = self.axes.sizes  # what the cache, and registrations, state
        for call in calls:
            for fact in (*call.facts("outputs"), *call.facts()):
                for axis, meaning in (fact.axes or {}).items():
                    if meaning != "length" and axis < len(fact.shape):
                        known.setdefault(meaning, {})[call.index] = fact.shape[axis]
            if call.past is not None and call.new is not None:
                for name, size in (("new", call.new), ("total", call.past + call.new), ("past", call.past)):
                    known.setdefault(name, {})[call.index] = size
        for place, meaning in self.declared.items():
            if meaning != "length":
                self.axes.names[place] = meaning
            elif "cross_attention_cache" in place[0]:
                self.axes.names[place] = "source"
                known.setdefault("source", {}).update(self.places[place])
            elif "past" not in known or not _equal(self.places[place], known["past"]):
                self.axes.names[place] = self.group("kept", self.places[place])
            else:
                self.axes.names[place] = "past"

    def group(self, name: str, sizes: _Sizes) -> str:
        """Return the name of a known axis with the given sizes (one per call), or a new name, such as ``n2``."""
        for numbered in itertools.chain([name], (f"{name}{number}" for number in itertools.count(2))):
            found = self.axes.sizes.get(numbered)
            if found is None or (_equal(found, sizes) and (len(found.keys() & sizes.keys()) > 1 or found == sizes)):
                break
        self.axes.sizes.setdefault(numbered, {}).update(sizes)
        return numbered

    def match_known(self) -> None:
        for place, sizes in self.places.items():
            fits = [name for name in self.candidates(place) if _equal(sizes, self.axes.sizes[name])]
            if place in self.axes.names or place in self.fixed or not fits:
                continue
            self.axes.names[place] = fits[0]
            if fits[0] in ("batch", "source"):
                self.axes.sizes[fits[0]] = {**sizes, **self.axes.sizes[fits[0]]}

    def candidates(self, place: Place) -> list[str]:
        """Return the names that an axis or integer input may get, such as ``batch`` and ``past``, likeliest first."""
        path, axis = place
        known: list[str] = [name for name in ("new", "total", "past", "source") if name in self.axes.sizes]
        if axis is None:  # a number that never changes is part of the program
            return known if len(set(self.places[place].values())) > 1 else []
        counts = path in self.counts
        batch = ["batch"] if "batch" in self.axes.sizes else []
        if axis == 0:
            known = [*batch, *(known if counts else [])]
        elif counts or self.varies("batch"):
            known += batch
        if max(self.places[place].values()) <= 1 and axis > 0 and not counts:
            return []  # an axis of one element proves nothing
        return known

    def varies(self, name: str) -> bool:
        return len(set(self.axes.sizes.get(name, {}).values())) > 1

    def find_batch(self) -> None:
        """Find the batch size of calls without a KV cache: the most common size of axis 0."""
        first = {place: sizes for place, sizes in self.places.items() if place[1] == 0 and place not in self.fixed}
        if "batch" in self.axes.sizes or not first:
            return
        groups: list[dict[Place, _Sizes]] = []
        for place, sizes in first.items():
            alike = next((group for group in groups if all(_equal(sizes, other) for other in group.values())), None)
            if alike is None:
                groups.append({place: sizes})
            else:
                alike[place] = sizes
        varying = [group for group in groups if any(len(set(sizes.values())) > 1 for sizes in group.values())]
        if not varying and len(groups) > 1:
            seen = {path: "/".join(map(str, sorted(set(sizes.values())))) for (path, _), sizes in first.items()}
            found = ", ".join(f"{path} {sizes}" for path, sizes in seen.items())
            self.axes.remarks.append(
                f"no axis was recognized as the batch: sizes along axis 0 differ ({found}) and never vary. Record a "
                "call with another batch size."
            )
            return
        chosen = max(varying or groups, key=len)
        self.axes.sizes["batch"] = {}
        for place, sizes in chosen.items():
            self.axes.names[place] = "batch"
            self.axes.sizes["batch"].update(sizes)

    def name_the_rest(self) -> None:
        for place, sizes in self.places.items():
            if place not in self.axes.names and place not in self.fixed and len(set(sizes.values())) > 1:
                self.axes.names[place] = self.group("n", sizes)
        for place, sizes in self.places.items():  # a mask that only the first call has is as long as that call's tokens
            if place[0] in self.counts and place[1] is not None and not {place} & {*self.axes.names, *self.fixed}:
                fits = [name for name in self.axes.sizes if self.varies(name) and _equal(sizes, self.axes.sizes[name])]
                if fits and max(sizes.values()) > 1:
                    self.axes.names[place] = fits[0]

    def describe(self) -> None:
        """Add relations such as ``total = past + new``, and remarks about sizes that did not vary, to ``self.axes``."""
        used = [name for name in self.axes.sizes if name in self.axes.names.values()]
        if "total" in used:
            self.axes.relations.append("total = past + new")
        for number, name in enumerate(used):
            if name.startswith("kept") and "past" in self.axes.sizes:
                most, past = max(self.axes.sizes[name].values()), self.axes.sizes["past"]
                if all(size == min(past[call], most) for call, size in self.axes.sizes[name].items() if call in past):
                    self.axes.relations.append(f"{name} = min(past, {most})")
            elif name == "n" or name.removeprefix("n").isdigit():
                relation = self.relation_of(name, used[:number])
                self.axes.relations += [relation] if relation else []
        declared = {self.axes.names[place] for place in self.declared}
        for name in dict.fromkeys(self.axes.names.values()):
            size, *others = set(self.axes.sizes[name].values())
            if not others and name != "new":
                is_declared = name in declared or name in self.declared.values()
                why = "a registered class states this" if is_declared else "axis 0 of every tensor has this size"
                self.axes.remarks.append(f"{name}: one size ({size}) was seen. It is assumed to vary, as {why}.")
        if "new" in used and all(call.past in (0, None) for call in self.calls):
            self.axes.remarks.append("new and total cannot be distinguished: no call with a filled cache was recorded.")
        if len(self.calls) == 1:
            self.axes.remarks.append("one call was recorded: record a second one with other sizes to see what varies.")

    def relation_of(self, name: str, others: Sequence[str]) -> str | None:
        """Return a formula that holds in all calls for a size, such as ``n = 2 * batch``, or ``None``."""
        sizes = self.axes.sizes[name]
        if len(set(sizes.values())) < 2:
            return None
        for other in (other for other in others if self.varies(other)):
            pairs = [
                (size, self.axes.sizes[other][call]) for call, size in sizes.items() if call in self.axes.sizes[other]
            ]
            offsets = {size - of_other for size, of_other in pairs}
            if len(offsets) == 1 and len(set(pairs)) > 1:
                offset = offsets.pop()
                return f"{name} = {other}" + (f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else "")
            ratios = {size / of_other for size, of_other in pairs if of_other}
            if len(ratios) == 1 and len(set(pairs)) > 1 and next(iter(ratios)).is_integer():
                return f"{name} = {int(ratios.pop())} * {other}"
        for one, other in itertools.combinations(others, 2):
            a, b = self.axes.sizes[one], self.axes.sizes[other]
            common = sizes.keys() & a.keys() & b.keys()
            if len(common) > 2 and all(sizes[call] == a[call] + b[call] for call in common):
                return f"{name} = {one} + {other}"
        return None


def _equal(one: _Sizes, other: Mapping[int, int]) -> bool:
    """Return whether two axes have equal sizes in every call that has both axes; false if no call has both."""
    common = one.keys() & other.keys()
    return bool(common) and all(one[call] == other[call] for call in common)


# Find the arguments of a phase that are constant, and the sizes that vary.

_GROWING = ("batch", "past", "total", "kept", "source")  # a call with 1 is a valid example for these sizes


def constants_of(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the non-tensor arguments that are equal in all calls of a phase (such as decode), by parameter name."""
    arguments = calls[0].snapshot.spec
    leaves = list(zip(*(call.facts() for call in calls), strict=True))  # the calls of a phase have one structure
    found = {}
    for name, spec in zip(arguments.context, arguments.children(), strict=True):
        own, leaves = leaves[: spec.num_leaves], leaves[spec.num_leaves :]
        same = (not first.is_tensor and all(same_value(first, other) for other in others) for first, *others in own)
        if _is_plain(spec) and all(same):
            found[name] = pytree.tree_unflatten([first.value for first, *_ in own], spec)
    return found


def varying_in(calls: Sequence[Call], axes: Axes, sizes: Mapping[str, int]) -> dict[Place, str]:
    """Return the axes and integer inputs that an export for ``calls`` makes dynamic, with the name of each size."""
    # sizes: the sizes that the caller chose, which vary
    known = set(axes.names.values())
    for name, size in sizes.items():
        if name not in known or name == "total":
            raise RecordError(f"No axis named {name!r} can be resized. Choose among {sorted(known - {'total'})}.")
        if type(size) is not int or size < 1:
            raise RecordError(f"The size of axis {name} must be an int of 1 or more, found {size!r}.")
    paths = {fact.path for fact in calls[0].facts()}
    found = {}
    for (path, axis), name in axes.names.items():
        seen = axes.seen(name, calls)
        # a size of 1 stays, as the number of new tokens in decoding: some models branch on this number
        stays = seen == [0] or (seen == [1] and not name.startswith(_GROWING))
        if path in paths and (not stays or name in sizes):
            found[path, axis] = name
    return found


def _is_plain(spec: pytree.TreeSpec) -> bool:
    # an object of another class may change: a call fills an empty cache
    return spec.is_leaf() or (spec.type in (list, tuple, dict) and all(map(_is_plain, spec.children())))
