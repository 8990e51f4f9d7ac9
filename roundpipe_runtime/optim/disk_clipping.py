"""Clip gradients that live on a disk some at a time, with the bits of torch's functions, which touch all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import norm_and_scaling

from ..device.disk import disk_of, in_groups, passing


@functools.cache
def clip_by_parts() -> None:
    """Let torch's ``clip_grad_norm_`` go through gradients on a disk in parts. Once per process."""
    found = norm_and_scaling()
    if found is None:  # an older torch: the numbers are the same, and all gradients are in memory meanwhile
        return
    module, norm, scaling = found
    setattr(module, norm, _norm_by_parts(getattr(module, norm)))
    setattr(module, scaling, _scaling_by_parts(getattr(module, scaling)))


def _norm_by_parts(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(whole)
    def norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # torch computes the norm of each tensor, and of these norms: sorted by device and dtype, where these differ
        if len({(one.device, one.dtype) for one in given}) != 1 or all(disk_of(one) is None for one in given):
            return whole(given, norm_type, error_if_nonfinite, foreach)
        groups, norms = in_groups(given), []
        with torch.no_grad():
            for number in passing(groups, written=False):
                norms += [torch.linalg.vector_norm(one, float(norm_type)) for one in groups[number]]
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            return whole(given, norm_type, error_if_nonfinite, foreach)  # which raises its own error
        return total

    return norm


def _scaling_by_parts(whole: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(whole)
    def scale(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        owners = {id(one.grad): one for one in given if one.grad is not None}
        gradients = [one.grad for one in owners.values() if one.grad is not None]
        if all(disk_of(one) is None for one in gradients):
            whole(given, max_norm, total_norm, *rest, **options)
            return
        if torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0) == 1.0:
            whole([], max_norm, total_norm, *rest, **options)  # a factor of one changes nothing
            return
        groups = in_groups(gradients)
        for number in passing(groups, written=True):
            whole([owners[id(one)] for one in groups[number]], max_norm, total_norm, *rest, **options)

    return scale
