"""What a type checker knows in a script of a user: `make types` checks it strictly, and it runs as it stands.

`assert_type` fails in mypy where a type is another one, and where it is `Any`.
"""

import tempfile
from typing import assert_type

import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, WeightedLoss
from yobx_flatten import load_nested, save_nested

X, Y = torch.ones(6, 4), torch.ones(6, 2)
CALL = (X,)


def squared(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs - labels) ** 2).sum()


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> WeightedLoss:
    return WeightedLoss(squared(outputs, labels), labels.numel())


def both(outputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    return [squared(outputs, labels), outputs.sum()]


class Total(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum()


def train() -> None:
    config = RoundPipeRunConfig(loss_reduction="sum")
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), devices="virtual:2", model_run_config=config)
    assert_type(model.forward_backward(CALL, label=Y, loss_fn=squared), torch.Tensor)
    assert_type(model.forward_backward(CALL, label=Y, loss_fn=weighted), torch.Tensor)
    assert_type(model.forward_backward(CALL, label=Y, loss_fn=nn.MSELoss()), torch.Tensor)
    assert_type(model.forward_backward(CALL, label=Y, loss_fn=nn.functional.mse_loss), torch.Tensor)
    assert_type(model.forward_backward(CALL, label=Y, loss_fn=both), list[torch.Tensor])
    loss, outputs = model.forward_backward(CALL, label=Y, loss_fn=squared, return_outputs=True)
    assert_type(loss, torch.Tensor)
    assert_type(outputs, torch.Tensor)
    assert outputs.shape == Y.shape
    model.close()

    with_loss = RoundPipe(nn.Sequential(nn.Linear(4, 1), Total()), devices="virtual:2")
    assert_type(with_loss.forward_backward(CALL), torch.Tensor)
    with_loss.close()


def store(folder: str) -> None:
    save_nested(f"{folder}/x.onnx", {"x": torch.ones(2)})
    assert_type(load_nested(f"{folder}/x.onnx"), object)
    found = load_nested(f"{folder}/x.onnx", expected=dict[str, torch.Tensor])
    assert_type(found, dict[str, torch.Tensor])
    assert found["x"].tolist() == [1, 1]


if __name__ == "__main__":
    train()
    with tempfile.TemporaryDirectory() as place:
        store(place)
