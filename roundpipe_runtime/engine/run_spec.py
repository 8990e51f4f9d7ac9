"""What a run is asked to do. It is fixed before the run starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ..device.transfer import HostValue
from ..optim.parameters import LayerContents
from ..schedule.plan import RunType
from ..schedule.round_robin import Stage
from .caller_state import CallerState
from .compiled import NOT_COMPILED, CompiledLayers
from .parameters.on_device import Gradients
from .recompute.states import call_seed

Trial: TypeAlias = Literal["parts", "others"]


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What a run is asked to do."""

    kind: RunType  # `"infer"`, `"train"` (forward now, backward later) or `"fused"`
    stages: Sequence[Stage]  # stages in the order of dispatch
    contents: Sequence[LayerContents]  # layers on the host
    num_microbatch: int  # number of microbatches
    requires_grad: bool  # whether gradients are computed
    recompute_grain: Literal["stage", "layer"]  # unit of recomputation in a backward stage, `"stage"` or `"layer"`
    preserve_rng_state: bool  # whether a recomputed forward draws the same random numbers
    base_seed: int  # base of the seeds of layer calls
    tag: str  # name that distinguishes pipelines that run at the same time
    caller: CallerState  # what the caller has set for its thread, such as autocast
    labels: Sequence[HostValue] = ()  # labels of each microbatch of a fused run. Default: none.
    # loss function of a fused run. Default: the outputs are the loss.
    loss_fn: Callable[[Any, Any], Any] = lambda outputs, labels: outputs
    keep_outputs: bool = True  # whether a fused run returns the outputs of the last layer. Default: `True`.
    # whether layers stay on a device from their forward to their backward, if they come there again. Default: `False`.
    stays: bool = False
    one_thread: bool = False  # whether the thread of one device does the work of all. Default: `False`.
    # function that is offered each gradient as soon as a microbatch has gone back through a layer. Default: none.
    take_gradient: Callable[[nn.Parameter, torch.Tensor], bool] | None = None
    # indices of the layers that run, of all. The first one takes the inputs of the run, the outputs of the last one are
    # those of the run. Default: all.
    span: range = range(0)
    # index of the first microbatch in the whole batch, of which this run may be a part. Default: 0.
    first_microbatch: int = 0
    # whether to look whether layers repeat themselves, and what gradients end in. Default: `False`.
    looks: bool = False
    # what is compared in a run that nothing comes of: `"parts"` of rows, without random numbers of torch, or
    # `"others"`, rows next to other ones, where all microbatches draw the same. Default: nothing is compared.
    trial: Trial | None = None
    # function that is given the index of a layer and its gradients on the host, as soon as their copies are under way.
    # It may take gradients out of the mapping. Default: none.
    gradients_landed: Callable[[int, Gradients], None] | None = None
    # layers that torch compiles. Default: none.
    compiled: CompiledLayers = NOT_COMPILED

    @property
    def has_backward(self) -> bool:
        """Whether some layers will be called again."""
        return self.kind != "infer"

    @functools.cached_property
    def has_copies(self) -> bool:
        """Whether several devices run the last stage."""
        return any(stage.copies > 1 for stage in self.stages)

    @functools.cached_property
    def restarts(self) -> set[int]:
        """Layers from which a backward stage calls the forward again, so that their input is kept."""
        backward = [stage.layers for stage in self.stages if stage.kind == "backward"]
        if self.recompute_grain == "layer":
            return {layer for layers in backward for layer in layers}
        return {layers[0] for layers in backward}

    @functools.cached_property
    def nbytes(self) -> list[tuple[int, int]]:
        """Bytes of each layer on a device, and of its gradients."""
        return [
            (
                layer.nbytes(),
                sum(layer.nbytes_of(parameter) for parameter in layer.parameters() if parameter.requires_grad),
            )
            for layer in self.contents
        ]

    def stage_nbytes(self, stage: Stage) -> int:
        """Return the bytes of the parameters of a stage on its device, and of the gradients where it goes backward."""
        found = [self.nbytes[layer] for layer in stage.layers]
        sets = 0 if stage.kind == "forward" else stage.gradient_sets
        return sum(held + sets * gradients for held, gradients in found)

    def seed(self, layer: int, microbatch: int) -> int:
        """Return the seed of a layer call."""
        # layer: index of the layer; the number of layers for the loss function
        microbatch = 0 if self.trial == "others" else microbatch
        found = self._seeds.get((layer, microbatch))
        if found is None:
            found = call_seed(self.base_seed, self.tag, layer, self.first_microbatch + microbatch)
            self._seeds[layer, microbatch] = found
        return found

    @functools.cached_property
    def _seeds(self) -> dict[tuple[int, int], int]:
        """Seeds of the calls so far: a recomputation has the one of its forward."""
        return {}
