"""Settings and results of a run: one pass of all microbatches through the layers of a pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from yobx_flatten.core.effects import Snapshot

from ..batch.loss import LossContract
from ..device.protocol import NOW, Event
from ..device.transfer import HostValue
from ..device.worker import Mailbox
from ..errors import StageError
from ..optim.layer_contents import LayerContents
from ..optim.parameters import AtHand, ParameterStore
from ..optim.readiness import ReadinessTable
from ..schedule.plan import RunType
from ..schedule.round_robin import Stage
from .code_state import CallerState
from .config import NOT_COMPILED, CompiledLayers
from .draws import Draws
from .parameters.kept import GradientMemory, KeptParameters
from .parameters.on_device import Buffers, Gradients, LayerOnDevice
from .parameters.partial_table import NOTHING_PARTIAL, PartialPlan
from .planner import Timer
from .recomputed import call_seed


@dataclasses.dataclass
class Run:
    spec: RunSpec
    store: ParameterStore
    table: ReadinessTable  # versions of the layers that may be read
    version: int  # version of the parameters that this run reads; a backward may read a later one than its forward
    timer: Timer
    contract: LossContract  # collects the losses
    kept: KeptParameters  # copies of parameters that stay on devices
    draws: Draws
    at_hand: AtHand  # function that returns a context which keeps the parameters of a layer in memory
    gradient_memory: GradientMemory | None = None  # pinned memory for gradients, `None` without an accelerator
    # function that waits until the gradients of the last step are freed, so that memory holds one set of gradients
    wait_cleared: Callable[[], None] = lambda: None
    partial_plan: PartialPlan = NOTHING_PARTIAL  # parameters that are copied on demand
    # activations and gradients between stages, and the first error of a stage
    mailbox: Mailbox = field(default_factory=Mailbox)
    collected: Collected = field(init=False)
    # layers that stay on a device between two stages, by device and layer
    residents: dict[tuple[str, int], LayerOnDevice] = field(default_factory=dict)
    # held while the loss function is called: several devices may run copies of the last stage
    loss_lock: threading.Lock = field(default_factory=threading.Lock)
    # of a forward with a later backward: versions of the parameters of each layer, and tensors in each output
    _versions: dict[int, list[int]] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.collected = Collected(WrittenBuffers(self.spec.contents))

    @contextlib.contextmanager
    def reading(self, layer: int) -> Iterator[None]:
        self.table.start_read(layer, self.version, check=self.mailbox.check)
        try:
            with self.at_hand(layer):
                yield
        finally:
            self.table.end_read(layer)

    @property
    def outputs(self) -> list[HostValue]:
        return [self.collected.outputs[number] for number in range(self.spec.num_microbatch)]

    def start_all(self, inputs: Sequence[HostValue]) -> None:
        for number, on_host in enumerate(inputs):
            self.mailbox.put(("activation", self.spec.span.start, number), on_host)

    def release(self) -> None:
        for resident in list(self.residents.values()):  # a copy, as a stage that still runs may add entries
            resident.release()
        self.residents.clear()

    def discard(self) -> None:
        self.draws.end()
        self.collected.clear()
        self.mailbox.clear()

    def remember_forward(self) -> None:
        self._sizes = [len(one.tensors) for one in self.outputs]
        self._versions = {
            c.index: [self.store.source(parameter)._version for parameter in c.parameters()] for c in self.spec.contents
        }

    def start_backward(self, gradients: Iterator[torch.Tensor | None]) -> None:
        for contents in self.spec.contents:
            now = [self.store.source(parameter)._version for parameter in contents.parameters()]
            if now != self._versions[contents.index]:
                raise StageError(
                    f"A parameter of {contents.title} was changed between forward and backward, so the recomputation "
                    "would give different values. Call backward before the optimizer's step."
                )
        for number, size in enumerate(self._sizes):
            found = [next(gradients) for _ in range(size)]
            copies = [None if gradient is None else (gradient, NOW) for gradient in found]
            self.mailbox.put(("gradient", self.spec.span.stop, number), copies)

    def gradient_scale(self) -> float:
        return self.contract.gradient_scale() if self.spec.kind == "fused" else 1.0

    def commit_gradients(self) -> None:
        """Add the gradients of this backward to the accumulated gradients, always from the last layer to the first."""
        # Gradients of layers are scaled on their devices. Gradients of a loss function's own parameters, which have the
        # index after the last layer, were summed before the scale was known.
        scale = self.gradient_scale()
        if scale == 0.0:  # the weights of all losses are zero, so trained parameters get zero gradients
            self.store.add_gradients(
                {p: torch.zeros_like(p) for p in c.parameters() if p.requires_grad} for c in self.spec.contents
            )
        gradients = self.collected.gradients
        layers = []
        for layer in sorted(gradients, reverse=True):
            is_late = layer == len(self.spec.contents) and scale not in (0.0, 1.0)
            found = {parameter: arrived(copy) for parameter, copy in gradients[layer].items()}
            layers.append({p: gradient.mul_(scale) for p, gradient in found.items()} if is_late else found)
        self.store.add_gradients(layers)
        gradients.clear()


# Comparison mode of a trial. "parts": rows run whole and in parts, and torch's random functions return a constant.
# "others": rows run next to other rows, and all microbatches draw the same numbers.
Trial: TypeAlias = Literal["parts", "others"]


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The settings of one forward and its backward, such as pipeline stages, seeds and loss function."""

    kind: RunType  # `"infer"`, `"train"` (forward now, backward later) or `"fused"`
    stages: Sequence[Stage]  # in the order of dispatch
    contents: Sequence[LayerContents]  # layers on the host
    num_microbatch: int
    requires_grad: bool  # whether gradients are computed
    recompute_grain: Literal["stage", "layer"]  # unit of recomputation in a backward stage
    preserve_rng_state: bool  # whether a recomputed forward draws the same random numbers
    base_seed: int  # number from which the seeds of layer calls are derived
    tag: str  # distinguishes pipelines that run at the same time
    caller: CallerState  # settings of the caller's thread, such as autocast
    labels: Sequence[HostValue] = ()  # labels of each microbatch of a fused run
    loss_fn: Callable[[Any, Any], Any] = lambda outputs, labels: outputs  # default: the outputs are the loss
    keep_outputs: bool = True  # whether a fused run returns the outputs of the last layer
    stays: bool = False  # whether layers stay on a device from forward to backward, if both run on this device
    one_thread: bool = False  # whether one thread does the work of all devices
    # function that is called with each gradient after each microbatch's backward through a layer
    take_gradient: Callable[[nn.Parameter, torch.Tensor], bool] | None = None
    span: range = range(0)  # layers that run: the first gets the inputs of the run, the last returns the outputs
    first_microbatch: int = 0  # index of the run's first microbatch in the whole batch
    looks: bool = False  # whether to check that recomputations repeat, and where gradients flow to
    trial: Trial | None = None  # comparison mode of a trial; `None` for other runs
    types: set[torch.dtype] = field(default_factory=set)  # dtypes in which a trial has computed
    # function that gets the index of a layer and the layer's gradients on the host, once their copies have started. The
    # function may remove gradients from the mapping.
    gradients_landed: Callable[[int, Gradients], None] | None = None
    compiled: CompiledLayers = NOT_COMPILED  # layers that torch compiles

    @functools.cached_property
    def restarts(self) -> set[int]:
        """Indices of the layers whose inputs are stored, because a backward stage starts a recomputation with them."""
        backward = [stage.layers for stage in self.stages if stage.kind == "backward"]
        if self.recompute_grain == "layer":
            return {layer for layers in backward for layer in layers}
        return {layers[0] for layers in backward}

    @functools.cached_property
    def nbytes(self) -> list[tuple[int, int]]:
        return [(c.nbytes(), sum(c.nbytes_of(p) for p in c.parameters() if p.requires_grad)) for c in self.contents]

    def stage_nbytes(self, stage: Stage) -> int:
        found = [self.nbytes[layer] for layer in stage.layers]
        sets = 0 if stage.kind == "forward" else stage.gradient_sets
        return sum(held + sets * gradients for held, gradients in found)

    def seed(self, layer: int, microbatch: int) -> int:
        # layer: index of the layer; the number of layers for the loss function
        number = 0 if self.trial == "others" else microbatch
        return call_seed(self.base_seed, self.tag, layer, self.first_microbatch + number)


