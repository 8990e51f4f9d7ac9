"""Keep ``int(size)`` symbolic in a trace, where Python would fix it to the size of the example.

.. code-block:: text

    interpolate(x, (int(rows * self.patch), ...))        int() of a symbol asks for its value, and the program would
                                                         take that one size only; a size is an integer already
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...registry.patches import AttributePatch


class _OfSizes(type):
    """Makes a class that is called, compared and tested as ``int`` is, and hands a size on."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.SymInt):
            return args[0]
        return builtins.int(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, found: type) -> bool:
        return issubclass(found, builtins.int)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.int

    def __hash__(cls) -> builtins.int:
        return hash(builtins.int)


class _Int(builtins.int, metaclass=_OfSizes):
    pass


@contextlib.contextmanager
def kept_sizes(module: torch.nn.Module) -> Iterator[None]:
    """Trace a module inside: the code of its classes reads a size that varies by ``int`` without fixing it.

    The name is put next to that code, in the files of its classes; ``int`` of anything else is what it was, also for
    other threads. Several traces may hold it at once.
    """
    with contextlib.ExitStack() as stack:
        for name in sorted({type(owner).__module__ for owner in module.modules()}):
            found = vars(sys.modules.get(name, builtins))
            if name.startswith("torch.") or found.get("int", _Int) is not _Int:
                continue  # a name of the file's own
            patch = _PATCHES.setdefault(id(found), AttributePatch(found, "int", _Int))
            patch.acquire()
            stack.callback(patch.release)
        yield


_PATCHES: dict[int, AttributePatch] = {}
