"""Make the inputs of AOTInductor packages contiguous where the compiled code expects it.

The code reads an input with the strides that the example had, and does not ask whether it has them
(https://github.com/pytorch/pytorch/issues/122784). A slice, such as ``ids[:, 5:]``, then gives other numbers without a
word. A package that is compiled inside the block remembers which inputs were contiguous, and a call inside the block
passes such. Other calls (in C++, outside the context manager) are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_KEY = "yobx_flatten.contiguous"  # in the metadata of a package: 1 or 0 for each tensor among its inputs
_METADATA = "aot_inductor.metadata"


def remembering_strides(flatten_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Make the version of ``_aoti_flatten_inputs`` (``torch._inductor.compile_fx``) that notes what is contiguous."""

    @functools.wraps(flatten_inputs)
    def _aoti_flatten_inputs(*args: Any, **kwargs: Any) -> Any:
        inputs, options = flatten_inputs(*args, **kwargs)
        contiguous = "".join(str(int(leaf.is_contiguous())) for leaf in inputs if isinstance(leaf, torch.Tensor))
        return inputs, {**options, _METADATA: {**options.get(_METADATA, {}), _KEY: contiguous}}

    return _aoti_flatten_inputs


def called_contiguous(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make the version of ``AOTICompiledModel.__call__`` that passes such inputs contiguous."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        contiguous = self.get_metadata().get(_KEY)
        if contiguous is None:
            return call(self, *args, **kwargs)
        return call(type(self)(_Runner(self.loader, contiguous)), *args, **kwargs)

    return __call__


class _Runner:
    """The loader of a package, as its call sees it."""

    def __init__(self, loader: Any, contiguous: str) -> None:
        self._loader, self._contiguous = loader, contiguous

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def boxed_run(self, inputs: list[Any]) -> Any:
        """Run; a wrong number of inputs is refused by the package itself."""
        wanted = self._contiguous.ljust(len(inputs), "0")[: len(inputs)]
        found = [leaf.contiguous() if one == "1" else leaf for leaf, one in zip(inputs, wanted, strict=True)]
        inputs.clear()  # as the loader does with what it has taken
        return self._loader.boxed_run(found)