# Attribute of layers whose forward starts with the code of earlier layers: the attribute of these layers is one object.
# The layers write the same values into the same buffers, so the values of the first layer are used.
RUNS_AGAIN = "_rp_runs_again"

# Gradients of the tensors between two stages, on the host; ``None`` for a tensor without one.
Copies: TypeAlias = list[tuple[torch.Tensor, Event] | None]


def arrived(copy: tuple[torch.Tensor, Event]) -> torch.Tensor:
    tensor, ready = copy
    ready.result()
    return tensor


@dataclasses.dataclass
class Collected:
    """Stores the results of pipeline stages until the results are written to the model."""

    # keys of pairs are (layer, microbatch); each entry is written by one stage only
    buffers: WrittenBuffers  # buffers that layers wrote
    outputs: dict[int, HostValue] = field(default_factory=dict)  # outputs of the last layer, by microbatch
    saved: dict[tuple[int, int], HostValue] = field(default_factory=dict)  # inputs from which a recomputation starts
    kept: dict[tuple[int, int], HostValue] = field(default_factory=dict)  # data of `save_for_recompute`
    input_gradients: dict[int, Copies] = field(default_factory=dict)  # of the inputs of the model, by microbatch
    # gradients of parameters, by layer; a loss function's own parameters have the index after the last layer
    gradients: dict[int, Gradients] = field(default_factory=dict)
    # gradients of a loss function's own parameters, by microbatch, until all have arrived
    loss_gradients: dict[int, dict[nn.Parameter, torch.Tensor]] = field(default_factory=dict)
    # attributes from before a forward that changes them
    attributes: dict[tuple[int, int], Snapshot] = field(default_factory=dict)
    shared: dict[tuple[int, int], Shared] = field(default_factory=dict)  # outputs that share memory
    # digests of a layer's outputs, to compare a recomputation with its forward
    digests: dict[tuple[int, int], list[tuple[torch.Tensor, Event]]] = field(default_factory=dict)

    def add_loss_gradients(self, layer: int) -> None:
        """Add the gradients of the loss function's parameters, in microbatch order, to ``self.gradients[layer]``."""
        while self.loss_gradients:
            sums = self.gradients.setdefault(layer, {})
            for parameter, gradient in self.loss_gradients.pop(min(self.loss_gradients)).items():
                before = sums.get(parameter)
                sums[parameter] = (gradient if before is None else before[0] + gradient, NOW)

    def clear(self) -> None:
        for one in dataclasses.fields(self):
            getattr(self, one.name).clear()


