"""Prove how the losses of microbatches of a model add up to that of the batch, before the first of them is used.

At calls 1, 2, 4, 8, ... of a kind, the code after the last layer runs on a few rows, in one piece and in two uneven
parts, as `batch/loss_proof` asks: weighted by the items that torch's loss functions were seen to average over, by rows,
or added. Where no weights fit, or where the code draws random numbers, the loss is computed once for all rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from yobx_flatten.core.effects import undisturbed
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.loss_proof import Column, Evaluation, NotProvenError, Part, in_32_bits, variants
from ..batch.loss_proof import prove as prove_weights
from ..batch.same_rows import rows_of
from ..batch.steady_draws import NoDropout
from ..device.generator import generator_alone
from .cutting.cut_plan import CutState
from .loss.call_options import CALL_OPTIONS, CallOptions, gives_share
from .loss.moe_aux_loss import has_auxiliary_loss, without_auxiliary_loss
from .loss.weights import WeightBy, counting, label_names, loss_of, with_loss_weight

Way: TypeAlias = WeightBy | Literal["joined", "whole"]

# Labels that losses ignore: torch's default, and places after the end of every text, for models that look for places.
_IGNORED = (-100, 10**6)


@dataclasses.dataclass(frozen=True)
class LossProof:
    """How the loss of a kind of call is computed."""

    # `"items"`, `"rows"` or `"sum"`: in microbatches, with these weights. `"joined"`: once, on what the layers return
    # for all rows. `"whole"`: in one microbatch.
    way: Way
    reason: str = ""  # reason for `"joined"` and `"whole"`; empty otherwise
    variants: int = 0  # number of sets of labels that were compared; 0 where another batch may show more
    row_nbytes: int = 0  # bytes of what the layers return for one row, which a joined loss holds for the whole batch

    def __str__(self) -> str:
        if self.way in ("joined", "whole"):
            how = "once for the whole batch" if self.way == "joined" else "in one microbatch"
            return f"computed {how}: {self.reason}"
        weights = {"items": "weighted by the items they count", "rows": "weighted by rows", "sum": "added"}[self.way]
        return f"losses of microbatches are {weights}, checked with {self.variants} sets of labels and masks"


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """The input of the code after the last layer, for some rows of a batch."""

    args: tuple[object, ...]  # positional arguments of the model
    kwargs: Kwargs  # keyword arguments of the model, without the options of the call
    count: int  # number of rows
    state: CutState | None = None  # what the layers returned; `None` for a model in one piece

    def widened(self) -> SomeRows:
        """Return rows whose tensors of 16 bits have 32, as rounding would hide wrong weights.

        What the layers returned are leaves, in which gradients end: the parameters that follow may all be frozen.
        """
        args, kwargs = pytree.tree_map_only(torch.Tensor, in_32_bits, (self.args, self.kwargs))
        state = self.state
        if state is not None:
            values = {key: in_32_bits(value.detach()) for key, value in state.values.items()}
            for value in values.values():
                value.requires_grad_(value.is_floating_point())
            state = dataclasses.replace(state, values=values)
        return dataclasses.replace(self, args=args, kwargs=kwargs, state=state)


def gives_loss(piece: nn.Module, state: CutState, options: CallOptions) -> bool:
    """Report whether the code after the last layer returns a loss."""
    with _left_as_found(piece), torch.no_grad():
        output, _, _ = piece(dataclasses.replace(state, options=dataclasses.replace(options, weight_by="items")))
    return loss_of(output) is not None


def prove(
    model: nn.Module,
    piece: nn.Module,
    whole: SomeRows,
    parts: Sequence[SomeRows],
    options: CallOptions,
    others: Mapping[str, object],
    split: Callable[[CutState], Sequence[CutState]] | None = None,
    known: LossProof | None = None,
) -> LossProof:
    """Find the weights with which the losses of parts add up to that of all rows."""
    # known: an earlier proof of this kind of call, whose weights have to hold again; none by default
    # piece: last piece of the cut model, or the only one
    # parts: the same rows in consecutive parts, of which the last one has the last row
    # others: arguments of the batch, whose labels also occur
    # split: function that cuts a state of all rows into those of the parts. Default: there are no states.
    otherwise: Way = "whole" if split is None else "joined"
    rows = whole.widened()
    tail = _Tail(model, piece, options, rows, [part.widened() for part in parts], split)
    columns = tail.columns(others)
    with _left_as_found(piece), NoDropout():
        first, has_drawn = tail.loss(rows, seed=1)
        if first is None or not first.losses[0].requires_grad:
            return LossProof("items")  # nothing to weigh
        if has_drawn and not _is_equal(first, tail.loss(rows, seed=2)[0]):
            return LossProof("whole", "the model draws random numbers after its layers")
        own = getattr(getattr(model, "config", None), "semantic_loss_ignore_index", None)
        ignored = (*_IGNORED, *([own] if isinstance(own, int) else []))
        try:
            found = prove_weights(tail.evaluate, variants(columns, ignored), _ways(known, gives_share(whole.kwargs)))
        except NotProvenError as error:
            return LossProof(otherwise, str(error), 1)
    if not found.compared:
        return LossProof(otherwise, "no labels count in its first rows, or it is not finite there")
    if found.way is None:
        reason = "it is not a mean or sum over rows, nor over labels that torch's loss functions count"
        return LossProof(otherwise, reason, found.compared)
    is_share = found.way == "sum" and gives_share(whole.kwargs)  # the items are those of the batch
    return LossProof("items" if is_share else found.way, variants=found.compared)


def _ways(known: LossProof | None, is_share: bool) -> Sequence[WeightBy]:
    """The weights to try: those of an earlier proof, as rows with as many labels each would also fit others."""
    way = None if known is None or not known.variants else known.way
    if way is None or way == "joined" or way == "whole":
        return "items", "rows", "sum"
    return ("items", "sum") if way == "items" and is_share else (way,)


class _Tail:
    """The code after the last layer, for some rows in one piece and in parts."""

    def __init__(
        self,
        model: nn.Module,
        piece: nn.Module,
        options: CallOptions,
        whole: SomeRows,
        parts: Sequence[SomeRows],
        split: Callable[[CutState], Sequence[CutState]] | None,
    ) -> None:
        self._model, self._piece, self._whole, self._parts, self._split = model, piece, whole, parts, split
        self._options = dataclasses.replace(options, weight_by="rows")  # a loss over no items stays as it is
        self._has_auxiliary = has_auxiliary_loss(model, whole.kwargs)
        self._parameters = _widened(piece)
        self._places: list[object] = []

    def columns(self, others: Mapping[str, object]) -> list[Column]:
        """Labels, masks, and what the layers have returned."""
        columns: list[Column] = []
        places = self._places
        labels = label_names(self._model)
        for name, value in sorted(self._whole.kwargs.items()):
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != self._whole.count:
                continue
            is_mask = value.dim() > 1 and bool(((value == 0) | (value == 1)).all())
            if is_mask or (name in labels and value.dtype != torch.bool):
                is_label = name in labels and value.dtype != torch.bool
                also = others.get(name) if is_label else None
                also = also if isinstance(also, torch.Tensor) and also.dtype == value.dtype else None
                columns.append(Column(value, 0, "label" if is_label else "mask", also))
                places.append(name)
        states = self._whole.state, self._parts[-1].state
        if states[0] is not None and states[1] is not None:
            for key, value in states[0].values.items():
                axis = rows_of(value, states[1].values.get(key), self._whole.count)
                if axis is not None and value.is_floating_point():
                    columns.append(Column(in_32_bits(value.detach()), axis, "output"))
                    places.append(key)
        return columns

    def evaluate(self, values: Sequence[torch.Tensor]) -> Evaluation:
        """The losses of other values of the columns, and the tensors in which gradients end."""
        given = dict(zip(self._places, values, strict=True))
        whole, leaves = self._whole, []
        if whole.state is not None:
            held = {key: given.get(key, in_32_bits(value.detach())) for key, value in whole.state.values.items()}
            leaves = [one.requires_grad_() for one in held.values() if one.is_floating_point()]
            whole = dataclasses.replace(whole, state=dataclasses.replace(whole.state, values=held))
        named = {name: value for name, value in given.items() if isinstance(name, str)}
        states = [None] * len(self._parts) if whole.state is None or self._split is None else self._split(whole.state)
        rows, start = [dataclasses.replace(whole, kwargs=whole.kwargs | named)], 0
        for part, state in zip(self._parts, states, strict=True):
            cut = {name: value[start : start + part.count] for name, value in named.items()}
            rows.append(dataclasses.replace(part, kwargs=part.kwargs | cut, state=state))
            start += part.count
        found = [self.loss(one, seed=1)[0] for one in rows]
        if any(one is None for one in found):
            raise ValueError("no loss")
        first, *others = [one for one in found if one is not None]
        trained = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        return first, others, [*leaves, *trained]

    def loss(self, rows: SomeRows, *, seed: int) -> tuple[Part | None, bool]:
        """The loss of some rows, ``None`` without one, and whether random numbers were drawn."""
        torch.default_generator.manual_seed(seed)  # and no other: devices have theirs
        before = torch.default_generator.get_state()
        if rows.state is None:
            args, kwargs = rows.args, {**rows.kwargs, CALL_OPTIONS: self._options}
        else:
            call = rows.args, rows.kwargs
            args, kwargs = (dataclasses.replace(rows.state, call=call, options=self._options, seed=seed),), {}
        with torch.enable_grad(), counting() as items:
            output, _, _ = functional_call(self._piece, dict(self._parameters), args, kwargs)
            loss = loss_of(output)
            if loss is not None and self._has_auxiliary:
                loss = without_auxiliary_loss(self._model, output)
        has_drawn = not torch.equal(before, torch.default_generator.get_state())
        _, count, _ = with_loss_weight({}, items, rows.count)
        known = count if 0 <= count < float("inf") else None
        return None if loss is None else Part((loss,), rows.count, known), has_drawn


def _is_equal(one: Part, other: Part | None) -> bool:
    return other is not None and torch.allclose(one.losses[0], other.losses[0], rtol=1e-5)


def _widened(piece: nn.Module) -> Mapping[str, torch.Tensor]:
    """The parameters of a piece, those of 16 bits as copies of 32."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in piece.named_parameters():
        wide = in_32_bits(parameter.detach())
        found[name] = parameter if wide.dtype == parameter.dtype else wide.requires_grad_(parameter.requires_grad)
    return found


@contextlib.contextmanager
def _left_as_found(piece: nn.Module) -> Iterator[None]:
    """Undo the effects of a call on the piece and on generators, and hide warnings about single rows."""
    # without autocast, as rounding would hide wrong weights
    with (
        generator_alone(),
        undisturbed(piece=piece),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
