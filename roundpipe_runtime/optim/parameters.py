"""Parameters on the host, their gradients, and their master weights in the optimizer's dtype.

The user's ``nn.Parameter`` is the host copy, and its ``grad`` is the gradient buffer, unless the optimizer works in
another dtype. Then the parameter has a *master weight* of that dtype: gradients are added to the master weight, the
optimizer updates it, and :meth:`ParameterStore.publish` rounds it into the parameter. If the parameter itself was
changed (``load_state_dict``, an in-place edit, ``.data``), the master weight is copied from the parameter. A master
weight takes no memory while its parameter is frozen. The ``grad`` of the parameter is the gradient of its master
weight, for training loops that read, clip or clear gradients.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..device.composite import StateSlot, check_gradient, parts_of, states_of
from ..device.pinning import PinnedMemory
from ..device.transfer import sent_dtype, sent_nbytes, widen
from ..device.worker import free_after_fork
from ..errors import ConfigError, StageError
from .parts import InMemory, Mark
from .torch_steps import dtype_of_gradient, install, number_of_steps, watch_originals

# Whether a parameter was written, and whether torch counted the write.
Change: TypeAlias = Literal["none", "counted", "uncounted"]

# Which weights an optimizer updates, and when.
Update: TypeAlias = Literal["masters", "in_place", "in_backward"]

# Slices of a table that are on a device at once: one is computed with, and one is copied.
_SLICES_AT_ONCE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSlot:
    """The entry of a parameter in a module of a layer: ``owner._parameters[name]``."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


@dataclasses.dataclass(frozen=True, slots=True)
class BufferSlot:
    """The entry of a buffer in a module of a layer: ``owner._buffers[name]``."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor

    def store(self, value: torch.Tensor) -> None:
        """Set the buffer's value, in place where that is possible, so that other references to the tensor see it."""
        same = value.shape == self.tensor.shape and value.dtype == self.tensor.dtype
        if same and self.owner._buffers.get(self.name) is self.tensor:
            with torch.no_grad():
                self.tensor.copy_(value)
        else:
            self.owner._buffers[self.name] = value


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The rule by which a large matrix of a layer is copied to a device in parts."""

    slice_rows: int | None  # rows of a slice; `None` if products are computed with the whole matrix
    is_head: bool = False  # whether the layer computes products with the matrix; otherwise it looks up rows


@dataclasses.dataclass(frozen=True, slots=True)
class LayerContents:
    """Parameters and buffers of a layer on the host."""

    index: int
    module: nn.Module
    slots: tuple[ParameterSlot, ...]  # a parameter may have several places
    buffers: tuple[BufferSlot, ...]
    states: tuple[StateSlot, ...]  # places of objects that belong to quantized weights
    # lock that is held while device copies are in these places; layers with a common module have the same lock
    lock: threading.RLock = dataclasses.field(repr=False)
    # tables, by the ``id()`` of the parameter
    tables: Mapping[int, Table] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """The description of the layer in errors."""
        return f"layer {self.index} ({type(self.module).__name__})"

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, each once."""
        return list({id(slot.parameter): slot.parameter for slot in self.slots}.values())

    @property
    def trains_tables(self) -> bool:
        """Whether a parameter that is copied in parts is trained."""
        return any(p.requires_grad for p in self.parameters() if id(p) in self.tables)

    def parts(self) -> list[torch.Tensor]:
        """Return the tensors to copy for the parameters: plain parameters, and the parts of quantized parameters."""
        return parts_of([*self.parameters(), *(state.value for state in self.states)])

    def nbytes(self) -> int:
        """Return the bytes of parameters and buffers on a device."""
        buffers = sum(buffer.tensor.element_size() * buffer.tensor.numel() for buffer in self.buffers)
        return sum(map(self.nbytes_of, self.parts())) + buffers

    def nbytes_of(self, part: torch.Tensor) -> int:
        """Return the bytes of a tensor on a device; of a large table, only the bytes of the slices in use."""
        table = self.tables.get(id(part))
        if table is None:
            return sent_nbytes(part)
        rows = min(_SLICES_AT_ONCE * (table.slice_rows or 0), part.shape[0]) if table.is_head else 0
        return rows * part.shape[1] * sent_dtype(part).itemsize


