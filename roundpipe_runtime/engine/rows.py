"""Check that layers compute each row of a batch independently, before the batch is split into microbatches.

During the check, dropout is off, and torch's random functions return a constant. Some layers draw random numbers in
other ways, such as from NumPy. Such a layer is called again with the same random numbers after one of three rows was
replaced by a copy of another row. The outputs for the unchanged rows must stay equal. A backward may also mix rows, for
example if the backward divides gradients by the number of rows. Rounding can change a choice between nearly equal
values, such as the expert of a token, so other rows are tried before an error is raised.
"""

# rows a, b, c; their outputs a', b', c'
# layers          [a b c] -> [a' b' c']    [a b] -> [a' b']        [c] -> [c']
# random layers   [a b c] -> [a' b' c']    [a b b] -> [a' b' .]    [c b c] -> [. b' c']
# gradients       of [a b c] = of [a b] + of [c]

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from yobx_flatten.core.compare import tolerance
from yobx_flatten.core.effects import Snapshot, undisturbed
from yobx_flatten.core.interrupts import Undoing
from yobx_flatten.core.private_names.of_torch import NormBase, pytree
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.registry.recipe.aliases import PyTree

from .. import errors
from ..batch.entries import FlatBatch, FlatMicrobatch
from ..errors import RoundPipeWarning, SplitError
from . import digests
from .code_state import Repeats
from .config import RoundPipeRunConfig
from .lifecycle import CannotTryError as CannotTryError
from .lifecycle import RunLifecycle
from .parameters.on_device import Gradients
from .run import Trial

# Enough rows for two parts of different sizes, and for two parts with several rows each.
_FEW, _SEVERAL = 3, 4
_TRIALS = 3  # sets of rows that are tried before an error
# Share of the tolerance that remains for other rows after some rows have differed: if rounding changed a choice, other
# rows are equal up to rounding; if rows influence each other a little, other rows also differ a little.
_SURELY = 0.1
# A hook may change outputs or gradients, so the caller's hooks run in trials.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_WHOLE = 2**16  # elements of the largest gradient whose values are all kept
_LARGER = 2.0**8  # factor of the loss of parts in a trial: also in training, gradients are scaled after the backward
_Hook: TypeAlias = Callable[..., Any]


@dataclasses.dataclass
class RowTrial:
    """A few rows of a batch and the same rows in two parts, for a comparison of the outputs of layers."""

    whole: FlatMicrobatch  # the rows
    parts: Sequence[FlatMicrobatch]  # the same rows in two parts
    outputs: list[Any] = dataclasses.field(default_factory=list)  # outputs of the layers for all rows, then for parts
    is_equal: bool = False  # whether the outputs for the parts equal the outputs for all rows
    has_state: bool = False  # whether a second call with the same rows and draws gives different outputs

    def __post_init__(self) -> None:
        self.count = self.whole.rows or 0  # number of rows

    def in_order(self, order: Sequence[int]) -> FlatMicrobatch:
        pairs = zip(self.whole.inputs, self.parts[-1].inputs, strict=True)
        inputs = [digests.taken(one, digests.rows_of(one, part, self.count), order) for one, part in pairs]
        return dataclasses.replace(self.whole, inputs=inputs)


