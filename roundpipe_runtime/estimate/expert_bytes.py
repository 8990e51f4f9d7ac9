"""Estimate how many experts of a mixture a step uploads: those that at least one of its tokens is routed to."""

from __future__ import annotations

from .layer_footprint import LayerFootprint

# The share of the experts up to which the runtime uploads them on demand, as `engine/parameters/routed` has it.
MOST_READ = 0.75


def expected_share(experts: int, per_token: float, tokens: float) -> float:
    """Return the share of the experts of a layer that tokens are expected to be routed to, if all are as likely.

    Routing that prefers some experts reaches fewer on average, so this is the most that is to be expected. A batch may
    reach more than is expected, and at most all of them.

    Args:
        experts: number of experts of the layer.
        per_token: number of different experts that each token is routed to.
        tokens: number of tokens.

    Returns:
        The share, from 0 to 1.

    >>> expected_share(8, 2, 1), round(expected_share(8, 2, 4), 2), round(expected_share(128, 8, 16), 2)
    (0.25, 0.68, 0.64)
    """
    return 1.0 - (1.0 - min(per_token / experts, 1.0)) ** tokens if experts else 1.0


def unread_bytes(layer: LayerFootprint, tokens: int, num_microbatch: int) -> tuple[float, float]:
    """Return the bytes of the parameters of a layer that a step is expected not to upload, and of their gradients."""
    # tokens: tokens of the step, all microbatches
    if not (layer.experts and tokens):
        return 0.0, 0.0
    share = expected_share(layer.experts, layer.routed_rows * num_microbatch / tokens, tokens)
    if share > MOST_READ:  # all are uploaded, ahead
        return 0.0, 0.0
    unread = (1.0 - share) * layer.expert_bytes
    # frozen experts have no gradients; of those that train they are taken to be in the dtype of the other gradients
    trained = min(layer.trained_bytes, layer.expert_bytes)
    wide = layer.grad_bytes / layer.trained_bytes if layer.trained_bytes else 0.0
    return unread, (1.0 - share) * trained * wide if layer.experts_train else 0.0
