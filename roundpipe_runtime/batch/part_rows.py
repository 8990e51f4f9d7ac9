"""Count the rows of each microbatch: of packed data, of a function's parts, or of even parts.

::

    packed by a pipeline       rows [3, 2, 2]        all else is cut along with them
    packed by hand             (2, 8), (1, 8)        2 and 1 are counted
    parts of a function        x: (1, 4), (2, 4)     the table is one object in both parts: it was not cut
                               table: (5, 6)         rows 1 and 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SplitError
from .entries import Entry, entries_of
from .packed import RoundPipePackedData
from .spec import sizes

Rows = tuple[int, ...]


def check_packed_counts(entries: Sequence[Entry]) -> None:
    """Check that all packed data has the same number of microbatches."""
    counts = {entry.path: len(entry.value) for entry in entries if isinstance(entry.value, RoundPipePackedData)}
    if len(set(counts.values())) > 1:
        counted = ", ".join(f"{path} into {count}" for path, count in counts.items())
        raise SplitError(f"These were split into different numbers of microbatches: {counted}.")


def rows_with_packed(
    entries: Sequence[Entry], batch: int | None, cut: Sequence[str], *, apart: bool
) -> list[int | None] | None:
    """Return the rows of the microbatches that packed data is in; ``None`` where there is no packed data."""
    # apart: whether rules cut each leaf separately
    packed = [entry for entry in entries if isinstance(entry.value, RoundPipePackedData)]
    if not packed:
        return None
    paths, count = ", ".join(entry.path for entry in packed), len(packed[0].value)
    found = {entry.stated for entry in packed if entry.stated is not None}
    found |= {entry.counted for entry in packed if entry.counted and sum(entry.counted) == batch}
    if len(found) == 1:
        return list(found.pop())
    if found and not apart:
        raise SplitError(f"{paths}: the rows of the microbatches differ, {[list(rows) for rows in sorted(found)]}.")
    if count == 1:
        return [batch]
    if apart and batch is not None:
        return list(sizes(batch, count))
    if apart or not cut:
        return [None] * count
    raise SplitError(
        f"{paths}: it is not known how many rows each of the {count} microbatches has, but {', '.join(cut)} must be "
        "split at the same rows. Give the row counts with the data, or split by a function:\n"
        "    RoundPipePackedData(values, rows=[...])\n    RoundPipeRunConfig(split_input=...)"
    )


def check_packed_rows(entries: Sequence[Entry], rows: Sequence[int | None], whose: str) -> None:
    """Check that packed data has the microbatches that a function of the user made of the other side."""
    # rows: rows of each microbatch of the other side
    for entry in entries:
        if not isinstance(entry.value, RoundPipePackedData):
            continue
        if len(entry.value) != len(rows):
            raise SplitError(f"{entry.path} has {len(entry.value)} microbatches, and {whose} made {len(rows)}.")
        own = entry.stated or entry.counted
        is_of_batch = own is not None and (entry.stated is not None or sum(own) == sum(count or 0 for count in rows))
        if own is not None and is_of_batch and None not in rows and own != tuple(rows):
            raise SplitError(
                f"{entry.path} has microbatches of {list(own)} rows, and {whose} made microbatches of {list(rows)}. "
                "Both must be split at the same rows."
            )


def rows_of_parts(
    parts: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> list[int | None]:
    """Return the rows of each part that a function of the user made; ``None`` for each where they cannot be determined.

    What is the same object in all parts was not cut. Of the rest, the sizes along the batch axis are the rows: where
    there are several, those that add up to the size of what was cut, or those that the other side also has.

    >>> import torch
    >>> table = torch.zeros(5, 6)
    >>> rows_of_parts([{"x": torch.zeros(1, 4), "table": table}, {"x": torch.zeros(2, 4), "table": table}], {})
    [1, 2]
    """
    # parts: trees by name, one mapping per microbatch
    # others: parts of the other side, if a function made them
    known, seen = _columns(parts)
    if not known and len(seen) > 1:
        before = {entry.path: entry.shape[entry.axis or 0] for entry in _entries(whole) if entry.shape}
        cut = [rows for rows, paths in seen.items() if any(before.get(path) == sum(rows) for path in paths)]
        seen = {rows: seen[rows] for rows in cut or seen}
    found = known or set(seen)
    if len(found) != 1 and others:
        known, seen = _columns(others)
        found = {rows for rows in known or set(seen) if not found or rows in found}
    return list(*found) if len(found) == 1 else [None] * len(parts)


def _columns(parts: Sequence[Mapping[str, Any]]) -> tuple[set[Rows], dict[Rows, list[str]]]:
    """The sizes that the leaves have in the parts: those along a known batch axis, and along axis 0, with the paths."""
    tables = [{entry.path: entry for entry in _entries(part)} for part in parts]
    known: set[Rows] = set()
    seen: dict[Rows, list[str]] = {}
    for path in [path for path in tables[0] if all(path in table for table in tables)]:
        column = [table[path] for table in tables]
        first = column[0]
        if isinstance(first.value, RoundPipePackedData):
            if len(first.value) == len(parts) and first.stated is not None:
                known.add(first.stated)
            elif len(first.value) == len(parts) and first.counted is not None:
                seen.setdefault(first.counted, []).append(path)
        elif all(entry.shape and (entry.axis is not None or not entry.is_known) for entry in column):
            rows = tuple(entry.shape[entry.axis or 0] for entry in column)
            if len(parts) > 1 and all(entry.value is first.value for entry in column):
                continue
            if first.is_known:
                known.add(rows)
            else:
                seen.setdefault(rows, []).append(path)
    return known, seen


def _entries(trees: Mapping[str, Any]) -> list[Entry]:
    return [entry for name, tree in trees.items() for entry in entries_of(tree, name, {})]
