"""Small models that are cut: toys, each with one thing that is hard to cut, and models of transformers."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from matrix.models import TooLargeError, make_model
from roundpipe_runtime import RoundPipeRunConfig, WeightedLoss
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return x + torch.tanh(self.linear(x)) * scale


class Opaque:
    """An object with a tensor that nobody registered."""

    def __init__(self, tensor):
        self.tensor = tensor


class TakesOpaque(Block):
    def forward(self, x, held):
        return super().forward(x) + held.tensor.sum()


class Toy(nn.Module):
    """Embedding, layers, head; ``between`` is the model's own code between two layers."""

    def __init__(self, layers: nn.ModuleList | None = None, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = layers if layers is not None else nn.ModuleList([Block() for _ in range(count)])
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            x = self.between(number, layer, x)
        return self.head(x)

    def between(self, number, layer, x):
        return layer(x)


def toy(between: Callable[..., torch.Tensor], layers: nn.ModuleList | None = None) -> Toy:
    return type("Own", (Toy,), {"between": between, "__module__": __name__})(layers)


def tokens(rows: int = 5, length: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(seed))


def known_model(name: str) -> nn.Module:
    """A small model of transformers; the test is skipped where an older version has none of this type."""
    try:
        return make_model(name)
    except (KeyError, ValueError, AttributeError, TooLargeError) as error:
        if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
            raise
        pytest.skip(f"transformers {transformers.__version__} has no small {name}: {str(error).splitlines()[0]}")


def hf_model(name: str) -> nn.Module:
    model = known_model(name).double()
    is_switchable = hasattr(model, "set_experts_implementation")  # not before transformers 5
    if is_switchable and model.can_generate() and hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """The model in training mode; random numbers would differ from those of the plain model."""
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def hf_batch(rows: int = 5, length: int = 10, seed: int = 1, *, padding: bool = True) -> dict[str, torch.Tensor]:
    """Tokens, a mask with padding in some rows only, labels that are ignored in parts."""
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padding:
        mask[0, :4] = 0
        mask[rows - 1, :2] = 0
    labels = ids.clone()
    labels[mask == 0] = -100
    labels[1 % rows, 3:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def wrapped(model: nn.Module, *, devices: str = "virtual:2", microbatches: int = 3, **options):
    """The model behind a pipeline; a model that stays whole is an error."""
    options.setdefault("use_sequential_preset", True)
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    return wrap_model_to_roundpipe(model, lower_threshold=0, model_run_config=config, devices=devices, **options)


def squares(output: torch.Tensor, labels: None) -> WeightedLoss:
    return WeightedLoss(output.square().sum(), output.shape[0])


def compare_toy(model: nn.Module, **options):
    """Cut a toy, and compare output and gradients of five rows in three microbatches with the plain model's."""
    model = model.double()
    plain = copy.deepcopy(model)
    ids = tokens()
    expected = plain(ids)
    (expected.square().sum() / 5).backward()
    pipeline = wrapped(model, example={"input_ids": tokens(2)}, **options)
    loss, found = pipeline.forward_backward((ids,), loss_fn=squares, return_outputs=True)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert math.isclose(loss.item(), expected.square().sum().item() / 5, rel_tol=1e-12)
    assert worst_gradient(model, plain) < 1e-12
    return pipeline.cut


def assert_like_plain(model, batch, expected_of=None, *, rel=1e-6, call=None, pipeline=None, **options):
    """The loss of a batch, or what another function is of it, and all gradients are those of the model by itself."""
    plain = copy.deepcopy(model)
    expected = plain(**batch).loss if expected_of is None else expected_of(plain)
    expected.backward()
    pipeline = wrapped(model, **options) if pipeline is None else pipeline
    loss = pipeline.forward_backward(input_kwargs=batch, **(call or {}))
    assert loss.item() == pytest.approx(expected.item(), rel=rel)
    assert worst_gradient(model, plain) < rel
    return pipeline


def worst_gradient(model: nn.Module, plain: nn.Module) -> float:
    """The largest relative error of a gradient, by norm; gradients far below all others count as rounding."""
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = dict(model.named_parameters())
    largest = max(g.norm().item() for g in expected.values())
    worst = 0.0
    for name, gradient in expected.items():
        other = found[name].grad
        other = torch.zeros_like(gradient) if other is None else other
        worst = max(worst, (other - gradient).norm().item() / max(gradient.norm().item(), 1e-3 * largest))
    for name, parameter in found.items():
        assert name in expected or parameter.grad is None or not parameter.grad.any(), name
    return worst
