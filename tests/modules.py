"""Modules of one expression, for tests that export or call them."""

from collections.abc import Callable
from typing import Any

import torch


def module_class(name: str, forward: Callable[..., Any]) -> type[torch.nn.Module]:
    """Return a class of modules with this `forward`, whose first argument is the module."""
    return type(name, (torch.nn.Module,), {"forward": forward, "__module__": forward.__module__})


class Answers(torch.nn.Module):
    """A module that returns what a function makes of its input."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, given: Any) -> Any:
        return self.answer(given)


def module_of(forward: Callable[..., Any], **parts: Any) -> torch.nn.Module:
    """Return a module in evaluation mode with this `forward`; tensors among its parts become parameters."""
    made = module_class("Own", forward)()
    for name, part in parts.items():
        setattr(made, name, torch.nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
    return made.eval()
