"""Check how the losses of a model's microbatches add up to the loss of the batch, before the first one is used.

At calls 1, 2, 4, 8, ... of a kind, the code after the last layer runs on a few rows, in one piece and in two uneven
parts, as `batch/loss_proof` asks: weighted by the items that torch's loss functions were seen to average over, by rows,
or added. Where no weights fit, or where the code draws random numbers, the loss is computed once for all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from yobx_flatten.core.compare import compare
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.loss import read_loss
from ..batch.loss_proof import NotProvenError, Part, Role, in_32_bits
from ..batch.steady_draws import NoDropout
from ..engine.loss_check import Sample, calls_apart
from .cutting.cut_plan import CutState
from .cutting.placeholder import Key
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
    label: Any = None  # labels of a function of its loss
    state: CutState | None = None  # what the layers returned; `None` for a model in one piece


@dataclasses.dataclass(frozen=True)
class LossOfModel:
    """A function of what a model returns for a batch with labels; its weights have to be those of the model's loss."""

    function: Callable[[Any, Any], Any]
    label: Any


class Tail:
    """The code after the last layer, which computes the loss of some rows, in 32 bits at least."""

    # model: model whose last piece, or only one, is `piece`
    # kwargs: keyword arguments of the model in the call that is checked
    # function: function of its output that computes the loss. Default: the loss is the model's.

    def __init__(
        self,
        model: nn.Module,
        piece: nn.Module,
        options: CallOptions,
        kwargs: Kwargs,
        function: LossOfModel | None = None,
    ) -> None:
        self._model, self._piece, self._kwargs, self._function = model, piece, kwargs, function
        self._own_way = options.weight_by
        self._options = dataclasses.replace(options, weight_by="rows")  # a loss over no items stays as it is
        self._has_auxiliary = has_auxiliary_loss(model, kwargs)
        self._parameters = _widened(piece)

    def without_proof(self, rows: SomeRows) -> LossProof | None:
        """Return how a loss is computed that is not to be weighed, or not to be compared; ``None`` for any other."""
        values = {} if rows.state is None else rows.state.values
        held = {key: value.detach().requires_grad_(value.is_floating_point()) for key, value in values.items()}
        with calls_apart(self._piece), NoDropout():
            first, has_drawn = self._loss(rows, held, seed=1)
            if first is None or not first.losses[0].requires_grad:
                return LossProof("items")
            again = self._loss(rows, held, seed=2)[0] if has_drawn else first
            if again is None or not compare(first.losses[0], again.losses[0], "sums"):
                return LossProof("whole", "the model draws random numbers after its layers")
        return None

    def prove(self, rows: Sequence[SomeRows], known: LossProof | None) -> LossProof:
        """Find the weights with which the losses of parts add up to that of all rows."""
        # rows: all of them, then the same rows in consecutive parts
        # known: an earlier proof of this kind of call, whose weights have to hold again; none by default
        otherwise: Way = "whole" if rows[0].state is None else "joined"
        roles = self._roles(rows[0])
        keys = [] if rows[0].state is None else list(rows[0].state.values)
        leaves = [
            [*(one.kwargs[name] for name in roles), *(one.state.values[key] for key in keys if one.state is not None)]
            for one in rows
        ]
        others = {place: self._kwargs[name] for place, name in enumerate(roles) if roles[name] == "label"}
        outputs: list[Role] = ["output"] * len(keys)
        spec = pytree.tree_structure([*roles, *keys])
        sample = Sample(leaves, [one.count for one in rows], [*roles.values(), *outputs], others, spec).widened()
        way = known.way if known is not None and known.variants else None
        own = getattr(getattr(self._model, "config", None), "semantic_loss_ignore_index", None)
        is_share = gives_share(self._kwargs)
        ways = _ways(way if self._function is None else self._own_way, is_share)
        called = self._piece, None if self._function is None else self._function.function
        with calls_apart(called) as next_call, NoDropout():

            def loss(number: int, leaves: Sequence[Any]) -> Part:
                next_call(number)
                some, named = rows[number], zip(roles, leaves, strict=False)
                values = dict(zip(keys, leaves[len(roles) :], strict=True))
                found, _ = self._loss(dataclasses.replace(some, kwargs=some.kwargs | dict(named)), values, seed=1)
                if found is None:
                    raise ValueError("no loss")
                return found

            try:
                ignored = (*_IGNORED, *([own] if isinstance(own, int) else []))
                found = sample.prove(loss, ways, ignored, again=way is not None)
            except NotProvenError as error:
                return LossProof(otherwise, str(error), 1)
        if not found.compared:
            return LossProof(otherwise, "no labels count in its first rows, or it is not finite there")
        if found.way is None:
            reason = "it is not a mean or sum over rows, nor over labels that torch's loss functions count"
            if self._function is not None:
                reason = "it is not a multiple of the model's loss, with or without a term that is the same for all"
            return LossProof(otherwise, reason, found.compared)
        # where it is a share, the items are those of the batch
        return LossProof("items" if found.way == "sum" and is_share else found.way, variants=found.compared)

    def _roles(self, rows: SomeRows) -> dict[str, Role]:
        """The labels and masks among the arguments."""
        found: dict[str, Role] = {}
        labels = label_names(self._model)
        for name, value in sorted(rows.kwargs.items()):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows.count:
                if name in labels and value.dtype != torch.bool:
                    found[name] = "label"
                elif value.dim() > 1 and bool(((value == 0) | (value == 1)).all()):
                    found[name] = "mask"
        return found

    def _loss(self, rows: SomeRows, values: dict[Key, torch.Tensor], *, seed: int) -> tuple[Part | None, bool]:
        """The loss of some rows, ``None`` without one, and whether random numbers were drawn."""
        # values: what the layers returned
        torch.default_generator.manual_seed(seed)
        before = torch.default_generator.get_state()
        args, kwargs, values = pytree.tree_map(in_32_bits, (rows.args, rows.kwargs, values))
        if rows.state is None:
            kwargs = {**kwargs, CALL_OPTIONS: self._options}
        else:
            options: dict[str, Any] = {"options": self._options, "seed": seed}
            args = (dataclasses.replace(rows.state, call=(args, kwargs), values=values, **options),)
            kwargs = {}
        with counting() as items:
            output, _, _ = functional_call(self._piece, dict(self._parameters), args, kwargs)
            loss = loss_of(output)
            if loss is not None and self._has_auxiliary:
                loss = without_auxiliary_loss(self._model, output)
        has_drawn = not torch.equal(before, torch.default_generator.get_state())
        if loss is None:
            return None, has_drawn
        _, count, _ = with_loss_weight({}, items, rows.count)
        found = read_loss(loss if self._function is None else self._function.function(output, rows.label))
        if found.kind == "sequence":
            raise ValueError("it returns several losses")
        return Part(found.tensors, rows.count, count if 0 <= count < float("inf") else None, found.weight), has_drawn


def _ways(way: Way | None, is_share: bool) -> Sequence[WeightBy]:
    """The weights to try: those of an earlier proof, as rows with as many labels each would also fit others."""
    if way is None or way == "joined" or way == "whole":
        return "items", "rows", "sum"
    return ("items", "sum") if way == "items" and is_share else (way,)


def _widened(piece: nn.Module) -> Mapping[str, torch.Tensor]:
    """The parameters of a piece, those of 16 bits as copies of 32."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in piece.named_parameters():
        wide = in_32_bits(parameter.detach())
        found[name] = parameter if wide.dtype == parameter.dtype else wide.requires_grad_(parameter.requires_grad)
    return found
