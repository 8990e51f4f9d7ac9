"""A language model's ONNX file by several exporters: the cost of making it, and of each token that it decodes.

Every file is made in a separate process, from the same folder of weights. Then one process with one thread opens all
of them in onnxruntime and runs them alternately, next to the eager model and ``torch.compile`` with a static cache. The
clock is that of the processor: it does not count what other programs took. Each number is the least of all rounds.

A product of one token reads every weight once, and how fast depends on the pages of memory that the system happens to
provide: the same file, opened twice, differed by a fifth. So everyone's weights are in huge pages (on Linux), and every
file is opened several times.

What is not installed in this environment is brought by another one: optimum needs an older transformers.

    python benchmarks/bench_export.py --genai /path/to/python --optimum /path/to/python
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

SIZES = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "2M": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "granite": {},
    "olmo2": {},
    "mistral": {"sliding_window": 1024},
    # every sixth layer sees everything
    "gemma3_text": {"sliding_window": 512},
}
STEPS, PREFILL_AFTER, PREFILL = 4, 16, 256
HUGE_PAGES = "glibc.malloc.hugetlb=1"

OURS = """
import sys, transformers, yobx_flatten
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
yobx_flatten.export_folder(model, sys.argv[2], source=sys.argv[1], {options})
"""
OPTIMUM = """
import sys
from optimum.exporters.onnx import main_export
main_export(sys.argv[1], sys.argv[2], task="text-generation-with-past")
"""
GENAI = """
import runpy, sys
sys.argv[1:] = ["-i", sys.argv[1], "-o", sys.argv[2], "-p", "fp32", "-e", "cpu", "-c", sys.argv[2] + "-cache"]
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""


def save_model(family: str, size: str, layers: int | None, folder: pathlib.Path) -> int:
    """Save a model with random weights and a fast tokenizer; return the bytes of its weights."""
    import torch
    import transformers

    sizes = {**SIZES[size], "max_position_embeddings": 8192, "tie_word_embeddings": True, **FAMILIES[family]}
    if layers:
        sizes["num_hidden_layers"] = layers
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    _tokenizer(sizes["vocab_size"]).save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def _tokenizer(words: int) -> Any:
    # the builders copy a tokenizer next to the file, and stop without one
    import tokenizers
    import transformers

    names = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(words - 3))]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make(python: str, program: str, source: pathlib.Path, target: pathlib.Path) -> dict[str, Any]:
    """Run an exporter in a separate process; return its cost, or why it failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    environment.pop("GLIBC_TUNABLES", None)
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [python, "-c", program, str(source), str(target)], env=environment, stdout=said, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or [""]
    if process.returncode:
        return {"error": lines[-1][:300]}
    unit = 1 if sys.platform == "darwin" else 1024
    file = next(path for path in sorted(target.glob("*.onnx")) if path.stat().st_size)
    return {
        "processor seconds": used.ru_utime + used.ru_stime,
        "seconds": time.perf_counter() - started,
        "peak bytes": used.ru_maxrss * unit,
        "bytes on disk": sum(path.stat().st_size for path in target.iterdir() if path.suffix in (".onnx", ".data")),
        "file": str(file),
        **count_nodes(file),
    }


def count_nodes(file: pathlib.Path) -> dict[str, Any]:
    """Count the operators of a file."""
    import onnx

    names = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
    attention = {name: names.count(name) for name in ("Attention", "GroupQueryAttention", "MultiHeadAttention")}
    return {"nodes": len(names), "attention": {name: count for name, count in attention.items() if count}}


class File:
    """An ONNX file with a cache that grows: what was returned is given again, without a copy by the host.

    ``kept`` is how many keys a layer's input holds at most, per layer with a window; other layers hold all.
    """

    def __init__(self, path: str, kept: dict[int, int]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.outputs = [node.name for node in self.session.get_outputs()]
        self.kept = kept

    def prepare(self, past: int, new: int, cache: dict[int, tuple[Any, Any]]) -> Callable[[], Any]:
        """Return a call of ``new`` tokens after a cache of ``past`` tokens."""
        import numpy
        import onnxruntime

        rows = rows_of(cache)
        known = {
            "input_ids": tokens(rows, past, new).numpy(),
            "attention_mask": numpy.ones((rows, past + new), numpy.int64),
            "position_ids": numpy.tile(numpy.arange(past, past + new), (rows, 1)),
        }
        values = {}
        for node in self.session.get_inputs():
            if node.name in known:
                dtype = numpy.int32 if node.type == "tensor(int32)" else numpy.int64
                array = known[node.name].astype(dtype)
            elif node.name.endswith("length"):  # a cache that only has windows counts its tokens
                array = numpy.full([1] * len(node.shape), past, numpy.int64)
            else:
                layer = int(node.name.split(".")[1])
                array = cache[layer]["value" in node.name.split(".")[2]].numpy()
                array = array[:, :, -self.kept.get(layer, past) :]
            values[node.name] = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ascontiguousarray(array))

        def call() -> Any:
            binding = self.session.io_binding()
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in self.outputs:
                binding.bind_output(name, "cpu")
            self.session.run_with_iobinding(binding)
            found = binding.get_outputs()[self.outputs.index("logits")].numpy()
            return found[:, -1]

        return call


class Eager:
    """The Hugging Face model, with a cache that grows."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, past: int, new: int, cache: dict[int, tuple[Any, Any]]) -> Callable[[], Any]:
        """Return a call of ``new`` tokens after a cache of ``past`` tokens."""
        import torch
        import transformers

        from yobx_flatten.huggingface.cache_names import installed_name

        rows = rows_of(cache)
        ids, mask = tokens(rows, past, new), torch.ones(rows, past + new, dtype=torch.int64)
        positions = torch.arange(past, past + new).expand(rows, -1)

        def call() -> Any:
            held = transformers.DynamicCache(config=self.model.config)
            for layer, (keys, values) in cache.items():
                held.update(keys, values, layer)
            start = time.process_time()  # the cache is made again for every call; that is not part of a token
            found = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **{installed_name(): held})
            call.seconds = time.process_time() - start
            return found.logits[:, -1].numpy()

        return call


