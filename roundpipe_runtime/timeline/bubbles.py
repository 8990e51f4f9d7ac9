"""Bubbles of a timeline by cause: what each device waited for when it did not compute.

::

    # device 0   F m0 | ?? | F m1      a gap ends when the next piece of work begins
    # device 1     | F m0  |           until its input is there     dependency
                                       then, while copies run       transfer
                                       the rest                     interpreter: the host, between two calls
    # between two runs no stage is under way                        optimizer: its step, and the caller's code
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from .record import Record

Cause: TypeAlias = Literal["transfer", "optimizer", "dependency", "interpreter"]

CAUSES: tuple[Cause, ...] = ("transfer", "optimizer", "dependency", "interpreter")


# Totals of a timeline: how long each device computed, copied and waited, and which stages took longest.


_COPIES = ("upload", "download")

_RANK = re.compile(r"rank +\d+ ")


@dataclasses.dataclass(frozen=True, slots=True)
class Bubble:
    """Time in which a device did not compute.

    Attributes:
        device: name of the device.
        cause: ``"transfer"``, ``"optimizer"``, ``"dependency"`` or ``"interpreter"``.
        start: time in seconds, as in the records.
        end: time in seconds.
    """

    device: str
    cause: Cause
    start: float
    end: float


def bubbles_of(records: Sequence[Record]) -> list[Bubble]:
    """Return the times in which each device did not compute, with their causes.

    Args:
        records: records of one or more runs, also of several ranks.

    Returns:
        The bubbles by device, between the first record of all and the last.

    >>> forward, upload = Record(0, 0, "a", "forward", 0, 2), Record(1, -1, "b", "upload", 2, 3)
    >>> found = bubbles_of([forward, upload, Record(1, 0, "b", "loss", 3, 4)])
    >>> [(bubble.device, bubble.cause, bubble.end - bubble.start) for bubble in found]
    [('a', 'dependency', 2), ('b', 'dependency', 2), ('b', 'transfer', 1)]
    """
    if not records:
        return []
    first, last = min(record.start for record in records), max(record.end for record in records)
    ranks: dict[str, list[Record]] = {}
    for record in records:
        found = _RANK.match(record.device)
        ranks.setdefault(found[0] if found else "", []).append(record)
    return [bubble for rank in sorted(ranks) for bubble in _of_rank(ranks[rank], first, last)]


def _of_rank(records: Sequence[Record], first: float, last: float) -> Iterator[Bubble]:
    runs = list(_runs(records))
    spans = [(min(r.start for r in run), max(r.end for r in run)) for run in runs]
    for device in sorted({record.device for record in records}):
        before = first
        for run, (start, end) in zip(runs, spans, strict=True):
            yield from _bubble(device, "optimizer", before, start)
            yield from _of_run(device, run, start, end)
            before = end
        yield from _bubble(device, "optimizer", before, last)


def _runs(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records of each run: a run begins with its first stage, when all earlier work has ended."""
    run: list[Record] = []
    seen: set[tuple[str, int, int]] = set()
    until, later = float("-inf"), False
    for record in sorted(records, key=lambda record: (record.start, record.stage)):
        key = record.kind, record.microbatch, record.layer
        # the first stage has downloads when others compute
        begins = record.stage == 0 and record.microbatch <= 0 and record.start >= until and record.kind != "download"
        if run and begins and (later or key in seen):
            yield run
            run, seen, later = [], set(), False
        run.append(record)
        until = max(until, record.end)
        later = later or (record.stage > 0 and record.kind not in _COPIES)  # copies may come early
        if record.stage == 0:
            seen.add(key)
    yield run


