"""A transformer reads bytes, through a pipeline of two devices and plainly: the same losses, step by step.

    python examples/byte_text.py

The text is what ``help()`` of Python shows. Each half of the comparison starts from the same weights and sees the same
batches, of 10 rows, which the pipeline's 3 microbatches cannot share evenly.
"""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import nn

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim

WIDTH, LENGTH, ROWS = 64, 64, 10


class Block(nn.Module):
    """Attention to what was read so far, then a layer on each byte alone; both are added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.feed(x)


class Embedding(nn.Module):
    """The position of a byte is learnt in addition to its value."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.byte(ids) + self.place


def build_model() -> nn.Sequential:
    """Seven layers, each a child of the ``nn.Sequential``; a pipeline is cut between them."""
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *[Block() for _ in range(4)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of shape (10, 64), the same ones each time; a label is the byte that follows."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all bytes."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def train_plainly(steps: int) -> list[float]:
    """The loss of each step, without a pipeline."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    losses = []
    for inputs, labels in batches(steps):
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_through_a_pipeline(steps: int) -> list[float]:
    """The loss of each step, where a device runs a few layers at a time."""
    model = RoundPipe(build_model(), devices="virtual:2", model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
    with OptimizerCtx():
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for inputs, labels in batches(steps):
        loss = model.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
    model.close()
    return losses


def main(steps: int = 100) -> tuple[list[float], list[float]]:
    """Train both ways, print the losses side by side, and return them."""
    plain, piped = train_plainly(steps), train_through_a_pipeline(steps)
    print("step  plain     pipeline  difference")
    for step in sorted({*range(0, steps, 10), steps - 1}):
        print(f"{step:4}  {plain[step]:.6f}  {piped[step]:.6f}  {abs(plain[step] - piped[step]):.1e}")
    largest = max(abs(one - other) for one, other in zip(plain, piped, strict=True))
    print(f"Largest difference of {steps} steps: {largest:.1e}.")
    return plain, piped


if __name__ == "__main__":
    torch.set_num_threads(1)  # operations this small lose more by being shared out than they gain
    main()
