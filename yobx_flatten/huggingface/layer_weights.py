"""Load the weights of each layer when the layer is called, and drop them after the call.

Between calls, a weight is on the device ``meta``. A *reader* is a function that reads and returns one weight.
"""

# checkpoint ── reader ──> layer 0: bring, forward, drop ──> layer 1: bring, forward, drop ──> ...

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

_Hook: TypeAlias = Any  # ``accelerate.hooks.ModelHook``: accelerate counts as untyped

Reader = Callable[[], torch.Tensor]
"""Function that reads and returns one weight; all names of a tied weight have the same function."""


class _LayerWeights:
    def __init__(self, layer: torch.nn.Module, readers: Mapping[str, Reader]) -> None:
        self.readers = readers  # by name of the weight in the layer
        self.is_paused = False
        self._calls = 0  # a layer may call itself
        self._dropped: list[tuple[dict[str, Any], str, Any]] = []
        layer.register_forward_pre_hook(self._bring, prepend=True)
        layer.register_forward_hook(self._drop, always_call=True)

    def _bring(self, layer: torch.nn.Module, _: object) -> None:
        if self.is_paused:
            return
        self._calls += 1
        if self._calls > 1:
            return
        read: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
        for name, reader in self.readers.items():
            owner, _, own = name.rpartition(".")
            held = layer.get_submodule(owner)._parameters
            self._dropped.append((held, own, held[own]))
            if id(reader) not in read:
                read[id(reader)] = torch.nn.Parameter(reader(), requires_grad=False)
            held[own] = read[id(reader)]

    def _drop(self, *_: Any) -> None:
        if self.is_paused:
            return
        self._calls -= 1
        if self._calls == 0:
            for held, name, empty in self._dropped:
                held[name] = empty
            self._dropped.clear()


_LAYERS: weakref.WeakKeyDictionary[torch.nn.Module, _LayerWeights] = weakref.WeakKeyDictionary()


def stream_layers(module: torch.nn.Module, readers: Mapping[str, Reader]) -> None:
    """Make each layer of a module load its weights with ``readers`` whenever the layer is called."""
    # a layer is an entry of a `ModuleList` or `ModuleDict`; a module outside of a layer loads its own parameters
    layers: dict[str, dict[str, Reader]] = {}
    for name, reader in readers.items():
        parts = name.split(".")[:-1]
        owners = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
        kinds = [isinstance(module.get_submodule(one), (torch.nn.ModuleList, torch.nn.ModuleDict)) for one in owners]
        entries = (
            one for one, above, is_one in zip(owners[1:], kinds, kinds[1:], strict=False) if above and not is_one
        )
        layer = next(entries, owners[-1])
        layers.setdefault(layer, {})[name.removeprefix(f"{layer}.") if layer else name] = reader
    for name, own in layers.items():
        part = module.get_submodule(name)
        _LAYERS[part] = _LayerWeights(part, own)


def streamed_readers(module: torch.nn.Module) -> dict[str, Reader]:
    """Return the functions that read a module's weights, given to :func:`stream_layers`, by parameter name."""
    named = module.named_modules(remove_duplicate=False)
    layers = [(name, _LAYERS[part]) for name, part in named if part in _LAYERS]
    return {f"{name}.{own}".lstrip("."): reader for name, layer in layers for own, reader in layer.readers.items()}


def largest_layer(module: torch.nn.Module) -> int:
    """Return the size in bytes of the largest layer that loads its weights on demand; 0 if no layer does."""
    layers = [part for part in module.modules() if part in _LAYERS]
    sizes = [sum(part.get_parameter(name).nbytes for name in _LAYERS[part].readers) for part in layers]
    return max(sizes, default=0)


def offloaded_readers(module: torch.nn.Module) -> dict[str, Reader]:
    """Return functions that read the weights which the accelerate library has offloaded, by parameter name."""
    found: dict[str, Reader] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for one in _offloading_hooks(part):
            weights = one.weights_map
            recursive = bool(getattr(one, "place_submodules", False))
            state = (*part.named_parameters(recurse=recursive), *part.named_buffers(recurse=recursive))
            for name, tensor in state:
                if tensor.is_meta:
                    found[f"{prefix}.{name}".lstrip(".")] = functools.partial(weights.__getitem__, name)
    return found


def device_of_inputs(module: torch.nn.Module) -> torch.device:
    """Return the device for the inputs of a module, which is the device of its weights during a call."""
    first: torch.Tensor = next(module.parameters())  # not get_input_embeddings(): some models have several, or none
    if not first.is_meta or not (streamed_readers(module) or offloaded_readers(module)):
        return first.device
    devices = [one.execution_device for part in module.modules() for one in _offloading_hooks(part)]
    return torch.device(devices[0]) if devices and devices[0] is not None else torch.device("cpu")


def _offloading_hooks(part: torch.nn.Module) -> list[_Hook]:
    hook = getattr(part, "_hf_hook", None)
    hooks = (hook, *getattr(hook, "hooks", ()))
    return [one for one in hooks if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None]


@contextlib.contextmanager
def paused(module: torch.nn.Module) -> Iterator[None]:
    """In a ``with`` block, calls of a module do not load the weights that its layers load on demand."""
    layers = [_LAYERS[part] for part in module.modules() if part in _LAYERS]
    hooked = [part for part in module.modules() if hasattr(part, "_hf_hook")]
    before: list[Any] = [part._hf_hook for part in hooked]
    for layer in layers:
        layer.is_paused = True
    try:
        if hooked:
            from accelerate.hooks import ModelHook

            for part in hooked:
                part._hf_hook = ModelHook()  # the function that accelerate's forward calls
        yield
    finally:
        for part, hook in zip(hooked, before, strict=True):
            part._hf_hook = hook
        for layer in layers:
            layer.is_paused = False
