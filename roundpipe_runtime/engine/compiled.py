"""Compile layers with ``torch.compile``: once per kind, because layers of one class share compiled code.

A layer is compiled while the engine calls it in a run with gradients, and is as it was for everyone else: a model is
cut and checked with the layers themselves, and so are trials of single rows. All stages run in one thread. torch states
for the whole process that it compiles, and models read that: a batch would get another mask in other threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

# Attribute of layers that call another module, which is compiled in their place; `None` where nothing is compiled.
TO_COMPILE = "_rp_to_compile"

# Where `torch.nn.Module.compile` puts what is called instead of the module's own code.
_CALLED = "_compiled_call_impl"

# They record the addresses of parameters, which are other ones at each visit.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledLayers:
    """The layers of a pipeline, compiled."""

    # options: keyword arguments of `torch.compile`; `None`: nothing is compiled

    def __init__(self, layers: Sequence[nn.Module], options: Mapping[str, Any] | None = None) -> None:
        self.is_empty = options is None
        targets = [] if options is None else [getattr(layer, TO_COMPILE, layer) for layer in layers]
        # Sizes are symbols from the first call on: by default torch compiles again at the second size, and a layer
        # would be recomputed by other code than it ran with.
        how = {"dynamic": True, **(options or {})}
        self._called: dict[int, tuple[nn.Module, Callable[..., Any]]] = {
            index: (target, torch.compile(target._call_impl, **how))
            for index, target in enumerate(targets)
            if isinstance(target, nn.Module) and any(True for _ in target.parameters())
        }

    @contextlib.contextmanager
    def standing(self, index: int) -> Iterator[None]:
        """A block in which calls of a layer run its compiled code; held with the layer's lock."""
        target, called = self._called.get(index, (None, None))
        if target is None:
            yield
            return
        before = vars(target).get(_CALLED)
        setattr(target, _CALLED, called)
        try:
            yield
        finally:
            if before is None:
                delattr(target, _CALLED)
            else:
                setattr(target, _CALLED, before)


NOT_COMPILED = CompiledLayers(())


def check_compile_options(given: object) -> Mapping[str, Any] | None:
    """Return the keyword arguments of ``torch.compile``; ``None`` where nothing is to be compiled.

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
            ' Use mode="max-autotune-no-cudagraphs", or leave it out.'
        )
    if given.get("dynamic", True) is None:
        raise ConfigError(
            "compile: dynamic=None compiles a layer again at the second size, so the recomputation would run different "
            "code than the forward. Write dynamic=True, which is the default, or dynamic=False for batches of one size."
        )
    return dict(given)


# The training state of a pipeline that its state dict does not hold.


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineProgress:
    """The progress of a pipeline, in addition to its parameters and buffers.

    Attributes:
        runs: Number of completed runs, from which the seeds of random layers follow.
        masters: Master weights: copies of parameters in the dtype of the optimizer, by the name of the parameter.
            Default: none.
        gradients: Gradients of an optimizer step that is still to come, by the name of the parameter. Default: none.
        replicas: Number of groups that batches were cut into. Default: not known.
    """

    runs: int
    masters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    replicas: int | None = None
