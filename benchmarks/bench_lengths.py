"""Memory of one row of up to 32,768 tokens: it grows with the number of tokens, and not with its square.

    python benchmarks/bench_lengths.py [--json FILE] [--lengths N ...]

A Llama of three layers on bytes, on two virtual devices, with `recompute_grain="layer"`. The number is the most memory
of a step, host and devices together, above that of the same process after a step of 64 tokens. A matrix of all pairs of
tokens, as a mask has, would take 1 GB at 32,768 tokens with one byte for each. With a large vocabulary a loss makes the
scores of some tokens at a time, and the memory of these scores does not grow.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from benchmarks.resident import status, tokens_of_text
from roundpipe_runtime import RoundPipeRunConfig, wrap_model_to_roundpipe

LENGTHS = (2048, 4096, 8192, 16384, 32768)
WIDTH, LAYERS, VOCABULARY = 64, 3, 256
# The last doubling may take this much more per token than the one before.
BAR = 1.1


def trained() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=max(LENGTHS),
        use_cache=False,
    )
    return wrap_model_to_roundpipe(
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16),
        devices="virtual:2",
        model_run_config=RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer"),
    )


def measure(pipe: Any, length: int, least: int = 0) -> dict[str, Any]:
    tokens = tokens_of_text(1, length, 1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest resident memory is counted anew
    began = time.perf_counter()
    loss = pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})
    pipe.zero_grad()
    return {"bytes": status("VmHWM") - least, "seconds": time.perf_counter() - began, "loss": float(loss)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    arguments = parser.parse_args()
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # glibc reads it at the start, and returns freed blocks with it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)})
    torch.set_num_threads(2)
    pipe = trained()
    measure(pipe, 64)
    least = status("VmRSS")
    results: dict[int, dict[str, Any]] = {}
    for length in arguments.lengths:
        results[length] = found = measure(pipe, length, least)
        per_token = found["bytes"] / length
        print(
            f"{length} tokens: {found['bytes'] / 1e6:.0f} MB, {per_token:,.0f} bytes each, {found['seconds']:.0f} s",
            flush=True,
        )
    pipe.close()
    sizes = sorted(results)
    slopes = [(results[b]["bytes"] - results[a]["bytes"]) / (b - a) for a, b in itertools.pairwise(sizes)]
    print("bytes per further token:", [round(slope) for slope in slopes])
    if arguments.json:
        stored = {"torch": torch.__version__, "machine": machine(), "layers": LAYERS, "lengths": results}
        arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return int(len(slopes) > 1 and slopes[-1] > BAR * slopes[-2])


if __name__ == "__main__":
    sys.exit(main())
