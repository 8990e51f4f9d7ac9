"""Compare a run with recorded results: what passed there passes now, or the run ends with 1.

The gate cannot pass on nothing. A column that passed and was not tried now, a type that is not there any more, a
library that is not installed and a run that tried nothing are all worse than before.
"""

from __future__ import annotations

import argparse
import dataclasses

from .models import split_name, type_exists
from .results import Results, regressions, was_tried

__all__ = ["Verdict", "is_asked_for", "judge"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a comparison has found, in words.

    Attributes:
        worse: reasons to end with 1.
        notes: what a reader of the results has to know, and which is not a fault of this package.
    """

    worse: list[str]
    notes: list[str]


def judge(found: Results, expected: Results | None, names: list[str], options: argparse.Namespace) -> Verdict:
    """Compare the chosen types and columns.

    Args:
        found: the results of this run.
        expected: recorded ones; ``None`` to look only at whether something was tried.
        names: the types that were chosen.
        options: the command line: ``columns``, and what chose the types.
    """
    nothing = [] if any(was_tried(found, name, options.columns) for name in names) else [_nothing(found, names)]
    if expected is None:
        return Verdict(nothing, [])
    columns = set(options.columns) | set(options.left_out)
    before = [name for name, entry in expected.types.items() if _passed(entry, columns)]
    absent = [name for name in before if name not in names and is_asked_for(name, options)]
    worse = regressions(found, expected, names, options.columns)
    worse += [f"{name}: the type is there, and was not run" for name in absent if type_exists(name)]
    for column, reason in options.left_out.items():
        count = sum(_passed(expected.types[name], {column}) for name in before)
        if count:
            worse.append(f"{column}: {count} types passed, and none was run: {reason}; --columns leaves it out")
    gone = [name for name in absent if not type_exists(name)]
    if not nothing and not set(before) & {*names, *gone}:
        worse.append(f"none of the {len(names)} types of this run passed there: nothing was compared")
    return Verdict(nothing + worse, [f"{name}: the installed transformers has no such type" for name in gone])


def is_asked_for(name: str, options: argparse.Namespace) -> bool:
    """Return whether the options choose a recorded type, if it is there.

    Args:
        name: the type.
        options: ``only`` with names and families, ``sample`` with a number; a sample asks for no type in particular.
    """
    if options.sample is not None:
        return False
    return not options.only or name in options.only or f"{split_name(name)[0]}:" in options.only


def _passed(entry: dict[str, dict[str, dict[str, object]]], columns: set[str]) -> bool:
    return any(result["ok"] is True for column, result in entry["columns"].items() if column in columns)


def _nothing(found: Results, names: list[str]) -> str:
    reasons = {
        str(result.get("why"))
        for name in names
        for result in found.types.get(name, {"columns": {}})["columns"].values()
    }
    return f"nothing was tried, of {len(names)} types: {'; '.join(sorted(reasons)[:5]) or 'no column was run'}"
