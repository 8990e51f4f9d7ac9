"""Store parameters on the host, their gradients, and their master weights in the optimizer's dtype.

The user's ``nn.Parameter`` is the host copy of a parameter, and its ``grad`` is the gradient buffer. If the optimizer
works in another dtype, the parameter has a *master weight* of the optimizer's dtype. The optimizer updates the master
weight, and :meth:`ParameterStore.publish` rounds the new value into the parameter. If the user changed the parameter
(``load_state_dict``, an in-place edit, ``.data``), the master weight is copied from the parameter. A master weight
takes no memory until its parameter is trainable. The ``grad`` of a parameter with a master weight is the gradient of
the master weight, so that training loops can read, clip or clear this gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..device.pinning import PinnedMemory
from ..device.protocol import Event
from ..device.transfer import sent_dtype, widen
from ..errors import ConfigError
from .layer_contents import LayerContents
from .parts import Mark, widened
from .torch_steps import Optimizer, dtype_of_gradient, install, number_of_steps, watch_originals

# Context manager that keeps the tensors of a layer in memory.
AtHand: TypeAlias = Callable[[int], AbstractContextManager[None]]
# Gradients on the host, with events for their completion.
Landed: TypeAlias = dict[nn.Parameter, tuple[torch.Tensor, Event]]
# Whether a parameter was written, and whether torch counted the write.
Change: TypeAlias = Literal["none", "counted", "uncounted"]

Update: TypeAlias = Literal["masters", "in_place", "in_backward"]  # which weights an optimizer updates, and when


def resized_late() -> ConfigError:
    return ConfigError(
        "Parameters cannot be resized now, because the tensors of the optimizer have the old size. Resize first:\n    "
        "model.resize_token_embeddings(...)\n    pipeline = wrap_model_to_roundpipe(model, optim_dtype=...)"
    )


class ParameterStore:
    """Stores a model's master weights and gradients, and copies of parameters for stages during an optimizer step."""

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
        self._looks, self._is_written_by_data = 0, False
        install()
        if optim_dtype is not None:
            watch_originals(self)
        self._steps = number_of_steps()

    def named(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter name with the tensor that the optimizer updates: the master weight, or the parameter."""
        names = self._names()
        for name, parameter in self._listed():
            if names[id(parameter)] == name or not remove_duplicate:
                yield f"{prefix}.{name}" if prefix else name, self._target(names[id(parameter)], parameter)

    def add_gradients(self, gradients: Iterable[Mapping[nn.Parameter, torch.Tensor]]) -> None:
        """Add gradients of layers to ``grad`` of the parameters or of their master weights, in the given order."""
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
        """Return the dtype in which a parameter's gradients are summed, and in which the optimizer updates it."""
        return self.optim_dtype if self.optim_dtype and parameter.is_floating_point() else parameter.dtype

    def dtype_between(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which a gradient is stored between the backward and the optimizer step."""
        summed = self.gradient_dtype(parameter)
        return summed if summed == sent_dtype(parameter) else self.kept_dtype or summed

    def landing_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which a gradient is copied from a device to the host."""
        return self.dtype_between(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        held = [parameter for _, parameter in self._listed()] + [master.tensor for master in self._masters.values()]
        for tensor in held:
            if set_to_none:
                tensor.grad = None
                _Master.shown.pop(tensor, None)
            elif tensor.grad is not None:
                tensor.grad = tensor.grad.detach().zero_()

    def publish(self, *, stepped: bool = False) -> None:
        """Make each parameter equal to its master weight, after an optimizer or the user has changed one of the two."""
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
        """Return whether an optimizer has stepped since the last call of this method."""
        before, self._steps = self._steps, number_of_steps()
        return self._steps != before

    def adopt(self) -> None:
        """Copy each parameter that was changed outside of an optimizer into its master weight.

        To detect writes through ``Tensor.data``, this method compares some values of each parameter. Calls 1, 2, 3, 5,
        9, 17, ... compare all values. After such a write was detected, all calls compare all values.
        """
        is_ahead = self._steps != number_of_steps()  # a step was not copied to the parameters yet
        compares_all = not is_ahead and (self._is_written_by_data or self._looks & (self._looks - 1) == 0)
        self._looks += not is_ahead
        if self._adopt(compares_all=compares_all) and not is_ahead and not self._is_written_by_data:
            self._is_written_by_data = True
            self._adopt(compares_all=True)

    def _adopt(self, *, compares_all: bool) -> bool:
        """Copy changed parameters to master weights; return whether ``Tensor.data`` of a parameter was written."""
        compares_all &= self.has_numbers_at_hand
        changes = [self._masters[name].adopt(p, compares_all=compares_all) for name, p in self._with_master()]
        return "uncounted" in changes

    def show_gradients(self) -> None:
        """Copy gradients of master weights to the parameters, in the dtype of the parameters."""
        for name, parameter in self._with_master():
            self._masters[name].take(parameter)
            self._masters[name].show(parameter, copies=True)

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the master weight of each parameter that has been trainable, by the name of the parameter."""
        return {name: master.tensor.detach() for name, master in self._masters.items() if master.is_filled}

    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in masters and self.gradient_dtype(parameter) != parameter.dtype:
                self._target(name, parameter)
                self._masters[name].set(parameter, masters[name])

    def load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.add_gradients([{p: gradients[name] for name, p in self.model.named_parameters() if name in gradients}])

    def _copier(self) -> Callable[[nn.Parameter, torch.dtype], torch.Tensor]:
        """Return a function that copies the values of a parameter to a new tensor for its master weight."""
        return lambda parameter, dtype: parameter.detach().to(dtype, copy=True)  # does not refer to the store

    # -- other stores have another memory, or another time of the step ----------------------------------------------

    def at_hand(self, contents: Sequence[LayerContents], order: Sequence[int]) -> AtHand:
        """Return a function that, given a layer index, returns a context manager that keeps the layer in memory."""
        return lambda layer: nullcontext()

    def updating(self, contents: Sequence[LayerContents]) -> AtHand:
        """Return a function that, given a layer index, returns a context manager in which the layer can be updated."""
        return lambda layer: nullcontext()

    def hold_state(self, target: torch.Tensor, state: dict[str, Any]) -> None:
        """Move the optimizer state of a parameter, for example to a disk; by default, do nothing."""

    def take_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        """Run an optimizer's step if torch cannot run it; return the optimizer that torch steps after this call."""
        return widened(optimizer, args, kwargs)

    def land(self, layer: int, gradients: Landed) -> Landed:
        """Store the gradients of a layer until the optimizer step, and return the stored gradients."""
        return gradients

    def wait_landed(self) -> None:
        """Wait until the gradients passed to :meth:`land` are stored; raise the error of a failed write."""

    def begin_run(self, contents: Sequence[LayerContents]) -> None:
        """Prepare this store for the gradients of a backward; raise an error if the store cannot take gradients."""

    def note_failed(self, error: BaseException) -> None:
        """Called after a failed backward: a subclass stops updates of layers, and adds a note to the error."""

    def end_run(self) -> None:
        """After a successful backward, end the optimizer step of a store that updates layers during the backward."""

    def check_whole(self) -> None:
        """Raise an error if an earlier backward failed after updating some of the layers."""

    def close(self) -> None: ...

    # -- copies that stages read during an asynchronous step ----------------------------------------------------------

    def source(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to copy to devices: the parameter, or its copy while an optimizer step changes it."""
        return self._shadows.get(id(parameter), parameter)

    def freeze(self) -> None:
        """Copy trained parameters without master weights, so that stages can read copies during an optimizer step."""
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
        """Store the host parameters with their names until :meth:`thaw`, because a forward replaces the parameters."""
        self.take_gradients(hides=True)  # a background step frees each gradient after its use
        self._before = list(self.model.named_parameters(remove_duplicate=False))  # a forward replaces them

    def targets(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the tensor that the optimizer updates for each parameter: its master weight, or the parameter."""
        names = self._names()
        return [self._target(names[id(p)], p) if id(p) in names else p for p in parameters]

    def refresh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy the results of an optimizer step to the tensors that stages read."""
        names = self._names()
        for parameter in parameters:
            name = names.get(id(parameter), "")
            if name in self._masters:
                self._masters[name].agree(parameter, stepped=True)
            elif id(parameter) in self._shadows:
                self._shadows[id(parameter)].copy_(parameter.detach())

    def thaw(self) -> None:
        """Delete the host copies of parameters, so that stages read the parameters themselves again."""
        self._shadows.clear()
        self._before = []

    def _needs_shadow(self, name: str) -> bool:
        return name not in self._masters

    def _listed(self) -> list[tuple[str, nn.Parameter]]:
        """Return the host parameters with their names, even while a forward has replaced them by device copies."""
        return self._before or list(self.model.named_parameters(remove_duplicate=False))

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in reversed(self._listed())}

    def why_not_clipped(self, parameters: Sequence[torch.Tensor]) -> str | None:
        return None

    def originals(self) -> dict[int, torch.Tensor]:
        return {id(parameter): self._masters[name].tensor for name, parameter in self._with_master()}

    def _with_master(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self._masters:
            yield from ((name, p) for name, p in self._listed() if name in self._masters)

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
        if self.gradient_dtype(parameter) == parameter.dtype:
            self._masters.pop(name, None)
            return parameter
        if name not in self._masters:
            self._masters[name] = _Master(parameter, self)
        self._masters[name].wake(parameter)
        return self._masters[name].tensor


class _Master:
    """The master weight of a parameter, with a snapshot of both tensors that shows later changes.

    A master weight counts as changed after every optimizer step, because torch's fused optimizers write without
    incrementing the version counter. Until the parameter is trainable, the master weight is a single NaN, expanded to
    the shape of the parameter. So an optimizer can refer to a master weight that takes no memory.
    """

    # shown: the gradient that each parameter shows, with its master weight; `None` for copies
    shown: ClassVar[Any] = WeakTensorKeyDictionary()

    def __init__(self, parameter: nn.Parameter, store: ParameterStore) -> None:
        dtype, kept = store.gradient_dtype(parameter), store.dtype_between(parameter)
        self._copy, self._has_numbers_at_hand = store._copier(), store.has_numbers_at_hand
        nothing = torch.full((), float("nan"), dtype=dtype, device=parameter.device).expand(parameter.shape)
        self.tensor = nn.Parameter(nothing, requires_grad=False)
        if kept != dtype:
            self.tensor.grad_dtype = kept
        self.is_filled = False
        self._key = weakref.ref(self)
        self._note(parameter)
        self.wake(parameter)

    def wake(self, parameter: nn.Parameter) -> None:
        """Make the master weight trainable or frozen, like its parameter."""
        if parameter.requires_grad and not self.is_filled:
            self._fill(parameter)
        if self.tensor.requires_grad != parameter.requires_grad:
            self.tensor.requires_grad_(parameter.requires_grad)

    def _fill(self, parameter: nn.Parameter) -> None:
        self.tensor.data = self._copy(parameter, self.tensor.dtype)
        self.is_filled = True
        self._note(parameter)

    def show(self, parameter: nn.Parameter, *, copies: bool = False) -> None:
        """Set ``parameter.grad`` to the gradient of the master weight."""
        gradient = self.tensor.grad
        if gradient is not None and gradient.shape == parameter.shape and parameter.is_leaf:
            shown = gradient.to(parameter.dtype, copy=True) if copies else gradient  # a copy has the parameter's dtype
            parameter.grad_dtype = None  # allows any dtype
            parameter.grad, self.shown[parameter] = shown, (None if copies else self._key, shown)

    def take(self, parameter: nn.Parameter, *, adds: bool = False) -> bool:
        """Move changes that user code made to ``parameter.grad`` to the gradient of the master weight."""
        # adds: whether a gradient that the caller has set is added. Returns whether this object had set the `grad`.
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
        self._mark = Mark.of(parameter, with_numbers=self._has_numbers_at_hand)
        self._version = self.tensor._version


def _accumulate(target: nn.Parameter, gradient: torch.Tensor) -> None:
    gradient = gradient.to(dtype_of_gradient(target))
    target.grad = gradient if target.grad is None else added(target.grad, gradient)


def added(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, in the memory of one of the two."""
    if total.layout != torch.strided and gradient.layout == torch.strided:
        return gradient.add_(total)  # torch adds sparse to dense tensors, but not dense to sparse
    return total.add_(gradient)


def is_watched(target: torch.Tensor) -> bool:
    """Return whether autograd must add gradients to a tensor, because the tensor has hooks or a graph."""
    return not target.is_leaf or bool(target._backward_hooks) or bool(target._post_accumulate_grad_hooks)
