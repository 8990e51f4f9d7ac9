"""``yobx-flatten env``."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Annotated

import typer

from ..terminal.output import say, say_json

__all__ = ["env", "versions"]

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
    """Return the versions of Python, of the system and of every library that matters; ``None`` where one is missing."""
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
    """Print the versions of everything that matters, for a report of a fault."""
    found = versions()
    if json:
        say_json({**found, "executable": sys.executable})
        return 0
    width = max(map(len, found))
    say("\n".join(f"{name:{width}}  {version or 'not installed'}" for name, version in found.items()))
    return 0
