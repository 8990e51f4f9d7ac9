"""Run all tests of the runtime on the reference accelerator: ``python -m tests.accelerator.parts``.

Folder by folder, in late and in random order, on 1, 2 and 4 devices: an hour. A run continues where it stopped:
what is in the record and passed is not run again without ``--again``.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_ROOT = Path(__file__).parents[2]
_RECORD = _ROOT / "docs" / "data" / "accelerator.json"
_PAGE = _ROOT / "docs" / "dev" / "accelerator.md"
_BEGIN, _END = "<!-- begin of the table -->", "<!-- end of the table -->"

_ORDERS = ("late", "random")
_DEVICES = (1, 2, 4)
_SEED = 11
# Seconds of one test: most take less than one, on a machine that does nothing else.
_SECONDS = 200


# Folders of tests/runtime, and what pytest is given for each; those of files next to folders have the parent's name.
PARTS: dict[str, list[str]] = {}
_RUNTIME = _ROOT / "tests" / "runtime"
for _folder in (_RUNTIME, _RUNTIME / "huggingface"):
    _inner = [one for one in sorted(_folder.iterdir()) if list(one.glob("test_*.py")) and one.name != "huggingface"]
    PARTS[_folder.name] = [str(file.relative_to(_ROOT)) for file in sorted(_folder.glob("test_*.py"))]
    PARTS |= {str(one.relative_to(_RUNTIME)): [str(one.relative_to(_ROOT))] for one in _inner}


def _run(part: str, order: str, devices: int, logs: Path | None) -> dict[str, Any]:
    """Counts of one part, and the names of tests that fail."""
    from tests.accelerator.exceptions import reasons

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-n", "0", "--timeout", str(_SECONDS), "--order", order, "--seed", str(_SEED)]
        command = [sys.executable, "-m", "pytest", "-p", "tests.accelerator.plugin", "-p", "no:cacheprovider", *options]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *PARTS[part]],
            cwd=_ROOT,
            env={**os.environ, "LATE_DEVICES": str(devices), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{part.replace('/', '-')}-{order}-{devices}.log").write_text(done.stdout + done.stderr)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    counts: Counter[str] = Counter()
    failed = [] if done.returncode in (0, 1) and cases else [f"pytest ends with status {done.returncode}"]
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skipped := case.find("skipped")) is not None:
            counts["listed" if skipped.get("message") in reasons() else "skipped"] += 1
        else:
            counts["passed"] += 1
    return {**{name: counts[name] for name in ("passed", "listed", "skipped")}, "failed": failed}


def table(runs: dict[str, dict[str, Any]]) -> str:
    """What passed and what is listed as a table in Markdown: a row for each folder."""
    columns = [(order, devices) for order in _ORDERS for devices in _DEVICES]
    rows = [["folder", *(f"{order}, {devices}" for order, devices in columns)], ["---", *["---:"] * len(columns)]]
    sums = [Counter[str]() for _ in columns]
    for part in PARTS:
        found = [runs.get(f"{part} {order} {devices}") for order, devices in columns]
        rows.append([f"`{part}`", *map(_cell, found)])
        for total, one in zip(sums, found, strict=True):
            total.update({name: one[name] for name in ("passed", "listed")} if one else {})
            total["failed"] += len(one["failed"]) if one else 0
    rows.append(["all", *(_cell({**total, "failed": [""] * total["failed"]}) for total in sums)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(found: dict[str, Any] | None) -> str:
    if not found:
        return "not run"
    failed = f", {len(found['failed'])} failed" if found["failed"] else ""
    return f"{found.get('passed', 0)} + {found.get('listed', 0)}{failed}"


def _recorded() -> dict[str, Any]:
    return json.loads(_RECORD.read_text())["runs"] if _RECORD.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS), help="folders. Default: all")
    parser.add_argument("--orders", nargs="*", default=list(_ORDERS), choices=_ORDERS, help="orders. Default: both")
    parser.add_argument("--devices", nargs="*", type=int, default=list(_DEVICES), help="numbers. Default: 1 2 4")
    parser.add_argument("--again", action="store_true", help="also run what has passed")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write what pytest prints to files of this folder")
    parser.add_argument("--page", action="store_true", help="write the table to docs/dev/accelerator.md")
    arguments = parser.parse_args()
    from benchmarks.bench_flatten import versions

    runs = _recorded()
    asked = [run[::-1] for run in itertools.product(arguments.devices, arguments.orders, arguments.only)]
    for run in asked:
        name = " ".join(map(str, run))
        if arguments.again or name not in runs or runs[name]["failed"]:
            found = _run(*run, arguments.logs)
            runs = {**_recorded(), name: found}  # another process may have run others meanwhile
            record = {"versions": versions(), "runs": dict(sorted(runs.items()))}
            _RECORD.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{name}: {_cell(runs[name])}", *runs[name]["failed"], sep="\n    ", flush=True)
    if arguments.page:
        before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        _, _, after = rest.partition(_END)
        _PAGE.write_text(f"{before}{_BEGIN}\n\n{table(runs)}\n\n{_END}{after}", encoding="utf-8")
    sys.exit(any(runs[" ".join(map(str, run))]["failed"] for run in asked))


if __name__ == "__main__":
    main()
