"""Keep frozen weights in few bits as they are, whatever a library writes into them when a layer is called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ..device.composite import Rebuilding, is_composite, is_wrapper, plain_numbers, states_of

__all__ = ["weights_kept"]


@contextlib.contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Restore weights in few bits, and what their modules keep next to them, after the block.

    A layer may repack its numbers when it is called in evaluation mode, as Linear4bit of bitsandbytes does on a CPU;
    packed like that, they give no gradient in a training. Nothing is copied: the block works on other objects around
    the same memory.
    """
    with contextlib.ExitStack() as stack:
        rebuilding = Rebuilding(plain_numbers)
        for module in model.modules():
            held = [p for p in module._parameters.values() if p is not None and is_composite(p)]
            states = states_of(module)
            if not held and not states:
                continue
            stack.callback(_restore_attributes, module, dict(vars(module)), dict(module._parameters))
            for parameter in held:
                numbers = None if is_wrapper(parameter) else plain_numbers(parameter)
                stack.callback(_restore_parameter, parameter, numbers, dict(vars(parameter)))
                copy = rebuilding.parameter(parameter)
                vars(parameter).update(vars(copy))
            vars(module).update({slot.name: rebuilding.state(slot.value) for slot in states})
        yield


def _restore_attributes(
    module: nn.Module, before: dict[str, object], parameters: dict[str, nn.Parameter | None]
) -> None:
    for name in [name for name in vars(module) if name not in before]:
        del vars(module)[name]
    vars(module).update({name: value for name, value in before.items() if name != "training"})
    module._parameters.update(parameters)


def _restore_parameter(parameter: nn.Parameter, numbers: torch.Tensor | None, before: dict[str, object]) -> None:
    if numbers is not None and (plain_numbers(parameter).data_ptr(), parameter.shape) != (
        numbers.data_ptr(),
        numbers.shape,
    ):
        parameter.data = numbers
    vars(parameter).clear()
    vars(parameter).update(before)
