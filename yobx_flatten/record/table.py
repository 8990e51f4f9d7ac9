"""Show recorded calls as a table: each argument, and what varies together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors.messages import table
from .axes import Axes
from .call import Call
from .example import constants_of, varying_in


def table_of(label: str, phases: Mapping[str, Sequence[Call]], axes: Axes) -> str:
    """Write the table."""
    total = sum(map(len, phases.values()))
    lines = [f"{label}: {total} call{'' if total == 1 else 's'}"]
    calls = [call for part in phases.values() for call in part]
    used = [name for name in axes.sizes if name in axes.names.values() or name == "past"]
    if used:
        lines.append("  " + "   ".join(f"{name} {_span(axes.seen(name, calls))}" for name in used))
    lines += [f"  {relation}" for relation in axes.relations]
    for name, part in phases.items():
        lines += ["", f"{name}: {len(part)} call{'' if len(part) == 1 else 's'}", *_phase(part, axes)]
    if axes.remarks:
        lines += ["", *(f"note: {remark}" for remark in axes.remarks)]
    return "\n".join(lines)


def _phase(calls: Sequence[Call], axes: Axes) -> Iterator[str]:
    constants = constants_of(calls)
    rows = [("argument", "dtype", "sizes", "varies")]
    rows += _merged([row for row in _rows(calls, axes) if row[0].partition(".")[0] not in constants])
    empty = [name for name in calls[0].snapshot.spec.context if name not in constants and not _holds(calls[0], name)]
    rows += [(name, "-", "holds nothing yet", "") for name in empty]
    yield from table(rows)
    if constants:
        yield f"  constant: {', '.join(f'{name}={value!r}' for name, value in constants.items())}"


def _rows(calls: Sequence[Call], axes: Axes) -> Iterator[tuple[str, str, str, str]]:
    varying = varying_in(calls, axes, {})
    by_call = [call.facts() for call in calls]
    for number, fact in enumerate(by_call[0]):
        if not fact.is_tensor:
            values = [facts[number].value for facts in by_call]
            name = varying.get((fact.path, None), "")
            yield fact.path, type(fact.value).__name__, _values(values), name
            continue
        sizes = [_axis_sizes({facts[number].shape[axis] for facts in by_call}) for axis in range(len(fact.shape))]
        names = [
            f"{axis}: {varying[fact.path, axis]}" for axis in range(len(fact.shape)) if (fact.path, axis) in varying
        ]
        yield fact.path, str(fact.dtype).removeprefix("torch."), " x ".join(sizes) or "()", ", ".join(names)


def _merged(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[tuple[str, str, str, str]]:
    """Put leaves of one parent that look alike into one row: the keys and values of all layers."""
    for (parent, *alike), group in itertools.groupby(rows, key=lambda row: (row[0].rpartition(".")[0], *row[1:])):
        paths = [row[0] for row in group]
        last = paths[-1].removeprefix(f"{parent}.")
        name = paths[0] if not parent or len(paths) == 1 else f"{paths[0]} ... {last} ({len(paths)})"
        if not parent:
            yield from ((path, alike[0], alike[1], alike[2]) for path in paths)
        else:
            yield name, alike[0], alike[1], alike[2]


def _holds(call: Call, name: str) -> bool:
    return any(fact.path.partition(".")[0] == name for fact in call.facts())


def _span(sizes: Sequence[int]) -> str:
    """Spell sorted sizes.

    >>> _span([2]), _span([1, 8]), _span([0, 8, 9, 10])
    ('2', '1, 8', '0, 8..10')
    """
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    spelled = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(spelled if len(spelled) < 6 else [*spelled[:2], "...", spelled[-1]])


def _axis_sizes(sizes: set[int]) -> str:
    spelled = _span(sorted(sizes))
    return f"({spelled})" if "," in spelled else spelled


def _values(values: Sequence[Any]) -> str:
    if all(type(value) is int for value in values):
        return _span(sorted(set(values)))
    shown = list(dict.fromkeys(map(repr, values)))
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
