"""What the upload of routed experts saves: bytes of a step, next to the upload of all experts.

    python benchmarks/bench_experts.py [--width N] [--layers N] [--json FILE]

A Mixtral (2 of 8 experts) and a Qwen3-MoE (4 of 32), each twice: one pipeline uploads the experts that tokens were
routed to (`upload_experts="routed"`, the default), the other all of them. Both take turns with the same steps, of a
forward alone and of a training, with few tokens and with many; all numbers that come out are compared bit by bit.
Weights are random, and tokens reach fewer experts than with even routing, as the share of bytes shows. Runs that prove
something (the first, second, fourth...) are not counted. Seconds are medians of processor time: on a CPU an upload is a
copy in its memory, so they show what asking for rows costs, and not what is saved on a link.
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
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine, versions  # found there only
from roundpipe_runtime import RoundPipeRunConfig, VirtualDevice, wrap_model_to_roundpipe

TOKENS = (1, 3, 8, 64)
# Runs that are not the first, second, fourth or eighth.
RUNS, COUNTED = 7, (2, 4, 5, 6)
MODELS = ("Mixtral, 2 of 8 experts", "Qwen3-MoE, 4 of 32 experts")
FORWARD, TRAINING = "forward", "training"


def made(name: str, width: int, layers: int) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
             "num_key_value_heads": width // 64, "head_dim": 64, "vocab_size": 256, "use_cache": False}  # fmt: skip
    if name == MODELS[0]:
        config = transformers.MixtralConfig(
            **sizes, intermediate_size=2 * width, num_local_experts=8, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(config).train()
    of_experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": width // 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **of_experts)).train()


class Side:
    """One model on one device, which uploads some experts or all."""

    def __init__(self, model: Any, experts: Literal["routed", "all"]) -> None:
        self.model = model
        config = RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean", upload_experts=experts)
        self.pipe = wrap_model_to_roundpipe(
            model, devices=[VirtualDevice()], model_run_config=config, lower_threshold=0
        )
        self.seconds: list[float] = []
        self.bytes: list[tuple[int, int]] = []

    def run(self, kind: str, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Run a batch; return everything that comes out of it."""
        before, began = self.pipe.parameter_traffic, time.process_time()
        if kind == TRAINING:
            self.pipe.zero_grad()
            found = [self.pipe.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})]
            found += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        else:
            with torch.no_grad():
                found = [self.pipe(input_ids=tokens).logits]
        self.seconds.append(time.process_time() - began)
        after = self.pipe.parameter_traffic
        self.bytes.append((after.uploaded - before.uploaded, after.skipped - before.skipped))
        return found


def compare(sides: Sequence[Side], kind: str, count: int) -> dict[str, Any]:
    """Run batches of so many tokens on both sides alternately."""
    for side in sides:
        side.seconds, side.bytes = [], []
    for number in range(RUNS):
        tokens = torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(number))
        results = [side.run(kind, tokens) for side in sides]
        if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
            raise RuntimeError(f"{kind} of {count} tokens: numbers differ")
    found: dict[str, Any] = {"kind": kind, "tokens": count}
    for name, side in zip(("all", "routed"), sides, strict=True):
        found[name] = {
            "bytes uploaded": round(statistics.mean(side.bytes[run][0] for run in COUNTED)),
            "bytes skipped": round(statistics.mean(side.bytes[run][1] for run in COUNTED)),
            "seconds of a step": statistics.median(side.seconds[run] for run in COUNTED),
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="width of the models. Default: 256")
    parser.add_argument("--layers", type=int, default=2, help="layers of the models. Default: 2, of 13 MB each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to a file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases: dict[str, list[dict[str, Any]]] = {}
    weights = {}
    for name in MODELS:
        cases[name] = []
        for kind in (FORWARD, TRAINING):
            for count in TOKENS:
                ways: Sequence[Literal["all", "routed"]] = ("all", "routed")
                sides = [Side(made(name, arguments.width, arguments.layers), way) for way in ways]
                weights[name] = sum(parameter.nbytes for parameter in sides[0].model.parameters())
                found = compare(sides, kind, count)
                cases[name].append(found)
                whole, routed = found["all"], found["routed"]
                print(
                    f"{name:28} {kind:9} {count:3} tokens: {whole['bytes uploaded'] / 1e6:,.0f} MB with all, "
                    f"{routed['bytes uploaded'] / 1e6:,.0f} MB, {whole['seconds of a step']:.3f} and "
                    f"{routed['seconds of a step']:.3f} s",
                    flush=True,
                )
                for side in sides:
                    side.pipe.close()
                del sides
                gc.collect()
    if arguments.json:
        written = {"machine": machine(), "versions": versions(), "cases": cases, "weights": weights}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
