"""Measure the rounding error of a dtype on a case: half precision against float32, or float32 against float64.

.. code-block:: text

    weights in float16 ──> outputs                          both sides begin with the same numbers,
            └── as float32 ──> outputs in float32            so what is between them is rounding

A file rounds elsewhere than the model, and is as far from float32; one that computes something else is further off.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ...errors.log import STEP
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ...trees.naming import output_names
from .case import Case
from .eager_runs import eager_steps
from .left import Left
from .memory import memory_available, weight_bytes

_HALF = (torch.float16, torch.bfloat16)

logger = logging.getLogger("yobx_flatten")

_TIMES = 5.0
"""A file and its model round in other places, and the largest of some thousand roundings is a matter of luck."""

_IN_FLOAT32 = 1e-4
"""Allowed difference of float32 outputs for any type of weights, also without a measurement."""

_PART = 0.1
"""The part of an output's range that is allowed at most, whatever the type costs: beyond, a comparison shows little."""

PART_OF_FLOAT32 = 1e-5
"""The same for weights in float32."""


def explained(stated: float, expected: torch.Tensor, part: float = _PART) -> float:
    """Return how much of a difference a type explains: a part of the output's own range at most.

    Outputs of other types than half precision may always differ by what those of a model in float32 may.

    >>> explained(100.0, torch.tensor([-1.0, 1.0], dtype=torch.float16))
    0.2
    """
    # stated: what it costs, times `_TIMES`. A folder of a stranger can state anything.
    # part: that part; by default a tenth, of half precision
    finite = expected.float()[expected.isfinite()]
    if not finite.numel():
        return 0.0
    rounding = torch.finfo(expected.dtype).eps * float(finite.abs().max())
    least = _TIMES * rounding if expected.dtype in _HALF else _IN_FLOAT32
    return max(min(stated, part * float(finite.max() - finite.min())), least)


class Yardstick:
    """The allowed difference of each output, given the error of the type of the weights."""

    # is_half: whether that is half precision, next to float32; else float32, next to float64. `True` by default

    def __init__(
        self,
        module: torch.nn.Module,
        names: Collection[str],
        written: Collection[str] = (),
        left: Left | None = None,
        *,
        is_half: bool = True,
    ) -> None:
        self._module, self._names, self._state = module, names, (written, left)
        self._narrow: tuple[torch.dtype, ...] = _HALF if is_half else (torch.float32,)
        self._wide = torch.float32 if is_half else torch.float64
        self._part = _PART if is_half else PART_OF_FLOAT32
        self._found: dict[int, tuple[Case, dict[str, float]]] = {}
        self.costs: dict[str, float] = {}
        self.largest: dict[str, float] = {}

    @property
    def precise(self) -> str:
        """The type that the weights are compared with."""
        return str(self._wide).removeprefix("torch.")

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return whether it measures this module."""
        return self._module is module

    @staticmethod
    def why_not(module: torch.nn.Module) -> str:
        """Return why a module cannot be measured; ``""`` where it can."""
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return "its weights are not in memory"
        needed = 2 * weight_bytes(module)
        return (
            ""
            if needed < memory_available() // 2
            else "its weights in twice as many bits take more than half of the free memory"
        )

    def allowed(self, case: Case) -> Mapping[str, float]:
        """Return by output the largest difference that the type of the weights explains."""
        if id(case) not in self._found:
            logger.info("measuring what the type of the weights costs: %s", case.name, extra=STEP)
            self._found[id(case)] = case, self._measured(case)
        return self._found[id(case)][1]

    def _measured(self, case: Case) -> dict[str, float]:
        steps = eager_steps(self._module, case, *self._state, twice=True)
        wide = Case(case.name, self._widened(case.args), self._widened(dict(case.kwargs)), case.steps)
        with _as_type(self._module, self._narrow, self._wide):
            others = eager_steps(self._module, wide, *self._state, twice=True)
        allowed: dict[str, float] = {}
        for step, other in zip(steps, others, strict=True):
            names = output_names(step.outputs, self._names)
            leaves = zip(names, pytree.tree_leaves(step.outputs), pytree.tree_leaves(other.outputs), strict=True)
            for name, one, precise in leaves:
                if not isinstance(one, torch.Tensor) or not one.is_floating_point() or not one.numel():
                    continue  # a model may return float32 that was computed in half precision
                apart = (one.double() - precise.double()).abs()
                cost = float(apart[apart.isfinite()].max()) if bool(apart.isfinite().any()) else 0.0
                most = explained(_TIMES * cost, one, self._part)
                allowed[name] = max(allowed.get(name, 0.0), most)
                self.costs[name] = max(self.costs.get(name, 0.0), cost)
                self.largest[name] = max(self.largest.get(name, 0.0), most)
        return allowed

    def _widened(self, tree: PyTree) -> PyTree:
        def wide(leaf: object) -> object:
            return leaf.to(self._wide) if isinstance(leaf, torch.Tensor) and leaf.dtype in self._narrow else leaf

        return pytree.tree_map(wide, tree)


@contextlib.contextmanager
def _as_type(module: torch.nn.Module, narrow: tuple[torch.dtype, ...], wide: torch.dtype) -> Iterator[None]:
    """Call a module inside with its weights in a wider type; they are its own again afterwards."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    copies: dict[int, torch.Tensor] = {}  # what is tied stays tied
    for owner in module.modules():
        places: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
        for held in places:
            mine = {name: one for name, one in held.items() if isinstance(one, torch.Tensor) and one.dtype in narrow}
            found.append((held, mine))
            for name, tensor in mine.items():
                if id(tensor) not in copies:
                    copy = tensor.detach().to(wide)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    copies[id(tensor)] = torch.nn.Parameter(copy, requires_grad=False) if is_weight else copy
                held[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for held, mine in found:
            held.update(mine)
