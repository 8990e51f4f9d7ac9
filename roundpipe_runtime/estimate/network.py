"""Estimate what data parallel training costs between nodes: bytes, seconds, memory of each host.

``n`` nodes, each with one process and all weights; gradients, masters and moments are cut into ``n`` shards, one per
node. Of each step, with ``P`` numbers that are trained:

::

    backward  |--- layer 9 --|--- layer 8 --| ...     forward of the next step  |--- layer 0 --|--- layer 1 --| ...
    network        gradients of 9, of 8, ...                                    weights of 1, of 2, ...

    gradients   each node sends the shards of the others:        (n - 1) / n  w P  bytes, w a number of a gradient
    weights     each node sends its shard to n - 1 others, who   (n - 1) / n  u P  bytes, u a number of a weight,
                send theirs: as much as it receives                                per node
    seconds     bytes / B,  B = 80 % of the line in bytes per second

Nothing of it grows with the number of microbatches, as weights and sums of gradients travel once per step. Gradients
land during the backward, a layer at a time, and travel meanwhile; weights travel during the forward of the next step.
So, with ``C`` seconds of computing of which a share ``f`` is forward,

::

    exposed     max(0, gradients - (1 - f) C) + max(0, weights - f C)
    step        C + exposed + A / n,  A the seconds of the optimizer on all numbers: each node steps its shard

Computing takes ``C = 8 P T / (G F)`` for ``T`` tokens of a node on ``G`` devices of ``F`` operations per second: 2 for
the forward, 2 for the forward again and 4 for the backward, so ``f`` is 1/4. It grows with the tokens, and the bytes do
not. The network is hidden where ``weights <= C / 4`` and ``gradients <= 3 C / 4``, with ``P`` on both sides:

::

    weights     T >= (n - 1) / n  (u / 2)  G F / B
    gradients   T >= (n - 1) / n  (w / 6)  G F / B

Memory of a host: all weights, ``u P``, and of gradients, masters and two moments in float32 its share, ``16 P / n``.

Not in it: more groups of rows than nodes, whose gradients travel once per group; rates in a node; nodes that compute
at different speeds. A stage of the forward waits for all of its layers, so with one forward stage the weights of its
first microbatch are not hidden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ConfigError
from .memory_estimate import HostMemory
from .report import PlanReport

LINE_SHARE = 0.8
"""Share of the line that a collective reaches."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodesEstimate:
    """What a step costs between nodes. Bytes and seconds are those of one node, which sends and receives as much."""

    nodes: int  # number of nodes
    network: float  # bits per second of a node's line
    gradient_bytes: float  # bytes of gradients sent per step
    weight_bytes: float  # bytes of updated weights sent per step
    gradient_seconds: float  # time on the line of the gradients
    weight_seconds: float  # time on the line of the weights
    exposed_gradients: float  # seconds for which the step waits for gradients
    exposed_weights: float  # seconds for which the step waits for weights
    optimizer_seconds: float  # seconds of the optimizer on a shard
    step_seconds: float
    gradient_tokens: float  # tokens of a node and step from which on gradients are hidden
    weight_tokens: float  # tokens of a node and step from which on weights are hidden

    @property
    def hidden_tokens(self) -> float:
        """Tokens of a node and step from which on the network takes no time of the step."""
        return max(self.gradient_tokens, self.weight_tokens)


