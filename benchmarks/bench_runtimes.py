"""One program in every runtime: CPU milliseconds per token that a Llama decodes, with one thread.

One export with bounds is written as a file for each runtime that is installed, without a proof, since the timed calls
are compared with the eager model. Then one process runs all of them alternately, next to the eager model and
``torch.compile`` with a static cache. Every file takes the cache and returns a longer one: that copy is measured.

    python benchmarks/bench_runtimes.py --compile --files build/runtimes --output docs/data/bench-runtimes.json

``--files`` keeps files and compiled code: a second run, on a quiet machine, only loads and measures. ExecuTorch brings
torchao and needs a separate environment: ``make executorch``, then its Python for everything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from bench_export import STEPS, Compiled, Eager, past_of, tokens

# Random weights. The first has few layers, since ExecuTorch and AOTInductor compile each for minutes.
SIZES = {
    "llama-123m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}
COMMON = {"head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True}
# The runtime, the method that writes its file, the suffix, and what has to be installed.
FILES = {
    "onnxruntime": ("to_onnx", ".onnx", "onnxruntime"),
    "OpenVINO": ("to_openvino", ".xml", "openvino"),
    "AOTInductor": ("to_aotinductor", ".pt2", "torch"),
    "ExecuTorch": ("to_executorch", ".pte", "executorch"),
}
NEW = 16


class Runner:
    """A file with a cache that grows, called as the loop that generates calls it."""

    def __init__(self, path: pathlib.Path) -> None:
        from yobx_flatten.runners.open import open_runner

        options = {}
        if path.suffix == ".onnx":
            import onnxruntime

            options["options"] = onnxruntime.SessionOptions()
            options["options"].intra_op_num_threads = options["options"].inter_op_num_threads = 1
        if path.suffix == ".pte":
            from executorch.extension.pybindings import portable_lib

            portable_lib._unsafe_reset_threadpool(1)
        self.runner = open_runner(path, trust=path.suffix == ".pt2", **options)

    def prepare(self, past: int, new: int, cache: dict[int, tuple[Any, Any]]) -> Callable[[], Any]:
        """Return a call of ``new`` tokens after a cache of ``past`` tokens."""
        import torch

        known = {
            "input_ids": tokens(1, past, new),
            "attention_mask": torch.ones(1, past + new, dtype=torch.int64),
            "position_ids": torch.arange(past, past + new)[None],
        }
        feeds = {name: known[name] for name in self.runner.ports if name in known}
        names = [name for name in self.runner.ports if name not in known]
        given = {name: cache[int(name.split(".")[1])][name.endswith("value")].contiguous() for name in names}
        held = self.runner.cache(given)

        def call() -> Any:
            start = time.process_time()
            found, _ = self.runner.step(feeds, dict(held))
            call.seconds = time.process_time() - start
            return found["logits"][:, -1].numpy()

        return call


def write(model: Any, most: int, folder: pathlib.Path, runtimes: list[str]) -> dict[str, dict[str, Any]]:
    """Export once, and write the files that are not there; return what each took, or why there is none."""
    known = folder / "made.json"
    made: dict[str, dict[str, Any]] = json.loads(known.read_text()) if known.is_file() else {}
    runtimes = [name for name in runtimes if "file" not in made.get(name, {})]
    if not runtimes:
        return made
    from yobx_flatten import DecodeSizes, FlattenError, decode_inputs, export_program

    start = time.process_time()
    exported = export_program(
        model,
        (),
        decode_inputs(model, DecodeSizes(2, 5, 3)),
        bounds={"batch": 2, "length": most + NEW, "new": NEW},
        proof="none",
    )
    made["the program"] = {"processor seconds": time.process_time() - start}
    for name in runtimes:
        method, suffix, _ = FILES[name]
        path = folder / f"{name}{suffix}"
        before = os.times()
        try:
            report = getattr(exported, method)(path)
        except FlattenError as error:
            made[name] = {"error": str(error).splitlines()[0][:300]}
        else:
            after = os.times()
            # a compiler is a process of its own
            spent = sum(after[:4]) - sum(before[:4])
            made[name] = {"processor seconds": spent, "bytes on disk": report.file_bytes or report.onnx_bytes}
            made[name] |= {} if report.planned_bytes is None else {"planned bytes": report.planned_bytes}
            made[name]["file"] = str(path)
        known.write_text(json.dumps(made))
        print(f"{name:28} {made[name]}", flush=True)
    return made


def measure(sides: dict[str, Any], past: int, cache: dict[int, tuple[Any, Any]], rounds: int) -> dict[str, Any]:
    """Time a token of every side alternately, and compare its logits with the eager model's."""
    calls = {side: sides[side].prepare(past, 1, cache) for side in sides}
    expected = calls["eager"]()
    differences = {side: float(abs(call() - expected).max()) for side, call in calls.items()}
    least = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for side, call in calls.items():
            for _ in range(STEPS):
                call()
                least[side] = min(least[side], call.seconds)
    milliseconds = {side: 1e3 * took for side, took in least.items()}
    return {"work": f"decode, {past} cached", "milliseconds": milliseconds, "off": differences}


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="llama-123m", help="of the model; llama-123m by default")
    parser.add_argument("--layers", type=int, help="how many of them; all by default")
    parser.add_argument("--past", default="128,1024,4096", help="tokens in the cache; with commas")
    parser.add_argument("--rounds", type=int, default=3, help="3 by default")
    parser.add_argument(
        "--runtimes", default=",".join(FILES), help="with commas; those that are not installed stay out"
    )
    parser.add_argument("--compile", action="store_true", help="also time torch.compile, which compiles for minutes")
    parser.add_argument("--files", type=pathlib.Path, help="a folder that keeps the files, of one size of model")
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file to write")
    options = parser.parse_args()
    asked = options.runtimes.split(",")
    if unknown := set(asked) - set(FILES):
        parser.error(f"--runtimes {','.join(sorted(unknown))}: expected some of {', '.join(FILES)}")
    pasts = [int(length) for length in options.past.split(",")]
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.files is not None:
        options.files.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.files / "compiled")
    import torch
    import transformers

    torch.set_num_threads(1)
    versions = {name: _version(name) for name in ("torch", "transformers", *(FILES[name][2] for name in asked))}
    versions = {name: version for name, version in versions.items() if version}
    print(", ".join(f"{name} {version}" for name, version in versions.items()), "- float32, one thread")
    torch.manual_seed(0)
    sizes = {**COMMON, **SIZES[options.size]}
    sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
    found |= {"versions": versions, "layers": sizes["num_hidden_layers"], "parameters": parameters}
    with contextlib.ExitStack() as stack:
        folder = options.files or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = write(model, max(pasts), folder, [name for name in asked if FILES[name][2] in versions])
        if hasattr(os, "sched_setaffinity"):  # OpenVINO starts as many threads as it sees cores
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sides: dict[str, Any] = {name: Runner(pathlib.Path(m["file"])) for name, m in made.items() if "file" in m}
        sides["eager"] = Eager(model)
        if options.compile:
            sides["torch.compile, static cache"] = Compiled(model)
        found |= {"load": list(os.getloadavg()), "made": made, "calls": []}
        with torch.no_grad():
            for past in pasts:
                row = measure(sides, past, past_of(model, past, 1), options.rounds)
                found["calls"].append(row)
                print(row["work"])
                for side, took in sorted(row["milliseconds"].items(), key=lambda item: item[1]):
                    print(f"   {side:28} {took:8.2f} ms   off by {row['off'][side]:.1e}", flush=True)
    for costs in made.values():
        costs.pop("file", None)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
