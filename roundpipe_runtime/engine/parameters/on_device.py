"""Copy a layer's parameters and buffers to a device, and use the copies while the layer runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from yobx_flatten.core.private_names import of_torch
from yobx_flatten.registry.patches import AttributePatch

from ...device.accelerator import PIECE
from ...device.composite import Rebuilding, is_composite, plain_numbers, same_numbers, weights_kept
from ...device.protocol import NOW, Device, Event
from ...device.transfer import as_sent, sent_dtype
from ...errors import StageError
from ...optim.layer_contents import LayerContents
from ..draws import traits_of
from ..layer_graph import HOST_PARAMETER, watch_escaped
from .host_table import HostSum, HostTable, TableAccess
from .kept import GradientMemory, KeptParameters
from .partial_table import NOTHING_PARTIAL, PartialLayer, PartialPlan, RowsOnDemand

T = TypeVar("T")

# Downloaded gradients or buffers: host copies, and the events when they are complete.
Gradients: TypeAlias = dict[nn.Parameter, tuple[torch.Tensor, Event]]
Buffers: TypeAlias = dict[int, tuple[torch.Tensor, Event]]

LAYER_TITLE = "_roundpipe_layer"  # attribute of the copy of a parameter: the layer that it belongs to


class LayerOnDevice:
    # gradient_dtype: function that returns the dtype in which gradients of a parameter are summed. Default: its own.
    # kept: copies of parameters that stay on devices. Default: none stay.
    # version: version of the parameters that the run reads. Default: 0.
    # memory: host memory for gradients that are summed on the host. Default: new memory for each gradient.
    # partial_plan: parameters that are copied on demand. Default: none.

    def __init__(
        self,
        contents: LayerContents,
        device: Device,
        source: Callable[[nn.Parameter], torch.Tensor],
        gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
        kept: KeptParameters | None = None,
        version: int = 0,
        memory: GradientMemory | None = None,
        partial_plan: PartialPlan = NOTHING_PARTIAL,
    ) -> None:
        self.contents = contents
        self.device = device
        self.title = contents.title
        self.traits = traits_of(contents.module)
        self._kept = kept or KeptParameters([device])
        self.partial = PartialLayer(contents, device, partial_plan)
        self._memory: list[torch.Tensor] = []
        self._parameters: dict[int, nn.Parameter] = {}
        self._wide: dict[int, torch.dtype] = {}  # dtypes of sums that differ from those of the gradients
        self._sums: dict[int, torch.Tensor] = {}
        # Results of a backward for each parameter, if they are kept apart from the sums.
        self._apart: dict[int, list[torch.Tensor]] | None = None
        self._tables: dict[nn.Parameter, TableAccess] = {}  # large parameters that stay on the host
        rebuilding = Rebuilding(partial(self._upload_part, version=version))
        for parameter in contents.parameters():
            dtype = gradient_dtype(parameter)
            if id(parameter) in contents.tables:
                copy = self._stand_in(parameter, source(parameter), dtype, memory)
            elif is_composite(parameter):
                copy = rebuilding.parameter(parameter)
                copy.__dict__[LAYER_TITLE] = self.title
            else:
                copy = self._copy_parameter(parameter, source(parameter), version)
            self._parameters[id(parameter)] = copy
            if id(parameter) not in contents.tables and dtype != sent_dtype(parameter):
                self._wide[id(parameter)] = dtype
        self._places = [
            (slot.owner, slot.name, self._parameters[id(slot.parameter)], slot.parameter) for slot in contents.slots
        ]
        self._states = [rebuilding.state(slot.value) for slot in contents.states]
        self._has_few_bits = bool(contents.states) or any(map(is_composite, contents.parameters()))
        self.buffers = [self._upload(buffer.tensor) for buffer in contents.buffers]
        self._memory += self.buffers
        self._marks = [(buffer, buffer._version) for buffer in self.buffers]
        self._written: set[int] = set()
        self.ready = device.arrival()

    def _upload(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        sent = tensor if dtype is None else as_sent(tensor, dtype, self.device.torch_device)
        return self.device.copy_in(sent.detach(), parameter=True)

    def _upload_part(self, part: torch.Tensor, version: int) -> torch.Tensor:
        kept = self._kept
        uploaded, stays = kept.upload(self.device, part, part, version, lambda one: self._upload(plain_numbers(one)))
        if not stays:
            self._memory.append(uploaded)
        return uploaded.detach()  # the owner of the part may replace the memory through `data`

    def _copy_parameter(self, parameter: nn.Parameter, source: torch.Tensor, version: int) -> nn.Parameter:
        dtype = sent_dtype(parameter)
        reserve = self.partial.reserve(parameter, self._kept.count) if dtype == source.dtype else None
        upload = reserve or partial(self._upload, dtype=dtype)
        uploaded, stays = self._kept.upload(self.device, parameter, source, version, upload)
        if not stays:
            self._memory.append(uploaded)
        copy = self._with_attributes(nn.Parameter(uploaded, requires_grad=parameter.requires_grad), parameter)
        self.partial.add(parameter, copy, uploaded, source)
        return copy

    def _stand_in(
        self, parameter: nn.Parameter, source: torch.Tensor, dtype: torch.dtype, memory: GradientMemory | None
    ) -> nn.Parameter:
        # source: values on the host; dtype: dtype in which gradients are summed
        # memory: host memory for sums of gradients; `None`: new memory for each
        index, form = self.contents.index, torch.empty(source.shape, dtype=dtype, device="meta")
        self._tables[parameter] = access = TableAccess(
            self.device,
            source,
            self.contents.tables[id(parameter)],
            requires_grad=parameter.requires_grad,
            new_sum=lambda: HostSum(form, lambda form: None if memory is None else memory.take(index, parameter, form)),
            count=self._kept.count,
            dtype=sent_dtype(parameter),
        )
        made = cast(nn.Parameter, HostTable(access, requires_grad=parameter.requires_grad))
        return self._with_attributes(made, parameter)

    def _with_attributes(self, copy: nn.Parameter, parameter: nn.Parameter) -> nn.Parameter:
        if type(parameter) is not nn.Parameter and isinstance(parameter, nn.Parameter):
            copy.__class__ = type(parameter)  # a class of the user
        copy.__dict__.update(parameter.__dict__)  # attributes that users set on parameters
        copy.__dict__[LAYER_TITLE] = self.title
        copy.__dict__[HOST_PARAMETER] = parameter
        return copy

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function()`` while the device copies replace the parameters and buffers of the module."""
        buffers, states = self.contents.buffers, self.contents.states
        is_trained = self.contents.module.training and torch.is_grad_enabled()
        versions = [copy._version for _, _, copy, _ in self._places] if is_trained else []
        with self.contents.lock:
            try:
                for owner, name, copy, _ in self._places:
                    owner._parameters[name] = copy
                for number, buffer in enumerate(buffers):
                    buffer.owner._buffers[buffer.name] = self.buffers[number]
                for slot, state in zip(states, self._states, strict=True):
                    slot.owner.__dict__[slot.name] = state
                forget_parametrized(self.contents.module)
                keeping = weights_kept(self.contents.module) if self._has_few_bits else contextlib.nullcontext()
                with keeping, self.partial.standing():
                    result = function()
                # a module contains the device copy of a parameter, or a placeholder that copies rows when they are read
                held: list[torch.Tensor | None] = [owner._parameters.get(name) for owner, name, _, _ in self._places]
                held = [one._stands_for[0] if isinstance(one, RowsOnDemand) else one for one in held]
                replaced = [one is not copy for one, (_, _, copy, _) in zip(held, self._places, strict=True)]
                if any(replaced):
                    raise self._wrote_parameter(replaced, "replaces")
                if versions and versions != (now := [copy._version for _, _, copy, _ in self._places]):
                    raise self._wrote_parameter([one != other for one, other in zip(versions, now, strict=True)])
                return result
            finally:
                forget_parametrized(self.contents.module)
                for number, buffer in enumerate(buffers):
                    found = buffer.owner._buffers.get(buffer.name)
                    if found is not None and found is not self.buffers[number]:
                        self.buffers[number] = found.detach()
                    buffer.owner._buffers[buffer.name] = buffer.tensor
                for slot in states:
                    slot.owner.__dict__[slot.name] = slot.value
                for owner, name, _, parameter in self._places:
                    owner._parameters[name] = parameter

    def parameters(self) -> list[nn.Parameter]:
        # autograd sets `grad` of the copies of whole embedding and head matrices
        return [*self._parameters.values(), *(leaf for table in self._tables.values() for leaf in table.leaves)]

    def check_parameters(self, source: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Raise an error if the layer has changed the values of a parameter's copy on the device."""
        copies: list[tuple[nn.Parameter | None, nn.Parameter]] = []
        for _, _, copy, parameter in self._places:  # `None` for a table of which no code needed the whole
            table = self._tables.get(parameter)
            copies.append((copy if table is None else next(iter(table.leaves), None), parameter))
        found = [copy is None or self._has_numbers_of(parameter, copy, source(parameter)) for copy, parameter in copies]
        there = [one for one in found if isinstance(one, torch.Tensor)]
        if there:  # one wait for all
            flags, complete = self.device.copy_out(torch.stack(there), last=True, parameter=True)
            complete.result()
            on_host = iter(flags.tolist())
            found = [next(on_host) if isinstance(one, torch.Tensor) else one for one in found]
        if not all(found):
            raise self._wrote_parameter([not one for one in found])

    def _has_numbers_of(self, parameter: nn.Parameter, copy: nn.Parameter, source: torch.Tensor) -> bool | torch.Tensor:
        with torch.no_grad():  # the parts are views
            parts = self.partial.present_parts(parameter, copy, source)
            found = None if parts is None else [self._are_as_copied(*part) for part in parts]
        if found is None:
            return self._are_as_copied(copy, source, sent_dtype(parameter))
        there = [one for one in found if isinstance(one, torch.Tensor)]
        with self.device.computing(self.ready):
            return torch.stack(there).all() if there and len(there) == len(found) else all(map(bool, found))

    def _are_as_copied(
        self, copy: torch.Tensor, source: torch.Tensor, dtype: torch.dtype | None = None
    ) -> bool | torch.Tensor:
        """Return whether the copy of a parameter on the device equals the values on the host."""
        # dtype: dtype to which the copy was rounded. Default: that of the source.
        is_wrapper = of_torch.is_traceable_wrapper_subclass(source)
        if is_wrapper or source.is_inference() or source.layout != torch.strided:
            return True  # such values cannot be compared
        source = source if dtype is None else as_sent(source, dtype, self.device.torch_device)
        if copy.shape != source.shape or copy.dtype != source.dtype:
            return False
        if copy.device == source.device:
            return bool(same_numbers(copy, source))
        # uploaded again: the host's values are pinned, while a download would need memory that then stays pinned
        has_no_gaps = copy.is_contiguous() and source.is_contiguous()
        pieces = zip(_pieces(copy), _pieces(source), strict=True) if has_no_gaps else [(copy, source)]
        flags = []
        for own, other in pieces:
            again = self.device.copy_in(other, parameter=True)
            with self.device.computing(self.device.arrival()):
                flags.append(same_numbers(own, again))
        return torch.stack(flags).all() if flags else True

    def _wrote_parameter(self, written: Sequence[bool], how: str = "writes") -> StageError:
        slots = [slot for slot, is_written in zip(self.contents.slots, written, strict=True) if is_written]
        names = {f"{type(slot.owner).__name__}.{slot.name}" for slot in slots}
        return StageError(
            f"{self.title} {how} {', '.join(sorted(names))} in its forward. A layer runs on copies of its parameters, "
            "so what it writes into them is lost. Make the parameter a buffer, or write it between two steps:\n"
            "    model.step(step_fn); model.synchronize(); write(parameter)"
        )

    def take_gradients(self) -> None:
        """Add the gradients of the last backward to the layer's gradient sums, in the order of the microbatches."""
        if self._apart is not None:
            return
        # Autograd sums in the copy's `grad`, in the same order. Gradients of another sum's dtype are moved out of it.
        for key, dtype in self._wide.items():
            copy = self._parameters[key]
            gradient, copy.grad = copy.grad, None
            if gradient is not None:
                total = self._sums.get(key)
                self._sums[key] = gradient.to(dtype) if total is None else total.add_(_addend(gradient, dtype))

    def keep_apart(self) -> None:
        """Store the gradients of each microbatch for :meth:`pop_gradients`, instead of summing over microbatches."""
        if self._apart is None:
            self._apart = {key: [] for key, copy in self._parameters.items() if copy.requires_grad}
            for key, found in self._apart.items():
                if key not in self._wide:  # else autograd adds each part to the sum, if a backward has several
                    self._parameters[key].register_post_accumulate_grad_hook(partial(_move_gradient, found))

    def pop_gradients(self) -> list[list[torch.Tensor]]:
        assert self._apart is not None
        popped = []
        for parameter in self.contents.parameters():
            copy, found = self._parameters[id(parameter)], self._apart.get(id(parameter), [])
            _move_gradient(found, copy)
            popped.append(found.copy())
            found.clear()
        return popped

    def add_gradients(self, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        # gradients: result of `pop_gradients`, on this device. Its tensors may be written.
        with torch.no_grad():
            for parameter, found in zip(self.contents.parameters(), gradients, strict=True):
                key = id(parameter)
                for gradient in found:
                    total, dtype = self._sums.get(key), self._wide.get(key, gradient.dtype)
                    if total is None:
                        self._sums[key] = gradient.to(dtype)
                    elif total.layout != torch.strided and gradient.layout == torch.strided:
                        self._sums[key] = gradient.to(dtype) + total
                    else:
                        total.add_(_addend(gradient, dtype))

    def hand_over(self, take: Callable[[nn.Parameter, torch.Tensor], bool]) -> None:
        # take: gets a parameter of the host and its gradient on the device; returns whether it accepted the gradient
        for parameter in self.contents.parameters():
            copy = self._parameters[id(parameter)]
            if copy.grad is not None and take(parameter, copy.grad):
                copy.grad = None
        for parameter, table in self._tables.items():
            found = table.pop_sum()
            if found is not None:
                found.result()
                if not take(parameter, found.total):
                    table.sum = found

    def download_gradients(
        self, scale: float, memory: GradientMemory | None, dtype: Callable[[nn.Parameter], torch.dtype] | None = None
    ) -> Gradients:
        # scale: factor for the sums. The device multiplies, because devices would wait while the host multiplied.
        # memory: host memory for gradients. Default: new memory for each gradient.
        # dtype: function that returns the dtype of a gradient on the host. Default: the dtype of the sum.
        totals = {}
        for parameter in self.contents.parameters():
            copy = self._parameters[id(parameter)]
            total = self._sums.pop(id(parameter), copy.grad)
            copy.grad = None
            if total is not None:
                totals[parameter] = total
        if scale not in (0.0, 1.0):
            with self.device.computing(self.ready):
                for total in totals.values():
                    total.mul_(scale)
        found: Gradients = {}
        for parameter, table in self._tables.items():
            of_table = table.pop_sum()
            if of_table is None:
                continue
            if scale not in (0.0, 1.0):
                of_table.scale(scale)
            if dtype is None or of_table.total.dtype == dtype(parameter):
                found[parameter] = of_table.total, of_table
            else:
                of_table.result()
                found[parameter] = of_table.total.to(dtype(parameter)), NOW
        for parameter in [*totals]:  # popped, so that each tensor is freed when its copy ends
            total = totals.pop(parameter)
            if dtype is not None and total.dtype != dtype(parameter):
                with self.device.computing(self.ready):
                    total = total.to(dtype(parameter))
            target = None if memory is None else memory.take(self.contents.index, parameter, total)
            runs = None if self._apart is not None else self.partial.gradient_runs(parameter, total)
            if runs is None:
                found[parameter] = self.device.copy_out(total, last=True, parameter=True, target=target)
            else:
                found[parameter] = self.device.copy_rows_out(total, runs, target)
        return found

    def changed_buffers(self) -> Buffers:
        """Return host copies of the buffers that changed since the last call of this method."""
        return {number: self.device.copy_out(self.buffers[number]) for number in self._find_changed()}

    def download_buffers(self) -> Buffers:
        self._find_changed()
        return {number: self.device.copy_out(self.buffers[number]) for number in sorted(self._written)}

    def _find_changed(self) -> list[int]:
        if not self.buffers:
            return []
        owners = [buffer.owner for buffer in self.contents.buffers]
        touched = set()
        for owner, buffer, (seen, version) in zip(owners, self.buffers, self._marks, strict=True):
            # torch's kernels write running statistics of a norm without counting a version
            is_counting = isinstance(owner, of_torch.NormBase) and owner.training and owner.track_running_stats
            if buffer is not seen or buffer._version != version or is_counting:
                touched.add(id(owner))
        changed = [number for number, owner in enumerate(owners) if id(owner) in touched]
        self._marks = [(buffer, buffer._version) for buffer in self.buffers]
        self._written.update(changed)
        return changed

    def release(self) -> None:
        self.partial.release(lambda nbytes: self._kept.count(skipped=nbytes))
        watch_escaped(self.parameters(), self.title)
        self.device.release(self._memory)
        for table in self._tables.values():
            table.release()
        self._apart = None
        held: list[Any] = [self._tables, self._memory, self._parameters, self._places, self._states, self._sums]
        for one in (*held, self.buffers, self._marks):
            one.clear()


def _move_gradient(found: list[torch.Tensor], copy: torch.Tensor) -> None:
    if copy.grad is not None:
        found.append(copy.grad)
        copy.grad = None


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = tensor.detach().view(-1)
    nbytes = flat.element_size()
    return [flat[start : start + PIECE // nbytes] for start in range(0, len(flat), PIECE // nbytes)]


def _addend(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # to save memory, only a gradient that the sum's dtype cannot represent exactly is converted before it is added
    is_wider = gradient.layout == torch.strided and torch.promote_types(gradient.dtype, dtype) == dtype
    return gradient if is_wider else gradient.to(dtype)


# Support layers that register parametrizations in the forward, as PEFT does to add adapters to stacked experts.


def _patch() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which registering a parametrization does not copy a parameter onto itself."""
    module, name = of_torch.setter_of_parametrizations()
    original = getattr(module, name, None)
    if original is None:
        return contextlib.nullcontext()

    def set_other(dest: Any, src: Any) -> None:
        if dest is not src:
            original(dest, src)

    return AttributePatch(module, name, set_other)


SETTING_NOTHING_TO_ITSELF = _patch()


def forget_parametrized(module: nn.Module) -> None:
    """Clear torch's cache of the parametrized values of a module."""
    # threads share torch's cache: while one thread is in `cached()`, cached values of other threads remain
    if cached := of_torch.cached_parametrizations():
        own = set(map(id, module.modules()))
        for key in tuple(cached):
            if key[0] in own:
                cached.pop(key, None)
