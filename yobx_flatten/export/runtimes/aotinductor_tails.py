"""Keep the last block of a tiled reduction within its output.

Inductor computes a sum of vectors for blocks of two loops. Where a third loop lies between these two, torch 2.13 stores
the last block whole, also where only a part of it belongs to the output: the rest overwrites the next row, or memory of
others (https://github.com/pytorch/pytorch/issues/196681).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...private_names.of_torch import cpp_kernels
from ...registry.patches import AttributePatch


def _storing_tails(aggregate: Callable[..., None]) -> Callable[..., None]:
    """Make the version of ``aggregate_reduction_buffers`` that writes a block of its own for the tail."""

    @functools.wraps(aggregate)
    def aggregate_reduction_buffers(self: Any, is_inner_only: bool, outer: Any) -> None:
        if outer is not None and not outer.is_reduction:
            # torch looks at the loop right inside of the outer one; any loop inside of it may be the sum
            loops = self.loop_nest.loops
            inside = loops[next(i for i, loop in enumerate(loops) if loop.var == outer.var) + 1 :]
            is_inner_only = is_inner_only or any(loop.is_reduction for loop in inside)
        aggregate(self, is_inner_only, outer)

    return aggregate_reduction_buffers


@functools.cache  # one patch, which several threads may hold
def _patch() -> AttributePatch | None:
    kernels, name = cpp_kernels(), "aggregate_reduction_buffers"
    if kernels is None or name not in vars(kernels):
        return None  # another version of torch: the replay decides
    return AttributePatch(kernels, name, _storing_tails(vars(kernels)[name]))


@contextmanager
def whole_tails() -> Iterator[None]:
    """Compile without the fault while the block is open."""
    patch = _patch()
    if patch is not None:
        patch.acquire()
    try:
        yield
    finally:
        if patch is not None:
            patch.release()
