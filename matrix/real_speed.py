"""Time files of a model with trained weights next to those of another builder: ``python -m matrix.real_speed --help``.

Both files take turns in one process with one thread, through the same calls of onnxruntime: keys and values in memory
that both read and write in place. What is compared is the file, not the loop around it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import numpy.typing as npt

from .page import row, rule
from .real_cases import RealTrial, build_peer
from .real_model import MODEL
from .results import installed_versions

__all__ = ["CALLS", "PAIRS", "File", "export_form", "main", "section_of", "written"]

PAIRS = {
    "float32": ("float32 fused", "fp32"),
    "int8": ("int8 fused", "int8"),
    "int8, other weights": ("other weights int8 fused", "int8"),
    "int4": ("int4 fused", "int4"),
    "int4, other weights": ("other weights int4 fused", "int4"),
    "int4, activations split": ("int4 fused split inputs", "int4"),
    "int8, other weights, activations int8": ("other weights int8 fused rounded inputs", "int8"),
    "int4, activations int8": ("int4 fused rounded inputs", "int4"),
}
"""By name: the form of this package, and the precision of the builder."""

CALLS: dict[str, tuple[int, int, int]] = {
    "token at 128": (1, 1, 128),
    "token at 1,024": (1, 1, 1024),
    "token at 4,096": (1, 1, 4096),
    "4 rows": (4, 1, 128),
    "16 rows": (16, 1, 128),
    "prompt of 128": (1, 128, 0),
    "prompt of 1,000": (1, 1000, 0),
}
"""By name: rows, new tokens of each, and tokens in the cache."""

_KEPT = "num_logits_to_keep"
_SECTION = """## Compared with the files of onnxruntime-genai's builder

The table shows CPU milliseconds with one thread for one call of our file, for one call of the builder's file, and the
ratio. Both files run alternately in one process, through the same calls of onnxruntime, with keys and values written in
place. Values are medians over both orders, on two cores shared with other work. One new token is measured with 128,
1,024 and 4,096 tokens in the cache; for several rows, with 128. For a prompt, our file computes the scores of the last
token only; the builder's file computes the scores of all tokens. Recorded in `data/{file}` by
`python -m matrix.real_speed`, with {versions}.

Our int4 file keeps the model's own integers and generates the model's tokens; of the builder's tokens, 66.8 % equal the
model's. Our file takes longer per token for three reasons: activations are not rounded to 8 bits, each block of weights
has its own minimum, and the output head has 8 bits. In int8, our file keeps the model's integers; the builder rounds
the weights again. For "other weights" in 8 bits, onnxruntime has no kernel with float activations, so our file rounds
the activations in two parts: channels that are large after a norm are multiplied in float, and the part of any other
value above a limit is rounded separately. `--activations split` does the same for int4. The last two rows are
`--activations int8`, which rounds the activations once, as the builder does ([quantize](guide/quantize.md)).

{rows}
"""


class File:
    """An ONNX file whose cache stays in one piece of memory, open in one thread."""

    def __init__(self, path: pathlib.Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._inputs = {one.name: one for one in self._session.get_inputs()}
        self._keeps = any(one.name == _KEPT for one in self._session.get_overridable_initializers())

    def prepare(self, rows: int, new: int, past: int) -> None:
        """Bind what one call takes and returns."""
        from onnxruntime import OrtValue

        self._binding, self._held = self._session.io_binding(), []
        total, ids = past + new, numpy.full((rows, new), 28)
        given: dict[str, npt.NDArray[Any]] = {"input_ids": ids, "attention_mask": numpy.ones((rows, total), "int64")}
        given["position_ids"] = numpy.arange(past, total)[None].repeat(rows, 0)
        for name, one in self._inputs.items():
            if name in given:
                self._bind(name, given[name])
                continue
            heads, size = one.shape[1], one.shape[3] if isinstance(one.shape[3], int) else _head_size(self._session)
            memory = numpy.full((rows, heads, total + 32, size), 0.01, "float32")
            value = OrtValue.ortvalue_from_numpy(memory)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
            self._held.append((memory, value))
        if self._keeps:
            self._bind(_KEPT, numpy.array(1))
        self._binding.bind_output("logits")

    def call(self) -> float:
        """Run the call; return CPU milliseconds."""
        start = time.process_time()
        self._session.run_with_iobinding(self._binding)
        return (time.process_time() - start) * 1000

    def _bind(self, name: str, array: npt.NDArray[Any]) -> None:
        from onnxruntime import OrtValue

        value = OrtValue.ortvalue_from_numpy(array)  # `bind_cpu_input` knows no input that has a value
        self._held.append((array, value))
        self._binding.bind_ortvalue_input(name, value)


def _head_size(session: Any) -> int:
    shape = next(one.shape for one in session.get_outputs() if one.name.startswith("present"))
    return shape[3] if isinstance(shape[3], int) else 64  # of the model that is measured here


def measured(ours: pathlib.Path, theirs: pathlib.Path, calls: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Return milliseconds of both files by the name of a call."""
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    # where its weights come to lie decides some percent: each file is opened first once, and called first once
    for order in (1, -1):
        files = [File(path) for path in (ours, theirs)[::order]][::order]
        for name, (rows, new, past) in calls.items():
            for file in files:
                file.prepare(rows, new, past)
                file.call()
            for _ in range(2 if new > 500 else 4 if new > 1 else 20 // rows + 3):
                for file, times in [*zip(files, samples[name], strict=True)][::order]:
                    times.extend(file.call() for _ in range(3 if new == 1 else 1))
        del files, file
    return {name: [round(statistics.median(times), 2) for times in both] for name, both in samples.items()}


def section_of(results: Mapping[str, Any], file: str) -> str:
    """Return the section of the page."""
    lines = [row(["", *CALLS]), rule(1 + len(CALLS))]
    for pair, times in results["pairs"].items():
        cells = [f"{ours:.4g}, {theirs:.4g}: {ours / theirs:.2f}" for ours, theirs in map(times.get, CALLS)]
        lines.append(row([pair, *cells]))
    versions = ", ".join(f"{library} {version}" for library, version in results["versions"].items())
    return _SECTION.format(file=file, versions=versions, rows="\n".join(lines))


def export_form(form: str, place: pathlib.Path) -> None:
    """Write a form of the model into a folder."""
    RealTrial(form, place).exported()


def _build(precision: str, place: pathlib.Path) -> None:
    build_peer(MODEL, place / "folder", precision)


def written(place: pathlib.Path, write: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Return the ONNX file of a form, written where it is not there yet."""
    if not (place / "done").exists():
        place.mkdir(parents=True, exist_ok=True)
        write(place)
        (place / "done").touch()
    return place / "folder" / "model.onnx"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m matrix.real_speed", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/real/forms"), help="exported forms")
    parser.add_argument("--only", nargs="*", choices=PAIRS, default=[*PAIRS], help="precisions")
    version = importlib.metadata.version("transformers")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(f"docs/data/speed-{version}.json"))
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"pairs": {}}
    if options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))
    results["versions"] = installed_versions() | {"onnxruntime-genai": importlib.metadata.version("onnxruntime-genai")}
    for pair in options.only:
        form, precision = PAIRS[pair]
        ours = written(options.folder / form.replace(" ", "-"), functools.partial(export_form, form))
        theirs = written(options.folder / f"builder-{precision}", functools.partial(_build, precision))
        results["pairs"][pair] = measured(ours, theirs, CALLS)
        sys.stdout.write(f"{pair} {results['pairs'][pair]}\n")
        results["pairs"] = {name: results["pairs"][name] for name in PAIRS if name in results["pairs"]}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
