"""Provide Adam for the host, and hooks that count optimizer steps, run them in parts, or refuse them.

The first pipeline registers the hooks, which torch calls around the step of every optimizer. An import does not
register the hooks, because an import must not change torch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from yobx_flatten.core.private_names.of_torch import clipping_functions, optimizer_post_hooks

from ..errors import ConfigError, warn

Optimizer: TypeAlias = torch.optim.Optimizer
# Function of an optimizer and the arguments of its step, which returns the optimizer that steps instead.
Taker: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Optimizer]
Hook: TypeAlias = Callable[[Optimizer, Any, Any], None]


class Adam(torch.optim.Adam):
    """Adam on the CPU with torch's fused kernel. The arguments are those of ``Adam`` in the original RoundPipe package.

    A parameter group with a complex parameter is updated by torch's loop over parameters, because the fused kernel does
    not support complex numbers.

    Args:
        params: parameters or groups, from :meth:`RoundPipe.optim_parameters`.
        lr: learning rate.
        betas: coefficients of the running averages of the gradient and of its square.
        eps: term added to the denominator for numerical stability.
        weight_decay: factor of the L2 penalty, or of the weight decay if ``decoupled_weight_decay`` is true.
        amsgrad: whether to use the AMSGrad variant.
        foreach: no effect here; if given, it is ignored with a warning.
        maximize: whether to maximize instead of minimize.
        capturable: must be ``False``.
        differentiable: must be ``False``.
        fused: no effect here: the fused kernel is always used.
        decoupled_weight_decay: whether weight decay is decoupled, as in AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if capturable or differentiable:
            raise ConfigError("Adam: only torch.optim.Adam supports capturable and differentiable.")
        if foreach is not None or fused is not None:
            warn("Adam: foreach and fused are ignored; a fused kernel is always used.", UserWarning)
        how = {"maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=True, **how)
        self._choose_kernels()
        self.register_step_pre_hook(check_shapes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and choose a kernel that supports them."""
        super().add_param_group(param_group)
        self._choose_kernels()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an optimizer state that :meth:`state_dict` of this class or of ``torch.optim.Adam`` returned."""
        super().load_state_dict(state_dict)
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        # torch refuses complex parameters in a group that has `fused=True`
        for group in self.param_groups:
            group["fused"] = not any(parameter.is_complex() for parameter in group["params"])
        # with this attribute, a GradScaler passes its scale to the optimizer, which the loop does not support
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)


def check_shapes(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise an error for a resized parameter, because the fused kernel would write outside of Adam's moments."""
    for one in [one for group in optimizer.param_groups for one in group["params"]]:
        moments = optimizer.state.get(one, {}).get("exp_avg", one)
        gradient = one if one.grad is None else one.grad
        if gradient.shape != one.shape or moments.shape != one.shape:
            shapes = f"{tuple(one.shape)}, unlike gradient {tuple(gradient.shape)} or moments {tuple(moments.shape)}"
            raise ConfigError(f"Adam: a parameter was resized to {shapes}. Create the optimizer again.")


class _Taking(threading.local):
    """The function that runs the optimizer steps of this thread instead of torch."""

    def __init__(self) -> None:
        self.taker: Taker | None = None
        self.hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self.depths: dict[Optimizer, int] = {}  # number of nested steps, which call `super().step()`


_TAKING = _Taking()
# Optimizers with a running step: the thread, and an event that is set when the step has ended.
_UNDER_WAY: weakref.WeakKeyDictionary[Optimizer, tuple[int, threading.Event]] = weakref.WeakKeyDictionary()
_WATCHED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Attribute of an optimizer that runs a part of another optimizer's step; its own steps are not taken over.
PART = "_roundpipe_part"
_counted = 0
_OTHERWISE: list[Taker] = []  # takers of the steps that no `taking_over` block takes over
_OWN: set[Hook] = set()  # hooks of this package after a step, which read no gradient


def number_of_steps() -> int:
    """Return the number of optimizer steps of this process that have ended since :func:`install` was called."""
    return _counted


def count_step() -> None:
    """Count an optimizer step that the hooks of torch did not see."""
    global _counted
    _counted += 1


def dtype_of_gradient(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that torch accepts for ``tensor.grad``."""
    chosen: torch.dtype | None = getattr(tensor, "grad_dtype", None) if tensor.is_leaf else None
    return chosen or tensor.dtype


@functools.cache
def install() -> None:
    hear_steps(_before, _after)


def hear_steps(before: Hook, after: Hook) -> None:
    """Call ``before`` and ``after`` around every optimizer step; these two functions must not read gradients."""
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    _OWN.add(after)


def take_over_always(taker: Taker, *, first: bool = False) -> None:
    """Let the function ``taker`` run every optimizer step of this process, except in a ``with taking_over()`` block."""
    # first: whether the function is called before functions that are already registered
    if taker not in _OTHERWISE:
        _OTHERWISE.insert(0 if first else len(_OTHERWISE), taker)


@contextlib.contextmanager
def taking_over(taker: Taker | None) -> Iterator[None]:
    """Let the function ``taker`` run the optimizer steps of this thread in a ``with`` block."""
    # taker: function that runs a step, after the optimizer's pre-hooks; `None`: optimizers step normally
    before, _TAKING.taker = _TAKING.taker, taker
    try:
        yield
    finally:
        _TAKING.taker = before
        if before is None:
            for hook in _TAKING.hooks.values():
                hook.remove()
            _TAKING.hooks.clear()
            _TAKING.depths.clear()


def under_way(optimizer: Optimizer, ended: threading.Event) -> None:
    """Register a running step: other threads wait for its end before they step, save or load the optimizer."""
    if optimizer not in _WATCHED:
        _WATCHED.add(optimizer)
        optimizer.register_state_dict_pre_hook(_wait)
        optimizer.register_load_state_dict_pre_hook(_wait)
    _UNDER_WAY[optimizer] = threading.get_ident(), ended


def other_post_hooks(optimizer: Optimizer) -> bool:
    """Whether code outside of ``roundpipe_runtime`` has registered a hook after the steps of the optimizer."""
    return bool(optimizer._optimizer_step_post_hooks) or any(h not in _OWN for h in optimizer_post_hooks.values())


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if PART in optimizer.__dict__:
        return
    if _TAKING.taker is not None:
        _TAKING.depths[optimizer] = _TAKING.depths.get(optimizer, 0) + 1
    else:
        _wait(optimizer)
        if not _OTHERWISE:
            return
    # hooks of an optimizer run after the global hooks, in order of registration; this hook must be the last
    if (earlier := _TAKING.hooks.pop(optimizer, None)) is not None:
        earlier.remove()
    if _TAKING.depths.get(optimizer, 1) == 1:
        _TAKING.hooks[optimizer] = optimizer.register_step_pre_hook(_take)


def _take(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    for taker in [_TAKING.taker] if _TAKING.taker is not None else _OTHERWISE:
        optimizer = taker(optimizer, args, kwargs)
    return (optimizer, *args[1:]), kwargs


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    count_step()
    if optimizer in _TAKING.depths:
        _TAKING.depths[optimizer] -= 1
    elif optimizer in _TAKING.hooks:
        _TAKING.hooks.pop(optimizer).remove()


def _wait(optimizer: Optimizer, *_: Any) -> None:
    thread, ended = _UNDER_WAY.get(optimizer, (0, None))
    if ended is not None and thread != threading.get_ident():
        ended.wait()


_STORES: weakref.WeakSet[Any] = weakref.WeakSet()  # of `ParameterStore`


def watch_originals(store: Any) -> None:
    """Make clipping or stepping a parameter raise an error if the parameter has a master weight in the store."""
    _STORES.add(store)
    _install()


@functools.cache
def _install() -> None:
    def checked(clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def call(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            check_clipped(given)
            return clip(given, *args, **kwargs)

        return call

    for owner, name in clipping_functions():
        setattr(owner, name, checked(getattr(owner, name)))
    register_optimizer_step_pre_hook(_check_stepped)


def check_clipped(parameters: Iterable[torch.Tensor]) -> None:
    """Raise an error if gradients of the parameters were already used, so that clipping would have no effect."""
    given = list(parameters)
    for store in list(_STORES):
        if reason := store.why_not_clipped(given):
            raise ConfigError(reason)


def _check_stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, nn.Parameter)]
    for store in list(_STORES):
        originals = store.originals()
        mine = [(one, originals[id(one)]) for one in held if id(one) in originals]
        given = [master.grad for _, master in mine if master.grad is not None]
        if given and all(one.grad is None or one.grad is master.grad for one, master in mine):
            kind, dtype = type(optimizer).__name__, mine[0][1].dtype
            raise ConfigError(
                f"{kind} has {len(mine)} parameters of the model, but gradients are stored with separate {dtype} "
                "copies, the master weights (optim_dtype). Give these to the optimizer, or it changes nothing:\n"
                f"    optimizer = {kind}(model.optim_parameters(), ...)\nIn create_optimizer of a Trainer, write "
                "self.pipeline.optim_parameters()."
            )
        if not given:  # a script may have set gradients of the parameters, and steps the parameters themselves
            store.take_gradients()