class RowCheck:
    """Checks that the layers of a pipeline treat rows independently, and stores the result for similar calls."""

    def __init__(self) -> None:
        self._repeats = Repeats()
        self._shown: set[Hashable] = set()
        self._failures: collections.Counter[Hashable] = collections.Counter()
        self._compared: collections.Counter[Hashable] = collections.Counter()
        self.tried: list[RowTrial] = []  # rows on which layers have run in this call
        self._warnings: list[str] = []  # of this call
        self._normalizes: Sequence[str] = ()  # the warning that a layer has batch norms
        self._nonlinear: dict[Hashable, bool] = {}
        self.is_nonlinear = False  # `GradientTrial.is_nonlinear` of the layers of this call

    def check(
        self, engine: RunLifecycle, batch: FlatBatch, rows: Sequence[int | None], config: RoundPipeRunConfig
    ) -> None:
        """Check that layers treat the rows of a batch independently, if a check is due in this pipeline call."""
        self.tried.clear()
        self.is_nonlinear = False
        if callable(config.split_input) or None in rows or sum(count or 0 for count in rows) < 2:
            return
        values = [(leaf.path, leaf.value) for leaf in (*batch.args.leaves, *batch.kwargs.leaves)]
        kinds = ((path, v.dtype, v.dim()) if isinstance(v, torch.Tensor) else (path, type(v)) for path, v in values)
        kind = tuple(kinds), tuple(layer.training for layer in engine.layers), config.requires_grad
        self.is_nonlinear = self._nonlinear.get(kind, False)
        if not self._repeats.is_due(kind, engine.layers):
            return
        if len(rows) > 1 and not self._normalizes:
            self._normalizes = _name_batch_norms(engine.layers)
            self._warnings += self._normalizes[:1]
        layer, total = None, sum(count or 0 for count in rows)
        for number in (math.ceil(total / _FEW), max(1, total // _SEVERAL)):
            trials: list[RowTrial] = []
            some = few_rows(engine, batch, dataclasses.replace(config, num_microbatch=number))
            try:
                layer = first_that_mixes(engine, some, config, len(engine.layers), tried=trials)
            except CannotTryError as error:  # with more rows, each part has several, as a norm needs
                reason = str(error)
            else:
                break
        else:
            self._failures[kind] += kind not in self._shown
            if self._failures[kind] == 2:  # at the second call with similar inputs
                self._shown.add(kind)
                errors.warn(
                    "RoundPipe could not check whether layers mix rows of a batch, because the layers fail on a few "
                    f"rows: {reason}. If a layer mixes rows, run the batch as one microbatch:\n"
                    "    RoundPipeRunConfig(num_microbatch=1)",
                    RoundPipeWarning,
                )
            return
        if layer is not None:
            self._repeats.failed(kind)
            raise errors.mixes_rows_forward(engine.layers[layer], layer)
        self._compared[kind] += 1
        if self._compared[kind] % 2:  # calls 1, 4, 16, ...: a backward costs more than a forward

            def few(most: int) -> Iterator[RowTrial]:
                return few_rows(engine, batch, dataclasses.replace(config, num_microbatch=math.ceil(total / most)))

            found = compare_gradients(engine, trials, rows, few, config, len(engine.layers))
            if found.mixes is not None:
                self._repeats.failed(kind)
                self._compared[kind] = 0
                raise errors.mixes_rows_backward(engine.layers[found.mixes], found.mixes)
            self.is_nonlinear = self._nonlinear[kind] = found.is_nonlinear
        if kind not in self._shown and any(trial.has_state for trial in trials):
            self._warnings.append(errors.KEEPS_STATE)
        self._shown.add(kind)
        self.tried += [trial for trial in trials if trial.outputs]

    def warn(self) -> None:
        for text in self._warnings:
            errors.warn(text, RoundPipeWarning)

    def end(self) -> None:
        self.tried.clear()
        self._warnings.clear()
        self._repeats.end()


def first_that_mixes(
    engine: RunLifecycle,
    trials: Iterator[RowTrial],
    config: RoundPipeRunConfig,
    number: int,
    tried: list[RowTrial],
    compared: Callable[[Any], PyTree] = lambda output: output,
) -> int | None:
    """Return the first layer whose outputs for some rows depend on other rows; ``None`` if there is none."""
    # number: number of layers that run
    # compared: function that returns the part of an output that is compared. Default: the whole output.
    # tried: list to which the trials are added
    if engine.steps.is_exact:
        engine.steps.wait_update()
    compare = _Comparison(engine, config, compared)
    found = None
    # layers may not accept some rows; if the call itself also fails, that error is raised
    with (
        raised_as(lambda error: CannotTryError(f"{type(error).__name__}: {error}")),
        set_apart(engine.layers) as compare.restart,
    ):
        for trial in itertools.islice(trials, _TRIALS):
            tried.append(trial)
            if (found := compare.mixing(trial, number)) is None:
                break
            compare.share = _SURELY
    return found


@dataclasses.dataclass(frozen=True)
class GradientTrial:
    """The result of :func:`compare_gradients`: which layer mixes rows, and whether gradients scale with the loss."""

    mixes: int | None = None  # last layer whose gradients for some rows differ from the sum of gradients for parts
    # whether gradients of layers are not proportional to gradients of outputs; a hook may clamp gradients
    is_nonlinear: bool = False


def compare_gradients(
    engine: RunLifecycle,
    tried: Sequence[RowTrial],
    rows: Sequence[int | None],
    few: Callable[[int], Iterator[RowTrial]],
    config: RoundPipeRunConfig,
    number: int,
    compared: Callable[[Any], PyTree] = lambda output: output,
) -> GradientTrial:
    """Compare the gradients for a few rows with the sum of the gradients for two parts of these rows."""
    # tried: trials on which the layers have run; rows: number of rows of each microbatch
    # few: function that returns trials with at most a given number of rows
    equal = [trial for trial in tried if trial.is_equal]
    most = max(min(max(count or 0 for count in rows), _FEW), 2)  # devices have room for a microbatch
    if not (config.requires_grad and equal):
        return GradientTrial()
    has_rows = digests.pair_leaves([*map(compared, equal[0].outputs)], [], equal[0].count)
    types = {parameter.dtype for layer in engine.layers for parameter in layer.parameters()}
    count = max(sum(one.numel() for one in digests.leaves_with_rows(compared(equal[0].outputs[0]), has_rows)), 1)
    mean = 1 / _LARGER if torch.float16 in (*types, _coarsest()) else 1 / count  # gradients in float16 vanish

    def loss(scale: float, outputs: Any, labels: Any) -> torch.Tensor:
        leaves = digests.leaves_with_rows(compared(outputs), has_rows)
        total = sum((_of_each_number(leaf) for leaf in leaves if leaf.requires_grad), start=torch.zeros(()))
        return total * (scale * mean)

    def gradients(given: Sequence[FlatMicrobatch], scale: float = 1.0) -> dict[nn.Parameter, digests.Digest]:
        found: dict[nn.Parameter, digests.Digest] = {}
        lock = threading.Lock()  # several devices have gradients

        def landed(layer: int, arriving: Gradients) -> None:
            while arriving:  # each gradient is released before the next one, to save host memory
                parameter, (gradient, ready) = arriving.popitem()
                ready.result()
                one = digests.digest(gradient, whole=_WHOLE)
                with lock:
                    types.add(gradient.dtype)
                    found[parameter] = found[parameter] + one if parameter in found else one

        with set_apart(engine.layers):
            engine.try_backward(given, config, range(number), functools.partial(loss, scale), landed, types)
        return found

    found = GradientTrial()
    for trial in itertools.islice(equal if equal[0].count <= most else few(most), _TRIALS):
        try:
            found = _compared(engine.layers[:number], trial, gradients, types)
        except CannotTryError:
            return GradientTrial()
        if found == GradientTrial():
            break
    return found


def _compared(
    layers: Sequence[nn.Module],
    trial: RowTrial,
    gradients: Callable[..., dict[nn.Parameter, digests.Digest]],
    types: set[torch.dtype],
) -> GradientTrial:
    whole = gradients([trial.whole])
    if not whole or any(one.odd is not None for one in whole.values()):
        return GradientTrial()
    least = 0.1 * max(map(digests.typical, whole.values()))

    def last_that_differs(given: Sequence[FlatMicrobatch], scale: float = 1.0) -> int | None:
        parts, limit = gradients(given, scale), tolerance("rows", *types)
        for layer in reversed(range(len(layers))):
            for parameter in layers[layer].parameters():
                part = parts.get(parameter)
                if digests.distance(part and part.divided(scale), whole.get(parameter), least) > limit:
                    return layer
        return None

    if last_that_differs(trial.parts, _LARGER) is None or last_that_differs([trial.whole]) is not None:
        return GradientTrial()  # equal, or the same rows differ at the next call
    mixes = last_that_differs(trial.parts)
    return GradientTrial(mixes, mixes is None)


def _of_each_number(leaf: torch.Tensor) -> torch.Tensor:
    """Return a scalar function of a tensor whose gradient differs by element, and stays small for large elements."""
    values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    finite = (values if values.isfinite().all() else torch.where(values.isfinite(), values, 0.0)).float()
    return finite.sum() + finite.square().log1p().sum()


class _Comparison:
    def __init__(self, engine: RunLifecycle, config: RoundPipeRunConfig, compared: Callable[[Any], PyTree]) -> None:
        self._engine, self._compared = engine, compared
        self._config = dataclasses.replace(config, requires_grad=False, execute_plan=None, output_device=None)
        self.restart: Callable[[], None] = lambda: None
        self.share = 1.0  # of the tolerance

    def mixing(self, trial: RowTrial, number: int) -> int | None:
        trial.is_equal = not self._differs(trial, number, together=True)
        if trial.is_equal:
            return None
        if self._is_other(trial, number, "others"):
            return None  # the same rows with equal draws give other values at the next call, so nothing can be compared
        draws = self._is_other(trial, number, "parts", together=True)  # layers draw, or keep a state in buffers
        trial.has_state = draws and self._is_other(trial, number, "others", together=True)
        mixes = functools.partial(self._depends_on_others if draws else self._differs, trial)
        if not mixes(number):
            return None
        # rows that one layer has mixed stay mixed in later layers
        return bisect.bisect_left(range(number - 1), True, key=lambda layer: mixes(layer + 1))

    def _differs(self, trial: RowTrial, number: int, *, together: bool = False) -> bool:
        trial.outputs[:] = self._outputs([trial.whole, *trial.parts], number, "parts", together=together)
        whole, *found = map(self._compared, trial.outputs)
        return digests.mixes_rows(whole, found, [one.rows or 0 for one in trial.parts], _coarsest(), self.share)

    def _is_other(self, trial: RowTrial, number: int, kind: Trial, *, together: bool = False) -> bool:
        first, again = self._run([trial.whole, trial.whole], number, kind, together=together)
        return digests.mixes_rows(first, [again], [trial.count], _coarsest(), self.share)

    def _depends_on_others(self, trial: RowTrial, number: int) -> bool:
        last = trial.count - 1
        order = [[*range(last), last - 1], [last, *range(1, trial.count)]]
        given = [trial.whole, trial.parts[-1], *map(trial.in_order, order)]
        whole, part, *found = map(pytree.tree_leaves, self._run(given, number, "others"))
        for other, kept in zip(found, [range(last), range(1, trial.count)], strict=True):
            is_alike = len(whole) == len(other) == len(part)
            for one, changed, few in zip(whole, other, part, strict=True) if is_alike else ():
                axis = digests.rows_of(one, few, trial.count)  # shown by the tensor for fewer rows
                if axis is None or not isinstance(changed, torch.Tensor) or not isinstance(one, torch.Tensor):
                    continue
                now, before = (digests.taken(t.detach().cpu(), axis, kept) for t in (changed, one))
                if now.shape == before.shape and not digests.is_close(now, before, _coarsest()):
                    return True
        return False

    def _run(
        self, microbatches: Sequence[FlatMicrobatch], number: int, trial: Trial, *, together: bool = False
    ) -> list[PyTree]:
        return [*map(self._compared, self._outputs(microbatches, number, trial, together=together))]

    def _outputs(self, given: Sequence[FlatMicrobatch], number: int, trial: Trial, *, together: bool) -> list[Any]:
        found: list[Any] = []
        for run in [given] if together else [[one] for one in given]:
            self.restart()
            found += self._engine.try_layers(run, self._config, range(number), trial)
        return found


def few_rows(
    engine: RunLifecycle,
    batch: FlatBatch,
    config: RoundPipeRunConfig,
    split_again: Callable[[FlatBatch, RoundPipeRunConfig], RoundPipeRunConfig] = lambda few, config: config,
) -> Iterator[RowTrial]:
    """Yield :class:`RowTrial` objects, each with a few rows of the batch."""
    # split_again: function that returns the settings for splitting a few rows into two parts. Default: those of the
    # batch.
    in_two = dataclasses.replace(config, num_microbatch=2)
    with contextlib.suppress(SplitError):
        inputs = [leaf.value for leaf in (*batch.args.leaves, *batch.kwargs.leaves)]
        labels = [leaf.value for leaf in batch.label.leaves]
        for some in engine.split(batch, config):
            args, kwargs = pytree.tree_unflatten(some.inputs, some.spec)
            few = FlatBatch.of(args, kwargs, pytree.tree_unflatten(some.labels, some.label_spec))
            parts = engine.split(few, split_again(few, in_two))
            for number, part in enumerate(parts):
                cut = with_shared(part.inputs, some.inputs, inputs), with_shared(part.labels, some.labels, labels)
                parts[number] = dataclasses.replace(part, inputs=cut[0], labels=cut[1])
            if len(parts) == 2 and None not in (some.rows, *(one.rows for one in parts)):
                yield RowTrial(some, parts)


def with_shared(cut: list[Any], some: Sequence[Any], of_batch: Sequence[Any]) -> list[Any]:
    """Return the tensors for one part of the rows; a tensor that all rows share is returned whole."""
    # cut: tensors of the part; some: tensors of the rows before the cut; of_batch: tensors of all rows
    # A leaf is shared if its shape is that of the leaf of the whole batch. If all shapes are equal, no leaf is shared.
    same = [getattr(a, "shape", None) == getattr(b, "shape", 0) for a, b in zip(some, of_batch, strict=False)]
    is_known = any(hasattr(one, "shape") and not kept for one, kept in zip(some, same, strict=False))
    if not is_known or len(some) != len(of_batch):
        return cut
    return [one if kept else other for kept, one, other in zip(same, some, cut, strict=True)]


def _coarsest() -> torch.dtype | None:
    """Return an autocast dtype that is in use on the CPU or the accelerator; ``None`` if autocast is off."""
    kinds = {"cpu", *([device.type] if (device := torch.accelerator.current_accelerator()) is not None else [])}
    found = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    return found[0] if found else None


def _name_batch_norms(layers: Sequence[nn.Module]) -> list[str]:
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    return [
        f"Layer {number} ({type(layer).__name__}) normalizes each microbatch with the mean and variance of that "
        "microbatch, so results depend on the number of microbatches. To use those of the whole batch:\n"
        "    RoundPipeRunConfig(num_microbatch=1)"
        for number, layer in enumerate(layers)
        if any(isinstance(module, kinds) and module.training for module in layer.modules())
    ]


@contextlib.contextmanager
def set_apart(layers: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """Set batch norms to evaluation mode inside the with block."""
    # yields: function that restores the attributes of the layers
    modules = list({module: None for layer in layers for module in layer.modules()})
    norms = [module for module in modules if isinstance(module, NormBase) and module.training]
    hooks = [hook for m in modules for name in _HOOKS for hook in getattr(m, name).values() if not _is_of_library(hook)]
    kept = [Snapshot.of_attributes(layer) for layer in layers]

    def restart() -> None:
        for attributes in kept:
            attributes.restore()

    def restore() -> None:
        for norm in norms:
            norm.training = True
        restart()

    of_hooks = undisturbed(called=hooks) if hooks else contextlib.nullcontext()
    with of_hooks, (undoing := Undoing(restore)), undoing:
        for norm in norms:
            norm.training = False
        yield restart


def _is_of_library(hook: _Hook) -> bool:
    """Return whether a hook is part of torch (weight normalization) or of transformers (collection of outputs)."""
    function: Any = hook.func if isinstance(hook, functools.partial) else hook
    is_of_transformers = str(getattr(function, "__module__", "")).startswith("transformers.")
    return is_of_transformers or type(hook).__module__.partition(".")[0] == "torch"
