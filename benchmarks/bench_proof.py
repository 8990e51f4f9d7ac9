"""What the proof of a model's loss costs, next to the check of its cut and to its steps.

    python benchmarks/bench_proof.py [--json FILE] [--repeat N] [--before FOLDER]

A Llama of 1.4 GB in float32, six rows in three microbatches on two virtual devices. Processor time, one thread, and how
much the process grows at most, beyond what it holds before. With another checkout of this repository (``--before``),
both are run in turns, each time in a separate process, and the least of each number counts.

Numbers above their bar are listed. The exit status is 0 also then, because a machine may be slow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package of the benchmarks

from benchmarks.bench_flatten import machine  # found there only

ROOT = Path(__file__).parent.parent

# The proof may take this much of the time of the check; a later step, of that of a step before.
PROOF_BAR, STEP_BAR = 1.5, 1.05

RUN = """
import json, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe

def field(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

def measured(run):
    before, begin = field("VmRSS"), time.process_time()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    made = run()
    return made, {"seconds": time.process_time() - begin, "bytes": field("VmHWM") - before}

torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=22, num_attention_heads=8)
model = LlamaForCausalLM(config)
tokens = torch.randint(5, config.vocab_size, (6, 32))
mask = torch.ones_like(tokens)
mask[1, :4] = 0
batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
pipeline, wrap = measured(lambda: wrap_model_to_roundpipe(model, devices="virtual:2"))
steps = []
for _ in range(3):
    model.zero_grad()
    steps.append(measured(lambda: pipeline.forward_backward(
        input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=3)))[1])
pipeline.close()
nbytes = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"model": nbytes, "wrap": wrap, "first step": steps[0], "later step": steps[-1]}))
"""


def run(folder: Path) -> dict[str, Any]:
    """What a process measures with the package of this folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=folder, env=environment, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def least(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of each number."""
    parts = {part: {what: min(one[part][what] for one in found) for what in found[0][part]}
             for part in ("wrap", "first step", "later step")}  # fmt: skip
    return {"model": found[0]["model"], **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, which proves nothing")
    options = parser.parse_args()
    sides = {"now": ROOT, **({"before": options.before} if options.before else {})}
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(options.repeat):
        for side, folder in sides.items():
            rounds[side].append(run(folder))
            print(side, json.dumps(rounds[side][-1]), flush=True)
    found = {side: least(held) for side, held in rounds.items()}
    import torch

    stored = {
        "machine": machine(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "found": found,
        "rounds": rounds,
    }
    if "before" in found:
        now, before = found["now"], found["before"]
        proof = now["first step"]["seconds"] - before["first step"]["seconds"]
        stored["ratios"] = {
            "proof / check before": proof / before["wrap"]["seconds"],
            "later step / before": now["later step"]["seconds"] / before["later step"]["seconds"],
            "memory of wrap / before": now["wrap"]["bytes"] / before["wrap"]["bytes"],
            "memory of first step / before": now["first step"]["bytes"] / before["first step"]["bytes"],
        }
        bars = {"proof / check before": PROOF_BAR, "later step / before": STEP_BAR}
        for name, ratio in stored["ratios"].items():
            over = f"  above its bar of {bars[name]}" if ratio > bars.get(name, ratio) else ""
            print(f"{name}: {ratio:.2f}{over}")
    if options.json:
        options.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