# A module may be part of two pipelines, so locks are stored by module.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = free_after_fork(threading.Lock())
if hasattr(os, "register_at_fork"):  # a thread of the parent process may have held a lock
    os.register_at_fork(after_in_child=_LOCKS.clear)


def scan(layers: Sequence[nn.Module]) -> list[LayerContents]:
    """Return the contents of each layer as they are now: parameters may have been replaced since the last run."""
    seen: dict[int, int] = {}  # the first layer of each module that holds tensors, by the ``id()`` of the module
    first = list(range(len(layers)))
    found = []
    for index, layer in enumerate(layers):
        slots, buffers, states = [], [], []
        for module in layer.modules():
            held = [(name, p) for name, p in module._parameters.items() if p is not None]
            buffered = [(name, b) for name, b in module._buffers.items() if b is not None]
            if held or buffered:
                earlier = seen.setdefault(id(module), index)
                first[index] = min(first[index], first[earlier])
            slots += [ParameterSlot(module, name, _materialised(p, name, index, module)) for name, p in held]
            buffers += [BufferSlot(module, name, b) for name, b in buffered]
            states += states_of(module)
        found.append((layer, tuple(slots), tuple(buffers), tuple(states)))
    with _LOCKS_LOCK:
        locks = [_LOCKS.setdefault(layers[number], threading.RLock()) for number in first]
    return [LayerContents(i, *contents, lock) for i, (contents, lock) in enumerate(zip(found, locks, strict=True))]


def _materialised(parameter: nn.Parameter, name: str, index: int, module: nn.Module) -> nn.Parameter:
    if is_lazy(parameter):
        raise StageError(
            f"layer {index}: {name!r} of {type(module).__name__} has no shape yet. Run the model once on a small "
            "batch before it is wrapped, so that lazy layers know their sizes."
        )
    return parameter


def check_gradients(layers: Iterable[LayerContents]) -> None:
    """Raise an error for a parameter that was resized after it got a gradient."""
    for layer in layers:
        for slot in layer.slots:
            check_gradient(f"{layer.title}: {slot.name!r}", slot.parameter)


def resized_late() -> ConfigError:
    """Return the error for resizing parameters after an optimizer has got copies of them."""
    return ConfigError(
        "The optimizer works on copies of the parameters (optim_dtype), which have the old size. Resize first:\n    "
        "model.resize_token_embeddings(...)\n    pipeline = wrap_model_to_roundpipe(model, optim_dtype=...)"
    )


