"""Execution plans, which group layers into stages: written by hand and checked, or computed from layer costs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import numbers
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ..errors import PlanError
from .partitioning import layer_costs, partition_and_copy
from .round_robin import Stage, stages_of

RunType: TypeAlias = Literal["infer", "train", "fused"]


@dataclasses.dataclass(slots=True)
class ModelExecutePlan:
    """An execution plan: which layers form a stage in forward and, independently, in backward.

    Examples of plans for a model with four layers, one for each run type::

        "infer": forward only              fwd_plan = [range(0, 2), range(2, 4)]
        "train": forward, later backward   fwd_plan = [range(0, 2), range(2, 4)]
                                           bwd_plan = [range(3, 4), range(1, 3), range(0, 1)]
        "fused": forward_backward          fwd_plan = [range(0, 3)]
                                           bwd_plan = [range(3, 4), range(1, 3), range(0, 1)]

    Backward stages are listed from the last layers to the first; the layers in a stage are ascending. In a plan for
    ``"fused"``, the first stage of ``bwd_plan`` runs forward, loss and backward of the last layers. A ``fwd_plan`` for
    ``"fused"`` contains only the layers before the first stage of ``bwd_plan``.

    Attributes:
        fwd_plan: layers of each forward stage, as ranges or lists of ascending indices.
        bwd_plan: layers of each backward stage, beginning with the stage of the last layers.
        last_stage_copies: number n of devices that run the fused stage, each for every n-th microbatch (default: 1). If
            a pipeline has fewer devices or microbatches than ``last_stage_copies``, the smaller number is used.

    >>> from torch import nn
    >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    >>> plan = ModelExecutePlan([range(0, 3)], [range(3, 4), range(1, 3), range(0, 1)])
    >>> [list(layers) for layers in plan.bwd_plan]
    [[3], [1, 2], [0]]
    """

    fwd_plan: Sequence[Sequence[int]] = dataclasses.field(default_factory=list)
    bwd_plan: Sequence[Sequence[int]] = dataclasses.field(default_factory=list)
    last_stage_copies: int = 1

    def for_two_passes(self) -> ModelExecutePlan:
        """Convert a plan for ``"fused"`` to a plan for ``"train"``, with separate forward and backward stages.

        >>> ModelExecutePlan([range(0, 3)], [range(3, 4), range(0, 3)]).for_two_passes().fwd_plan
        [range(0, 3), range(3, 4)]
        """
        end = self.fwd_plan[-1][-1] + 1 if self.fwd_plan else 0
        # The forward of a fused plan ends where the first backward stage begins. In two passes, this stage also needs a
        # forward stage.
        if not self.bwd_plan or end != self.bwd_plan[0][0]:
            return self
        return ModelExecutePlan([*self.fwd_plan, self.bwd_plan[0]], self.bwd_plan)

    def check_valid(self, *given: int | str, **named: Any) -> None:
        """Check that every layer runs once in each direction, in order: ``check_valid(num_layers, run_type)``.

        Args:
            *given: ``num_layers`` (the number of layers of the model) and ``run_type`` (see :meth:`auto`), in any
                order.
            **named: the arguments ``num_layers`` and ``run_type``, if they are passed by name.

        Raises:
            PlanError: if a layer is missing, repeated or out of order; the message names the layer.
        """
        for value in given:
            name = "num_layers" if type(value) is int else "run_type"
            if name in named:
                raise PlanError(f'{name} is given twice:\n    plan.check_valid(4, "fused")')
            named[name] = value
        if set(named) != {"num_layers", "run_type"}:
            raise PlanError(
                f"check_valid takes num_layers and run_type, found {', '.join(sorted(named)) or 'nothing'}:\n"
                '    plan.check_valid(4, "fused")'
            )
        num_layers, run_type = named["num_layers"], named["run_type"]
        if run_type not in ("infer", "train", "fused"):
            raise PlanError(f'run_type must be "infer", "train" or "fused", found {run_type!r}.')
        if num_layers < 1:
            raise PlanError("A plan needs a model with at least one layer.")
        _check_copies(self.last_stage_copies)
        forward, backward = _check_stages("fwd_plan", self.fwd_plan), _check_stages("bwd_plan", self.bwd_plan)
        if run_type == "infer":
            _check_order("fwd_plan", forward, range(num_layers))
            return
        after_fused = num_layers
        if run_type == "fused":
            if not backward:
                raise PlanError('bwd_plan is empty. With run_type="fused", its first stage must run the last layers.')
            after_fused = backward[0].start
        _check_order("bwd_plan", backward[::-1], range(num_layers))
        _check_order("fwd_plan", forward, range(after_fused), fused=run_type == "fused")

    def stages(self, run_type: RunType, num_layers: int, *, most_copies: int | None = None) -> list[Stage]:
        """Check the plan, and return its stages in the order in which they are dispatched to devices.

        Args:
            run_type: ``"infer"``, ``"train"`` or ``"fused"``, see :meth:`auto`.
            num_layers: number of layers of the model.
            most_copies: largest number of devices that can run the fused stage (default: no limit).

        Returns:
            The stages of the plan, in the order of dispatch.

        Raises:
            PlanError: if the plan does not fit the model, see :meth:`check_valid`.
        """
        self.check_valid(num_layers, run_type)
        copies = self.last_stage_copies if most_copies is None else min(self.last_stage_copies, most_copies)
        return stages_of(run_type, list(map(_range, self.fwd_plan)), list(map(_range, self.bwd_plan)), copies)

    @classmethod
    def auto(
        cls,
        run_type: RunType,
        *models: Any,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
        previous: ModelExecutePlan | Sequence[ModelExecutePlan] | None = None,
        last_stage_copies: int | Literal["auto"] = 1,
        num_microbatch: int | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]:
        """Compute a plan from the cost of each layer, which is estimated until the model has run, and then measured.

        Args:
            run_type: ``"infer"`` (forward only), ``"train"`` (forward, later backward) or ``"fused"`` (forward and
                backward of each microbatch). With ``"fused"`` and several ``models``, which run in sequence, only the
                last model is fused, and the others get plans for ``"train"``.
            *models: pipelines, ``nn.Sequential`` modules, or lists of :class:`LayerCost`.
            min_stages: smallest number of stages (default: the number of devices).
            upper_threshold: largest ratio of the time of a stage to the time of the slowest layer.
            model_memory_limit: GB (1e9 bytes) for parameters and gradients on a device (default: the memory of the
                devices, if known). A stage may use half of the limit, because the next stage is loaded meanwhile.
            previous: the plan in use, which is kept unless the new plan is clearly faster.
            last_stage_copies: number of devices that run the last layer (default: 1). If several devices run the last
                layer, it is a separate stage, and the devices take its microbatches in turn. With ``"auto"``, several
                devices run the last layer only if the simulated iteration becomes clearly faster.
            num_microbatch: number of microbatches for which times of plans are simulated (default: ``min_stages`` + 1).

        Returns:
            The plan of the model, or a list with one plan per model if there are several.

        Raises:
            PlanError: if no model is given, or a single layer needs more memory than a stage may have.
        """
        if not models:
            raise PlanError('ModelExecutePlan.auto needs a model:\n    ModelExecutePlan.auto("fused", model)')
        costs = [layer_costs(model) for model in models]
        _check_number("upper_threshold", upper_threshold)
        if min_stages is None:
            min_stages = max(int(getattr(model, "num_devices", 1)) for model in models)
        if type(min_stages) is not int:
            raise PlanError(f"min_stages must be a whole number, found {min_stages!r}.")
        limits = [getattr(model, "model_memory_limit", None) for model in models]
        known = min((limit for limit in limits if limit is not None), default=None)
        limit = known if model_memory_limit is None else model_memory_limit
        if limit is not None:
            _check_number("model_memory_limit", limit)
            if not limit > 0:
                raise PlanError(f"model_memory_limit is in GB and must be above 0, found {limit!r}.")
        if last_stage_copies != "auto":
            _check_copies(last_stage_copies)
        before = [previous] if isinstance(previous, ModelExecutePlan) else list(previous or [])
        found, copies = partition_and_copy(
            run_type,
            costs,
            min_stages=min_stages,
            upper_threshold=upper_threshold,
            bytes_per_stage=None if limit is None else limit * 1e9 / 2,
            previous=[(list(map(_range, p.fwd_plan)), list(map(_range, p.bwd_plan))) for p in before] or None,
            copies_before=before[-1].last_stage_copies if before else 1,
            copies=last_stage_copies,
            num_microbatch=num_microbatch,
        )
        plans = [cls(forward, backward) for forward, backward in found]
        plans[-1].last_stage_copies = copies
        return plans[0] if len(models) == 1 else plans


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise PlanError(f"{name} must be a number, found {value!r}.")


def _check_copies(value: Any) -> None:
    if type(value) is not int or value < 1:
        raise PlanError(f"last_stage_copies must be an int of at least 1 (a number of devices), found {value!r}.")


def _range(stage: Sequence[int]) -> range:
    return stage if isinstance(stage, range) else range(stage[0], stage[-1] + 1)


def _check_stages(name: str, stages: Any) -> list[range]:
    if not isinstance(stages, Sequence) or not all(isinstance(stage, Sequence) for stage in stages):
        raise PlanError(f"{name} must be a list of ranges, found {stages!r}.")
    found = []
    for index, stage in enumerate(stages):
        layers = list(stage)
        if not layers:
            raise PlanError(f"{name}[{index}] is empty. A stage must have at least one layer.")
        if not all(type(layer) is int for layer in layers):
            raise PlanError(f"{name}[{index}] must contain indices of layers, found {layers}.")
        if layers[0] < 0:
            raise PlanError(f"{name} contains layer {layers[0]}, but layers are counted from 0.")
        for before, layer in itertools.pairwise(layers):
            if layer != before + 1:
                what = "repeated" if layer == before else "missing" if layer > before + 1 else "out of order"
                which = layer if layer <= before else before + 1
                raise PlanError(
                    f"{name}[{index}] is {layers}: layer {which} is {what}. A stage consists of consecutive layers, in "
                    "ascending order:\n"
                    f"    range({min(layers)}, {max(layers) + 1})"
                )
        found.append(range(layers[0], layers[-1] + 1))
    return found


def _check_order(name: str, stages: Sequence[range], layers: range, *, fused: bool = False) -> None:
    is_forward = name == "fwd_plan"
    found = [layer for stage in stages for layer in stage]
    if found == list(layers):
        return
    counts = collections.Counter(found)
    missing = [layer for layer in layers if layer not in counts]
    repeated = [layer for layer, count in counts.items() if count > 1]
    unknown = [layer for layer in counts if layer not in layers]
    if unknown and fused and is_forward:
        problem = f"repeats layer {unknown[0]}"
    elif unknown:
        problem = f"names layer {unknown[0]}, which the model does not have"
    elif missing:
        problem = f"misses layer {missing[0]}"
    elif repeated:
        problem = f"repeats layer {repeated[0]}"
    else:
        first = next(layer for layer, expected in zip(found, layers, strict=True) if layer != expected)
        problem = f"reorders layer {first}"
    written = ", ".join(f"range({s.start}, {s.stop})" for s in (stages if is_forward else stages[::-1]))
    if not layers:
        needed = "must be empty"
    else:
        order = "in order" if is_forward else "in order from the last to the first"
        needed = f"must contain each of the layers {layers.start} to {layers.stop - 1} once, {order}"
    if fused and is_forward:
        needed += f"; the first stage of bwd_plan runs forward and backward of the {'other ' if layers else ''}layers"
    raise PlanError(f"{name} {problem}: it is [{written}], but {needed}.")