class Compiled:
    """``torch.compile`` with a static cache that has room for the tokens to come."""

    def __init__(self, model: Any) -> None:
        import torch

        self.model = model
        self.compiled = torch.compile(model, dynamic=False)

    def prepare(self, past: int, new: int, cache: dict[int, tuple[Any, Any]]) -> Callable[[], Any]:
        """Return a call of ``new`` tokens after a cache of ``past`` tokens."""
        import torch
        import transformers

        from yobx_flatten.huggingface.cache_names import installed_name

        held = transformers.StaticCache(config=self.model.config, max_cache_len=past + new)
        for layer, (keys, values) in cache.items():
            held.update(keys, values, layer)
        rows = rows_of(cache)
        ids, positions = tokens(rows, past, new), torch.arange(past, past + new).expand(rows, -1)

        def call() -> Any:
            for layer in held.layers:
                layer.cumulative_length.fill_(past)  # every call writes the same places again
                if hasattr(layer, "cumulative_length_int"):  # what a layer with a window counts with
                    layer.cumulative_length_int = past
            start = time.process_time()
            found = self.compiled(input_ids=ids, position_ids=positions, **{installed_name(): held})
            call.seconds = time.process_time() - start
            return found.logits[:, -1].numpy()

        return call


def tokens(rows: int, past: int, new: int) -> Any:
    """The same tokens for everyone, and in every row."""
    import torch

    return (torch.arange(past, past + new) % 200 + 3).repeat(rows, 1)


def rows_of(cache: dict[int, tuple[Any, Any]]) -> int:
    """How many rows a cache is of."""
    return next(iter(cache.values()))[0].shape[0]


def past_of(model: Any, length: int, rows: int) -> dict[int, tuple[Any, Any]]:
    """All keys and values per layer, as the model itself computes them for that many tokens."""
    import transformers

    from yobx_flatten.huggingface.cache_names import installed_name

    held = transformers.DynamicCache()  # without a configuration no layer drops what its window has passed
    for begin in range(0, length, 512):
        model.model(input_ids=tokens(1, begin, min(512, length - begin)), **{installed_name(): held})
    return {
        number: (layer.keys.repeat(rows, 1, 1, 1), layer.values.repeat(rows, 1, 1, 1))
        for number, layer in enumerate(held.layers)
    }


