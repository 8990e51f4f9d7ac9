"""One set of inputs that is replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from ...errors import InvalidArgumentError, describe_class
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs to check.

    Attributes:
        name: a short description of the case, for the report.
        args: positional arguments; none by default.
        kwargs: keyword arguments; none by default.
        steps: number of calls, 1 by default; after the first, each gets the cache that the call before returned.

    >>> import torch
    >>> from yobx_flatten import export_program
    >>> case = Case("one row", (torch.ones(1, 3),))
    >>> exported = export_program(torch.nn.Linear(3, 2), (torch.zeros(4, 3),), cases=[case])
    >>> [result.case for result in exported.report.cases]
    ['the example', 'one row']
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 1


def clone(tree: PyTree) -> PyTree:
    """Copy every tensor of nested inputs: static caches are written to in place."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def check_cases(cases: Iterable[Any]) -> list[Case]:
    """Check that every case is a :class:`Case`."""
    found = list(cases)
    for number, case in enumerate(found):
        if not isinstance(case, Case):
            raise InvalidArgumentError(
                f"cases[{number}]: expected a Case, found {describe_class(case)}.\n"
                '    cases=[Case("five rows", args, kwargs)]'
            )
    return found


# Choose how much of an export is replayed: ``"full"``, ``"sampled"`` or ``"none"``.


Proof = Literal["auto", "full", "standard", "sample", "none"]
"""``"full"`` replays all cases, ``"standard"`` the same with files alone and less text, ``"sample"`` the example and
the largest case, ``"none"`` nothing."""

STANDARD_FROM, SAMPLED_FROM = 10**8, 10**9
"""Bytes of weights from which on ``"auto"`` means ``"standard"``, and ``"sample"``."""

UNPROVEN = 'UNPROVEN: nothing was checked, as requested by proof="none". Compare it with the model before you use it.'


def choose_proof(proof: Proof, weight_bytes: int) -> Literal["full", "standard", "sample", "none"]:
    """Return the proof of an export: ``"full"``, ``"standard"``, ``"sample"`` or ``"none"``.

    >>> choose_proof("auto", 32)
    'full'
    """
    # proof: a `Proof`. With `"auto"` a proof takes no longer than the export: a call of a model of 1 GB takes seconds.
    if proof not in get_args(Proof):
        raise InvalidArgumentError(f"proof must be one of {', '.join(map(repr, get_args(Proof)))}, found {proof!r}.")
    if proof == "auto":
        return "full" if weight_bytes < STANDARD_FROM else "standard" if weight_bytes < SAMPLED_FROM else "sample"
    return proof


def sampled(cases: Sequence[Case]) -> list[Case]:
    """Return the case with the largest inputs: the one past the window, or with padding."""

    def size(case: Case) -> int:
        leaves: list[Any] = pytree.tree_leaves((case.args, dict(case.kwargs)))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    return [max(cases, key=size)] if cases else []
