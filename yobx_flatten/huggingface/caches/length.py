"""Flatten the number of tokens that sliding layers have seen to a 0-d tensor, and back to an int.

The layers count in a Python integer. Among the inputs of a program that is one more kind of input, which ExecuTorch,
AOTInductor and the signature of a submodule do not have; a tensor is what all of them take. It stays on the CPU, where
reading it waits for nothing.

.. code-block:: text

    layer.cumulative_length    12  -- flatten -->  tensor(12)  -- unflatten -->  12
    the same in a trace     a symbol  ---------->  an operator's tensor  ----->  the tensor: it has no value yet
"""

from __future__ import annotations

from typing import Any

import torch

from ...private_names.of_torch import functorch, is_jit_tracing
from ...trace.program_inputs import StoredInteger

# those whose methods are replaced in a trace; what models bring along also counts in integers there
_CLASSES = {
    "DynamicSlidingWindowLayer",
    "StaticSlidingWindowLayer",
    "SlidingWindowLayer",  # transformers 4.56
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}


def slides(cls: type) -> bool:
    """Return whether layers of a class slide, and their count may be a tensor in a trace."""
    return cls.__name__ in _CLASSES and cls.__module__ == "transformers.cache_utils"


def length_leaf(seen: int | torch.SymInt | torch.Tensor | StoredInteger) -> Any:
    """Return the leaf for a number of tokens."""
    # seen: what the layers hold: an integer; in a trace a symbol, or the leaf that they were unflattened with
    if isinstance(seen, StoredInteger):
        return int(seen)
    if torch.compiler.is_dynamo_compiling():
        return seen  # compiled code follows a number, and could not read it from a tensor
    if type(seen) is int or type(seen) is torch.SymInt:
        # an operator in a trace, where a new tensor would be a constant of the program
        return torch.full((), seen, dtype=torch.int64, device="cpu")  # type: ignore[arg-type] # a symbol also serves
    return seen


def length_of(leaf: object) -> object:
    """Return what layers hold for a leaf: its number, or the leaf where it has none that can be read."""
    # leaf: an int64 tensor without axes; an integer, as stored by earlier versions; a placeholder
    if not isinstance(leaf, torch.Tensor) or leaf.dim() or _has_no_value():
        return leaf
    plain = leaf
    while functorch.is_functorch_wrapped_tensor(plain):  # vmap: the counts of several caches
        plain = functorch.get_unwrapped(plain)
    if type(plain) is not torch.Tensor or plain.is_meta:  # fake, functional, ...
        return leaf
    numbers = {plain.item()} if not plain.dim() else set(plain.reshape(-1).tolist())
    number = numbers.pop() if len(numbers) == 1 else None
    # a change of all leaves to another type, or to their gradients, also comes here
    if type(number) is int or (type(number) is float and number.is_integer()):
        return int(number)
    return leaf


def _has_no_value() -> bool:
    return torch.compiler.is_compiling() or is_jit_tracing()