class WrittenBuffers:
    """The buffers that layers write in a forward, such as running statistics."""

    def __init__(self, contents: Sequence[LayerContents]) -> None:
        self._contents = contents
        self._final: dict[int, Buffers] = {}
        self._trail: dict[int, list[Buffers]] = {}
        self._at_start: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, layer: int, written: Buffers) -> None:
        self._final[layer] = written

    def follow(self, layer: int, written: Buffers) -> None:
        """Store a layer's buffers after one microbatch, for a recomputation of the next microbatch."""
        self._trail.setdefault(layer, []).append(written)

    def before(self, layer: int, microbatch: int) -> Buffers:
        trail = self._trail.get(layer, [])
        slots = self._contents[layer].buffers
        numbers = sorted({number for written in trail for number in written})
        found: Buffers = {n: (self._at_start.get((layer, n), slots[n].tensor), NOW) for n in numbers}
        for written in trail[:microbatch]:
            found |= written
        return found

    def check(self) -> None:
        """Raise an error if two layers write the same buffer.

        Parts of one split Hugging Face forward may do so: each part repeats the code of the forward before it, and
        thus writes the same values.
        """
        for layer, number, writer in self._written():
            one, other = self._contents[writer], self._contents[layer]
            code = getattr(other.module, RUNS_AGAIN, None)
            if writer != layer and (code is None or code is not getattr(one.module, RUNS_AGAIN, None)):
                raise StageError(
                    f"{one.title} and {other.title} are the same module, or share a module, and both write its buffer "
                    f"{other.buffers[number].name!r}. The layers run at the same time, so each would miss the other's "
                    "writes. Give each layer its own module."
                )

    def _written(self) -> Iterator[tuple[int, int, int]]:
        places: dict[int, list[tuple[int, int]]] = {}
        for layer, written in sorted(self._final.items()):
            for number in written:
                places.setdefault(id(self._contents[layer].buffers[number].tensor), []).append((layer, number))
        for claimed in places.values():
            changed = []
            for layer, number in claimed if len(claimed) > 1 else ():
                value = arrived(self._final[layer][number])
                before = self._contents[layer].buffers[number].tensor
                if value.dtype != before.dtype or not torch.equal(value, before):
                    changed.append((layer, number))
            # torch does not report the writes of a norm, so a norm that a layer does not call also counts as written
            changed = changed or claimed[:1]
            yield from ((layer, number, changed[0][0]) for layer, number in changed)

    def final(self) -> dict[tuple[int, int], torch.Tensor]:
        own = [(layer, number) for layer, number, writer in self._written() if layer == writer]
        return {(layer, number): arrived(self._final[layer][number]) for layer, number in own}

    def keep_start(self) -> None:
        for layer, written in self._final.items():
            for number in written:
                self._at_start[layer, number] = self._contents[layer].buffers[number].tensor.clone()

    def commit(self, *, keep_start: bool) -> None:  # after `check`
        """Write the final values of the buffers to the model."""
        if keep_start:
            self.keep_start()
        for (layer, number), value in self.final().items():
            self._contents[layer].buffers[number].store(value)
        self._final.clear()

    def clear(self) -> None:
        self._final.clear()
        self._trail.clear()


