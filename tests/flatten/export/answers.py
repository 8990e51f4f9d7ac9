"""A module that returns what a function makes of its input."""

import torch

__all__ = ["Answers"]


class Answers(torch.nn.Module):
    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(x)
