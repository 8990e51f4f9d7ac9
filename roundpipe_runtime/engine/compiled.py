"""Compile layers with ``torch.compile``: once per kind, because layers of one class share compiled code.

The compiled code runs only in runs with gradients. All stages then run in one thread: torch's flag that a compilation
is active is global, and models read the flag, so a batch in another thread would get a different mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.registry.patches import AttributePatch

from ..errors import ConfigError

# Attribute of layers that only call another module, which is compiled instead; `None` if nothing is compiled.
TO_COMPILE = "_rp_to_compile"

# Where `torch.nn.Module.compile` stores the compiled call.
_CALLED = "_compiled_call_impl"

# These modes record the addresses of parameters, which change each time when a layer is loaded to a device.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledLayers:
    """The layers of a pipeline, compiled with ``torch.compile``; the engine calls them in runs with gradients."""

    # options: keyword arguments of `torch.compile`; `None` disables it

    def __init__(self, layers: Sequence[nn.Module], options: Mapping[str, Any] | None = None) -> None:
        self.is_empty = options is None
        targets = [] if options is None else [getattr(layer, TO_COMPILE, layer) for layer in layers]
        # Use symbolic sizes from the first call: by default torch compiles again at the second size, and a layer
        # would be recomputed by other code than its forward.
        how = {"dynamic": True, **(options or {})}
        self._called: dict[int, tuple[nn.Module, Callable[..., Any]]] = {
            index: (target, torch.compile(target._call_impl, **how))
            for index, target in enumerate(targets)
            if isinstance(target, nn.Module) and any(True for _ in target.parameters())
        }

    def standing(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Make calls of a layer run its compiled code in the with block; the caller holds the layer's lock."""
        target, called = self._called.get(index, (None, None))
        return contextlib.nullcontext() if target is None else AttributePatch(target, _CALLED, called)


NOT_COMPILED = CompiledLayers(())


def check_compile_options(given: object) -> Mapping[str, Any] | None:
    """Return the keyword arguments of ``torch.compile``; ``None`` if compilation is disabled.

    >>> check_compile_options(True), check_compile_options({"backend": "aot_eager"}), check_compile_options(False)
    ({}, {'backend': 'aot_eager'}, None)
    """
    if given is None or isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"compile must be True, or keyword arguments of torch.compile, found {given!r:.80}. Write:\n"
            '    RoundPipe(model, compile={"backend": "inductor"})'
        )
    mode = given.get("mode")
    if mode in _WITH_GRAPHS:
        raise ConfigError(
            f"compile: mode={mode!r} records the addresses of parameters in CUDA graphs, and a pipeline loads its "
            "layers to new addresses."
            ' Use mode="max-autotune-no-cudagraphs", or leave mode out.'
        )
    if given.get("dynamic", True) is None:
        raise ConfigError(
            "compile: dynamic=None compiles a layer again at the second size, so the recomputation would run different "
            "code than the forward. Write dynamic=True, which is the default, or dynamic=False for batches of one size."
        )
    return dict(given)


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineProgress:
    """The training progress of a pipeline, which a checkpoint stores with its parameters and buffers.

    Attributes:
        runs: Number of completed runs, from which the seeds of random layers are derived.
        masters: Master weights: copies of parameters in the optimizer's dtype, by parameter name (default: none).
        gradients: Accumulated gradients that no optimizer step has used yet, by parameter name (default: none).
        replicas: Number of groups that batches were split into (default: not known).
    """

    runs: int
    masters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    replicas: int | None = None
