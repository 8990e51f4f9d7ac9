"""``yobx-flatten env``: print the versions that a bug report needs."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Annotated

import typer

from ..errors.tried_versions import NEWEST_TRIED, untried_versions
from ..terminal.output import say, say_json

_LIBRARIES = (
    "yobx-flatten",
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-genai",
    "openvino",
    "executorch",
    "torchao",
    "optree",
    "jax",
    "diffusers",
    "accelerate",
    "peft",
    "safetensors",
    "typer",
    "rich",
)


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the system and all relevant libraries; ``None`` for missing libraries."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def env(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Print all versions for a bug report, and the newest versions that were tested."""
    found = versions()
    untried = untried_versions()
    if json:
        newer = [one.library for one in untried]
        say_json({**found, "executable": sys.executable, "newest_tried": NEWEST_TRIED, "newer_than_tried": newer})
        return 0
    width, shown = max(map(len, found)), {name: version or "not installed" for name, version in found.items()}
    wide = max(len(shown.get(name, "")) for name in NEWEST_TRIED)
    for name, tried in NEWEST_TRIED.items():
        if name in shown:
            shown[name] = f"{shown[name]:{wide}}  (newest tried: {tried})"
    say("\n".join(f"{name:{width}}  {version}" for name, version in shown.items()))
    if untried:
        lines = [f"{one}. If something fails: pip install '{one.library}<={one.tried}'" for one in untried]
        say("\n".join(["", *lines]))
    return 0
