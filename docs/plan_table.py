"""The table of memory by model: `python docs/plan_table.py` plans each training as `roundpipe plan` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "plans.json"
BATCH, LENGTH, MICROBATCHES = 16, 2048, 8
CARD = {"memory": 24 * 2**30, "link": 25e9, "flops": 150e12}
HOSTS = (32, 64, 128, 256, 512, 1024, 2048)  # GB that machines have

# Sizes as in the configurations that are published with the weights.
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2, 1B": (
        "LlamaConfig",
        {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"tie_word_embeddings": True},
    ),
    "Llama 3.1, 8B": (
        "LlamaConfig",
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "Qwen 3, 14B": (
        "Qwen3Config",
        {**QWEN, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
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
TRAININGS = ("all weights", "LoRA, rank 16")


def plan(name: str, training: str) -> dict[str, float]:
    """Return what one training of one model takes.

    Args:
        name: a key of `MODELS`.
        training: an item of `TRAININGS`.
    """
    import torch
    import transformers

    from roundpipe_runtime.estimate.hardware import describe_hardware
    from roundpipe_runtime.fine_tune import Lora, add_lora
    from roundpipe_runtime.huggingface.plan_training import PlannedTraining, model_on_meta

    cls, sizes = MODELS[name]
    model = model_on_meta(getattr(transformers, cls)(dtype="bfloat16", **sizes))
    parameters = sum(p.numel() for p in model.parameters())
    if training != TRAININGS[0]:
        with torch.device("meta"):
            model = add_lora(model, Lora.parse("16"))
    found: dict[str, float] = {"parameters": parameters}
    for count in (1, 4):
        cards = describe_hardware(",".join(f"cuda:{n}" for n in range(count)), **CARD)
        planned = PlannedTraining(model, cards, optim_dtype=torch.float32)
        report = planned.report(batch=BATCH, length=LENGTH, num_microbatch=MICROBATCHES)
        found[f"seconds on {count}"] = report.simulation.time
        if count == 1:
            found["device bytes"] = max(memory.total for memory in report.device_memory)
            found["host bytes"] = report.host_memory.total
    return found


def rows(data: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | trained | a GPU needs | the host needs | a host of | a step on one GPU, on four |"
    yield "|---|---|---:|---:|---:|---:|"
    for name, trainings in data.items():
        for training, found in trainings.items():
            host = found["host bytes"] / 1e9
            fitting = next(size for size in HOSTS if host < 0.95 * size)
            size = f"{name} ({found['parameters'] / 1e9:.1f} billion)"
            times = f"{found['seconds on 1']:.1f} s, {found['seconds on 4']:.1f} s"
            device = f"{found['device bytes'] / 1e9:.1f} GB"
            yield f"| {size} | {training} | {device} | {host:.0f} GB | {fitting} GB | {times} |"


def write_plans(folder: Path) -> None:
    """Write the table in Markdown into `folder`, from the numbers that are stored."""
    text = "\n".join([*rows(json.loads(DATA.read_text(encoding="utf-8"))), ""])
    path = folder / "plans.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    planned = {name: {training: plan(name, training) for training in TRAININGS} for name in MODELS}
    DATA.write_text(json.dumps(planned, indent=1) + "\n", encoding="utf-8")
    print(*rows(planned), sep="\n")