def keys_kept(config: Any) -> dict[int, int]:
    """How many keys the cache of transformers keeps, per layer with a window."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return {layer: window - 1 for layer, kind in enumerate(kinds) if window and kind == "sliding_attention"}


def measure(
    openers: dict[str, Callable[[], Any]], model: Any, pasts: list[int], batches: list[int], rounds: int, openings: int
) -> list[dict[str, Any]]:
    """Time the sides alternately, and compare their logits with the eager ones: larger batches at the middle length."""
    work = [(f"decode, {past} cached", past, 1, 1) for past in pasts]
    middle = pasts[len(pasts) // 2]
    work += [(f"decode, {middle} cached, {rows} rows", middle, 1, rows) for rows in batches]
    work.append((f"prefill {PREFILL} after {PREFILL_AFTER}", PREFILL_AFTER, PREFILL, 1))
    caches = [past_of(model, past, rows) for _, past, _, rows in work]
    least = [dict.fromkeys(openers, math.inf) for _ in work]
    differences: list[dict[str, float]] = [{} for _ in work]
    for opening in range(openings):
        names = list(openers)
        sides = {side: openers[side]() for side in names[opening % len(names) :] + names[: opening % len(names)]}
        for (_, past, new, _), cache, found, off in zip(work, caches, least, differences, strict=True):
            calls = {side: sides[side].prepare(past, new, cache) for side in openers}
            expected = calls["eager"]()
            for side, call in calls.items():
                off[side] = float(abs(call() - expected).max())
            for _ in range(rounds):
                for side, call in calls.items():
                    for _ in range(STEPS if new == 1 else 1):
                        start = time.process_time()
                        call()
                        found[side] = min(found[side], getattr(call, "seconds", time.process_time() - start))
            del calls
            gc.collect()
        del sides
        gc.collect()
    return [
        {"work": name, "milliseconds": {side: 1e3 * took for side, took in found.items()}, "off": off}
        for (name, _, _, _), found, off in zip(work, least, differences, strict=True)
    ]


def run(family: str, options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Make all files of one family and time them."""
    import torch
    import transformers

    source = folder / family
    weights = save_model(family, options.size, options.layers, source)
    exporters = {
        "yobx_flatten": (sys.executable, OURS.format(options='proof="sample"')),
        "yobx_flatten, onnxruntime's operators": (
            sys.executable,
            OURS.format(options='proof="sample", optimize="onnxruntime"'),
        ),
    }
    if options.optimum:
        exporters["optimum"] = (options.optimum, OPTIMUM)
    if options.genai:
        exporters["onnxruntime-genai"] = (options.genai, GENAI)
    made = {
        name: make(python, program, source, folder / f"{family}-{number}")
        for number, (name, (python, program)) in enumerate(exporters.items())
    }
    for name, costs in made.items():
        print(f"{family:12} {name:40} ", _made_line(costs, weights), flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    kept = keys_kept(model.config)  # GroupQueryAttention hides what a window has passed, and wants all keys
    openers: dict[str, Callable[[], Any]] = {
        name: functools.partial(File, costs["file"], kept if name == "yobx_flatten" else {})
        for name, costs in made.items()
        if "file" in costs
    }
    openers["eager"] = functools.partial(Eager, model)
    if options.compile:
        compiled = Compiled(model)
        openers["torch.compile, static cache"] = lambda: compiled
    with torch.no_grad():
        rows = measure(openers, model, options.past, options.batches, options.rounds, options.openings)
    for row in rows:
        print(f"{family:12} {row['work']}")
        for side, took in sorted(row["milliseconds"].items(), key=lambda item: item[1]):
            print(f"{'':12}   {side:40} {took:8.2f} ms   off by {row['off'][side]:.1e}", flush=True)
    for costs in made.values():
        costs.pop("file", None)
    return {
        "size": options.size,
        "layers": model.config.num_hidden_layers,
        "bytes of the weights": weights,
        "openings": options.openings,
        "made": made,
        "calls": rows,
    }


def _made_line(costs: dict[str, Any], weights: int) -> str:
    if "error" in costs:
        return f"failed: {costs['error']}"
    return (
        f"{costs['processor seconds']:6.1f} s of processor, peak {costs['peak bytes'] / weights:4.1f}x the weights, "
        f"{costs['nodes']} nodes, {costs['attention'] or 'attention in single operations'}"
    )


def main() -> None:
    """Measure, print, and store."""
    if sys.platform.startswith("linux") and "GLIBC_TUNABLES" not in os.environ:  # read when a process begins
        os.environ["GLIBC_TUNABLES"] = HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.argv])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="135M", help="135M by default")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--families", default="llama", help=f"of {', '.join(FAMILIES)}; with commas")
    parser.add_argument("--past", default="128,1024,4096", help="tokens in the cache; with commas")
    parser.add_argument("--batches", default="4", help="batches with more than one row, their rows; with commas")
    parser.add_argument("--rounds", type=int, default=5, help="of each opening; 5 by default")
    parser.add_argument("--openings", type=int, default=3, help="how often each file is opened; 3 by default")
    parser.add_argument("--genai", help="Python of an environment with onnxruntime-genai")
    parser.add_argument("--optimum", help="Python of an environment with optimum-onnx")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile, which compiles for minutes")
    parser.add_argument("--output", type=pathlib.Path, help="a JSON file to write, or to add families to")
    options = parser.parse_args()
    options.families = options.families.split(",")
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"--families {','.join(sorted(unknown))}: expected some of {', '.join(FAMILIES)}")
    options.past = [int(length) for length in options.past.split(",")]
    options.batches = [int(rows) for rows in options.batches.split(",")]
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "onnxruntime")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()), "- float32, one thread")
    found: dict[str, Any] = {"machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
    found |= {"versions": versions, "load": list(os.getloadavg()), "models": {}}
    if options.output and options.output.exists():
        stored = json.loads(options.output.read_text())
        if all(stored[what] == found[what] for what in ("machine", "versions")):
            found["models"] = stored["models"]  # a family at a time can be measured anew
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families:
            found["models"][family] = run(family, options, pathlib.Path(folder))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
