"""Refuse parameters of which a device cannot get a copy, such as those of quantized layers."""

from __future__ import annotations

import torch
from torch import nn

from yobx_flatten import find_unregistered
from yobx_flatten.errors.failures import result_or
from yobx_flatten.private_names.of_torch import is_traceable_wrapper_subclass

from ..errors import ConfigError

__all__ = ["check_copyable"]


def check_copyable(model: nn.Module) -> None:
    """Check that a copy of the numbers of each parameter is a copy of the parameter."""
    for name, parameter in model.named_parameters():
        if type(parameter) in (nn.Parameter, torch.Tensor):
            continue
        if reason := _reason(parameter):
            kind = type(parameter)
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, {reason}. A device gets a copy of the numbers of "
                "a parameter only, so quantized weights cannot train in a pipeline. Load the model without "
                "quantization:\n"
                "    AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)"
            )


def _copy(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        torch.empty_like(parameter).copy_(parameter)


def _reason(parameter: nn.Parameter) -> str | None:
    is_made_of_others: bool = bool(is_traceable_wrapper_subclass(parameter))  # bool, or mypy takes it for impossible
    if is_made_of_others:
        # the class of a library raises what it likes for operators that it does not have
        return result_or(
            lambda: _copy(parameter),
            lambda error: f"whose class does not copy it ({type(error).__name__}: {str(error).splitlines()[0]:.80})",
        )
    held = vars(parameter)
    tensors = [name for name, value in held.items() if isinstance(value, torch.Tensor)]
    tensors += [found.path.removeprefix("held")[2:-2] for found in find_unregistered(held, name="held")]
    return f"which keeps tensors in its attribute {tensors[0]!r}" if tensors else None
