"""Tensors whose values tell their row, and the rows that each microbatch got."""

import torch


def rows(count, *shape):
    """A tensor whose values tell the row."""
    return torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape).contiguous()


def firsts(parts, pick):
    """The rows that each microbatch got."""
    return [pick(part).flatten(1)[:, 0].tolist() if pick(part).dim() > 1 else pick(part).tolist() for part in parts]
