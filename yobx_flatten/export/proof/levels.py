"""Choose how much of an export is replayed: ``"full"``, ``"sampled"`` or ``"none"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from ...errors import InvalidArgumentError
from ...private_names.of_torch import pytree
from .case import Case

Proof = Literal["auto", "full", "sample", "none"]
"""``"full"`` replays all cases, ``"sample"`` the example and the largest one, ``"none"`` nothing."""

SAMPLED_FROM = 10**9
"""Bytes of weights from which on ``"auto"`` means ``"sample"``."""

UNPROVEN = 'UNPROVEN: nothing was replayed, as asked for by proof="none". Compare it with the model before it is used.'


def choose_proof(proof: Proof, weight_bytes: int) -> Literal["full", "sample", "none"]:
    """Return the proof of an export: ``"full"``, ``"sample"`` or ``"none"``.

    >>> choose_proof("auto", 32)
    'full'
    """
    # proof: a `Proof`. `"auto"` is `"full"` for weights of less than 1 GB (`SAMPLED_FROM`), since a call of a larger
    # model takes seconds, and `"sample"` for others.
    if proof not in get_args(Proof):
        raise InvalidArgumentError(f"proof must be one of {', '.join(map(repr, get_args(Proof)))}, found {proof!r}.")
    if proof == "auto":
        return "full" if weight_bytes < SAMPLED_FROM else "sample"
    return proof


def sampled(cases: Sequence[Case]) -> list[Case]:
    """Return the case with the largest inputs: the one past the window, or with padding."""

    def size(case: Case) -> int:
        leaves: list[Any] = pytree.tree_leaves((case.args, dict(case.kwargs)))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    return [max(cases, key=size)] if cases else []
