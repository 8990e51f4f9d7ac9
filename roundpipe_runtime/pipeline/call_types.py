"""Typed signatures of ``forward_backward``.

A function that is typed gives typed results: the loss, and with ``return_outputs`` what its first argument is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, overload

import torch

from ..batch.loss import WeightedLoss
from ..engine.config import RoundPipeRunConfig

Loss: TypeAlias = torch.Tensor | WeightedLoss | tuple[torch.Tensor | float, torch.Tensor | float]
Outputs = TypeVar("Outputs")


class ForwardBackward(Protocol):
    """``forward_backward`` of a pipeline, called."""

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
    """Return a method as it is, with the type that it has when it is called on an instance."""
    return cast(ForwardBackward, method)
