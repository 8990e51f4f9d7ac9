"""Time the file that keeps the integers of a GGUF next to llama.cpp: ``python -m matrix.real_llama_cpp`` (needs npm).

llama.cpp reads the GGUF itself, built for this processor, as the package ``node-llama-cpp`` of npm brings it. Both
have one thread and take turns, each in a separate process.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from .page import row, rule
from .real_cases import RealTrial
from .real_model import GGUF
from .real_speed import CALLS, PAIRS, File, export_form, written
from .results import installed_versions
from .served import Served

__all__ = ["KEY", "main", "section_of"]

KEY = "llama.cpp"
"""Entry of the results that `real_speed` also writes."""

_PACKAGES = {"node-llama-cpp": "3.22.1"}
_BUILDS = {("Linux", "x86_64"): "linux-x64", ("Linux", "aarch64"): "linux-arm64"}
_ROUNDS = 2
_SECTION = """## Compared with llama.cpp

The table shows CPU milliseconds with one thread for an ONNX file that keeps the integers of a GGUF file, for llama.cpp
with this GGUF file, and the ratio. Each of the two runs in its own process; the processes take turns, and values are
medians of {rounds} turns. llama.cpp is {release}, built for this processor ({processor}), from the npm package
`node-llama-cpp` {package}. llama.cpp rounds activations to 8 bits, and its times include choosing the most likely
token. Recorded by `python -m matrix.real_llama_cpp`, with {versions}.

{rows}

## Time of a token, and tokens kept

This table shows the CPU time per token with 128 tokens in the cache, relative to the builder's int4 file, and the share
of equal greedy tokens in ten chats, both from the tables above (llama.cpp's time was measured relative to our int4
file). The builder rounds the weights again; llama.cpp and our files keep the integers of the GGUF file (Q4_1).
onnxruntime stores their scales in float32, so our file has a third more bytes than the builder's.

{frontier}
"""


def install(folder: pathlib.Path) -> None:
    """Install llama.cpp for this processor into a folder, without running scripts of packages."""
    build = _BUILDS.get((platform.system(), platform.machine()))
    if build is None or shutil.which("npm") is None:
        raise SystemExit(f"matrix.real_llama_cpp needs npm, and Linux on x86-64 or aarch64: {platform.platform()}")
    folder.mkdir(parents=True, exist_ok=True)
    packages = _PACKAGES | {f"@node-llama-cpp/{build}": _PACKAGES["node-llama-cpp"]}
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": packages}), encoding="utf-8")
    options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(["npm", "install", *options], cwd=folder, check=True)


def measured(ours: pathlib.Path, llama: Served) -> dict[str, list[float]]:
    """Return milliseconds of both by the name of a call of one row."""
    calls = {name: (new, past) for name, (rows, new, past) in CALLS.items() if rows == 1}
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    file = File(ours)
    for turn in range(1 + _ROUNDS):
        for name, (new, past) in calls.items():
            repetitions = 12 if new == 1 else 1
            file.prepare(1, new, past)
            own, other = [file.call() for _ in range(repetitions)], llama.measure(new, past, repetitions)
            if turn:  # the first one warms up
                samples[name][0].extend(own)
                samples[name][1].extend(other)
    return {name: [round(statistics.median(times), 2) for times in both] for name, both in samples.items()}


def kept(llama: Served, form: str, place: pathlib.Path) -> float:
    """Return the share of the model's own greedy tokens in ten chats that llama.cpp also chooses."""
    equal = compared = 0
    for prompt, answer in RealTrial(form, place).chats:
        found = llama.measure([*prompt.tolist(), *answer[:-1].tolist()], len(prompt))
        equal += sum(own == other for own, other in zip(answer.tolist(), found, strict=True))
        compared += len(answer)
    return equal / compared


def frontier(results: Mapping[str, Any], shares: Mapping[str, float]) -> str:
    """Return the table of times and tokens kept, fastest first; `shares` are those of the forms in `matrix.real`."""
    call = "token at 128"
    points: dict[str, tuple[float, float]] = {}
    for pair, (form, _) in PAIRS.items():
        if pair in results["pairs"] and form.startswith("int4") and form in shares:
            ours, theirs = results["pairs"][pair][call]
            points[pair] = ours / theirs, shares[form]
    points["onnxruntime-genai's builder"] = 1.0, shares["genai builder int4"]
    own, other = results[KEY]["calls"][call]
    points["llama.cpp"] = points["int4"][0] * other / own, results[KEY]["tokens"]
    rows = [row([name, f"{time:.2f}", f"{share:.1%}"]) for name, (time, share) in sorted(points.items(), key=_time)]
    return "\n".join([row(["file", "time", "tokens"]), rule(3), *rows])


def _time(point: tuple[str, tuple[float, float]]) -> float:
    return point[1][0]


def section_of(results: Mapping[str, Any], shares: Mapping[str, float]) -> str:
    """Return the section of the page; empty where nothing is recorded."""
    held = results.get(KEY)
    if held is None:
        return ""
    names = [name for name in CALLS if name in held["calls"]]
    cells = [f"{ours:.4g}, {theirs:.4g}: {ours / theirs:.2f}" for ours, theirs in map(held["calls"].get, names)]
    versions = ", ".join(f"{library} {version}" for library, version in held["versions"].items())
    rows = "\n".join([row(["", *names]), rule(1 + len(names)), row(["int4 of the GGUF", *cells])])
    facts = {name: held[name] for name in ("release", "processor", "package", "rounds")}
    return _SECTION.format(versions=versions, rows=rows, frontier=frontier(results, shares), **facts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m matrix.real_llama_cpp", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/real/forms"), help="exported forms")
    parser.add_argument("--npm", type=pathlib.Path, default=pathlib.Path("build/real/llama.cpp"), help="its packages")
    version = importlib.metadata.version("transformers")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(f"docs/data/speed-{version}.json"))
    options = parser.parse_args(arguments)
    form = "GGUF fused"
    ours = written(options.folder / form.replace(" ", "-"), functools.partial(export_form, form))
    install(options.npm)
    llama = Served(["node", str(pathlib.Path(__file__).with_suffix(".mjs")), str(GGUF.resolve())], options.npm)
    calls, tokens = measured(ours, llama), kept(llama, form, options.folder)
    llama.close()
    on = [feature.split(" = ")[0].strip() for feature in llama.facts["processor"].split("|") if "= 1" in feature]
    results: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    results[KEY] = {
        "calls": calls,
        "tokens": tokens,
        "release": llama.facts["release"],
        "processor": ", ".join(name.removeprefix("CPU : ") for name in on),
        "package": _PACKAGES["node-llama-cpp"],
        "rounds": _ROUNDS,
        "versions": installed_versions(),
    }
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{calls}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