def _of_run(device: str, run: Sequence[Record], start: float, end: float) -> Iterator[Bubble]:
    done: dict[tuple[int, int], float] = {}
    for record in run:
        if record.kind not in _COPIES:
            place = record.stage, record.microbatch
            done[place] = max(done.get(place, start), record.end)
    own = sorted((record for record in run if record.device == device), key=lambda record: record.start)
    copies = [record for record in own if record.kind in _COPIES]
    now = start
    for record in own:
        if record.kind in _COPIES:
            continue
        if record.start > now:
            ready = min(max(done.get((record.stage - 1, record.microbatch), start), now), record.start)
            yield from _bubble(device, "dependency", now, ready)
            yield from _copied(device, copies, ready, record.start)
        now = max(now, record.end)
    # its last gradients are downloaded, and other devices end later
    last = max([now, *(copy.end for copy in copies)])
    yield from _copied(device, copies, now, last)
    yield from _bubble(device, "dependency", last, end)


def _copied(device: str, copies: Sequence[Record], start: float, end: float) -> Iterator[Bubble]:
    """This interval, split where copies begin and end."""
    now = start
    for copy in copies:
        begin, stop = max(copy.start, now), min(copy.end, end)
        if stop <= begin:
            continue
        yield from _bubble(device, "interpreter", now, begin)
        yield from _bubble(device, "transfer", begin, stop)
        now = stop
    yield from _bubble(device, "interpreter", now, end)


def _bubble(device: str, cause: Cause, start: float, end: float) -> Iterator[Bubble]:
    if end > start:
        yield Bubble(device, cause, start, end)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTotals:
    """Seconds that a device computed, copied and waited."""

    device: str  # name of the device
    busy: float  # seconds in which it computed
    transfers: float  # seconds of copies while the device did not compute
    idle: float  # seconds in which it did neither


@dataclasses.dataclass(frozen=True, slots=True)
class StageTotals:
    """Time of a stage, all microbatches together."""

    stage: int  # index of the stage in the run
    device: str  # name of its device
    seconds: float  # seconds of computation
    copies: float  # seconds of its copies
    layers: tuple[int, int]  # first and last layer, -1 where they are not known
    kinds: tuple[str, ...]  # kinds of work, in order


def device_totals(records: Sequence[Record]) -> list[DeviceTotals]:
    """Return the totals of each device between the first record of all and the last, by name.

    >>> records = [Record(0, -1, "a", "upload", 0, 2), Record(0, 0, "a", "forward", 1, 3)]
    >>> device_totals([*records, Record(1, 0, "b", "loss", 3, 4)])[0]
    DeviceTotals(device='a', busy=2.0, transfers=1.0, idle=1.0)
    """
    if not records:
        return []
    whole = max(record.end for record in records) - min(record.start for record in records)
    found = []
    for device in sorted({record.device for record in records}):
        own = [record for record in records if record.device == device]
        busy = _covered(record for record in own if record.kind not in _COPIES)
        either = _covered(own)
        found.append(DeviceTotals(device, busy, either - busy, whole - either))
    return found


def stage_totals(records: Sequence[Record]) -> list[StageTotals]:
    """Return the totals of each stage, the slowest first.

    A stage is identified by its index and its device: a timeline may hold several runs.
    """
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.stage, record.device), []).append(record)
    found = []
    for (stage, device), own in groups.items():
        layers = [record.layer for record in own if record.layer >= 0]
        found.append(
            StageTotals(
                stage=stage,
                device=device,
                seconds=sum(record.end - record.start for record in own if record.kind not in _COPIES),
                copies=sum(record.end - record.start for record in own if record.kind in _COPIES),
                layers=(min(layers, default=-1), max(layers, default=-1)),
                kinds=tuple(dict.fromkeys(record.kind for record in own if record.kind not in _COPIES)),
            )
        )
    return sorted(found, key=lambda totals: -totals.seconds)


def _covered(records: Iterable[Record]) -> float:
    """Seconds covered by at least one of them."""
    total, until = 0.0, float("-inf")
    for record in sorted(records, key=lambda record: record.start):
        total += max(0, record.end - max(record.start, until))
        until = max(until, record.end)
    return total