class _Place(NamedTuple):
    memory: int
    numbers: int  # number of elements that the storage has room for
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]
    layer: str  # title of the layer that returned it


# Outputs of a layer that share memory with another output, by their index.
Shared: TypeAlias = dict[int, _Place]

# Views of a storage with more elements are not compared element by element, and count as overlapping.
_MANY = 2**24


def shared_views(outputs: Sequence[torch.Tensor], title: str) -> Shared:
    places: dict[int, list[int]] = {}
    for number, tensor in enumerate(outputs):
        if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    shared: Shared = {}
    for memory, numbers in places.items():
        for number in numbers if memory and len(numbers) > 1 else ():
            one = outputs[number]
            count = one.untyped_storage().nbytes() // one.element_size()
            shared[number] = _Place(memory, count, one.storage_offset(), one.shape, one.stride(), title)
    return shared


def check_writes(shared: Shared, written: Sequence[int], title: str) -> None:
    """Raise an error if a layer wrote in place to an input that shared memory with another input."""
    for number in written:
        other = next((one for one in shared if one != number and _overlap(shared[one], shared[number])), None)
        if other is not None:
            raise StageError(
                f"{title} writes in place to its input number {number}, of shape {tuple(shared[number].shape)}. "
                f"Inputs {number} and {other} are outputs of {shared[number].layer} that share memory. The pipeline "
                f"copies them separately, so a write to input number {number} would not change input number {other}. "
                f"Let {shared[number].layer} return one tensor for both, and slice this tensor in {title}:\n"
                "    first = tokens[:, 0]\n"
                f"Or, if only input number {number} should change, write to a copy:\n    first = first + prompt"
            )


def _overlap(one: _Place, other: _Place) -> bool:
    if one.memory != other.memory:
        return False
    if one.numbers > _MANY:
        return True
    numbers = torch.zeros(one.numbers, dtype=torch.bool)
    numbers.as_strided(one.shape, one.stride, one.offset).fill_(True)
    return bool(numbers.as_strided(other.shape, other.stride, other.offset).any())
