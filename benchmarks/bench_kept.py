"""What parameters that stay on a device save: bytes that a step uploads, without them and with all there is room for.

    python benchmarks/bench_kept.py [--width N] [--layers N] [--json FILE]

A Llama with adapters (LoRA, r=8), and the same one with all of its weights trained over four batches for each step, on
one virtual device with a limit. The bits of the losses are compared. The rest is counted: bytes of parameters that were
copied in the third step, bytes that the device holds between two steps, and the peak of copies on it. Seconds are
the median of three alternating steps; on a CPU an upload is a copy in its memory, so they show what keeping costs, not
what it saves on a link.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine, versions  # found there only
from benchmarks.resident import tokens_of_text
from roundpipe_runtime import RoundPipeRunConfig, VirtualDevice, wrap_model_to_roundpipe

ROWS, LENGTH, MICROBATCHES, BATCHES = 2, 64, 2, 4
STEPS = 3
LORA, FULL = "LoRA", "all weights, 4 batches a step"


def made(way: str, width: int, layers: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=round(width * 8 / 3 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora) if way == LORA else model


class Training:
    """One model on one device with a limit, of which parameters may keep some."""

    def __init__(self, way: str, model: Any, limit: int, keep: Any) -> None:
        self.way = way
        self.device = VirtualDevice(memory_limit=limit)
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, loss_reduction="mean", keep_parameters=keep)
        self.pipe = wrap_model_to_roundpipe(model, devices=[self.device], model_run_config=config, lower_threshold=0)
        trained = [parameter for parameter in self.pipe.optim_parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-2)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.uploaded = 0

    def step(self, number: int) -> None:
        before, began = self.pipe.parameter_traffic.uploaded, time.perf_counter()
        for part in range(1 if self.way == LORA else BATCHES):
            tokens = tokens_of_text(ROWS, LENGTH, 10 * number + part)
            loss = self.pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})
            self.losses.append(float(loss))
        self.pipe.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()))
        self.seconds.append(time.perf_counter() - began)
        self.uploaded = self.pipe.parameter_traffic.uploaded - before

    def found(self) -> dict[str, Any]:
        return {
            "bytes uploaded": self.uploaded,
            "bytes that stay": self.pipe.parameter_traffic.kept[self.device.name],
            "peak bytes of copies": self.device.peak,
            "seconds of a step": statistics.median(self.seconds),
        }


def compare(way: str, width: int, layers: int, share: float) -> dict[str, Any]:
    """Train with and without, alternately, on a device whose memory is a share of the weights."""
    models = [made(way, width, layers) for _ in range(2)]
    weights = sum(parameter.nbytes for parameter in models[0].parameters())
    sides = [Training(way, model, int(share * weights), keep) for model, keep in zip(models, (0, "auto"), strict=True)]
    for number in range(STEPS):
        for side in sides:
            side.step(number)
    if sides[0].losses != sides[1].losses:
        raise RuntimeError(f"{way}: the losses differ, {sides[0].losses} and {sides[1].losses}")
    found = {"limit of the device": int(share * weights), "weights": weights}
    found |= {"off": sides[0].found(), "auto": sides[1].found()}
    for side in sides:
        side.pipe.close()
    del sides, models
    gc.collect()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768, help="width of the model. Default: 768")
    parser.add_argument(
        "--layers", type=int, default=24, help="layers of the model. Default: 24, so 170 million weights"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to a file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for way, share in [(LORA, 0.75), (LORA, 2.0), (FULL, 0.75), (FULL, 2.0)]:
        name = f"{way}, device of {share:g} times the weights"
        cases[name] = found = compare(way, arguments.width, arguments.layers, share)
        off, auto = found["off"], found["auto"]
        print(
            f"{name:55} uploaded {off['bytes uploaded'] / 1e6:,.1f} MB, {auto['bytes uploaded'] / 1e6:,.1f} with auto, "
            f"{auto['bytes that stay'] / 1e6:,.0f} stay, peak {off['peak bytes of copies'] / 1e6:,.0f} and "
            f"{auto['peak bytes of copies'] / 1e6:,.0f} MB, {off['seconds of a step']:.2f} and "
            f"{auto['seconds of a step']:.2f} s",
            flush=True,
        )
    if arguments.json:
        written = {"machine": machine(), "versions": versions(), "cases": cases}
        written |= {"rows": ROWS, "tokens": LENGTH, "microbatches": MICROBATCHES}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
