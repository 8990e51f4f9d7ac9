"""Make a recomputation give the values of the first forward: with equal seeds, and with data that the layer saves.

The seed of a layer call is derived from the state of torch's generator, the layer, and the microbatch, not from devices
or the order of calls. Random generators of NumPy, of Python and in attributes of layers are reset by :mod:`.draws`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from yobx_flatten.core.private_names.of_torch import pytree

from ..device.worker import generator_alone, generator_lock
from ..errors import StageError
from .draws import (
    CallDraws,
    Draws,
    Generator,
    LayerTraits,
    ProcessState,
    held_generators,
    process_generators,
    traits_of,
)

T = TypeVar("T")


def call_seed(base: int, tag: str, layer: int, microbatch: int) -> int:
    """Return the seed for the random numbers of one layer call.

    >>> call_seed(0, "", 0, 0) == call_seed(0, "", 0, 0) != call_seed(0, "", 0, 1)
    True
    """
    # base: digest of the state of torch's generator when the run began
    text = f"{base}|{tag}|{layer}|{microbatch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


# torch's CPU generator and the generators of NumPy and Python are shared by all threads. A layer that draws holds a
# lock. The first call of a layer detects whether the layer draws, and later calls check this.


def run_seeded(
    call: Callable[[], T],
    code: Any,
    seed: Callable[[], int],
    generator: VisitGenerator,
    again: Callable[[], T],
    traits: LayerTraits | None = None,
    place: Callable[[], CallDraws] | None = None,
) -> T:
    """Run ``call()`` with random generators seeded by ``seed()``, then restore the state of the generators."""
    # seed: function that returns the seed of this call
    # generator: generator of the call's device
    # again: function that repeats the call, if the first call unexpectedly drew without a seed
    # traits: record of the code. Default: `traits_of(code)`.
    # place: function that returns the position of the call in its run. Default: the call is outside of a run, and the
    # generators of Python and NumPy are ignored.
    generator.seed(seed)
    training = bool(getattr(code, "training", True))
    known = traits_of(code) if traits is None else traits
    if known.draws.get(training) is not False or known.generators.get(training):
        return _alone(call, again, code, known, training, seed(), None if place is None else place())
    before = generator.cpu_state
    if before is None:
        with generator_lock():
            before = ProcessState()
    generator.cpu_state = None
    result = call()
    with generator_lock():
        if before.is_now():
            generator.cpu_state = before
            return result
        if before.is_moved():  # by runs of other threads
            return result
        after = ProcessState()
        has_drawn = before.mark != after.mark
        torch.set_rng_state(before.state)
    known.generators.pop(training, None)
    where = None if place is None else place()
    # Other threads of the program may have drawn, so no error is raised; the next call is watched.
    if not has_drawn and (where is None or not where.is_repeatable()):
        return result
    known.draws.pop(training, None)  # if the repetition is refused, the next call is seeded from its start
    generator.seed(seed)
    return _alone(again, again, code, known, training, seed(), where)


def _alone(
    call: Callable[[], T],
    again: Callable[[], T],
    code: Any,
    known: LayerTraits,
    training: bool,
    seed: int,
    place: CallDraws | None,
) -> T:
    """Return the result of ``call()`` with seeded generators, while no other thread draws random numbers."""

    def seeded(call: Callable[[], T], generators: Sequence[Generator]) -> tuple[T, set[int] | None]:
        # `(result, None)` is returned if the call used a generator of Python or NumPy that is not in `generators`.
        outside = torch.get_rng_state()
        found = [(one, one.get()) for one in generators]
        try:
            torch.default_generator.manual_seed(seed)
            begun = [] if place is None else [(one, place.begin(one, seed)) for one in generators]
            before = ProcessState()
            result = call()
            after = ProcessState()
            drew = before.mark != after.mark
            known.draws[training] = known.draws.get(training, False) or drew
            if place is None:
                return result, set()
            if drew:
                place.draws.has_drawn = True
            if before.others != after.others and _shared_keys().isdisjoint(one.key for one in generators):
                return result, None
            return result, {one.key for one, state in begun if place.end(one, state)}
        finally:
            for one, state in found:
                one.set(state)
            torch.set_rng_state(outside)

    with generator_alone():
        generators = () if place is None else known.generators.get(training)
        if generators:  # the user may have replaced a generator of the layer
            generators = (*held_generators(code), *(one for one in generators if one.key in _shared_keys()))
        if generators is not None:
            result, used = seeded(call, generators)
            if used is not None:
                return result
            if place is None or not place.is_repeatable():
                known.generators.pop(training, None)
                return result
            call = again
        held, shared = held_generators(code), process_generators()
        result, used = seeded(call, (*held, *shared))
        # The next call may draw from a generator of the layer.
        known.generators[training] = (*held, *(shared if used and used & {one.key for one in shared} else ()))
        return result


def _shared_keys() -> set[int]:
    return {one.key for one in process_generators()}


class VisitGenerator:
    """The random generator of an accelerator: seeded for each layer call, and restored after a pipeline stage."""

    # draws: draws of the run, which records whether a call drew from the device's generator
    # cpu_state: state of the CPU's generator after the last call; the stage sets it to `None` before other user code

    def __init__(self, device: torch.device, draws: Draws | None = None) -> None:
        self._device, self._draws = device, draws
        self._generator: Any = None
        self._outside: torch.Tensor | None = None
        self._seeded: torch.Tensor | None = None
        self.cpu_state: ProcessState | None = None

    def seed(self, seed: Callable[[], int]) -> None:
        if self._outside is None:
            if self._device.type == "cpu":
                return
            self._generator = _generator_of(self._device)
            self._outside = self._generator.get_state()
        self._look()
        self._generator.manual_seed(seed())
        self._seeded = None if self._draws is None or self._draws.has_drawn else self._generator.get_state()

    def of_device(self) -> Any:
        return None if self._device.type == "cpu" else _generator_of(self._device)

    def _look(self) -> None:
        draws, seeded = self._draws, self._seeded
        if draws is not None and seeded is not None and not torch.equal(seeded, self._generator.get_state()):
            draws.has_drawn = True  # never set to False here: another device may have drawn during the comparison
        self._seeded = None

    def restore(self) -> None:
        if self._outside is not None:
            self._look()
            self._generator.set_state(self._outside)
            self._outside = None


def _generator_of(device: torch.device) -> Any:
    # the generator's own methods are several times faster than the functions of the module, such as `get_rng_state`
    library = torch.get_device_module(device)
    generators = getattr(library, "default_generators", None)
    return _ModuleGenerator(library, device) if generators is None else generators[device.index]


class _ModuleGenerator:
    """The default generator of an accelerator whose module has no ``default_generators``."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library, self._device = library, device

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._library.get_rng_state(self._device)
        return state

    def manual_seed(self, seed: int) -> None:
        with torch.accelerator.device_index(self._device.index):
            self._library.manual_seed(seed)

    def set_state(self, state: torch.Tensor) -> None:
        self._library.set_rng_state(state, self._device)


