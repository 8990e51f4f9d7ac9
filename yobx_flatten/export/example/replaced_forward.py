"""Replace the ``forward`` of a module inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the ``forward`` of a module in the block, and restore it afterwards."""
    held = module.__dict__  # past torch's __setattr__, which a class may have replaced
    before = {"forward": held["forward"]} if "forward" in held else {}
    held["forward"] = forward
    try:
        yield
    finally:
        del held["forward"]
        held.update(before)
