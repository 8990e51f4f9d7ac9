"""Keep frozen weights in few bits as they are, whatever a library writes into them when a layer is called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..device.composite import Rebuilding, is_composite, is_wrapper, plain_numbers, states_of


def has_few_bits(module: nn.Module) -> bool:
    """Report whether a module itself holds a frozen weight in few bits."""
    return any(p is not None and is_composite(p) for p in module._parameters.values()) or bool(states_of(module))


@contextlib.contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Restore weights in few bits, and what their modules keep next to them, after the block.

    A layer may repack its numbers when it is called in evaluation mode, as Linear4bit of bitsandbytes does on a CPU;
    packed like that, they give no gradient in a training. Nothing is copied: the block works on other objects around
    the same memory.
    """
    with contextlib.ExitStack() as stack:
        rebuilding = Rebuilding(plain_numbers)
        for module in filter(has_few_bits, model.modules()):
            states = states_of(module)
            stack.callback(vars(module).update, {slot.name: slot.value for slot in states})
            for name, parameter in module._parameters.items():
                if parameter is not None and is_composite(parameter):
                    stack.callback(module._parameters.__setitem__, name, parameter)
                    numbers = None if is_wrapper(parameter) else plain_numbers(parameter)
                    stack.callback(_restore, parameter, numbers, dict(vars(parameter)))
                    vars(parameter).update(vars(rebuilding.parameter(parameter)))
            vars(module).update({slot.name: rebuilding.state(slot.value) for slot in states})
        yield


def _restore(parameter: nn.Parameter, numbers: torch.Tensor | None, before: dict[str, Any]) -> None:
    """Give a parameter the numbers and the attributes that it had."""
    if numbers is not None:
        now = plain_numbers(parameter)
        if (now.data_ptr(), now.shape, now.dtype) != (numbers.data_ptr(), numbers.shape, numbers.dtype):
            parameter.data = numbers
    vars(parameter).clear()
    vars(parameter).update(before)
