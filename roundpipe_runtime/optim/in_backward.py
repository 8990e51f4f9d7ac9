"""Step each layer of a model as soon as its gradient is complete, while the backward of earlier layers still runs.

Only the gradients of a few layers are in memory at one time. No parameter of a layer is read after the layer's
backward, so the results equal those of an optimizer step after the whole backward. A parameter that several layers
share is updated after the backward of all layers that use the parameter.
"""

# devices          L3 backward | L2 backward | L1 backward | L0 backward
# gradients                g3 --->      g2 --->       g1 --->      g0      float32, two layers at a time
# update thread               step L3    |  step L2    |  step L1    | step L0

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..device.worker import add_note_once, on_error
from ..errors import ConfigError, StageError
from .layer_contents import LayerContents
from .parameters import Landed, ParameterStore, added, is_watched
from .parts import LandingQueue, OptimizerParts, can_step_in_parts
from .torch_steps import Optimizer, check_shapes, count_step, dtype_of_gradient, watch_originals

_IN_PLACE = 'RoundPipe(model, optim_dtype=torch.float32, gradient_dtype=torch.bfloat16, update="in_place")'


class InBackwardStore(ParameterStore):
    is_in_place = True

    def __init__(self, model: nn.Module, optim_dtype: torch.dtype | None = None) -> None:
        super().__init__(model, optim_dtype)
        self._optimizers: list[Optimizer] = []
        self._not_called: set[Optimizer] = set()  # optimizers whose `step` was not called since the last run
        self._landing = LandingQueue("in backward")
        self._current: _Steps | None = None
        self._stepped: list[int] = []  # layers that were updated by a run that is under way or has failed
        _STORES.add(self)
        _watch_scalers()
        watch_originals(self)

    def use(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_called)
        self._optimizers = list(optimizers)
        self._not_called.clear()

    def _note_called(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._not_called.discard(optimizer)

    def why_not_clipped(self, parameters: Sequence[torch.Tensor]) -> str | None:
        held = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, parameters)):
            return None
        return (
            'update="in_backward" has stepped each layer as soon as its gradient was computed, so no gradient is left '
            f"to clip. Keep the gradients until the step:\n    {_IN_PLACE}"
        )

    def begin_run(self, contents: Sequence[LayerContents]) -> None:
        self._current = None
        self.check_whole()
        if self._not_called:
            raise ConfigError(
                f'update="in_backward": {type(next(iter(self._not_called))).__name__}.step() was not called after the '
                "last forward_backward. Call step() after each forward_backward: gradients of two calls cannot be "
                "added, because each call uses up its gradients. For larger batches, use more microbatches:\n"
                "    RoundPipeRunConfig(num_microbatch=...)"
            )
        if not self._optimizers:
            raise ConfigError(
                'update="in_backward" needs the optimizer before forward_backward:\n    model.step_with(optimizer)'
            )
        holders = collections.Counter(
            id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        )
        for parameter in [p for layer in contents for p in layer.parameters() if p.requires_grad]:
            reason = ""
            if holders[id(parameter)] != 1:
                reason = f"{holders[id(parameter)]} optimizers contain it: freeze it, or give it to one optimizer"
            elif is_watched(parameter):
                reason = "it has a hook, which would see no gradient: remove the hook"
            elif parameter.grad is not None:
                reason = "it has an older gradient, which no step would see: call optimizer.zero_grad()"
            if reason:
                raise ConfigError(f'update="in_backward" cannot update a {tuple(parameter.shape)} parameter: {reason}.')
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            before = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if hook is not check_shapes]
            after = [hook for hook in optimizer._optimizer_step_post_hooks.values() if hook != self._note_called]
            if before or after:
                raise ConfigError(
                    f'update="in_backward": {name} has hooks around its step, which would see no gradient. Remove '
                    f"the hooks, or keep the gradients until the step:\n    {_IN_PLACE}"
                )
            if not can_step_in_parts(optimizer):
                raise ConfigError(
                    f'update="in_backward" updates layers one by one, but {name} gives other results if parameters '
                    f"are updated one by one. Use AdamW or a similar optimizer, or keep the gradients:\n    {_IN_PLACE}"
                )
            check_shapes(optimizer, (), {})
        self._current = _Steps(self._optimizers, contents)

    def land(self, layer: int, gradients: Landed) -> Landed:
        """Start the optimizer step of a layer; return no gradients, because the step uses them up."""
        if (steps := self._current) is None:
            raise StageError(
                'update="in_backward" updates parameters only in forward_backward, with a loss per microbatch. To '
                f"call backward() yourself, or for one loss of all microbatches, use another update:\n    {_IN_PLACE}"
            )
        coming = dict(gradients)
        gradients.clear()

        def step() -> None:
            if steps.has_failed:
                return
            with on_error(steps.stop):
                for _, ready in coming.values():
                    ready.result()
                complete = steps.complete(layer, coming)
                coming.clear()
                if complete:
                    self._stepped.append(layer)
                    steps.step(complete)

        self._landing.submit(step)
        return {}

    def wait_landed(self) -> None:
        self._landing.wait()

    def note_failed(self, error: BaseException) -> None:
        """End the updates of a failed backward, and add a note to the error that names the layers already updated."""
        steps, self._current = self._current, None
        if steps is not None:
            steps.stop(error)
            with suppress(BaseException):
                self.wait_landed()
        if self._stepped:
            add_note_once(error, self._damage())

    def end_run(self) -> None:
        steps, self._current = self._current, None
        if steps is not None:
            for parts in steps.parts:
                parts.finish()
            count_step()
            self._stepped.clear()
            self._not_called = set(self._optimizers)

    def check_whole(self) -> None:
        if self._stepped:
            raise StageError(self._damage())

    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Load stored weights, and forget that an earlier backward failed after updating some of the layers."""
        super().load_masters(masters)
        self._stepped.clear()
        self._not_called.clear()

    def _damage(self) -> str:
        return (
            f'update="in_backward" had stepped layers {min(self._stepped)} to {max(self._stepped)} when '
            "forward_backward failed, but not the layers before them. Load the last checkpoint:\n"
            "    load_checkpoint(folder, model, optimizer=optimizer)"
        )

    def close(self) -> None:
        self._current = None
        self._landing.close()
        _STORES.discard(self)


class _Steps:
    """The optimizer steps of one backward, and gradients of shared parameters that are not complete yet."""

    def __init__(self, optimizers: Sequence[Optimizer], contents: Sequence[LayerContents]) -> None:
        self.has_failed = False
        self.parts = [OptimizerParts(optimizer) for optimizer in optimizers]
        self._own = [{id(p) for g in optimizer.param_groups for p in g["params"]} for optimizer in optimizers]
        self._layers = {layer.index: layer.parameters() for layer in contents}
        self._left = collections.Counter(id(p) for held in self._layers.values() for p in held)
        self._found: dict[nn.Parameter, dict[int, torch.Tensor]] = {}

    def complete(self, layer: int, gradients: Landed) -> dict[nn.Parameter, torch.Tensor]:
        """Add gradients of a layer; return the sum for each parameter whose layers have all added their gradients."""
        for parameter, (gradient, _) in gradients.items():
            self._found.setdefault(parameter, {})[layer] = gradient.to(dtype_of_gradient(parameter))
        found = {}
        for parameter in self._layers[layer]:
            self._left[id(parameter)] -= 1
            if not self._left[id(parameter)] and parameter in self._found:
                parts = self._found.pop(parameter)
                found[parameter] = functools.reduce(added, [parts[number] for number in sorted(parts, reverse=True)])
        return found

    def step(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for parts, own in zip(self.parts, self._own, strict=True):
            mine: dict[torch.Tensor, torch.Tensor] = {p: g for p, g in gradients.items() if id(p) in own}
            parts.give(mine)
            parts.step(set(map(id, mine)))

    def stop(self, error: BaseException) -> None:
        self.has_failed = True


_STORES: weakref.WeakSet[InBackwardStore] = weakref.WeakSet()


@functools.cache
def _watch_scalers() -> None:
    """Make ``GradScaler.scale`` raise an error while a backward also updates layers."""
    plain: Callable[..., Any] = torch.amp.GradScaler.scale

    @functools.wraps(plain)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled() and any(store._current is not None for store in list(_STORES)):
            raise ConfigError(
                f'update="in_backward" uses each gradient immediately, so {type(self).__name__} could not divide '
                f"gradients by its scale. Train in bfloat16 without a scaler, or keep the gradients:\n    {_IN_PLACE}"
            )
        return plain(self, outputs)

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign] # torch has no hook for scalers
