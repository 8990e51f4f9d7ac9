"""Modules of one expression, for tests that export or call them."""

from collections.abc import Callable
from typing import Any

import torch


def module_class(name: str, forward: Callable[..., Any]) -> type[torch.nn.Module]:
    """Return a class of modules with this `forward`, whose first argument is the module."""
    return type(name, (torch.nn.Module,), {"forward": forward, "__module__": forward.__module__})
