"""Refuse nested values in ``**kwargs``: torch exports them, and the program cannot be called.

torch 2.14 and 2.15 write the guards of such a program with names that are not there (docs/dev/upstream.md):

.. code-block:: text

    forward(self, x, **kwargs)       given extra={"a": tensor}       a guard reads L['kwargs']['extra']['a']: NameError
    forward(self, x, *, extra)                                       a guard reads extra_a
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import Dim

from ..errors import InvalidArgumentError
from ..errors.failures import result_or
from ..private_names.of_torch import pytree
from ..recipe.aliases import DynamicShapes


def check_nested_kwargs(
    export: Callable[..., Any], module: torch.nn.Module, kwargs: Mapping[str, Any] | None, shapes: DynamicShapes
) -> None:
    """Refuse an export whose program would end in a ``NameError`` at every call."""
    # shapes: its dynamic shapes; without any there are no such guards
    parameters = inspect.signature(module.forward).parameters
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if shapes is None or not takes_more:
        return
    nested = [name for name, value in (kwargs or {}).items() if name not in parameters and _is_nested(value)]
    if nested and _has_defect(export):
        names = ", ".join(nested)
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward takes {names} in its **kwargs. torch {torch.__version__} exports "
            "nested values there with sizes that vary, and the program raises NameError: name 'L' is not defined. Name "
            f"them in the signature, or let export_program do it:\n    def forward(self, ..., *, {names}, **kwargs):\n"
            "    export_program(module, args, kwargs)"
        )


def _is_nested(value: object) -> bool:
    leaves, spec = pytree.tree_flatten(value)
    return not spec.is_leaf() and any(isinstance(leaf, torch.Tensor) for leaf in leaves)


class _Smallest(torch.nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        added: torch.Tensor = kwargs["extra"]["a"]
        return x + added


@functools.cache
def _has_defect(export: Callable[..., Any]) -> bool:
    """Export the smallest such module as torch.export.export does, once per process, and call its program."""
    x, kwargs = torch.ones(3, 2), {"extra": {"a": torch.ones(3, 2)}}
    shapes = {"x": {0: Dim.AUTO}, "extra": {"a": {0: Dim.AUTO}}}
    # versions before refuse the shapes
    traced = functools.partial(export, _Smallest(), (x,), kwargs, shapes, strict=False, pre_dispatch=True)
    program = result_or(traced, lambda error: None)
    if program is None:
        return False
    try:
        program.module()(x, **kwargs)
    except NameError:
        return True
    return False
