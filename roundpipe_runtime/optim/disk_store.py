"""Keep parameters, gradients, master weights and optimizer state on a disk; a few layers are in memory at a time.

The optimizer updates one layer at a time, bitwise identical to a step for all layers
(:mod:`roundpipe_runtime.optim.parts`). An optimizer that cannot update one layer at a time raises an error.
"""

# run     forward: layer 0, 1, ... parameters are read | backward: ..., 1, 0 parameters are read, gradients written
# step    layer 0: all that its update needs is read, the update runs, all is written | layer 1 ...

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor, nn

from yobx_flatten.core.private_names.of_torch import norm_and_scaling

from ..device.disk import DiskMemory, disk_of, in_groups, page_out, passing
from ..device.pinning import is_dense
from ..device.protocol import Event
from ..errors import ConfigError
from .layer_contents import LayerContents, scan
from .parameters import AtHand, Landed, ParameterStore, is_watched
from .parts import LandingQueue, OptimizerParts, can_step_in_parts, state_share
from .torch_steps import Optimizer, take_over_always

# Smallest tensor of an optimizer, in bytes, that is kept on the disk. Smaller ones, like step counts, are read often.
_SMALLEST = 4096


class DiskStore(ParameterStore):
    has_numbers_at_hand = False  # reading a few numbers of a parameter reads a page of the disk for each

    def __init__(
        self, model: nn.Module, memory: DiskMemory, layers: Sequence[nn.Module], optim_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, optim_dtype)
        self.memory, self._layers = memory, list(layers)
        self._states: dict[int, list[weakref.ref[Tensor]]] = {}
        self._landing = LandingQueue("disk landing")
        self._has_stepped = False  # since parameters and master weights were compared
        needed = 0  # bytes of parameters, master weights and gradients, each in whole pages
        for name, parameter in model.named_parameters():
            can_move = _can_move(parameter)
            if parameter.requires_grad and parameter.numel() and not can_move:
                raise ConfigError(
                    f'host="disk:{memory.folder}": {name!r} is trainable, but a {type(parameter.data).__name__} '
                    f"{tuple(parameter.shape)} on {parameter.device} cannot be stored in a file. Train in memory:\n    "
                    'RoundPipe(model, host="memory")'
                )
            own = _paged(parameter.nbytes) if can_move and not memory.holds(parameter) else 0
            wide = _paged(parameter.numel() * self.gradient_dtype(parameter).itemsize) if parameter.requires_grad else 0
            needed += own + (1 if self.gradient_dtype(parameter) == parameter.dtype else 2) * wide
        memory.reserve(needed)
        self._move()
        memory.acquire()
        clip_by_parts()
        take_over_always(_take, first=True)
        _STORES.add(self)

    def _move(self) -> None:
        """Move parameters that are in memory to the disk, such as parameters that the user has replaced."""
        for name, parameter in self.model.named_parameters():
            if _can_move(parameter) and not self.memory.holds(parameter):
                parameter.data = self.memory.copy(("weight", name), parameter)
                self.memory.leave([parameter])

    def _copier(self) -> Callable[[nn.Parameter, torch.dtype], Tensor]:
        memory = self.memory

        def copy(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
            if not _can_move(parameter):  # such as an empty parameter
                return parameter.detach().to(dtype, copy=True)
            made = memory.copy(("master", id(parameter)), parameter, dtype)
            memory.leave([parameter], written=False)
            memory.leave([made])
            return made

        return copy

    def at_hand(self, contents: Sequence[LayerContents], order: Sequence[int]) -> AtHand:
        return LayersAtHand(self.memory, order, lambda layer: _on_host(contents[layer]), written=False)

    def land(self, layer: int, gradients: Landed) -> Landed:
        """Start to write a layer's dense gradients to the disk; return each gradient and an event to wait for it."""
        moves: collections.deque[tuple[Tensor, Event, Tensor]] = collections.deque()
        places: dict[nn.Parameter, Tensor] = {}
        found: Landed = {}
        for parameter, (gradient, ready) in gradients.items():
            if is_dense(gradient):
                places[parameter] = self.memory.next_empty(("gradient", layer, id(parameter)), gradient)
                moves.append((gradient, ready, places[parameter]))
            else:
                found[parameter] = gradient, ready
        gradients.clear()

        def move_down() -> None:
            while moves:  # popped, so that memory is free as soon as a gradient is on the disk
                gradient, ready, place = moves.popleft()
                ready.result()
                self.memory.write(place, gradient)
                self.memory.leave([place])

        landed = self._landing.submit(move_down)
        return found | {parameter: (place, landed) for parameter, place in places.items()}

    def wait_landed(self) -> None:
        self._landing.wait()

    def add_gradients(self, gradients: Iterable[Mapping[nn.Parameter, Tensor]]) -> None:
        if any(is_watched(self._masters[n].tensor if n in self._masters else p) for n, p in self._listed()):
            super().add_gradients(gradients)  # hooks see the gradients of all layers in one backward
            return
        for layer in gradients:
            held = dict(layer)
            for parameter, gradient in layer.items():
                if is_dense(gradient) and not self.memory.holds(gradient):
                    held[parameter] = self.memory.copy(("gradient", -1, id(parameter)), gradient)
            targets = self.targets(list(held))
            sums = [target.grad for target in targets if target.grad is not None]
            super().add_gradients([held])
            self.memory.leave(filter(is_dense, [*held.values(), *sums]))

    def show_gradients(self) -> None:
        """Do nothing: the gradients stay on the disk, because copies might not fit into memory."""

    def owns(self, optimizer: Optimizer) -> bool:
        mine = {id(parameter) for _, parameter in self._listed()}
        mine |= {id(master.tensor) for master in self._masters.values()}
        return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])

    def take_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        """Run the optimizer step layer by layer; return an optimizer whose step does nothing."""
        if not self.owns(optimizer):
            return super().take_step(optimizer, args, kwargs)
        has_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
        if has_closure or not can_step_in_parts(optimizer):
            reason = "was given a closure" if has_closure else "does not update one parameter after the other"
            remedy = "Use AdamW without a closure" if has_closure else "Use AdamW, for example"
            raise ConfigError(
                f'{type(optimizer).__name__} {reason}, but host="disk:{self.memory.folder}" updates one layer at a '
                f'time. {remedy}, or keep the model in memory:\n    RoundPipe(model, host="memory")'
            )
        contents = scan(self._layers)
        parts = OptimizerParts(optimizer, self.hold_state)
        new = [p for p in parts.parameters if p not in optimizer.state]
        if new:  # reserve space for their state, so that a full disk raises an error before any update
            share = state_share(optimizer)
            self.memory.reserve(sum(int(share * p.nbytes) + 2 * _paged(1) for p in new))
        left = {id(parameter) for parameter in parts.parameters}
        at_hand = self.updating(contents)
        for layer in contents:
            mine = left.intersection(map(id, self.targets(layer.parameters())))
            left -= mine
            if mine:
                with at_hand(layer.index):
                    parts.step(mine)
                    self.refresh(layer.parameters())
        parts.step(left)
        self._has_stepped = True
        return parts.finish()

    def updating(self, contents: Sequence[LayerContents]) -> AtHand:
        held = {layer.index: (_on_host(layer), self.targets(layer.parameters())) for layer in contents}

        def of_layer(layer: int) -> list[Tensor]:
            parameters, targets = held[layer]
            gradients = [target.grad for target in targets if target.grad is not None]
            refs = [ref for target in targets for ref in self._states.get(id(target), ())]
            states = [tensor for ref in refs if (tensor := ref()) is not None]
            return [*parameters, *targets, *filter(is_dense, gradients), *states]

        return LayersAtHand(self.memory, [layer.index for layer in contents], of_layer, written=True)

    def hold_state(self, target: Tensor, state: dict[str, Any]) -> None:
        keys = [key for key, value in state.items() if _is_state(value)]
        for key in keys:
            if not self.memory.holds(state[key]):
                state[key] = self.memory.copy(("state", id(target), key), state[key])
        self._states[id(target)] = [weakref.ref(state[key]) for key in keys]

    def publish(self, *, stepped: bool = False) -> None:
        """Make each parameter equal to its master weight, one parameter at a time."""
        stepped = (self.note_published() or stepped) and not self._has_stepped  # `take_step` has copied its results
        self._has_stepped = False
        self.take_gradients()
        self._move()
        for name, parameter in self._with_master():
            master = self._masters[name]
            is_left = master.agrees(parameter) and not stepped
            if not stepped:
                master.adopt(parameter)  # one at a time, because all at once would fill the memory
            master.agree(parameter, stepped=stepped)
            if not is_left:
                self.memory.leave([parameter, master.tensor])

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        for name, value in masters.items():
            super().load_masters({name: value})
            if name in self._masters:
                self.memory.leave([self._masters[name].tensor])
            page_out(value)

    def load_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, value in gradients.items():
            super().load_gradients({name: value})
            page_out(value)

    def freeze(self) -> None:
        raise ConfigError(
            "step(..., is_async=True) copies all parameters into memory, which may be too small for them with "
            f'host="disk:{self.memory.folder}". Step layer by layer:\n    model.step(step_fn, is_async="exact")'
        )

    def close(self) -> None:
        self._landing.close()
        self.memory.close()
        _STORES.discard(self)