class ParameterStore(InMemory):
    """Holds master weights and gradients of a model's parameters, and the copies that stages read during a step."""

    # optim_dtype: dtype in which the optimizer works; `None` for the dtype of each parameter
    # kept_dtype: dtype of the gradients of master weights between a run and the step; `None` for the same as the weight

    # whether reading some values of all parameters is fast, so that writes by way of `data` can be detected
    has_numbers_at_hand = True

    # whether trained parameters have the dtype of the optimizer themselves, and are rounded when copied to devices
    is_in_place = False

    def __init__(self, model: nn.Module, optim_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.optim_dtype = optim_dtype
        self.kept_dtype: torch.dtype | None = None
        self._masters: dict[str, _Master] = {}
        self._shadows: dict[int, torch.Tensor] = {}
        self._before: list[tuple[str, nn.Parameter]] = []
        self._looks = 0
        self._is_written_by_data = False
        install()
        if optim_dtype is not None:
            watch_originals(self)
        self._steps = number_of_steps()

    def named(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter's name and the tensor that the optimizer updates: its master weight, or itself."""
        names = self._names()
        for name, parameter in self._listed():
            if names[id(parameter)] == name or not remove_duplicate:
                yield f"{prefix}.{name}" if prefix else name, self._target(names[id(parameter)], parameter)

    def add_gradients(self, gradients: Iterable[Mapping[nn.Parameter, torch.Tensor]]) -> None:
        """Add gradients of layers to the gradient buffers of the parameters, in the given order."""
        # gradients: one mapping per layer, last layer first, so that the order of sums does not depend on the plan
        names = self._names() if self.optim_dtype else {}
        watched: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = []
        for layer in gradients:
            for parameter, gradient in layer.items():
                name = names.get(id(parameter))
                target = parameter if name is None else self._target(name, parameter)
                if name in self._masters:
                    found.append((self._masters[name], parameter))
                    self._masters[name].take(parameter, adds=True)
                if is_watched(target):
                    watched.append((target, gradient.to(dtype_of_gradient(target))))
                else:
                    _accumulate(target, gradient)
        if watched:  # in one backward, so that hooks see the sum over layers that share a parameter
            torch.autograd.backward([target for target, _ in watched], [gradient for _, gradient in watched])
        for master, parameter in found:
            master.show(parameter)

    def take_gradients(self, *, hides: bool = False) -> None:
        """Copy changes that user code made to ``grad`` of parameters into the gradients of master weights."""
        for name, parameter in self._with_master():
            if self._masters[name].take(parameter) and not hides:
                self._masters[name].show(parameter)

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which gradients of a parameter are summed."""
        return self._dtype(parameter)

    def dtype_between(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the gradient of a parameter between a run and the step."""
        summed = self._dtype(parameter)
        return summed if summed == sent_dtype(parameter) else self.kept_dtype or summed

    def landing_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of a parameter is copied from a device."""
        return self.dtype_between(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and of master weights."""
        held = [parameter for _, parameter in self._listed()] + [master.tensor for master in self._masters.values()]
        for tensor in held:
            if set_to_none:
                tensor.grad = None
                _Master.shown.pop(tensor, None)
            elif tensor.grad is not None:
                tensor.grad = tensor.grad.detach().zero_()

    def publish(self, *, stepped: bool = False) -> None:
        """Make parameters and master weights equal; if a parameter itself was changed, its values are used."""
        # stepped: whether an optimizer has just stepped; steps of torch's optimizers are also detected
        stepped = self.note_published() or stepped
        self.take_gradients()
        if self.is_in_place:
            self._widen(self.model.parameters())
        if not stepped:
            self.adopt()
        for name, parameter in self._with_master():
            self._masters[name].agree(parameter, stepped=stepped)

    def note_published(self) -> bool:
        """Record that parameters equal master weights; report whether an optimizer has stepped since the last call."""
        before, self._steps = self._steps, number_of_steps()
        return self._steps != before

    def adopt(self) -> None:
        """Copy each parameter that was changed outside of an optimizer into its master weight.

        To detect writes by way of ``data``, some values of each parameter are compared. All values are compared at
        calls 1, 2, 4, 8, ..., and at all calls after such a write was detected.
        """
        is_ahead = self._steps != number_of_steps()  # a step was not copied to the parameters yet
        compares_all = not is_ahead and (self._is_written_by_data or self._looks & (self._looks - 1) == 0)
        self._looks += not is_ahead
        if self._adopt(compares_all=compares_all) and not is_ahead and not self._is_written_by_data:
            self._is_written_by_data = True
            self._adopt(compares_all=True)

    def _adopt(self, *, compares_all: bool) -> bool:
        """Update master weights of changed parameters; report whether torch had not counted a write."""
        compares_all &= self.has_numbers_at_hand
        changes = [self._masters[name].adopt(p, compares_all=compares_all) for name, p in self._with_master()]
        return "uncounted" in changes

    def show_gradients(self) -> None:
        """Copy the gradients of master weights to their parameters, in the dtype of the parameters."""
        for name, parameter in self._with_master():
            self._masters[name].take(parameter)
            self._masters[name].show(parameter, copies=True)

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the master weights by name, except master weights of parameters that were always frozen."""
        return {name: master.tensor.detach() for name, master in self._masters.items() if master.is_filled}

    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Load master weights from :meth:`masters`, except for parameters that have the optimizer's dtype."""
        for name, parameter in self.model.named_parameters():
            if name in masters and self._dtype(parameter) != parameter.dtype:
                self._target(name, parameter)
                self._masters[name].set(parameter, masters[name])

    def load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients, by the names of parameters, to the gradient buffers."""
        self.add_gradients([{p: gradients[name] for name, p in self.model.named_parameters() if name in gradients}])

    def _copier(self) -> Callable[[nn.Parameter, torch.dtype], torch.Tensor]:
        """Return a function that copies a parameter for its master weight; the function must not refer to the store."""
        return _copy_in_memory

    # -- copies that stages read during an asynchronous step ----------------------------------------------------------

    def source(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stages copy to devices: the parameter, or its copy while a step changes it."""
        return self._shadows.get(id(parameter), parameter)

    def freeze(self) -> None:
        """Let stages read copies of the parameters, except frozen parameters and parameters with a master weight."""
        self.note_names()
        missing = {
            id(parameter): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if self._needs_shadow(name) and parameter.requires_grad and id(parameter) not in self._shadows
        }
        # a clone of a pinned tensor is not pinned
        memory = PinnedMemory({key: tensor.nbytes for key, tensor in missing.items() if tensor.is_pinned()})
        for key, tensor in missing.items():
            place = memory.empty_like(key, tensor)
            self._shadows[key] = tensor.clone() if place is None else place.copy_(tensor)

    def note_names(self) -> None:
        """Remember the parameters until :meth:`thaw`, because modules hold device copies instead during a run."""
        self.take_gradients(hides=True)  # a background step frees each gradient after its use
        self._before = list(self.model.named_parameters(remove_duplicate=False))

    def targets(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the tensor that the optimizer updates for each parameter: its master weight, or the parameter."""
        names = self._names()
        return [self._target(names[id(p)], p) if id(p) in names else p for p in parameters]

    def refresh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update the copies of these parameters that stages read."""
        names = self._names()
        for parameter in parameters:
            name = names.get(id(parameter), "")
            if name in self._masters:
                self._masters[name].agree(parameter, stepped=True)
            elif id(parameter) in self._shadows:
                self._shadows[id(parameter)].copy_(parameter.detach())

    def thaw(self) -> None:
        """Drop the copies, so that stages read the parameters themselves again."""
        self._shadows.clear()
        self._before = []

    def _needs_shadow(self, name: str) -> bool:
        return name not in self._masters

    def _listed(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters, during a run from before the run, because modules may contain device copies."""
        return self._before or list(self.model.named_parameters(remove_duplicate=False))

    def _names(self) -> dict[int, str]:
        """Return the first name of each parameter, by the ``id()`` of the parameter."""
        return {id(parameter): name for name, parameter in reversed(self._listed())}

    def why_not_clipped(self, parameters: Sequence[torch.Tensor]) -> str | None:
        """Return why gradients of these parameters cannot be clipped; ``None`` if clipping works."""
        return None

    def originals(self) -> dict[int, torch.Tensor]:
        """Return the master weights of the model's parameters, by the ``id()`` of each parameter."""
        return {id(parameter): self._masters[name].tensor for name, parameter in self._with_master()}

    def _with_master(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self._masters:
            yield from ((name, p) for name, p in self._listed() if name in self._masters)

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.optim_dtype if self.optim_dtype and parameter.is_floating_point() else parameter.dtype

    def _widen(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            widen([parameter], self.optim_dtype or parameter.dtype)
            kept = self.dtype_between(parameter)
            if parameter.requires_grad and kept != dtype_of_gradient(parameter):
                parameter.grad_dtype = kept

    def _target(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if self.is_in_place:
            self._widen([parameter])
            return parameter
        if self._dtype(parameter) == parameter.dtype:
            self._masters.pop(name, None)
            return parameter
        if name not in self._masters:
            dtype, kept = self._dtype(parameter), self.dtype_between(parameter)
            self._masters[name] = _Master(
                parameter, dtype, kept, self._copier(), has_numbers_at_hand=self.has_numbers_at_hand
            )
        self._masters[name].wake(parameter)
        return self._masters[name].tensor


def _copy_in_memory(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    return parameter.detach().to(dtype, copy=True)


class _Master:
    """The master weight of a parameter, and the versions of both tensors when they last had the same values.

    The version of a tensor does not show all writes, because torch's fused optimizers write without a new version. So
    the master weight also counts as changed after a step. While the parameter is frozen, the tensor has the shape of
    the parameter and the memory of one NaN, because an optimizer may already hold the tensor.
    """

    # shown: the gradient that each parameter shows, with its master weight; `None` for copies
    shown: ClassVar[Any] = WeakTensorKeyDictionary()

    def __init__(
        self,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        kept: torch.dtype,
        copy: Callable[[nn.Parameter, torch.dtype], torch.Tensor],
        *,
        has_numbers_at_hand: bool,
    ) -> None:
        self._copy = copy
        self._has_numbers_at_hand = has_numbers_at_hand
        nothing = torch.full((), float("nan"), dtype=dtype, device=parameter.device).expand(parameter.shape)
        self.tensor = nn.Parameter(nothing, requires_grad=False)
        if kept != dtype:
            self.tensor.grad_dtype = kept
        self.is_filled = False
        self._key = weakref.ref(self)
        self._note(parameter)
        self.wake(parameter)

    def wake(self, parameter: nn.Parameter) -> None:
        """Freeze or unfreeze the master weight like the parameter, and copy the values of a trainable parameter."""
        if parameter.requires_grad and not self.is_filled:
            self._fill(parameter)
        if self.tensor.requires_grad != parameter.requires_grad:
            self.tensor.requires_grad_(parameter.requires_grad)

    def _fill(self, parameter: nn.Parameter) -> None:
        self.tensor.data = self._copy(parameter, self.tensor.dtype)
        self.is_filled = True
        self._note(parameter)

    def show(self, parameter: nn.Parameter, *, copies: bool = False) -> None:
        """Set ``grad`` of the parameter to the gradient of the master weight, or to a copy in the parameter's dtype."""
        gradient = self.tensor.grad
        if gradient is not None and gradient.shape == parameter.shape and parameter.is_leaf:
            shown = gradient.to(parameter.dtype, copy=True) if copies else gradient
            parameter.grad_dtype = None  # allows any dtype
            parameter.grad, self.shown[parameter] = shown, (None if copies else self._key, shown)

    def take(self, parameter: nn.Parameter, *, adds: bool = False) -> bool:
        """Copy changes of the parameter's ``grad`` to the master weight, clear ``grad``, and report if it was set."""
        # adds: whether a gradient that the caller has set is added
        owner, shown = self.shown.get(parameter, (None, None))
        found, is_mine = parameter.grad if parameter.is_leaf else None, owner is self._key
        if is_mine and found is not shown and self.tensor.grad is shown:  # replaced, or cleared
            self.tensor.grad = None if found is None else found.to(dtype_of_gradient(self.tensor))
        elif adds and found is not None and found is not shown:
            _accumulate(self.tensor, found)
        elif not is_mine:
            return False
        parameter.grad = None
        self.shown.pop(parameter, None)
        return is_mine

    def agrees(self, parameter: nn.Parameter) -> bool:
        return not self.is_filled or (self._change(parameter) == "none" and self.tensor._version == self._version)

    def agree(self, parameter: nn.Parameter, *, stepped: bool) -> None:
        self.wake(parameter)
        if not self.is_filled or (stepped and self.adopt(parameter) != "none"):
            return
        if stepped or self.tensor._version != self._version:
            with torch.no_grad():
                parameter.copy_(self.tensor)
            self._note(parameter)

    def adopt(self, parameter: nn.Parameter, *, compares_all: bool = False) -> Change:
        change = self._change(parameter) if self.is_filled else "none"
        if change == "none" and compares_all and self.is_filled and self.tensor._version == self._version:
            change = "none" if torch.equal(self.tensor.detach().to(parameter.dtype), parameter) else "uncounted"
        if change != "none":
            self.set(parameter, parameter)
        return change

    def _change(self, parameter: nn.Parameter) -> Change:
        if self._mark.is_counted(parameter):
            return "counted"
        return "none" if self._mark.has_numbers(parameter) else "uncounted"

    def set(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if not self.is_filled:
            self._fill(parameter)
        if value.shape != self.tensor.shape:
            raise resized_late()
        with torch.no_grad():
            self.tensor.copy_(value)
        self._note(parameter)

    def _note(self, parameter: nn.Parameter) -> None:
        """Note that parameter and master weight have the same values."""
        self._mark = Mark.of(parameter, with_numbers=self._has_numbers_at_hand)
        self._version = self.tensor._version


def _accumulate(target: nn.Parameter, gradient: torch.Tensor) -> None:
    gradient = gradient.to(dtype_of_gradient(target))
    target.grad = gradient if target.grad is None else added(target.grad, gradient)


def added(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, in the memory of one of them."""
    if total.layout != torch.strided and gradient.layout == torch.strided:
        return gradient.add_(total)  # torch adds sparse to dense tensors, but not dense to sparse
    return total.add_(gradient)


def is_watched(target: torch.Tensor) -> bool:
    """Return whether autograd must accumulate the gradient, because the tensor has hooks or a graph."""
    return not target.is_leaf or bool(target._backward_hooks) or bool(target._post_accumulate_grad_hooks)
