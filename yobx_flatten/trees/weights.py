"""Find where the weights of a module are: device, ``meta``, or offloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ..errors import InvalidArgumentError


def has_no_data(module: torch.nn.Module, leaves: Iterable[Any], brought: Collection[str] = ()) -> str:
    """Return why a module cannot be run: it, or an input, has shapes and no data. Empty where it can."""
    # brought: names of weights that are brought when a layer is called; none by default
    from ..private_names.of_torch import FakeTensor

    weights = [(name, tensor) for name, tensor in _state(module) if name not in brought]
    for name, tensor in [*weights, *(("an input", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))]:
        if isinstance(tensor, FakeTensor):
            return f"{name} is a FakeTensor, which has no data"
        if tensor.is_meta:
            return f"{name} is on the device meta and has no data"
    return ""


def check_not_offloaded(module: torch.nn.Module) -> None:
    """Refuse a module whose weights accelerate brings when a layer is called: a trace has none of them."""
    for name, part in module.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ()))):
            raise InvalidArgumentError(
                f"The weights of {name or 'the module'} ({type(part).__qualname__}) are offloaded by accelerate, which "
                "loads them when the layer is called; torch.export finds none. Call export_program, which loads them. "
                "Or load them first, or load the model without device_map:\n"
                "    accelerate.hooks.remove_hook_from_module(module, recurse=True)"
            )


def on_other_devices(module: torch.nn.Module, tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, str, str]]:
    """List inputs that are not where the weights are: path, device, device of the weights.

    Nothing where weights are on several devices, or none, or where hooks of accelerate move the inputs. A number in a
    tensor without axes may be on the CPU.
    """
    devices = Counter(tensor.device for _, tensor in _state(module))
    if len(devices) != 1 or any(hasattr(part, "_hf_hook") for part in module.modules()):
        return []
    (device,) = devices
    found = []
    for path, tensor in tensors:
        number = tensor.dim() == 0 and tensor.device.type == "cpu"
        if tensor.device != device and not number:
            found.append((path, str(tensor.device), str(device)))
    return found


def about_devices(path: str, found: str, weights: str) -> str:
    """Say what is the matter with an input on another device."""
    return f"{path} is on {found}, the weights are on {weights}. Unless forward moves it, the trace stops. Move it:"


def _state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
