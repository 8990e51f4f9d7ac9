"""Explanations of error messages, and tables that map the words of a message to its explanation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from ..trees.arguments import inputs_by_name


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of an error. Its ``str`` is the text to read.

    Attributes:
        text: the meaning of the error.
        paths: the inputs or outputs it is about, as Python.
        remedy: the line to type; empty where there is none.
        known: whether the message is one of those that :func:`explain_error` knows.
    """

    text: str
    paths: tuple[str, ...] = ()
    remedy: str = ""
    known: bool = True

    def __str__(self) -> str:
        remedy = self.remedy.replace("\n", "\n    ")
        return f"{self.text}\n    {remedy}" if remedy else self.text


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error, with the exported or called object."""

    error: BaseException  # the exception that was raised
    message: str  # the text of the error
    module: torch.nn.Module | ExportedProgram | None  # the module or program; `None` where it is not known
    args: tuple[Any, ...]  # positional arguments of the export or the call
    kwargs: Mapping[str, Any]  # keyword arguments of the export or the call
    dynamic_shapes: Any  # the shapes as passed to `torch.export.export`

    def inputs(self) -> dict[str, Any]:
        """Return the arguments by parameter name."""
        return inputs_by_name(self.module, self.args, self.kwargs)


Row = tuple[str, Callable[[Failure, "re.Match[str]"], Explanation | None]]
"""A pattern that a message keeps from version to version, and a function that explains what matches it."""
