"""A small ResNet learns scikit-learn's digits, through a pipeline of two devices and plainly: the same losses.

    pip install scikit-learn
    python examples/digits_resnet.py

Batch norm takes its mean and variance over what it is given, and a pipeline gives it a microbatch. So the plain run
here goes over the same microbatches one after the other, as gradient accumulation does; the running statistics are
also compared.
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim

ROWS, MICROBATCHES, HELD_BACK = 50, 3, 297


class Residual(nn.Module):
    """Two convolutions added to their input; ``stride=2`` halves the picture."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def build_model() -> nn.Sequential:
    """Nine layers, from pictures (rows, 1, 8, 8) to scores (rows, 10)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16),
        Residual(16, 32, stride=2),
        Residual(32, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of shape (1797, 1, 8, 8) with values up to 1, and what they show."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 50 pictures, the same ones each time; the last 297 pictures are held back."""
    images, labels = load()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(images) - HELD_BACK, (ROWS,), generator=generator)
        yield images[chosen], labels[chosen]


loss_fn = nn.functional.cross_entropy


def train_plainly(steps: int) -> tuple[nn.Module, list[float]]:
    """The model and the loss of each step, microbatch by microbatch, without a pipeline."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    losses = []
    for inputs, labels in batches(steps):
        total = 0.0
        parts = zip(inputs.tensor_split(MICROBATCHES), labels.tensor_split(MICROBATCHES), strict=True)
        for some_inputs, some_labels in parts:
            loss = loss_fn(model(some_inputs), some_labels) * (len(some_inputs) / ROWS)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model, losses


def train_through_a_pipeline(steps: int) -> tuple[RoundPipe, list[float]]:
    """The same, where a device runs a few layers at a time."""
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, loss_reduction="mean")
    model = RoundPipe(build_model(), devices="virtual:2", model_run_config=config)
    with OptimizerCtx():
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for inputs, labels in batches(steps):
        loss = model.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
    return model, losses


def accuracy(model: nn.Module) -> float:
    """The share of held-back pictures that the model reads right."""
    images, labels = load()
    with torch.no_grad():
        scores = model.eval()(images[-HELD_BACK:])
    return (scores.argmax(1) == labels[-HELD_BACK:]).float().mean().item()


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Over everything that training changed: parameters and running statistics."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def main(steps: int = 100) -> tuple[list[float], list[float]]:
    """Train both ways, print the losses side by side, and return them."""
    (model, plain), (pipeline, piped) = train_plainly(steps), train_through_a_pipeline(steps)
    print("step  plain     pipeline  difference")
    for step in sorted({*range(0, steps, 10), steps - 1}):
        print(f"{step:4}  {plain[step]:.6f}  {piped[step]:.6f}  {abs(plain[step] - piped[step]):.1e}")
    largest = max(abs(one - other) for one, other in zip(plain, piped, strict=True))
    print(f"Largest difference of {steps} steps: {largest:.1e}.")
    print(f"Largest difference of parameters and running statistics: {largest_difference(model, pipeline):.1e}.")
    print(f"Read right of {HELD_BACK} other pictures: {accuracy(model):.1%} plain, {accuracy(pipeline):.1%} pipeline.")
    pipeline.close()
    return plain, piped


if __name__ == "__main__":
    torch.set_num_threads(1)  # operations this small lose more by being shared out than they gain
    main()
