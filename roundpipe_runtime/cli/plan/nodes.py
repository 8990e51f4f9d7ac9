"""Show a plan for several machines, in words and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from yobx_flatten.errors.messages import format_bytes, table

from ...estimate.network import NodesEstimate
from ..quantities import format_seconds

_LINES = (10e9, 25e9, 100e9, 400e9)


def as_dict(found: NodesEstimate, reports: Callable[[int, float], NodesEstimate]) -> dict[str, Any]:
    """Return everything for JSON: sizes in bytes, times in seconds, rates in bits per second."""
    return {
        **_without_infinity(dataclasses.asdict(found)),
        "hidden_tokens": [
            {"nodes": count, "network": line, "tokens": _finite(reports(count, line).hidden_tokens)}
            for count in _counts(found.nodes)
            for line in _lines(found.network)
        ],
    }


def write_nodes(found: NodesEstimate, reports: Callable[[int, float], NodesEstimate], *, rows: int, tokens: int) -> str:
    """Return the estimate as text."""
    parts = (
        ("gradients", found.gradient_bytes, found.gradient_seconds, found.exposed_gradients),
        ("weights", found.weight_bytes, found.weight_seconds, found.exposed_weights),
    )
    computed = found.step_seconds - found.exposed_gradients - found.exposed_weights - found.optimizer_seconds
    waited = found.exposed_gradients + found.exposed_weights
    return "\n".join(
        [
            f"{found.nodes} machines, {_line(found.network)} each; a step of all is {rows} rows",
            *table([["sent by each", "a step", "on the line", "not hidden"], *map(_sent, parts)], align="<>>>"),
            f"A step takes {format_seconds(found.step_seconds)}: {format_seconds(computed)} of computing, "
            f"{format_seconds(waited) if waited else 'nothing'} of waiting,",
            f"  {format_seconds(found.optimizer_seconds)} of AdamW on one part in {found.nodes}",
            "",
            f"Tokens of a step and machine that hide the network; there are {tokens:,}",
            *table(
                [
                    ["", *map(_line, _lines(found.network))],
                    *(
                        [f"{count} machines", *(_tokens(reports(count, line)) for line in _lines(found.network))]
                        for count in _counts(found.nodes)
                    ),
                ],
                align="<" + ">" * len(_lines(found.network)),
            ),
        ]
    )


def _sent(part: tuple[str, float, float, float]) -> list[str]:
    name, size, seconds, exposed = part
    return [name, format_bytes(size), format_seconds(seconds), format_seconds(exposed) if exposed else "-"]


def _counts(nodes: int) -> list[int]:
    return sorted({2, 4, 8, nodes})


def _lines(network: float) -> list[float]:
    return sorted({*_LINES, network})


def _line(network: float) -> str:
    return f"{network / 1e9:g} Gbit/s"


def _tokens(estimate: NodesEstimate) -> str:
    return f"{estimate.hidden_tokens:,.0f}" if math.isfinite(estimate.hidden_tokens) else "never"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _without_infinity(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) for name, value in values.items()}
