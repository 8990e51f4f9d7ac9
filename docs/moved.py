"""Pages that were merged into others: their old addresses lead to the new place."""

from __future__ import annotations

import os
from pathlib import Path

MOVED = {
    "guide/adapters": "guide/lora#switch-adapters-in-an-onnx-file",
    "guide/caches_of_models": "guide/caches#caches-of-other-models-and-your-own",
    "guide/differences": "guide/torch_and_jax#containers-and-order",
    "guide/differences_of_classes": "guide/torch_and_jax#static-parts-are-compared-and-hashed",
    "guide/errors_after_export": "guide/errors#calling-a-program",
    "guide/flattening_list": "guide/caches#every-registered-class",
    "guide/from_roundpipe": "guide/coming_from#roundpipe",
    "guide/inside_the_block": "guide/block#other-libraries-inside-the-block",
    "guide/large_models": "guide/export#models-larger-than-memory",
    "guide/license": "license",
    "guide/onnxruntime_genai": "guide/runtimes#onnxruntime-genai",
    "guide/register_functions": "guide/register_your_class#flatten-functions-of-your-own",
    "guide/runtime_command_line": "guide/command_line#roundpipe-train",
    "guide/runtime_cut": "guide/runtime_huggingface#how-the-model-is-split-into-layers",
    "guide/runtime_disk": "guide/runtime_devices#state-on-a-disk",
    "guide/runtime_errors": "guide/errors#errors-of-a-pipeline",
    "guide/runtime_layers": "guide/runtime#what-a-layer-may-do",
    "guide/runtime_lora": "guide/lora",
    "guide/runtime_schedule": "guide/runtime_plan#schedule-stages-and-microbatches",
    "guide/runtime_split": "guide/runtime_loss#how-a-batch-is-split",
    "guide/runtime_stages": "guide/runtime_distributed",
    "guide/runtime_types": "guide/runtime_loss#your-own-classes-in-a-batch",
    "guide/security": "license#security",
    "guide/store_inputs": "guide/record#save-inputs-and-outputs-to-files",
    "guide/write_a_node": "guide/register_your_class#the-jax-way",
}


def write_redirects(site: Path) -> None:
    """Write a page at each old address that sends the reader on.

    Args:
        site: the folder of the built site.
    """
    for old, new in MOVED.items():
        page, _, section = new.partition("#")
        address = os.path.relpath(f"{page}.html", Path(old).parent) + (f"#{section}" if section else "")
        (site / f"{old}.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{address}">'
            f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">This page has moved.</a>\n',
            encoding="utf-8",
        )
