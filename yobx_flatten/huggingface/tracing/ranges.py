"""Trace ``torch.arange`` that starts at a tensor: positions before transformers 5.1.

.. code-block:: text

    arange(seen, seen + new)     asks a tensor for two numbers, which a trace cannot answer
    arange(new) + seen           the same, of a size that is known
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from ...recipe.aliases import Kwargs

_SUMS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}


class TensorRanges(TorchFunctionMode):
    """Make such ranges without asking for a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[Any, Any, Any]] = {}  # by id: a sum, and what was added

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function of torch; see :class:`TensorRanges`."""
        kwargs = kwargs or {}
        if func is torch.arange and len(args) == 2 and isinstance(args[0], torch.Tensor):
            found = self._sums.get(id(args[1]))
            if found is not None and found[1] is args[0]:
                return torch.arange(found[2], **kwargs) + args[0]
        result = func(*args, **kwargs)
        if func in _SUMS and len(args) == 2 and _is_count(args[0]) and not isinstance(args[1], torch.Tensor):
            self._sums[id(result)] = result, args[0], args[1]  # with the sum, so that its id is not used again
        return result


def _is_count(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 0