_STORES: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _take(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
    for store in list(_STORES):
        if store.owns(optimizer):
            return store.take_step(optimizer, args, kwargs)
    return optimizer


def hold_on_disk(optimizer: Any, target: Tensor) -> None:
    """Move optimizer state to the disk if its parameter is on a disk, for example after loading a checkpoint."""
    state = getattr(optimizer, "state", {}).get(target)
    for store in list(_STORES):
        if state and store.memory.holds(target):
            loaded = [tensor for tensor in state.values() if _is_state(tensor)]
            store.hold_state(target, state)
            store.memory.leave([tensor for tensor in state.values() if _is_state(tensor)])
            for tensor in loaded:  # the loaded tensors may be mapped from a checkpoint file
                page_out(tensor)


def _on_host(contents: LayerContents) -> list[Tensor]:
    return [parameter for parameter in contents.parameters() if _can_move(parameter)]


def _can_move(parameter: Tensor) -> bool:
    data = parameter.data
    return type(data) is Tensor and data.device.type == "cpu" and data.numel() > 0 and is_dense(data)


def _is_state(value: Any) -> bool:
    return type(value) is Tensor and value.nbytes >= _SMALLEST and value.device.type == "cpu" and is_dense(value)


def _paged(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


@functools.cache
def clip_by_parts() -> None:
    """Make torch's ``clip_grad_norm_`` read gradients on a disk a few at a time, with bitwise identical results."""
    if (found := norm_and_scaling()) is None:  # another torch, which reads all gradients into memory at once
        return
    module, *names = found
    whole_norm, whole_scaling = (getattr(module, name) for name in names)

    @functools.wraps(whole_norm)
    def norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        # torch sorts tensors by device and dtype first, so only tensors of one device and dtype keep their order
        if len({(one.device, one.dtype) for one in given}) != 1 or all(disk_of(one) is None for one in given):
            return cast(Tensor, whole_norm(given, norm_type, error_if_nonfinite, foreach))
        groups, norms = in_groups(given), []
        with torch.no_grad():
            for number in passing(groups, written=False):
                norms += [torch.linalg.vector_norm(one, float(norm_type)) for one in groups[number]]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            total = whole_norm(given, norm_type, error_if_nonfinite, foreach)  # raises torch's error
        return total

    @functools.wraps(whole_scaling)
    def scale(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, *rest: Any, **how: Any
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = {id(one.grad): one for one in given if one.grad is not None}
        gradients = [one.grad for one in owners.values() if one.grad is not None]
        if all(disk_of(one) is None for one in gradients):
            whole_scaling(given, max_norm, total_norm, *rest, **how)
        elif torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0) == 1.0:
            whole_scaling([], max_norm, total_norm, *rest, **how)  # a factor of one changes nothing
        else:
            groups = in_groups(gradients)
            for number in passing(groups, written=True):
                whole_scaling([owners[id(one)] for one in groups[number]], max_norm, total_norm, *rest, **how)

    for name, by_parts in zip(names, (norm, scale), strict=True):
        setattr(module, name, by_parts)


class LayersAtHand:
    """Loads the tensors of a layer from the disk before the layer is used, and reads the next layer ahead."""

    # order: indices of the layers in the order of their use
    # written: whether the tensors may be changed while they are used

    def __init__(
        self, memory: DiskMemory, order: Sequence[int], tensors_of: Callable[[int], list[Tensor]], *, written: bool
    ) -> None:
        self._memory, self._order, self._tensors_of, self._written = memory, order, tensors_of, written
        self._places: dict[int, collections.deque[int]] = {}
        for place, layer in enumerate(order):
            self._places.setdefault(layer, collections.deque()).append(place)
        self._next = 0  # first place in the order that was not fetched
        self._ahead: dict[int, Future[None]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, layer: int) -> Iterator[None]:
        """Keep a layer's tensors in memory in the with block; threads of several devices may call this in parallel."""
        with self._lock:
            left = self._places.get(layer)
            place = left.popleft() if left else None
            here = None if place is None else self._ahead.pop(place, None)
            if place is not None:
                self._next = max(self._next, place + 1)
                while self._next < len(self._order):  # fetch the next layer that has tensors
                    number, self._next = self._next, self._next + 1
                    if tensors := self._tensors_of(self._order[number]):
                        self._ahead[number] = self._memory.fetch(tensors)
                        break
        if here is None or here.cancel():  # a read that has not started is faster here than behind other reads
            self._memory.read(self._tensors_of(layer))
        else:
            here.result()
        try:
            yield
        finally:
            self._memory.leave(self._tensors_of(layer), written=self._written)
