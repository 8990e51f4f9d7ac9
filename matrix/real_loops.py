"""Time a token of a folder in this package's loop next to onnxruntime-genai's: ``python -m matrix.real_loops --help``.

`real_speed` times the files through the same calls. Here each folder is opened as its user opens it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import pathlib
import sys
import time
from typing import IO, Any

from .page import row, rule
from .real_cases import build_peer, open_peer
from .real_model import MODEL
from .real_runtimes import measured, opened
from .real_speed import PAIRS, export_form, written
from .results import installed_versions

__all__ = ["KEY", "main", "section_of"]

KEY = "loops"
"""Entry of the results that `real_speed` also writes."""

_PAST = (128, 1024, 4096)
_ROUNDS, _ROOM = 8, 64
_SECTION = """## Compared with onnxruntime-genai, each in its own loop

The same folders are opened as users open them: our folder by `open_generator(folder, threads=1)`, the builder's by
onnxruntime-genai's `Generator` with one thread. The table shows CPU milliseconds for one more token with our folder and
with the builder's, and the ratio. Each folder has its own process; the processes take turns, and values are medians of
{rounds} turns. Our loop asks Linux for huge pages for its weights, which this machine grants. Recorded in `data/{file}`
by `python -m matrix.real_loops`, with {versions}.

{rows}
"""


def serve(folder: pathlib.Path, requests: IO[str], answers: IO[str]) -> None:
    """Open a folder of the builder, and answer each line of requests with the milliseconds of its tokens."""
    import numpy
    import onnxruntime_genai as genai

    model = open_peer(folder)
    answers.write(f"{json.dumps(installed_versions())}\n")
    answers.flush()
    held: dict[int, Any] = {}
    for line in requests:
        past, tokens = json.loads(line)
        if past not in held:
            held.clear()  # without the cache of the last past
            params = genai.GeneratorParams(model)
            params.set_search_options(max_length=past + _ROOM, do_sample=False)
            held[past] = genai.Generator(model, params)
            held[past].append_tokens(numpy.full((1, past), 28, numpy.int32))
        times = []
        for _ in range(tokens):
            start = time.process_time()
            held[past].append_tokens(numpy.array([[28]], numpy.int32))
            held[past].get_logits()
            times.append((time.process_time() - start) * 1000)
        answers.write(f"{json.dumps(times)}\n")
        answers.flush()


def section_of(results: dict[str, Any], file: str) -> str:
    """Return the section of the page; empty where nothing is recorded."""
    held = results.get(KEY)
    if held is None:
        return ""
    lines = [row(["", *(f"token at {past:,}" for past in _PAST)]), rule(1 + len(_PAST))]
    for pair, (ours, theirs) in held["milliseconds"].items():
        times = [(ours[str(past)], theirs[str(past)]) for past in _PAST]
        lines.append(row([pair, *(f"{one:.4g}, {other:.4g}: {one / other:.2f}" for one, other in times)]))
    versions = ", ".join(f"{library} {version}" for library, version in held["versions"].items())
    return _SECTION.format(file=file, versions=versions, rounds=_ROUNDS, rows="\n".join(lines)) + "\n"


def _build(precision: str, place: pathlib.Path) -> None:
    build_peer(MODEL, place / "folder", precision)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m matrix.real_loops", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/real/forms"), help="exported forms")
    parser.add_argument("--only", nargs="*", choices=PAIRS, default=[*PAIRS], help="precisions")
    parser.add_argument("--serve", type=pathlib.Path, help="time a folder of the builder; for its own processes")
    version = importlib.metadata.version("transformers")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(f"docs/data/speed-{version}.json"))
    options = parser.parse_args(arguments)
    if options.serve is not None:
        serve(options.serve, sys.stdin, sys.stdout)
        return 0
    results: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8"))
    held = results.setdefault(KEY, {"milliseconds": {}})
    held["versions"] = installed_versions() | {"onnxruntime-genai": importlib.metadata.version("onnxruntime-genai")}
    for pair in options.only:
        form, precision = PAIRS[pair]
        ours, theirs = options.folder / form.replace(" ", "-"), options.folder / f"builder-{precision}"
        written(ours, functools.partial(export_form, form))
        written(theirs, functools.partial(_build, precision))
        folders = {"ours": opened(ours / "folder"), "theirs": opened(theirs / "folder", module="matrix.real_loops")}
        found = measured(folders, _PAST, _ROUNDS)
        for folder in folders.values():
            folder.close()
        held["milliseconds"][pair] = [found["ours"], found["theirs"]]
        sys.stdout.write(f"{pair} {held['milliseconds'][pair]}\n")
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
