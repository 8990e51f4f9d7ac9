"""Time a token of each runtime's folder next to onnxruntime's: ``python -m matrix.real_runtimes --help``.

Folders are opened as a user opens them, each in a separate process, since two of the libraries cannot share one. The
processes take turns, so that other work on the machine delays all of them alike.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import IO, Any

import torch

from .page import row, rule
from .real_cases import FORMS
from .real_speed import export_form, written
from .results import installed_versions
from .served import Served

__all__ = ["BASE", "KEY", "main", "measured", "opened", "section_of"]

KEY = "runtimes"
"""Entry of the results that `real_speed` also writes."""

BASE = "float32 fused"
"""The form that the others are compared with."""

_FORMS = ("OpenVINO", "AOTInductor", "ExecuTorch")
_PAST = (128, 1024, 4096)
_ROUNDS, _TOKENS = 8, 3
_SECTION = """## Other runtimes compared with onnxruntime

The table shows CPU milliseconds with one thread for one more token with 128, 1,024 and 4,096 tokens in the cache, and
the ratio to onnxruntime's fused float32 file. `open_generator(folder, threads=1, trust=True)` opens each folder in its
own process. The processes take turns of {tokens} tokens on two cores shared with other work, and values are medians of
{rounds} turns. AOTInductor uses torch's threads (`torch.set_num_threads(1)`). The ExecuTorch file is the one in the
table above, which accepts up to 4,352 tokens. Recorded in `data/{file}` by `python -m matrix.real_runtimes`, with
{versions}.

{rows}
"""


def opened(folder: pathlib.Path, python: str = sys.executable, module: str = "matrix.real_runtimes") -> Served:
    """Open a folder in a separate process, which answers a number of tokens in the cache, and of further ones.

    Args:
        folder: where the files are.
        python: the interpreter that has its library. Default: this one.
        module: the module that serves it. Default: this one.
    """
    return Served([python, "-m", module, "--serve", str(folder)])


def serve(folder: pathlib.Path, requests: IO[str], answers: IO[str]) -> None:
    """Open a folder, and answer each line of requests with the milliseconds of its tokens."""
    from yobx_flatten import open_generator

    torch.set_num_threads(1)
    runner = open_generator(folder, threads=1, trust=True).parts.decoder
    others = {
        name: importlib.metadata.version(name) for name in ("openvino", "executorch") if find_spec(name) is not None
    }
    answers.write(f"{json.dumps(installed_versions() | others)}\n")
    answers.flush()
    held: dict[int, tuple[Mapping[str, Any], int]] = {}
    for line in requests:
        past, tokens = json.loads(line)
        if past not in held:
            held = {past: (runner.cache(_filled(runner, past)), past)}  # without the cache of the last past
        cache, seen = held[past]
        times = []
        for _ in range(tokens):
            given = {"input_ids": torch.tensor([[28]]), "attention_mask": torch.ones(1, seen + 1, dtype=torch.int64)}
            if "position_ids" in runner.ports:
                given["position_ids"] = torch.tensor([[seen]])
            start = time.process_time()
            _, cache = runner.step(given, cache, last_scores=True)
            times.append((time.process_time() - start) * 1000)
            seen += 1
        held[past] = cache, seen
        answers.write(f"{json.dumps(times)}\n")
        answers.flush()


def _filled(runner: Any, past: int) -> dict[str, torch.Tensor]:
    """A cache of one row with so many tokens: a prompt of 4,096 would take minutes, and times depend on no value."""
    draw = torch.Generator().manual_seed(0)
    ports = [slot.port for slot in runner.slots]
    size = 64  # of this model; the fused ONNX file does not state it
    return {port.name: torch.randn(1, port.shape[1], past, port.shape[3] or size, generator=draw) for port in ports}


def measured(folders: Mapping[str, Served], pasts: Sequence[int], rounds: int = _ROUNDS) -> dict[str, dict[str, float]]:
    """Return milliseconds for each folder and each number of tokens in the cache."""
    found: dict[str, dict[str, float]] = {name: {} for name in folders}
    for past in pasts:
        samples: dict[str, list[float]] = {name: [] for name in folders}
        for turn in range(1 + rounds):
            for name, folder in folders.items():
                times = folder.measure(past, _TOKENS)
                if turn:  # the first one fills buffers
                    samples[name].extend(times)
        for name, times in samples.items():
            found[name][str(past)] = round(statistics.median(times), 2)
    return found


def section_of(results: Mapping[str, Any], file: str) -> str:
    """Return the section of the page; empty where nothing is recorded."""
    held = results.get(KEY)
    if held is None:
        return ""
    base = held["milliseconds"][BASE]
    lines = [row(["", *(f"token at {int(past):,}" for past in base)]), rule(1 + len(base))]
    for name, times in held["milliseconds"].items():
        ratios = ["" if name == BASE else f": {times[past] / base[past]:.2f}" for past in base]
        lines.append(row([name, *(f"{times[past]:.4g}{ratio}" for past, ratio in zip(base, ratios, strict=True))]))
    versions = ", ".join(f"{library} {version}" for library, version in held["versions"].items())
    facts = {"tokens": held["tokens"], "rounds": held["rounds"]}
    return _SECTION.format(file=file, versions=versions, rows="\n".join(lines), **facts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m matrix.real_runtimes", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/real/forms"), help="exported forms")
    parser.add_argument("--only", nargs="*", choices=_FORMS, default=[*_FORMS], help="forms, next to onnxruntime's")
    parser.add_argument("--executorch", default=".venv-executorch/bin/python", help="Python that has ExecuTorch")
    parser.add_argument(
        "--serve", type=pathlib.Path, help="time a folder as standard input asks; for its own processes"
    )
    version = importlib.metadata.version("transformers")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(f"docs/data/speed-{version}.json"))
    options = parser.parse_args(arguments)
    if options.serve is not None:
        serve(options.serve, sys.stdin, sys.stdout)
        return 0
    folders: dict[str, Served] = {}
    for form in (BASE, *options.only):
        python = options.executorch if form == "ExecuTorch" else sys.executable
        place = options.folder / form.replace(" ", "-")
        _export(form, place, python)
        folders[form] = opened(place / "folder", python)
    milliseconds = measured(folders, _PAST)
    versions = {name: found for folder in folders.values() for name, found in folder.facts.items()}
    for folder in folders.values():
        folder.close()
    results: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    results[KEY] = {"milliseconds": milliseconds, "tokens": _TOKENS, "rounds": _ROUNDS, "versions": versions}
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{milliseconds}\n")
    return 0


def _export(form: str, place: pathlib.Path, python: str) -> None:
    assert form in FORMS
    if python == sys.executable:
        written(place, functools.partial(export_form, form))
        return
    code = (
        "import functools, pathlib, sys; from matrix.real_speed import export_form, written; "
        "written(pathlib.Path(sys.argv[2]), functools.partial(export_form, sys.argv[1]))"
    )
    subprocess.run([python, "-c", code, form, str(place)], check=True)


if __name__ == "__main__":
    sys.exit(main())
