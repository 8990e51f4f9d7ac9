"""Run cases of a door in this process, and state what each of them came to."""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from roundpipe_runtime import RoundPipeError
from yobx_flatten.errors import FlattenError

from .doors import DOORS
from .mutations import SECRET, change_file

SECONDS = 10  # of the processor; what waits has six times as long
_ROOM = 2**30  # bytes that a case may take besides what the process has

_ACTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.", "socket.connect", "shutil.rm")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class _TooSlow(BaseException):
    """The case takes too long; nothing may catch it."""


class _Watch:
    """Notes what a case does that no file may cause. Python's audit hooks stay until the process ends."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.seen, self.is_on = os.fspath(folder), list[str](), False
        self.made = set[str]()  # temporary folders, which may be removed again
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "tempfile.mkdtemp":
            self.made.add(given[0])
        elif event == "shutil.rmtree" and given[0] in self.made:
            pass
        elif event.startswith(_ACTS):
            self.seen.append(f"{event} {given!r:.200}")
        elif event == "open" and isinstance(given[0], (str, bytes)):
            path, mode, flags = os.fsdecode(given[0]), given[1] or "", given[2] or 0
            writes = any(sign in mode for sign in "wax+") if mode else bool(flags & _WRITES)
            is_inside = os.path.abspath(path).startswith(self.folder)
            if path.endswith(SECRET) or path in ("/etc/passwd", "/dev/zero") or (writes and not is_inside):
                self.seen.append(f"open {path!r} {mode!r}")


def _too_slow(number: int, frame: object) -> None:
    raise _TooSlow


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """A block of ten seconds, and of a gigabyte more of addresses than the process has."""
    used = int(pathlib.Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = {number: signal.signal(number, _too_slow) for number in (signal.SIGPROF, signal.SIGALRM)}
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_cases(door: str, seeds: Iterable[int], folder: pathlib.Path) -> Iterator[tuple[int, str, str]]:
    """Run cases of a door."""
    kind, place = DOORS[door], folder / "case"
    good = folder / "good"
    good.mkdir()
    (folder / SECRET).write_text("no case has a reason to read this")
    kind.write(good)
    shutil.copytree(good, place)
    kind.read(place)  # the good one; it also imports what is needed
    names = sorted({path.relative_to(good) for pattern in kind.files for path in good.glob(pattern) if path.is_file()})
    watch = _Watch(place)
    for seed in seeds:
        dice = random.Random(f"{door} {seed}")
        change_file(place / dice.choice(names), dice)
        kind.repair(place)
        yield (seed, *_one(kind.read, place, watch))
        for name in names:
            shutil.copyfile(good / name, place / name)
        for path in set(place.rglob("*")) - {place / path.relative_to(good) for path in good.rglob("*")}:
            path.unlink(missing_ok=True)  # a lock, a leftover


def _one(read: Any, place: pathlib.Path, watch: _Watch) -> tuple[str, str]:
    watch.seen.clear()
    outcome, found = "loaded", ""
    try:
        with warnings.catch_warnings(), _bounded():
            warnings.simplefilter("ignore")
            watch.is_on = True
            read(place)
    except (FlattenError, RoundPipeError):
        outcome = "refused"
    except _TooSlow:
        found = f"more than {SECONDS} seconds"
    except BaseException as error:
        found = f"{type(error).__name__}: {str(error)[:200]}"
        if os.environ.get("FUZZ_TRACEBACK"):
            raise
    finally:
        watch.is_on = False
    if "tests.fuzz.stranger" in sys.modules:
        found = "a module that the file names was imported"
        del sys.modules["tests.fuzz.stranger"]
    found = "; ".join([*watch.seen[:3], *([found] if found else [])])
    return ("finding", found) if found else (outcome, "")
