"""What works with the newest versions that pip installs: ``python -m matrix.newest --help``; `make newest` runs it.

Each step is a command in a separate process: a library that cannot even be imported is a result like any other. The
results, with the versions, go to ``docs/data/newest.json``, which the install page shows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from .results import recorded_file

__all__ = ["Outcome", "Step", "main", "run_step", "steps", "unknown_of"]

ROOT = pathlib.Path(__file__).parent.parent  # nothing here imports torch, which may be what is broken
OUTPUT = ROOT / "docs" / "data" / "newest.json"
LOGS = ROOT / "build" / "newest"
UNKNOWN = "what the tables do not know"
_LIBRARIES = (
    *("torch", "transformers", "onnxruntime", "onnx", "onnxscript", "onnx-ir", "accelerate", "safetensors"),
    *("huggingface-hub", "tokenizers", "numpy"),
)
_REASON_LINES, _REASON_LETTERS = 12, 300
# Lines in which a step states what failed. Where there are none, its last line is the reason.
_FAILED = re.compile(r"^(FAIL|ERROR|worse than|nothing was tried)|differs from the eager model")


@dataclasses.dataclass(frozen=True)
class Step:
    """Something to run.

    Attributes:
        name: what it shows, for a reader of the results.
        command: a program and its arguments.
        shows: a pattern that its output has if something was done, by default any text; a command that does nothing
            also ends with 0.
        missing: why it cannot be run; empty if it can.
        optional: it may be missing.
    """

    name: str
    command: tuple[str, ...]
    shows: str = r"\S"
    missing: str = ""
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a step: ``ok``, ``failed`` with a reason, or ``not there`` with a reason."""

    name: str
    result: str
    reason: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.result != "failed"


def steps(cases: pathlib.Path) -> list[Step]:
    """Return all steps, in order.

    Args:
        cases: a folder with programs ``newest_*.py`` and a ``run.py`` that runs them; it may be missing.
    """
    python = sys.executable
    signatures = sorted((ROOT / "tests").rglob("test_replaced_signatures.py"))
    pytest = (python, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider")
    return [
        Step("the programs of the README", (python, "-m", "matrix.newest_programs", "readme"), shows=r"^ok "),
        Step("yobx-flatten demo", (python, "-m", "yobx_flatten", "demo")),
        Step("roundpipe demo", (python, "-m", "roundpipe_runtime", "demo")),
        Step(
            "signatures of replaced functions",
            (*pytest, *map(str, signatures)),
            shows=r"\b[1-9]\d* passed",
            missing="" if signatures else "no file of the tests is called test_replaced_signatures.py",
        ),
        Step("generation next to eager", (python, "-m", "matrix.newest_programs", "generation"), shows=r"^ok "),
        Step(
            "further cases",
            (python, str(cases / "run.py"), "newest_"),
            shows=r"\b[1-9]\d* PASS",
            missing="" if (cases / "run.py").is_file() else "the folder of CASES is not there",
            optional=True,
        ),
        _sample("matrix", "a sample of the matrix", "--only", "causal:"),
        _sample("cut", "a sample of the cut matrix"),
        Step(UNKNOWN, (python, "-m", "matrix.newest_unknown"), shows=r"^\{"),
    ]


def _sample(stem: str, name: str, *chosen: str) -> Step:
    module = "matrix" if stem == "matrix" else f"matrix.{stem}"
    against = recorded_file(stem)
    how = ("--sample", "8", "--redo", "all", "--output", str(LOGS / f"{stem}.json"), "--against", str(against))
    return Step(name, (sys.executable, "-m", module, *chosen, *how))


def run_step(step: Step, log: pathlib.Path, timeout: float) -> Outcome:
    """Run one step; its output goes to a file.

    Args:
        step: what to run.
        log: the file.
        timeout: seconds.
    """
    if step.missing:
        return Outcome(step.name, "not there" if step.optional else "failed", step.missing, 0.0)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="newest-") as scratch, log.open("w", encoding="utf-8") as output:
        # what it writes goes away with the folder; the checkout comes before what is installed
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "TMPDIR": scratch, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            step.command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started
            process.wait()
    said, seconds = log.read_text(encoding="utf-8", errors="replace"), round(time.monotonic() - started, 1)
    if code is None:
        return Outcome(step.name, "failed", f"not done after {timeout:.0f} seconds", seconds)
    if code == 0 and re.search(step.shows, said, re.MULTILINE):
        return Outcome(step.name, "ok", "", seconds)
    reason = _reason(said, scratch) if code else "it ended with 0, and has done nothing"
    return Outcome(step.name, "failed", reason or f"exit status {code}", seconds)


