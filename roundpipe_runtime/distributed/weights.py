"""Keep whole parameters on every rank, but split master weights and optimizer state between the ranks."""

# parameter       every rank has the whole parameter: layers run as in one process
# target          DTensor that the optimizer updates: Shard(0) of a matrix, all of a vector; in optim_dtype, or a view
# target.grad     DTensor with the gradients summed over all ranks, for the rows of the target
# after a step    each rank sends its updated rows to the other ranks, layer by layer

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..device.disk import in_groups, passing
from ..device.worker import Outcome, Uninterrupted
from ..errors import ConfigError, DistributedError, RankStepError, format_failure
from ..optim.layer_contents import LayerContents
from ..optim.parameters import ParameterStore, is_watched
from ..optim.readiness import ReadinessTable
from ..optim.step import OptimizerCtx, StepRunner
from ..optim.torch_steps import dtype_of_gradient, hear_steps
from .ranks.ranks import Ranks


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


class RankStore(ParameterStore):
    """Stores all parameters, gradients and master weights of a model on every rank."""

    def __init__(self, model: nn.Module, optim_dtype: torch.dtype | None, ranks: Ranks) -> None:
        super().__init__(model, optim_dtype)
        self.ranks = ranks

    def rows_of(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``whole``, a tensor shaped like the parameter, that this rank's optimizer updates."""
        return whole

    def landing_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.gradient_dtype(parameter)

    def start_publication(self) -> None:
        """Make the next :meth:`refresh` of each parameter exchange its new values between the ranks."""


class ShardedStore(RankStore):
    """Stores whole parameters on every rank; each rank stores its share of the gradients and master weights."""

    def __init__(self, model: nn.Module, optim_dtype: torch.dtype | None, ranks: Ranks) -> None:
        super().__init__(model, optim_dtype, ranks)
        assert ranks.mesh is not None
        self._mesh: DeviceMesh = ranks.mesh
        self._number = ranks.rank % ranks.num_shards
        self._shards: dict[str, Target] = {}
        self._published: set[int] = set()

    def rows_of(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        if not is_cut(parameter):
            return whole.reshape(1) if whole.dim() == 0 else whole
        return shards(whole, self.ranks.num_shards)[self._number]

    def _target(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name not in self._shards:
            self._shards[name] = Target(self, parameter)
        self._shards[name].wake(parameter)
        return self._shards[name].tensor

    def as_dtensor(self, parameter: torch.Tensor, local: torch.Tensor) -> DTensor:
        shape = parameter.shape if parameter.dim() else torch.Size([1])
        stride = torch.empty(shape, device="meta").stride()
        placements: list[Placement] = [Replicate()] * self._mesh.ndim
        if is_cut(parameter):
            placements[-1] = Shard(0)
        made: DTensor = DTensor.from_local(local, self._mesh, placements, run_check=False, shape=shape, stride=stride)
        return made

    def add_gradients(self, gradients: Iterable[Mapping[nn.Parameter, torch.Tensor]]) -> None:
        # gradients: one mapping per layer, last layer first, from parameters to the rows of this rank
        names = self._names()
        watched: list[tuple[nn.Parameter, torch.Tensor]] = []
        for layer in gradients:
            for parameter, gradient in layer.items():
                target = self._target(names[id(parameter)], parameter)
                rows = gradient.to(dtype_of_gradient(target)).view(local_of(target).shape)
                if is_watched(target):
                    watched.append((target, self.as_dtensor(parameter, rows)))
                elif target.grad is None:
                    target.grad = self.as_dtensor(parameter, rows)
                else:
                    local_of(target.grad).add_(rows)
        if watched:
            torch.autograd.backward([target for target, _ in watched], [gradient for _, gradient in watched])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for shard in self._shards.values():
            if set_to_none:
                shard.tensor.grad = None
            elif shard.tensor.grad is not None:
                local_of(shard.tensor.grad).zero_()

    def show_gradients(self) -> None:
        """Do nothing: each rank has gradients for its shards of the parameters only."""

    def load_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.add_gradients([{p: self._loaded(p, gradients[name]) for name, p in self._listed() if name in gradients}])

    def masters(self) -> dict[str, torch.Tensor]:
        dtypes = {name: parameter.dtype for name, parameter in self._listed()}
        found = {name: shard.tensor.detach() for name, shard in self._shards.items() if shard.is_master}
        return {name: tensor for name, tensor in found.items() if tensor.dtype != dtypes.get(name)}

    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Load master weights by name of the parameter: ``DTensor``s from :meth:`masters`, or whole tensors."""
        for name, parameter in self.model.named_parameters():
            if name in masters and self.gradient_dtype(parameter) != parameter.dtype:
                self._target(name, parameter)
                self._shards[name].set(parameter, self._loaded(parameter, masters[name]))

    def _loaded(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        return local_of(value) if isinstance(value, DTensor) else self.rows_of(parameter, value)

    def adopt(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self._shards:
                self._shards[name].adopt(parameter)

    def publish(self, *, stepped: bool = False) -> None:
        self.note_published()
        self.adopt()
        if stepped:
            self.start_publication()
            self.refresh(list(self.model.parameters()))

    def start_publication(self) -> None:
        self._published = set()
        # Scan now: a run that begins before all layers are refreshed replaces parameters by copies.
        self.note_names()

    @torch.no_grad()
    def refresh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Exchange the rows of parameters that each rank has updated, and update the host copies that stages read."""
        names = self._names()
        fresh = [p for p in parameters if p.requires_grad and names.get(id(p)) and id(p) not in self._published]
        # no optimizer has the other parameters
        held = {p: self._shards[names[id(p)]] for p in fresh if names[id(p)] in self._shards}
        for parameter, shard in held.items():
            if shard.is_master:  # rounded
                shard.rows(parameter).copy_(local_of(shard.tensor))
        # values that the steps of all ranks have computed
        parts = [shards(p.detach(), self.ranks.num_shards) for p in held if is_cut(p)]
        flat = [[part.contiguous() for part in parts_of] for parts_of in parts]
        self.ranks.gather(flat, self.ranks.shard_members(), "weights")
        for original, received in zip(parts, flat, strict=True):
            for to, source in zip(original, received, strict=True):
                if to is not source:  # the rows of the parameter are not contiguous
                    to.copy_(source)
        for parameter in fresh:
            if parameter in held:
                held[parameter].note(parameter)
            if id(parameter) in self._shadows:
                self._shadows[id(parameter)].copy_(parameter)
            self._published.add(id(parameter))

    def _needs_shadow(self, name: str) -> bool:
        return name not in self._shards or not self._shards[name].is_master


class Target:
    """The tensor that this rank's optimizer updates for a parameter: a view of the parameter, or a master weight."""

    # If the optimizer works in the dtype of the parameter, the updated tensor is a view of this rank's rows of the
    # parameter. If the optimizer works in another dtype, the updated tensor is a master weight. A frozen parameter
    # needs no master weight, so a NaN that is expanded to the shape of the rows, and takes no memory, stands for it.

    def __init__(self, store: ShardedStore, parameter: nn.Parameter) -> None:
        self._store = store
        self._dtype = store.gradient_dtype(parameter)
        self._has_own_rows = self._dtype != parameter.dtype
        self.is_master = False
        rows = self.rows(parameter)
        if self._has_own_rows:
            rows = torch.full((), float("nan"), dtype=self._dtype).expand(rows.shape)
        self.tensor = nn.Parameter(store.as_dtensor(parameter, rows), requires_grad=parameter.requires_grad)
        if (kept := store.dtype_between(parameter)) != self._dtype:
            self.tensor.grad_dtype = kept
        self.wake(parameter)
        self.note(parameter)

    def wake(self, parameter: nn.Parameter) -> None:
        """Copy ``requires_grad`` from a parameter to the tensor that the optimizer updates for this parameter."""
        if parameter.requires_grad and not self.is_master and self._has_own_rows:
            self._replace(self.rows(parameter).to(self._dtype, copy=True))
            self.is_master = True
            self.note(parameter)
        if self.tensor.requires_grad != parameter.requires_grad:
            self.tensor.requires_grad_(parameter.requires_grad)

    def adopt(self, parameter: nn.Parameter) -> None:
        if self._state(parameter) != self._agreed:
            if self.is_master:
                self.set(parameter, self.rows(parameter))
            elif not self._has_own_rows:
                self._replace(self.rows(parameter))  # a view; the parameter's data may have been replaced
            self.note(parameter)

    @torch.no_grad()
    def set(self, parameter: nn.Parameter, rows: torch.Tensor) -> None:
        if not self.is_master:
            self._replace(torch.empty_like(rows, dtype=self._dtype))
            self.is_master = True
        local_of(self.tensor).copy_(rows)
        self.note(parameter)

    def note(self, parameter: nn.Parameter) -> None:
        """Record that the optimizer's tensor now equals the parameter, to detect later changes by other code."""
        self._agreed = self._state(parameter)

    def rows(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._store.rows_of(parameter, parameter.detach())

    def _replace(self, rows: torch.Tensor) -> None:
        # Optimizers hold the DTensor, so its memory is replaced, for which torch has no public function.
        self.tensor._local_tensor.data = rows  # type: ignore[attr-defined] # of a DTensor

    def _state(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        return id(parameter), parameter.data_ptr(), parameter._version


# Step the optimizer on shards, and send the new weights to the other ranks.
#
#     run t | step t | run t+1                         the step is that of this rank's rows
#                    | layer 0 | layer 1 | layer 2     weights after the step, gathered layer by layer next to run t+1,
#                                                      which waits for each layer before it reads it

# Optimizers that compute sums over a whole matrix, or over all parameters.
_NOT_ELEMENTWISE = {"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap", "sparseadam"}
_IN_BLOCKS = ("4bit", "8bit", "fp8")  # quantized moments, with a scale for each block


class RankSteps(StepRunner):
    """Runs the optimizer steps of one rank, and exchanges the updated weights with the other ranks."""

    _store: RankStore
    ranks: Ranks

    def __init__(self, store: RankStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]) -> None:
        super().__init__(store, table, lambda: self._contents)
        self.ranks = store.ranks
        # Read by the caller's thread, while no copies of a run are in the places of parameters.
        self._scan_now = scan
        self._contents: Sequence[LayerContents] = ()
        self._is_inside = False
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _runners().add(self)

    def run(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step in this thread; the next forward waits for the new weights layer by layer."""
        self.synchronize()
        self._store.adopt()
        self._run_agreed(step)
        self._publish_next()

    def start(self, step: Callable[[], Any]) -> None:
        super().start(partial(self._run_agreed, step))

    def run_exact(self, step: Callable[[], Any], lock: contextlib.AbstractContextManager[Any]) -> None:
        self.run(step)

    def run_ended(self) -> None:
        """After a successful pipeline call, exchange the weights of an optimizer step that ran during the call."""
        if self._unpublished:
            self.wait_update()
            self._start_publication()
        super().run_ended()

    def _run_agreed(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step; raise an error on all ranks if the step fails on one of them."""
        self._is_inside = True
        with Outcome() as outcome, OptimizerCtx():
            step()
        self._is_inside = False
        failure = outcome.error
        if failure is None:
            # Fails if the step failed on another rank; otherwise one model would have weights of two steps.
            self.ranks.exchange(None, "step")
            return
        if not isinstance(failure, RankStepError):
            self.ranks.fail_step(format_failure(failure))
        raise failure

    def _publish_next(self) -> None:
        """Gather the new weights of all ranks, layer by layer, in parallel with the next forward."""
        if self.ranks.num_shards == 1:
            self._store.publish(stepped=True)
            return
        self._start_publication()
        # Runs wait for the new version, so the publishing must have been submitted before the version is announced.
        with Uninterrupted():
            self._publication = self._worker.submit(self._publish, self._table.latest + 1)
            self._table.advance()

    def _start_publication(self) -> None:
        # The publishing thread cannot scan, since a parallel run has replaced parameters by its device copies.
        self._contents = self._scan_now()
        self._store.start_publication()

    def close(self) -> None:
        _runners().discard(self)
        super().close()

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates this pipeline; raise an error if the optimizer cannot update shards."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        targets = {id(target) for _, target in self._store.named()}
        own = held & targets
        if optimizer in self._checked or self.ranks.num_shards == 1:
            return bool(own)
        whole = {id(parameter) for parameter in self._store.model.parameters()} - targets
        if held & whole:
            raise DistributedError(
                f"{type(optimizer).__name__} was made from the full parameters of the model, which get no gradient: "
                "this rank has the gradients of its shards only. Create the optimizer inside OptimizerCtx:\n"
                "    with OptimizerCtx():\n"
                f"        optimizer = {type(optimizer).__name__}(model.parameters(), ...)"
            )
        names, problem = [kind.__name__.lower() for kind in type(optimizer).__mro__], None
        if any(name in _NOT_ELEMENTWISE for name in names):
            problem = "sums over whole matrices, so its results for shards would be wrong"
        elif any(name.endswith(_IN_BLOCKS) for name in names):
            problem = "has one scale per block of values, and shards cut blocks, so its results would be wrong"
        if own and problem:
            raise DistributedError(
                f"{type(optimizer).__name__} {problem}. Each rank has one of {self.ranks.num_shards} shards of each "
                "matrix. Do not shard the optimizer state; the results of training stay the same:\n"
                f'    mesh = init_device_mesh("cpu", ({self.ranks.size}, 1))\n    model = RoundPipe(model, mesh=mesh)'
            )
        self._checked.add(optimizer)
        return bool(own)


@cache
def _runners() -> weakref.WeakSet[RankSteps]:
    """Return the set of the :class:`RankSteps` of all open pipelines."""
    found: weakref.WeakSet[RankSteps] = weakref.WeakSet()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for runner in list(found):
            if runner.owns(optimizer) and not runner._is_inside:
                runner.synchronize()
                runner._store.adopt()

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for runner in list(found):
            if not runner._is_inside and runner.ranks.num_shards > 1 and runner.owns(optimizer):
                runner._publish_next()

    hear_steps(before, after)
    return found


def is_cut(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1


def shards(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a tensor along axis 0 into ``count`` views, as ``Shard(0)`` does; the last views may be empty.

    >>> [shard.tolist() for shard in shards(torch.arange(5).reshape(5, 1), 2)]
    [[[0], [1], [2]], [[3], [4]]]
    """
    found = list(tensor.chunk(count, 0)) if tensor.shape[0] else []
    return found + [tensor[:0]] * (count - len(found))


def pieces(tensor: torch.Tensor, num_shards: int, num_copies: int) -> list[torch.Tensor]:
    """Split a gradient into one view for each rank; each rank sums the gradients of the rows in its view.

    >>> [part.shape[0] for part in pieces(torch.zeros(7, 2), 2, 2)]
    [2, 2, 2, 1]
    """
    # num_copies: number of ranks that hold each shard; each of these ranks sums a part of the shard
    # returns: a tensor per rank, in the order of the mesh: copy after copy, within a copy shard after shard
    if not is_cut(tensor):
        return [tensor.reshape(1) if tensor.dim() == 0 else tensor] * (num_shards * num_copies)
    parts = [shards(shard, num_copies) for shard in shards(tensor, num_shards)]
    return [parts[shard][copy] for copy in range(num_copies) for shard in range(num_shards)]


# Compute the norm of all gradients, bitwise identical for every number of ranks.
#
# Powers are summed in float64 over each row, which is never split between shards. Every rank gathers the sums of all
# rows, and adds them in the same order.


@torch.no_grad()
def clip_grad_norm(
    targets: Iterable[torch.Tensor],
    ranks: Ranks,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``; all ranks must call this function."""
    # norm_type: exponent of the norm, `inf` for the largest number
    if not norm_type > 0:
        raise ConfigError(f"clip_grad_norm_: norm_type must be positive, like 2.0, found {norm_type!r}.")
    gradients = [target.grad for target in targets if target.grad is not None]
    sums: list[torch.Tensor] = []  # of `abs(value) ** norm_type` (for `inf`: maxima) over each row of each gradient
    parts: list[list[torch.Tensor]] = []
    for gradient in _in_turn(gradients, written=False):
        local = local_of(gradient)
        if not local.is_floating_point() and not local.is_complex():
            continue
        rows = local.flatten(1) if is_cut(gradient) else local.reshape(-1, 1)
        values = rows.abs().double() if rows.is_complex() else rows.double()
        if norm_type == 2.0:
            of_rows = values.square().sum(1)
        elif math.isinf(norm_type):
            of_rows = values.abs().amax(1) if values.shape[1] else values.new_zeros(values.shape[0])
        else:
            of_rows = values.abs().pow(norm_type).sum(1)
        if ranks.num_shards > 1 and is_cut(gradient):
            whole = torch.empty(gradient.shape[0], dtype=torch.float64)
            parts.append(shards(whole, ranks.num_shards))
            parts[-1][ranks.rank % ranks.num_shards].copy_(of_rows)
            of_rows = whole
        sums.append(of_rows)
        del rows, values  # as large as the gradient
    ranks.gather(parts, ranks.shard_members(), "step")
    if math.isinf(norm_type):
        norm = max((float(rows.max()) for rows in sums if rows.numel()), default=0.0)
    else:
        is_finite = all(bool(rows.isfinite().all()) for rows in sums)
        norm = math.fsum(float(rows.sum()) for rows in sums) ** (1 / norm_type) if is_finite else math.nan
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm}, which cannot be clipped.")
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        for gradient in _in_turn(gradients, written=True):
            local_of(gradient).mul_(factor)
    return torch.tensor(norm, dtype=torch.float32)


def _in_turn(gradients: list[torch.Tensor], *, written: bool) -> Iterator[torch.Tensor]:
    """Yield the gradients one by one; a gradient on a disk is loaded into memory while it is used."""
    groups = in_groups(gradients)
    for number in passing(groups, written=written):
        yield from groups[number]
