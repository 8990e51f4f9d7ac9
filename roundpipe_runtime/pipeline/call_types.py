"""Typed signatures of ``forward_backward``, in which the type of ``loss_fn`` determines the type of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, overload

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ..batch.loss import WeightedLoss, terms_of_batch
from ..device.transfer import shapes_of
from ..device.worker import noting
from ..engine.config import RoundPipeRunConfig

Loss: TypeAlias = torch.Tensor | WeightedLoss | tuple[torch.Tensor | float, torch.Tensor | float]
Outputs = TypeVar("Outputs")


class ForwardBackward(Protocol):
    """The type of ``forward_backward`` of a pipeline: which results it returns for which arguments."""

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Loss] = ...,
        return_outputs: Literal[False] = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        *,
        loss_fn: Callable[[Any, Any], list[torch.Tensor]],
        return_outputs: Literal[False] = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> list[torch.Tensor]: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        *,
        return_outputs: Literal[True],
        run_config: RoundPipeRunConfig | None = None,
    ) -> tuple[torch.Tensor, object]: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        *,
        loss_fn: Callable[[Outputs, Any], Loss],
        return_outputs: Literal[True],
        run_config: RoundPipeRunConfig | None = None,
    ) -> tuple[torch.Tensor, Outputs]: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Loss | list[torch.Tensor]] = ...,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], object]: ...


def forward_backward_method(method: Callable[..., object]) -> ForwardBackward:
    """Return a method unchanged, typed as :class:`ForwardBackward`."""
    return cast(ForwardBackward, method)


def back_from(outputs: PyTree, label: Any, loss_fn: Callable[[Any, Any], Any], return_outputs: bool) -> PyTree:
    """Compute a loss from the outputs of a whole batch, and run its backward."""
    found = shapes_of([leaf for leaf in pytree.tree_leaves((outputs, label)) if isinstance(leaf, torch.Tensor)])
    with torch.enable_grad():
        with noting(f"In the loss, called once with the joined outputs and the labels of all rows: tensors {found}"):
            # outputs of microbatches carry the weights of their losses, but joined outputs do not
            own = getattr(loss_fn, "__wrapped__", loss_fn) if hasattr(loss_fn, "has_proven_weights") else loss_fn
            loss = own(outputs, label)
        total, terms = terms_of_batch(loss)
    if terms:
        torch.autograd.backward([term.tensor for term in terms], [term.seed for term in terms])
    total = pytree.tree_map(torch.Tensor.cpu, total)
    return (total, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)) if return_outputs else total
