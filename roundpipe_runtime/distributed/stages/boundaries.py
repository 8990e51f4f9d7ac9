"""Agree once on the objects that one stage sends to the next: their structure and tensor sizes.

::

    stage 0                                  stage 1
    forward on tensors without data          waits
      State(hidden, kept, counter=1)  ──>    Boundary: State without its tensors, float32 (3, 16), float32 (3, 8)
                                             forward on tensors without data ──> ...
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from yobx_flatten.errors.failures import raised_as, result_or
from yobx_flatten.private_names.of_torch import FakeTensorMode, pytree

from ...device.transfer import TreeStructure, flatten_value
from ...device.worker import Outcome
from ...errors import ConfigError, StageError


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSizes:
    """A tensor without its data."""

    shape: tuple[int, ...]  # sizes
    dtype: torch.dtype  # type of the numbers
    needs_grad: bool  # whether a gradient flows back through it

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSizes:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return a leaf tensor of these sizes."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.needs_grad)

    def __str__(self) -> str:
        grad = "" if self.needs_grad else " without gradient"
        return f"{str(self.dtype).removeprefix('torch.')}{self.shape}{grad}"


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """An object that crosses from one process to another, without its tensors."""

    structure: TreeStructure  # object with places for its tensors
    tensors: tuple[TensorSizes, ...]  # sizes of these tensors, in order

    @classmethod
    def of(cls, value: Any, *, what: str) -> Boundary:
        """Describe an object."""
        structure, tensors = flatten_value(value, what=what)
        return cls(structure, tuple(map(TensorSizes.of, tensors)))

    def check(self, value: Any, *, what: str, with_gradients: bool) -> list[torch.Tensor]:
        """Return the tensors of an object that must be as described."""
        structure, tensors = flatten_value(value, what=what)
        if structure != self.structure:
            raise StageError(
                f"{what} has other classes or non-tensor values than the stages agreed on when they were made:\n"
                f"    agreed {_text(self.structure)}\n    found  {_text(structure)}\nOnly tensors are sent with each "
                "microbatch. Turn the value that varies into a tensor, or return None:\n    torch.tensor(count)"
            )
        for number, (tensor, agreed) in enumerate(zip(tensors, self.tensors, strict=True)):
            found = TensorSizes.of(tensor)
            if not with_gradients:
                found = dataclasses.replace(found, needs_grad=agreed.needs_grad)
            if found != agreed:
                raise StageError(
                    f"{what}: tensor {number} is {found}, and the stages agreed on {agreed} when they were made. All "
                    "microbatches have one size: pad rows and texts to it, or make the pipeline again with\n"
                    "    DistributedPipeline(..., example_args=(...), example_kwargs={...})"
                )
        return [tensor.contiguous() for tensor in tensors]


def _text(structure: TreeStructure) -> str:
    tensors = 1 + max((n for n in structure.leaves if isinstance(n, int)), default=-1)
    # a class may not show itself, or not without its tensors
    return result_or(lambda: repr(structure.rebuild([_Tensor()] * tensors)), lambda error: str(structure.spec))


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


def call_without_data(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, what: str) -> Any:
    """Return the outputs of a module for tensors that have sizes and no data.

    The module itself is not run: a copy of it is, with parameters that take no memory. So no buffer, counter or random
    number changes.
    """
    # args: positional arguments; only the sizes of their tensors count
    # a pipeline's threads and devices need data; its model computes the same
    held = vars(module)
    plain = held.get("_rp_original") or held.get("_rp_model") or module
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(empty, value.requires_grad)
        return empty.requires_grad_(value.requires_grad)

    def refused(error: Exception) -> StageError:
        return StageError(
            f"{what} cannot be called on tensors without data: {type(error).__name__}: {error}\n"
            "Give what it returns for one microbatch, with tensors of the right sizes:\n"
            "    DistributedPipeline(..., example_outputs={stage: output})"
        )

    with raised_as(refused):  # the code of a module raises what it likes without data
        # parameters and buffers are in deepcopy's memo, so that none of them is copied
        memo = {id(tensor): fake(tensor) for tensor in [*plain.parameters(), *plain.buffers()]}
        callee = copy.deepcopy(plain, memo)
        given, named = pytree.tree_map(fake, (tuple(args), dict(kwargs)))
        with mode, torch.enable_grad():
            return callee(*given, **named)


def share(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Exchange an object among all processes of a group, and return all objects in rank order."""
    found: list[Any] = [value] * dist.get_world_size(group)
    if len(found) == 1:
        return found
    with warnings.catch_warnings():
        # torch pickles its own TreeSpec through a class that it deprecates
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_object(found, value, group=group)
    return found


def agree(
    num_stages: int, mine: Mapping[int, Callable[[Boundary | None], Boundary]], group: dist.ProcessGroup | None
) -> list[Boundary]:
    """Find out the outputs of each stage, stage by stage, in all processes."""
    found: list[Boundary] = []
    for stage in range(num_stages - 1):
        own: Any = None
        with Outcome() as outcome:
            if stage in mine:
                own = mine[stage](found[-1] if found else None)
                if dist.get_world_size(group) > 1:
                    _check_picklable(own, stage)
        error = outcome.error
        if error is not None:
            own = f"{type(error).__name__}: {error}"
        answers = [answer for answer in share(own, group) if answer is not None]
        if error is not None:
            raise error
        if isinstance(answers[0], str):
            raise StageError(f"Stage {stage}, in another process, cannot be made: {answers[0]}")
        found.append(answers[0])
    return found


def _check_picklable(boundary: Boundary, stage: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # as in :func:`share`
            pickle.dumps(boundary)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Stage {stage} returns {_text(boundary.structure)}, but its non-tensor part cannot be sent to another "
            f"process: {error}\nReturn the tensors that the next stage needs, and make the other objects there."
        ) from error