def estimate_nodes(
    nodes: int,
    network: float,
    *,
    gradients: float,
    weights: float,
    forward: float,
    backward: float,
    optimizer: float,
    tokens: float,
) -> NodesEstimate:
    """Estimate a step of several nodes from a step of one.

    >>> P, T = 8e9, 65536  # one RTX 4090 in each of two nodes on 25 Gbit/s, bfloat16 on the wire
    >>> compute = 8 * P * T / 110e12
    >>> found = estimate_nodes(2, 25e9, gradients=2 * P, weights=2 * P, forward=compute / 4, backward=3 * compute / 4,
    ...                        optimizer=30 * P / 100e9, tokens=T)
    >>> round(found.step_seconds), round(found.weight_seconds, 1), found.exposed_weights, round(found.weight_tokens)
    (39, 3.2, 0.0, 22000)
    """
    # weights: bytes of all trained weights on the wire
    # forward: seconds of a node in forward stages, in which no gradient lands
    # optimizer: seconds of one host for the optimizer on all parameters
    if nodes < 1 or not 0 < network < math.inf:
        raise ConfigError(
            f"nodes must be 1 or more and network above 0 bits per second, found nodes={nodes}, network={network}."
        )
    rate = LINE_SHARE * network / 8
    sent = (nodes - 1) / nodes
    gradient_seconds, weight_seconds = sent * gradients / rate, sent * weights / rate
    exposed = max(0.0, gradient_seconds - backward), max(0.0, weight_seconds - forward)
    shard = optimizer / nodes
    return NodesEstimate(
        nodes=nodes,
        network=network,
        gradient_bytes=sent * gradients,
        weight_bytes=sent * weights,
        gradient_seconds=gradient_seconds,
        weight_seconds=weight_seconds,
        exposed_gradients=exposed[0],
        exposed_weights=exposed[1],
        optimizer_seconds=shard,
        step_seconds=forward + backward + sum(exposed) + shard,
        gradient_tokens=tokens_that_hide(gradient_seconds, backward, tokens),
        weight_tokens=tokens_that_hide(weight_seconds, forward, tokens),
    )


def tokens_that_hide(line: float, compute: float, tokens: float) -> float:
    """Return the tokens of a step with which computing takes as long as the line.

    >>> tokens_that_hide(3.0, 1.0, 1000), tokens_that_hide(0.0, 0.0, 1000)
    (3000.0, 0.0)
    """
    # line: seconds on the line, whatever the number of tokens
    # compute: seconds of computing next to it, for `tokens` tokens
    if not line:
        return 0.0
    return tokens * line / compute if compute else math.inf


def host_of_node(host: HostMemory, nodes: int) -> HostMemory:
    """Return the memory of a node's host that keeps one shard of what the optimizer works on.

    >>> P = 8_000_000_000
    >>> one = HostMemory(parameters=2 * P, gradients=4 * P, masters=4 * P, optimizer=8 * P, activations=0)
    >>> [host_of_node(one, nodes).total // 10**9 for nodes in (1, 2, 4, 8)]
    [144, 80, 48, 32]
    """

    def shard(size: int) -> int:
        return -(-size // nodes)

    return dataclasses.replace(
        host, gradients=shard(host.gradients), masters=shard(host.masters), optimizer=shard(host.optimizer)
    )


def nodes_of_report(
    report: PlanReport,
    parameters: Iterable[nn.Parameter],
    nodes: int,
    network: float,
    *,
    optim_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> NodesEstimate:
    """Estimate a step of several nodes from the plan of one."""
    # parameters: parameters of the model; those that are trained travel
    # optim_dtype: dtype of gradients. Default: that of each parameter.
    # reduce_dtype: dtype of gradients on the wire. Default: that of the gradients.
    trained = [p for p in {id(p): p for p in parameters}.values() if p.requires_grad]
    wire = reduce_dtype or optim_dtype
    computed = sum(report.seconds)
    forward = sum(layer.forward_flops for layer in report.layers) / report.hardware.flops
    share = forward / computed if computed else 0.0
    seconds = report.simulation.time
    return estimate_nodes(
        nodes,
        network,
        gradients=sum(p.numel() * (wire or p.dtype).itemsize for p in trained),
        weights=sum(p.nbytes for p in trained),
        forward=share * seconds,
        backward=(1 - share) * seconds,
        optimizer=report.optimizer_seconds,
        tokens=report.tokens,
    )


def of_node(report: PlanReport, nodes: int) -> PlanReport:
    """Return the plan of one node of several: its host keeps a shard of what the optimizer works on, and steps that."""
    step = dataclasses.replace(
        report.step,
        host_memory=host_of_node(report.host_memory, nodes),
        optimizer_bytes=report.step.optimizer_bytes // nodes,
    )
    return dataclasses.replace(report, step=step, simulated=report.simulate(step))
