"""Exchange tokens for heads between ranks, so that attention sees all tokens of some heads (sequence parallelism).

::

    projections   rank 0: tokens 0 1 | heads a b        rank 1: tokens 2 3 | heads a b
    attention     rank 0: tokens 0 1 2 3 | heads a      rank 1: tokens 0 1 2 3 | heads b
    output        rank 0: tokens 0 1 | heads a b        rank 1: tokens 2 3 | heads a b

The exchange is one all-to-all of its own group, called by the thread of the only device of each rank, so that
every rank calls in the same order (Jacobs et al., *DeepSpeed Ulysses*, 2023).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .ranks import job_timeout

_PERIOD = 0.0002  # seconds between two looks at an exchange that has not ended


class TokenExchange:
    """The exchanges of one model among the ranks of a mesh."""

    # reason: returns why the call under way is to be given up, as another rank has failed; `None` while it continues

    def __init__(self, mesh: DeviceMesh, reason: Callable[[], BaseException | None]) -> None:
        self._members: list[int] = mesh.mesh.flatten().tolist()
        self._reason = reason
        self.size, self.rank = len(self._members), self._members.index(dist.get_rank())
        self.sent = 0
        self._group: Any = None

    def to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``(rows, heads / size, all tokens, width)`` of ``(rows, heads, tokens, width)``."""
        found: torch.Tensor = _Exchanged.apply(tensor, self, True)  # type: ignore[no-untyped-call] # torch has no types for it
        return found

    def to_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``(rows, heads, tokens, width)`` of ``(rows, heads / size, all tokens, width)``."""
        found: torch.Tensor = _Exchanged.apply(tensor, self, False)  # type: ignore[no-untyped-call] # as above
        return found

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Send part i of the first axis to rank i, and return the parts received."""
        if self._group is None:
            self._group = dist.new_group(self._members, timeout=job_timeout(), backend="gloo")
        out = parts.to("cpu").contiguous()
        into = torch.empty_like(out)
        work: Any = dist.all_to_all_single(into, out, group=self._group, async_op=True)
        self.sent += out.nbytes * (self.size - 1) // self.size
        while not work.is_completed():
            if (reason := self._reason()) is not None:
                raise reason
            time.sleep(_PERIOD)
        work.wait()  # which raises what went wrong
        return into.to(parts.device)

    def close(self) -> None:
        """Close a broken exchange and its process group; all ranks make a new group for the next exchange."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                group.abort()
                dist.destroy_process_group(group)


class _Exchanged(torch.autograd.Function):
    """The exchange in one direction, whose gradient travels in the other one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: TokenExchange, is_to_heads: bool) -> torch.Tensor:
        ctx.exchange, ctx.is_to_heads = exchange, is_to_heads
        return _to_heads(tensor, exchange) if is_to_heads else _to_tokens(tensor, exchange)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _to_tokens if ctx.is_to_heads else _to_heads
        return back(gradients[0], ctx.exchange), None, None


def _to_heads(tensor: torch.Tensor, exchange: TokenExchange) -> torch.Tensor:
    rows, heads, tokens, width = tensor.shape
    parts = tensor.reshape(rows, exchange.size, heads // exchange.size, tokens, width).transpose(0, 1)
    found = exchange.swap(parts)  # by the rank of the tokens
    return found.permute(1, 2, 0, 3, 4).reshape(rows, heads // exchange.size, exchange.size * tokens, width)


def _to_tokens(tensor: torch.Tensor, exchange: TokenExchange) -> torch.Tensor:
    rows, heads, tokens, width = tensor.shape
    parts = tensor.reshape(rows, heads, exchange.size, tokens // exchange.size, width).permute(2, 0, 1, 3, 4)
    found = exchange.swap(parts)  # by the rank of the heads
    return found.transpose(0, 1).reshape(rows, exchange.size * heads, tokens // exchange.size, width)
