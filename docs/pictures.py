"""Pictures that the guide shows, from recorded data and from the schedule itself.

`python docs/pictures.py --record` runs the caches, the calls and the schedule, and stores what they gave.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmark_tables import COLOURS, GREY, plot

DATA = Path(__file__).parent / "data"
RECORDED = DATA / "pictures.json"


def write_pictures(folder: Path) -> None:
    """Write every picture as SVG into a folder."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    _timeline(recorded["timeline"], folder / "timeline.svg")
    _layer_kinds(recorded["layers"], folder / "layer_kinds.svg")
    _sizes_over_calls(recorded["calls"], folder / "sizes_over_calls.svg")
    _size_and_error(json.loads((DATA / "real-5.24.0.json").read_text(encoding="utf-8")), folder / "size_and_error.svg")
    _gpu_memory(json.loads((DATA / "plans.json").read_text(encoding="utf-8")), folder / "gpu_memory.svg")


def _timeline(steps: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.colors import to_rgb

    colours = {"forward": COLOURS[0], "fused": COLOURS[2], "backward": COLOURS[3]}
    names = {"forward": "forward", "fused": "forward, loss, backward", "backward": "recompute, backward"}
    with plot(path) as (axes,):
        for step in steps:
            # lighter for later microbatches, and opaque, so that the black text is readable on a dark page
            shade = 0.8 - 0.2 * step["microbatch"]
            colour = [1 - shade * (1 - part) for part in to_rgb(colours[step["kind"]])]
            place = {"left": step["start"], "height": 0.9, "edgecolor": "white"}
            axes.barh(step["device"], step["end"] - step["start"], color=colour, **place)
            middle = (step["start"] + step["end"]) / 2
            text = f"{step['layers']}\nm{step['microbatch']}"
            axes.text(middle, step["device"], text, ha="center", va="center", fontsize=9, color="black")
        for kind, colour in colours.items():
            axes.barh([0], [0], color=colour, label=names[kind])
        axes.set_yticks([0, 1], ["device 0", "device 1"])
        axes.set_xlabel("time; top: layers, bottom: microbatch; a layer takes 1 forward and 3 backward", color=GREY)
        axes.invert_yaxis()
        axes.legend(frameon=False, labelcolor=GREY, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def _layer_kinds(kept: dict[str, list[int]], path: Path) -> None:
    with plot(path) as (axes,):
        for (name, sizes), colour, style in zip(kept.items(), COLOURS, ("-", "--", "-.", ":"), strict=False):
            axes.plot(range(1, len(sizes) + 1), sizes, style, color=colour, linewidth=2, label=name)
        axes.set_xlabel("tokens read", color=GREY)
        axes.set_ylabel("keys in memory", color=GREY)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, labelcolor=GREY, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


def _sizes_over_calls(sizes: dict[str, list[int]], path: Path) -> None:
    with plot(path) as (axes,):
        for (name, values), colour in zip(sizes.items(), COLOURS, strict=False):
            axes.plot(range(len(values)), values, "o-", color=colour, label=name)
        axes.set_xlabel("call of the model in generate()", color=GREY)
        axes.set_ylabel("size", color=GREY)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, labelcolor=GREY)


# The label of a form, and where it stands: points to the right of the mark and above it.
SHOWN = {
    "float32 fused": ("float32", -45, -12),
    "float16 fused": ("float16", 7, -3),
    "other weights int8 fused": ("int8", 7, -3),
    "other weights int8 fused rounded inputs": ("int8, rounded activations", 7, -3),
    "other weights int4 fused": ("int4", -22, -4),
    "int4 fused rounded inputs": ("int4 of a GGUF, rounded activations", 3, -12),
    "GGUF fused": ("int4 of a GGUF", 7, 2),
    "genai builder int4": ("int4 of the builder of onnxruntime-genai", 7, -3),
}


def _size_and_error(results: dict[str, Any], path: Path) -> None:
    with plot(path) as (axes,):
        for name, (label, right, above) in SHOWN.items():
            found = results["types"][name]["columns"]
            size, agree = found["folder"]["bytes"] / 1e6, 100 * found["chats"]["tokens"]
            axes.plot([size], [agree], "o", color=COLOURS[2] if "genai" in name else COLOURS[0])
            place = {"xytext": (right, above), "textcoords": "offset points"}
            axes.annotate(label, (size, agree), **place, color=GREY, fontsize=8)
        axes.set_ylim(60, 103)
        axes.set_xlabel("size of the file, MB", color=GREY)
        axes.set_ylabel("equal greedy tokens, %", color=GREY)


def _gpu_memory(plans: dict[str, dict[str, Any]], path: Path) -> None:
    with plot(path) as (axes,):
        for place, trainings in enumerate(plans.values()):
            for shift, training, colour in ((-0.2, "all weights", COLOURS[0]), (0.2, "LoRA, rank 16", COLOURS[2])):
                size = trainings[training]["machines"]["24 GB"]["device bytes"] / 1e9
                axes.barh(place + shift, size, height=0.38, color=colour, label=None if place else training)
                axes.text(size + 0.2, place + shift, f"{size:.1f} GB", va="center", color=GREY, fontsize=8)
        axes.axvline(24 * 2**30 / 1e9, color=GREY, linestyle="--")
        axes.set_yticks(range(len(plans)), list(plans))
        axes.set_xlabel("memory of one GPU of 24 GB (dashed), as planned", color=GREY)
        axes.invert_yaxis()
        axes.legend(frameon=False, labelcolor=GREY, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


# --- what is recorded -------------------------------------------------------------------------------------------------


def record() -> dict[str, Any]:
    """Return what the schedule, the layers of caches and a generation do."""
    return {"timeline": _scheduled(), "layers": _layers(), "calls": _calls()}


def _scheduled() -> list[dict[str, Any]]:
    from roundpipe_runtime.schedule import ModelExecutePlan, RoundRobin, steps_in_order

    plan = ModelExecutePlan(fwd_plan=[range(3), range(3, 6)], bwd_plan=[range(n, n + 1) for n in range(6, -1, -1)])
    stages = plan.stages("fused", num_layers=7)
    free, done, steps = [0.0, 0.0], [0.0] * 3, []
    for step in steps_in_order(RoundRobin(2).assign(len(stages)), 3):
        stage = stages[step.stage]
        start = max(free[step.device], done[step.microbatch])
        end = start + len(stage.layers) * (1.0 if stage.kind == "forward" else 3.0)
        free[step.device] = done[step.microbatch] = end
        first, last = stage.layers[0], stage.layers[-1]
        layers = str(first) if first == last else f"{first}-{last}"
        found = {"device": step.device, "microbatch": step.microbatch, "kind": stage.kind, "layers": layers}
        steps.append({**found, "start": start, "end": end})
    return steps


def _layers() -> dict[str, list[int]]:
    import torch
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

    token = torch.zeros(1, 1, 1, 2)
    made = {
        "DynamicLayer": DynamicLayer(),
        "DynamicSlidingWindowLayer, window 8": DynamicSlidingWindowLayer(sliding_window=8),
        "StaticLayer, room for 24": StaticLayer(max_cache_len=24),
        "StaticSlidingWindowLayer, window 8": StaticSlidingWindowLayer(max_cache_len=24, sliding_window=8),
    }
    kept: dict[str, list[int]] = {name: [] for name in made}
    for name, layer in made.items():
        for _ in range(24):
            layer.update(token, token)
            kept[name].append(layer.keys.shape[2])
    return kept


def _calls() -> dict[str, list[int]]:
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from yobx_flatten import record_calls

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96, num_key_value_heads=2, head_dim=8, sliding_window=8, eos_token_id=None, **sizes
    )
    model = MistralForCausalLM(config).eval()
    with record_calls(model, outputs=False) as calls:
        model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    found: dict[str, list[int]] = {"past (tokens seen)": [], "new": [], "kept (keys in the sliding layer)": []}
    for call in calls:
        cache = next(value for value in call.inputs.values() if hasattr(value, "layers"))
        keys = getattr(cache.layers[0], "keys", None)
        past, kept = cache.get_seq_length(), 0 if keys is None else keys.shape[2]
        for values, size in zip(found.values(), (past, call.inputs["input_ids"].shape[1], kept), strict=True):
            values.append(int(size))
    return found


if __name__ == "__main__":
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    write_pictures(Path(__file__).parent / "tables")