@dataclasses.dataclass(eq=False)
class CallState:
    """The kind of one layer call, such as a recomputation, and the data that the layer saves for its recomputation."""

    # a first forward, a forward without recomputation, or a recomputation
    kind: Literal["none", "forward", "fused", "recompute"]
    data: tuple[Any, ...] | None = None  # data that the layer saves in its first forward, and gets in the recomputation

    def restart_generators(self) -> None: ...


class _Current(threading.local):
    call = CallState("none")


CURRENT = _Current()


def save_for_recompute(*data: Any) -> None:
    """Save data in a layer's ``forward`` for the recomputation of the same call, at most once per layer call.

    The function does nothing if no recomputation will follow: if gradients are disabled, or outside of a pipeline.

    Args:
        *data: any objects; tensors must not require gradients.

    Raises:
        StageError: data was already saved in this layer call, or a tensor requires a gradient.

    >>> from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
    >>> class Noise(torch.nn.Module):  # draws once; the recomputed forward reads what was drawn
    ...     def forward(self, x):
    ...         if doing_recompute():
    ...             (noise,) = get_recompute_data()
    ...         else:
    ...             noise = torch.rand(x.shape)
    ...             save_for_recompute(noise)
    ...         return x + noise
    >>> model = RoundPipe(torch.nn.Sequential(torch.nn.Linear(2, 2), Noise()), devices="virtual:2")
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([2, 2])
    >>> model.close()
    """
    call = CURRENT.call
    if call.kind != "forward" or not torch.is_grad_enabled():
        return
    if call.data is not None:
        raise StageError("save_for_recompute was already called in this layer call. Pass all data in one call.")
    for leaf in pytree.tree_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise StageError(
                f"save_for_recompute: a tensor of shape {tuple(leaf.shape)} requires a gradient, which would not "
                "flow through the recomputation. Save tensor.detach()."
            )
    call.data = data


def restart_generators() -> None:
    CURRENT.call.restart_generators()


def doing_recompute() -> bool:
    """Return whether the current call of a layer is a recomputation for the backward.

    >>> doing_recompute()  # outside of a pipeline
    False
    """
    return CURRENT.call.kind == "recompute"


def get_recompute_data() -> tuple[Any, ...]:
    """Return, in a recomputation, the data that :func:`save_for_recompute` saved in the forward of the same layer call.

    Returns:
        The arguments of :func:`save_for_recompute`, as a tuple.

    Raises:
        StageError: no recomputation is under way, or the layer saved nothing.

    >>> get_recompute_data()  # outside of a pipeline; :func:`save_for_recompute` has an example of a layer
    Traceback (most recent call last):
        ...
    roundpipe_runtime.errors.StageError: ...
    """
    call = CURRENT.call
    if call.kind != "recompute":
        raise StageError(
            "get_recompute_data: no recomputation is running. Check doing_recompute() first:\n"
            "    if doing_recompute():\n"
            "        (mask,) = get_recompute_data()"
        )
    if call.data is None:
        raise StageError("get_recompute_data: the first forward of this layer saved nothing with save_for_recompute.")
    return call.data
