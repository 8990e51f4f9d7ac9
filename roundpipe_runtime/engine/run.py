"""One run of a pipeline: its task, its inputs, and the commit of the results of its stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ..batch.loss import LossContract
from ..device.transfer import HostValue
from ..device.worker import Mailbox
from ..errors import StageError
from ..optim.parameters import LayerContents, ParameterStore
from ..optim.parts import AtHand
from ..optim.readiness import ReadinessTable
from ..schedule.plan import RunType
from ..schedule.round_robin import Stage
from .caller_state import CallerState
from .collected import Collected, WrittenBuffers
from .compiled import NOT_COMPILED, CompiledLayers
from .parameters.kept import GradientMemory, KeptParameters
from .parameters.on_device import Gradients, LayerOnDevice
from .parameters.routed import NOTHING_PARTIAL, PartialPlan
from .recompute.draws import Draws
from .recompute.states import call_seed
from .timer import Timer


@dataclasses.dataclass
class Run:
    """One pass over all microbatches."""

    spec: RunSpec  # what the run is asked to do
    store: ParameterStore
    table: ReadinessTable  # versions of the layers that may be read
    version: int  # version that this run reads; a backward after another step reads a later one than its forward
    timer: Timer  # measures the work
    contract: LossContract  # contract that reduces the losses
    kept: KeptParameters  # copies of parameters that stay on devices
    draws: Draws  # what its calls draw
    at_hand: AtHand  # has the parameters of a layer in memory for a block
    gradient_memory: GradientMemory | None = None  # pinned memory for gradients, `None` without an accelerator
    # function that waits until gradients of the last step are gone: no two sets take memory
    wait_cleared: Callable[[], None] = lambda: None
    partial_plan: PartialPlan = NOTHING_PARTIAL  # parameters that are copied when they are read
    # activations and gradients between stages, and the first error of any
    mailbox: Mailbox = dataclasses.field(default_factory=Mailbox)
    collected: Collected = dataclasses.field(init=False)  # results of the stages
    # layers that stay on a device between two stages, by device and layer
    residents: dict[tuple[str, int], LayerOnDevice] = dataclasses.field(default_factory=dict)
    # lock that is held while the loss function is called, which copies of the last stage share
    loss_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _versions: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.collected = Collected(WrittenBuffers(self.spec.contents))

    @contextlib.contextmanager
    def reading(self, layer: int) -> Iterator[None]:
        """Wait until this run's version of a layer is there, and keep it there for the block."""
        self.table.start_read(layer, self.version, check=self.mailbox.check)
        try:
            with self.at_hand(layer):
                yield
        finally:
            self.table.end_read(layer)

    def start(self, microbatch: int, inputs: HostValue) -> None:
        """Pass the inputs of a microbatch to the first layer; also in a run of one fused stage."""
        # inputs: arguments of the first layer that runs; those of the model, if that is the first of all
        self.mailbox.put(("activation", self.spec.span.start, microbatch), inputs)

    def start_all(self, inputs: Sequence[HostValue]) -> None:
        """Pass the inputs of all microbatches to the first layer."""
        for number, on_host in enumerate(inputs):
            self.start(number, on_host)

    def release(self) -> None:
        """Release the memory of devices that this run still holds."""
        for resident in list(self.residents.values()):  # a stage that is not waited for may still put one there
            resident.release()
        self.residents.clear()

    def discard(self) -> None:
        """Discard everything that was collected: the run has failed."""
        self.draws.end()
        self.collected.clear()
        self.mailbox.clear()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def remember_versions(self) -> None:
        """Note the versions of the parameters, for :meth:`check_unchanged`."""
        self._versions = {
            c.index: [self.store.source(parameter)._version for parameter in c.parameters()] for c in self.spec.contents
        }

    def check_unchanged(self) -> None:
        """Check that no parameter changed since the forward, before the run goes back through the layers."""
        for contents in self.spec.contents:
            now = [self.store.source(parameter)._version for parameter in contents.parameters()]
            if now != self._versions[contents.index]:
                raise StageError(
                    f"A parameter of {contents.title} was changed between forward and backward, so the recomputation "
                    "would give different values. Call backward before the optimizer's step."
                )

    def gradient_scale(self) -> float:
        """Return the factor for gradients of parameters, known when the last microbatch has its loss."""
        return self.contract.gradient_scale() if self.spec.kind == "fused" else 1.0

    def commit_gradients(self) -> None:
        """Add the gradients of this run to the gradient buffers, last layer first for any plan.

        Those of layers are scaled already, on their devices. Those of a loss function, after the last layer, are not:
        they are summed while the scale is not known yet.
        """
        scale = self.gradient_scale()
        if scale == 0.0:
            self._zero_gradients()
        gradients = self.collected.gradients
        layers = []
        for layer in sorted(gradients, reverse=True):
            found: dict[nn.Parameter, torch.Tensor] = {}
            is_late = layer == len(self.spec.contents) and scale not in (0.0, 1.0)
            for parameter, (gradient, ready) in gradients[layer].items():
                ready.result()
                found[parameter] = gradient.mul_(scale) if is_late else gradient
            layers.append(found)
        self.store.add_gradients(layers)
        gradients.clear()

    def _zero_gradients(self) -> None:
        """No microbatch had a weight: the loss is zero, and so are the gradients, as they would be of a constant."""
        self.store.add_gradients(
            {p: torch.zeros_like(p) for p in c.parameters() if p.requires_grad} for c in self.spec.contents
        )


# The specification of a run. It is fixed before the run starts.


Trial: TypeAlias = Literal["parts", "others"]


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The specification of a run."""

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
    # how a dry run is compared: `"parts"` of rows, without random numbers of torch, or
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
