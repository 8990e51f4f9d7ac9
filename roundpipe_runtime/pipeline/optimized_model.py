"""Update the parameters of a pipeline with an optimizer, and save and load the training state."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from ..engine.code_state import gradient_mode_kept
from ..engine.lifecycle import PipelineProgress
from ..errors import ConfigError, RoundPipeWarning, warn
from ..optim.in_backward import InBackwardStore
from ..optim.step import in_optimizer_ctx
from ..optim.torch_steps import check_clipped
from .engine_handle import EngineHandle


class OptimizedModel(EngineHandle):
    """Base class of a pipeline with the methods that an optimizer needs, and those that save and load its state."""

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter that the optimizer updates, once.

        With ``optim_dtype`` and ``update="masters"``, master weights are yielded: copies of the parameters in
        ``optim_dtype``, which have the gradients. Without master weights, parameters of the model are yielded.
        """
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters that the optimizer updates, see :meth:`optim_parameters`.

        Args:
            prefix: prefix of the names.
            remove_duplicate: whether a parameter with several names is yielded only once.

        Returns:
            An iterator over names and parameters.
        """
        yield from self._rp_engine.store.named(prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters of the model; inside :class:`OptimizerCtx`, those that the optimizer updates.

        Args:
            prefix: prefix of the names.
            recurse: whether to include parameters of submodules.
            remove_duplicate: whether a parameter with several names is yielded only once.

        Returns:
            An iterator over names and parameters.
        """
        if in_optimizer_ctx():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
        else:
            yield from self._rp_model.named_parameters(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield names and modules of the model.

        If another module contains the pipeline, ``named_parameters`` of that module calls this method with ``memo``.
        Inside :class:`OptimizerCtx`, a call with ``memo`` yields one module with the parameters of the optimizer.

        Args:
            memo: modules that were yielded already.
            prefix: prefix of the names.
            remove_duplicate: whether a module with several names is yielded only once.

        Returns:
            An iterator over names and modules.
        """
        if memo is None or not in_optimizer_ctx() or self._rp_engine.store.optim_dtype is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
        elif self not in memo:
            memo.add(self)
            holder = nn.Module()  # the names have dots, which `register_parameter` refuses
            holder.__dict__["_parameters"] = dict(self.optim_named_parameters(remove_duplicate=remove_duplicate))
            yield prefix, holder

    def step_with(self, *optimizers: torch.optim.Optimizer) -> None:
        """Set the optimizers with which ``forward_backward`` updates each layer if ``update="in_backward"``.

        ``optimizer.step()`` must still be called after each ``forward_backward``, because schedulers expect the call.
        ``optimizer.step()`` then updates only parameters outside of the layers, such as parameters of a loss.

        Args:
            *optimizers: optimizers that together update all :meth:`optim_parameters`.

        Raises:
            ConfigError: the pipeline does not have ``update="in_backward"``.

        >>> from roundpipe_runtime import RoundPipe
        >>> layer = nn.Linear(4, 4).bfloat16()
        >>> model = RoundPipe(layer, optim_dtype=torch.float32, update="in_backward", devices="virtual:1")
        >>> optimizer = torch.optim.AdamW(model.optim_parameters())
        >>> model.step_with(optimizer)
        >>> loss = model.forward_backward((torch.ones(2, 4).bfloat16(),), loss_fn=lambda outputs, _: outputs.sum())
        >>> layer.weight.dtype, layer.weight.grad, optimizer.state[layer.weight]["step"].item()
        (torch.float32, None, 1.0)
        >>> optimizer.step()
        >>> model.close()
        """
        store = self._rp_engine.store
        if not isinstance(store, InBackwardStore):
            raise ConfigError(
                "step_with needs a pipeline that updates parameters in forward_backward:\n"
                '    RoundPipe(model, optim_dtype=torch.float32, update="in_backward")'
            )
        store.use(optimizers)

    def step(
        self, step_fn: Callable[..., Any], is_async: bool | Literal["exact"] = False, *args: Any, **kwargs: Any
    ) -> None:
        """Run an optimizer step, immediately or in the background.

        Args:
            step_fn: function that runs the step: ``lambda: (optimizer.step(), optimizer.zero_grad())``.
            is_async: when the step runs (default: before this method returns). With ``is_async="exact"``, the step runs
                in the background, and a layer waits for its update before it runs again, so results are unchanged. With
                ``is_async=True``, the step runs in the background, and the next forward and backward use old weights.
            *args: arguments of ``step_fn``.
            **kwargs: keyword arguments of ``step_fn``.

        Raises:
            ConfigError: ``step_fn`` is not a function, or ``is_async`` is not ``True``, ``False`` or ``"exact"``.
        """
        if not callable(step_fn):
            raise ConfigError(
                f"step_fn must be a function, found {step_fn!r}:\n"
                "    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))"
            )
        if isinstance(is_async, str) and is_async != "exact":
            raise ConfigError(f'is_async must be True, False or "exact", found {is_async!r}.')
        engine = self._rp_engine
        is_in_backward = isinstance(engine.store, InBackwardStore)
        if is_in_backward and is_async is True:
            raise ConfigError(
                'update="in_backward" has stepped the parameters already, so the next forward cannot use the '
                "parameters from before the step:\n    model.step(step_fn)"
            )
        if is_in_backward or not is_async:
            with gradient_mode_kept():
                engine.steps.run(functools.partial(step_fn, *args, **kwargs))
        elif is_async == "exact":
            engine.steps.run_exact(functools.partial(bound_now(step_fn), *args, **kwargs), engine.lock)
        else:
            engine.steps.start(functools.partial(bound_now(step_fn), *args, **kwargs))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of the optimizer's parameters so that their total norm is at most ``max_norm``.

        The norm is computed from the gradients of all ranks, so all ranks must call this method. The norm is bitwise
        identical for every number of ranks.

        Args:
            max_norm: largest total norm of the gradients.
            norm_type: exponent of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: whether to raise an error if the norm is not finite.

        Returns:
            The norm before scaling.

        Raises:
            ConfigError: ``norm_type`` is not positive.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is true.
        """
        from ..distributed.weights import clip_grad_norm  # torch's DTensor takes a while to load

        targets = list(self.optim_parameters())
        check_clipped(targets)
        return clip_grad_norm(targets, self.ranks, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def synchronize(self) -> None:
        """Wait for an optimizer step in the background, so that the model's parameters and gradients are up to date."""
        self._rp_engine.synchronize()
        self._rp_engine.store.show_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including the gradients of the optimizer's parameters."""
        self._rp_engine.zero_grad(set_to_none)

    def progress(self) -> PipelineProgress:
        """Return the training state of the pipeline that is not in its state dict.

        Returns:
            The number of completed runs, the master weights and gradients (not copied), and the number of row groups.
        """
        return dataclasses.replace(self._rp_engine.progress(), replicas=self.replicas)

    def load_progress(self, progress: PipelineProgress) -> None:
        """Load the result of :meth:`progress`, after the parameters have been loaded, and discard existing gradients.

        Args:
            progress: training state of a pipeline with the parameter names of this pipeline. The master weights in
                ``progress`` are ignored if this pipeline does not use master weights. Batches are split into the
                stored number of groups, unless this pipeline was created with ``replicas``.
        """
        self._rp_engine.load_progress(progress)
        self._rp_keep_replicas(progress.replicas or 1)

    def _rp_keep_replicas(self, replicas: int) -> None:
        """Split batches into ``replicas`` groups of rows, as the saved training did; warn if this is impossible."""
        if replicas == self.replicas or replicas == 1:
            return
        if self._rp_options.replicas is None and self.mesh is not None and replicas >= self.ranks.size:
            self._rp_engine.groups.replicas = replicas
            return
        warn(
            f"The loaded training split its batches into {replicas} groups, and {self.name} splits them into "
            f"{self.replicas}, so sums are added in a different order. For identical results:\n"
            f"    RoundPipe(..., replicas={replicas})",
            RoundPipeWarning,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for an optimizer step in the background, and return the state dict of the wrapped model.

        Args:
            *args: positional arguments of the model's ``state_dict``.
            **kwargs: keyword arguments of the model's ``state_dict``.

        Returns:
            The state dict.
        """
        self._rp_engine.synchronize()
        return self._rp_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the model, and update the optimizer's master weights.

        Args:
            state_dict: parameters and buffers by name.
            strict: whether the names must be exactly those of the model.
            assign: whether the tensors replace the parameters, instead of a copy of their values.

        Returns:
            The missing and the unexpected keys, as ``nn.Module.load_state_dict`` returns them.

        Raises:
            RuntimeError: names or shapes do not fit the model.
        """
        self._rp_engine.synchronize()
        result = self._rp_model.load_state_dict(state_dict, strict, assign)
        self._rp_engine.store.publish()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # torch calls this method instead of `load_state_dict` if another module contains the pipeline. A background
        # step that ended later would overwrite the loaded values.
        self._rp_engine.synchronize()
        super()._load_from_state_dict(*args, **kwargs)


_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})


# A step function that runs in the background must read the variables of the time of the call:
#
#     for step in range(100):
#         optimizer = first if step % 2 else second            # otherwise the lambda would read the next optimizer
#         model.step(lambda: optimizer.step(), is_async="exact")


def bound_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function, with the current values of the global and closure variables that the function reads."""
    # a function that assigns global or closure variables is returned unchanged: other code reads the new values
    return _bound(function, {}, {}) if isinstance(function, types.FunctionType) else function


def _bound(
    function: types.FunctionType, spaces: dict[int, dict[str, Any]], done: dict[int, types.FunctionType]
) -> types.FunctionType:
    # spaces: one copy of the globals of each module; done: bound functions of this call, by identity
    key = id(function)
    if key in done:
        return done[key]
    done[key] = function  # the function may call itself
    if _writes(function.__code__):
        return function
    space = spaces.setdefault(id(function.__globals__), dict(function.__globals__))
    for name in _names(function.__code__):
        found = space.get(name)
        if isinstance(found, types.FunctionType) and found.__globals__ is function.__globals__:
            space[name] = _bound(found, spaces, done)
    cells = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a name that has no value yet
            cells.append(cell)
        else:
            is_function = isinstance(value, types.FunctionType)
            cells.append(types.CellType(_bound(value, spaces, done) if is_function else value))
    made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    done[key] = made
    return made


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(one for inner in code.co_consts if isinstance(inner, types.CodeType) for one in _codes(inner))]


@functools.lru_cache(256)
def _names(code: types.CodeType) -> set[str]:
    return {name for one in _codes(code) for name in one.co_names}


@functools.lru_cache(256)
def _writes(code: types.CodeType) -> bool:
    """Return whether a function assigns a variable of its module or of the function around it."""
    inner = {name for one in _codes(code) for name in one.co_cellvars}  # own variables that inner functions share
    return any(
        step.opname in _WRITES and (step.opname.endswith("GLOBAL") or step.argval not in inner)
        for one in _codes(code)
        for step in dis.get_instructions(one)
    )
