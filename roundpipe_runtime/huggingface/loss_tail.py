"""Run the code after the last layer on some rows, and return loss, gradients and decisions."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.value_probe import Answers, Decision, ValueProbe
from ..engine.recompute.generators import generators_kept
from .cutting.cut_state import CutState
from .cutting.digest import Digest, digest, distance, typical
from .loss.call_options import CALL_OPTIONS, CallOptions
from .loss.moe_aux_loss import without_auxiliary_loss
from .loss.weights import WeightBy, label_names, loss_of, shares_of

__all__ = ["Found", "SomeRows", "Tail", "are_close", "left_as_found", "wide_rows", "widened"]

# Parts are summed in another order than all rows, in 32 bits or more, as weights of 16 bits are widened for the proof.
# Wrong weights are off by far more, as labels are spread unevenly.
_TOLERANCE = 3e-5

# Numbers of a gradient of which all are kept.
_WHOLE = 2**16


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """The input of the code after the last layer, for some rows of a batch."""

    args: tuple[Any, ...]  # positional arguments of the model
    kwargs: Kwargs  # keyword arguments of the model, without the options of the call
    count: int  # number of rows
    state: CutState | None = None  # what the layers returned; `None` for a model in one piece


@dataclasses.dataclass(frozen=True)
class Found:
    """A loss, the number of items that it was seen to average over, and what is known of its gradients."""

    loss: torch.Tensor
    count: float
    gradients: Sequence[Digest | None]
    decisions: Sequence[Decision] = ()
    of_parts: Sequence[Sequence[Decision]] = ()
    draws: bool = False


@dataclasses.dataclass(frozen=True)
class Tail:
    """The code after the last layer."""

    model: nn.Module
    piece: nn.Module
    options: CallOptions
    has_auxiliary: bool
    parameters: Mapping[str, torch.Tensor]

    def of_all(self, rows: SomeRows, *, seed: int, answers: Answers = ()) -> Found | None:
        """The loss of all rows; ``None`` without one."""
        state, leaves = _with_leaves(rows.state)
        with torch.enable_grad():
            loss, count, decisions = self._loss(dataclasses.replace(rows, state=state), "items", seed, answers)
        if loss is None or not loss.requires_grad:
            return None
        draws = not torch.equal(torch.default_generator.get_state(), _seeded_state(seed))
        return dataclasses.replace(self._found(loss, count, leaves), decisions=decisions, draws=draws)

    def of_parts(
        self,
        whole: SomeRows,
        parts: Sequence[SomeRows],
        split: Callable[[CutState], Sequence[CutState]] | None,
        way: WeightBy,
        is_share: bool,
        answers: Sequence[Answers] = (),
    ) -> Found | None:
        """The weighted losses of the parts; ``None`` where they have no such weights."""
        state, leaves = _with_leaves(whole.state)
        with torch.enable_grad():
            states = [None] * len(parts) if state is None or split is None else split(state)
            found = [
                self._loss(dataclasses.replace(part, state=one), way, 1, answered)
                for part, one, answered in zip(parts, states, answers or [()] * len(parts), strict=True)
            ]
            losses = [loss for loss, *_ in found if loss is not None]
            counts = [count for _, count, _ in found]
            is_share = is_share or way == "sum"
            if len(losses) < len(parts) or not all(math.isfinite(n) and (n >= 0 or is_share) for n in counts):
                return None
            shares = shares_of(counts)
            loss = torch.stack([a * b for a, b in zip(losses, shares, strict=True)]).sum()
            made = self._found(loss, sum(counts), leaves) if loss.requires_grad else None
            return made and dataclasses.replace(made, of_parts=[decisions for *_, decisions in found])

    def _loss(
        self, rows: SomeRows, way: WeightBy, seed: int, answers: Answers
    ) -> tuple[torch.Tensor | None, float, Sequence[Decision]]:
        options = dataclasses.replace(self.options, weight_by=way)
        torch.default_generator.manual_seed(seed)  # and no other: devices have theirs
        if rows.state is None:
            args, kwargs = rows.args, {**rows.kwargs, CALL_OPTIONS: options}
        else:
            call = rows.args, rows.kwargs
            args, kwargs = (dataclasses.replace(rows.state, call=call, options=options, seed=seed),), {}
        # what runs before the code looks at outputs of the last layer, or at labels, runs before the layers
        values = {} if rows.state is None else rows.state.values
        given, last = list(values.values()), max((key.call for key in values), default=0)
        labels = [rows.kwargs.get(name) for name in label_names(self.model)] if rows.state is None else []
        begins = [one for key, one in values.items() if key.call == last]
        begins = begins or [one for one in labels if isinstance(one, torch.Tensor)]
        sources = [one for one in pytree.tree_leaves((rows.args, rows.kwargs)) if isinstance(one, torch.Tensor)]
        with ValueProbe([*given, *sources], answers, begins) as probe:
            output, count, _ = functional_call(self.piece, dict(self.parameters), args, kwargs)
        loss = loss_of(output)
        if loss is None:
            return None, count, probe.decisions
        loss = without_auxiliary_loss(self.model, output) if self.has_auxiliary else loss
        return loss, count, probe.decisions

    def _found(self, loss: torch.Tensor, count: float, leaves: Sequence[torch.Tensor]) -> Found:
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        found: list[torch.Tensor | None] = [*torch.autograd.grad(loss, [*leaves, *trained], allow_unused=True)]
        digests: list[Digest | None] = []
        while found:  # large ones are gone as soon as they are digested
            gradient = found.pop(0)
            digests.append(None if gradient is None else digest(gradient, whole=_WHOLE))
        return Found(loss.detach(), count, digests)


def _seeded_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _with_leaves(state: CutState | None) -> tuple[CutState | None, list[torch.Tensor]]:
    """The state with tensors of its own that require gradients, and these tensors."""
    if state is None:
        return None, []
    values = {
        key: _wide(value.detach()).requires_grad_() if value.is_floating_point() else value
        for key, value in state.values.items()
    }
    return dataclasses.replace(state, values=values), [value for value in values.values() if value.requires_grad]


def widened(piece: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a piece, those of 16 bits as copies of 32: rounding would hide wrong weights."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in piece.named_parameters():
        wide = _wide(parameter.detach())
        found[name] = parameter if wide.dtype == parameter.dtype else wide.requires_grad_(parameter.requires_grad)
    return found


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def wide_rows(rows: SomeRows) -> SomeRows:
    """Return rows whose tensors of 16 bits have 32."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _wide, (rows.args, rows.kwargs))
    return dataclasses.replace(rows, args=args, kwargs=kwargs)


def are_close(found: Found | None, expected: Found) -> bool:
    """Report whether the loss of parts and its gradients are those of all rows."""
    if found is None:
        return False
    difference = (found.loss.double() - expected.loss.double()).abs()
    if not difference <= _TOLERANCE * expected.loss.double().abs().clamp(min=1e-6):  # NaN is not
        return False
    pairs = list(zip(found.gradients, expected.gradients, strict=True))
    least = 0.1 * max((typical(right) for _, right in pairs if right is not None), default=0.0)
    return all(distance(left, right, least) <= _TOLERANCE for left, right in pairs)


@contextlib.contextmanager
def left_as_found(piece: nn.Module) -> Iterator[None]:
    """Restore random states and buffers at the end of the block; warnings about single rows are not the user's."""
    buffers = [(buffer, buffer.clone(), buffer._version) for buffer in piece.buffers()]
    try:
        # without autocast, as rounding would hide wrong weights
        with generators_kept(piece), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with torch.no_grad():
            for buffer, before, version in buffers:
                if buffer._version != version:
                    buffer.copy_(before)
