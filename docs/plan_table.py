"""The table of memory by model: `python docs/plan_table.py` plans each training as `roundpipe plan` does."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "plans.json"
BATCH, LENGTH, MICROBATCHES = 16, 2048, 8
# A GPU of each size: bytes, and rates as such devices have them in trainings, typed in.
MACHINES = {
    "16 GB": {"memory": 16 * 2**30, "link": 25e9, "flops": 80e12},
    "24 GB": {"memory": 24 * 2**30, "link": 25e9, "flops": 150e12},
    "80 GB": {"memory": 80 * 2**30, "link": 50e9, "flops": 400e12},
    "141 GB": {"memory": 141 * 10**9, "link": 50e9, "flops": 500e12},
}
HOSTS = (64, 128, 256, 512, 1024, 2048)  # GB that machines have

# Sizes as in the configurations that are published with the weights.
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen 3, 1.7B": (
        "Qwen3Config",
        {**QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"tie_word_embeddings": True},
    ),
    "Llama 3.1, 8B": (
        "LlamaConfig",
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "Qwen 3, 32B": (
        "Qwen3Config",
        {**QWEN, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    ),
    "Llama 3.3, 70B": (
        "LlamaConfig",
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
}
TRAININGS = ("all weights", "all weights, moments in 8 bits", "LoRA, rank 16")


def plan(name: str) -> dict[str, Any]:
    """Return what each training of one model takes, on each machine.

    Args:
        name: a key of `MODELS`.
    """
    whole = _planned(name, adapters=False)
    narrow = dict(whole, **{"host bytes": whole.pop("host bytes in 8 bits")})
    adapters = _planned(name, adapters=True)
    del adapters["host bytes in 8 bits"]
    return dict(zip(TRAININGS, (whole, narrow, adapters), strict=True))


def _planned(name: str, *, adapters: bool) -> dict[str, Any]:
    """All machines, from a model of two layers, the first of which stands for all but the last."""
    import torch
    import transformers
    from torch import nn

    from roundpipe_runtime.estimate.hardware import Hardware
    from roundpipe_runtime.estimate.report import plan_report
    from roundpipe_runtime.fine_tune import Lora, add_lora
    from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta

    def machine(rates: dict[str, Any], count: int) -> Hardware:
        names = tuple(f"cuda:{number}" for number in range(count))
        return Hardware(names=names, kind="cuda", host=None, host_rate=60e9, origin={}, **rates)

    cls, sizes = MODELS[name]
    model = model_on_meta(getattr(transformers, cls)(dtype="bfloat16", **{**sizes, "num_hidden_layers": 2}))
    frozen = sum(p.numel() for p in model.parameters())
    if adapters:
        with torch.device("meta"):
            model = add_lora(model, Lora.parse("16"))
    found: dict[str, Any] = {"machines": {}}
    hosts = []
    for size, rates in MACHINES.items():
        planned = PlannedTraining(model, machine(rates, 1), optim_dtype=torch.float32)
        layers = planned.report(batch=BATCH, length=LENGTH, num_microbatch=MICROBATCHES).layers
        assert len(layers) == len(planned.cut.pieces) == 4
        begin, layer, last, end = planned.cut.pieces
        more = [copy.deepcopy(layer) for _ in range(sizes["num_hidden_layers"] - 2)]
        pieces = [begin, layer, *more, last, end]
        measured = [layers[0], *[layers[1]] * (len(more) + 1), *layers[2:]]
        in_layers = sum(p.numel() for part in more for key, p in part.named_parameters() if "lora_" not in key)
        found["parameters"] = frozen + in_layers
        row: dict[str, Any] = {}
        for count in (1, 4):
            report = plan_report(
                nn.ModuleList([model, *more]), pieces, measured, machine(rates, count),
                num_microbatch=MICROBATCHES, tokens=BATCH * LENGTH, optim_dtype=torch.float32, rule=planned.rule,
            )  # fmt: skip
            row[f"seconds on {count}"] = report.simulation.time
            if count == 1:
                row["fits"] = report.fits_devices
                row["device bytes"] = max(memory.total for memory in report.device_memory)
                hosts.append(report.host_memory)
        found["machines"][size] = row
    # a plan of longer stages saves fewer activations
    found["host bytes"] = max(host.total for host in hosts)
    found["host bytes in 8 bits"] = max(map(_with_eight_bits, hosts))
    return found


def _with_eight_bits(host: Any) -> int:
    """Bytes of the host with gradients of 2, masters of 4 and two moments of 1, with a scale of 4 for 256 of them."""
    numbers = host.gradients // 4
    return int(host.total - host.gradients - host.optimizer + numbers * (2 + 2 * (1 + 4 / 256)))


def rows(data: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | trained | the host needs | a host of | " + " | ".join(f"GPU of {size}" for size in MACHINES) + " |"
    yield "|---|---|---:|---:|" + "---:|" * len(MACHINES)
    for name, trainings in data.items():
        for training, found in trainings.items():
            host = found["host bytes"] / 1e9
            fitting = next(size for size in HOSTS if host < 0.95 * size)
            cells = [_cell(found["machines"][size]) for size in MACHINES]
            yield f"| {name} | {training} | {host:.0f} GB | {fitting:,} GB | {' | '.join(cells)} |"


def _cell(found: dict[str, Any]) -> str:
    if not found["fits"]:
        return "-"
    return f"{found['seconds on 1']:.1f} s, {found['seconds on 4']:.1f} s"


def write_plans(folder: Path) -> None:
    """Write the table in Markdown into `folder`, from the numbers that are stored."""
    text = "\n".join([*rows(json.loads(DATA.read_text(encoding="utf-8"))), ""])
    path = folder / "plans.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    planned = {name: plan(name) for name in MODELS}
    DATA.write_text(json.dumps(planned, indent=1) + "\n", encoding="utf-8")
    print(*rows(planned), sep="\n")
