"""Resolve ``module:name`` on the command line to an object; a function is called."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..errors.failures import raised_as
from ..terminal.running import UserError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_object_name(text: str) -> bool:
    """Return whether a text has the form ``module:name``.

    >>> is_object_name("my_inputs:make"), is_object_name("C:/models"), is_object_name("llama")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def import_module(name: str) -> Any:
    """Import a module, also from the current folder, as ``python -m`` does."""
    here = os.getcwd()
    sys.path.insert(0, here)

    def failed(error: BaseException) -> UserError:
        return UserError(f"the module {name} cannot be imported: {type(error).__name__}: {error}")

    try:
        with raised_as(failed):  # the module is the user's, and may raise anything
            return importlib.import_module(name)
    finally:
        if here in sys.path:
            sys.path.remove(here)


def object_of(name: str) -> Any:
    """Import the object that ``module:name`` names, and call it if it is a function or a class."""
    module_name, _, path = name.partition(":")
    found = import_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, torch.nn.Module):
        return found
    with raised_as(lambda error: UserError(f"{name}() failed: {type(error).__name__}: {error}")):
        return found()


def call_of(returned: Any) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]] | None:
    """Return the module, args and kwargs of a tuple that starts with a module; ``None`` for any other object."""
    if not isinstance(returned, tuple) or not returned or not isinstance(returned[0], torch.nn.Module):
        return None
    args = next((part for part in returned[1:] if isinstance(part, tuple)), ())
    kwargs = next((part for part in returned[1:] if isinstance(part, Mapping)), {})
    return returned[0], args, kwargs
