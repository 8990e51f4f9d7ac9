"""What a process of a benchmark keeps in memory, and text for it to train on."""

from __future__ import annotations

import pydoc_data.topics

import torch

__all__ = ["status", "tokens_of_text"]


def status(name: str) -> int:
    """Return bytes of this process, as Linux counts them."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def tokens_of_text(rows: int, length: int, number: int) -> torch.Tensor:
    """Return a batch of bytes of the text that Python ships with: the topics of its help, about 700 kB."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    return torch.tensor([list(text[start : start + length]) for start in starts])