def _reason(said: str, scratch: str) -> str:
    """The lines that state what failed, without the places of this machine."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    failed = [line for line in lines if _FAILED.search(line)] or lines[-1:]
    text = "\n".join(line[:_REASON_LETTERS] for line in failed[:_REASON_LINES])
    places = {scratch: "TMP", str(ROOT): ".", sys.prefix: "ENV", str(pathlib.Path.home()): "~"}
    for place in sorted(places, key=len, reverse=True):  # one may be inside another, as .venv is inside the checkout
        text = text.replace(place, places[place])
    return text


def unknown_of(log: pathlib.Path) -> dict[str, list[str]]:
    """Return what the last step has found: model types and classes that no table knows; nothing if it failed."""
    said = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    lines = [line for line in said if line.startswith("{")]
    found: dict[str, list[str]] = json.loads(lines[-1]) if lines else {}
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a step failed."""
    parser = argparse.ArgumentParser("python -m matrix.newest", description=__doc__, allow_abbrev=False)
    cases, default = pathlib.Path("../shared/cases"), "default docs/data/newest.json, where all steps are run"
    parser.add_argument("--cases", metavar="FOLDER", type=pathlib.Path, default=cases, help="further programs to run")
    parser.add_argument("--only", metavar="WORD", nargs="*", help="steps whose name has one of these words")
    parser.add_argument("--output", metavar="FILE", type=pathlib.Path, help=default)
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=3600.0, help="for one step (default 3600)")
    options = parser.parse_args(arguments)
    planned = steps((ROOT / options.cases).resolve())
    chosen = [step for step in planned if not options.only or any(word in step.name for word in options.only)]
    if not chosen:
        parser.error(f"--only: no step has such a name; they are {', '.join(step.name for step in planned)}")
    versions = _versions()
    _say(", ".join(f"{name} {version}" for name, version in versions.items()))
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for number, step in enumerate(chosen, 1):
        _say(f"[{number}/{len(chosen)}] {step.name} ...")
        outcomes.append(run_step(step, _log(step.name), options.timeout))
        _say("\n        ".join(_shown(outcomes[-1])))
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "ok": all(outcome.ok for outcome in outcomes),
        "versions": versions,
        "steps": [dataclasses.asdict(outcome) for outcome in outcomes],
        "unknown": unknown_of(_log(UNKNOWN)) if any(one.name == UNKNOWN and one.ok for one in outcomes) else {},
    }
    for kind, names in results["unknown"].items():
        _say(f"not in the tables, {kind}: {', '.join(names) or 'none'}")
    output = options.output or (OUTPUT if len(chosen) == len(planned) else None)
    if output is not None:
        output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        _say(f"written to {output}")
    failed = [outcome.name for outcome in outcomes if not outcome.ok]
    _say(f"failed: {', '.join(failed)}" if failed else "no step failed")
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _log(name: str) -> pathlib.Path:
    return LOGS / f"{re.sub('[^a-z]+', '-', name.lower())}.log"


def _shown(outcome: Outcome) -> list[str]:
    log = _log(outcome.name).relative_to(ROOT)
    more = [f"all that it printed: {log}"] if outcome.result == "failed" and outcome.seconds else []
    return [f"        {outcome.result}, {outcome.seconds:.0f} s", *outcome.reason.splitlines(), *more]


if __name__ == "__main__":
    sys.exit(main())
