"""Refuse a model that draws random numbers in evaluation: no file could be compared with it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ...core.effects import undisturbed
from ...errors import GenerationError
from ...private_names.of_torch import pytree
from ...recipe.aliases import TransformersModel


@torch.no_grad()
def check_nothing_is_drawn(model: TransformersModel, example: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose outputs follow torch's seed; one that draws and drops what it drew is taken."""
    with undisturbed(seed=0, model=model):
        before = torch.get_rng_state()
        first = _tensors(model(**example))
        if torch.equal(before, torch.get_rng_state()):
            return
    with undisturbed(seed=1, model=model):
        second = _tensors(model(**example))
    same = [one.shape == two.shape and torch.equal(one, two) for one, two in zip(first, second, strict=True)]
    if all(same):
        return
    if model.training:
        raise GenerationError(
            f"{type(model).__qualname__} is in training mode, and its dropout draws. Before the export:\n"
            "    model.eval()"
        )
    given = "; it takes noise=, which a file can take" if "noise" in inspect.signature(model.forward).parameters else ""
    raise GenerationError(
        f"{type(model).__qualname__} draws random numbers in evaluation, and two calls of it differ: nothing "
        f"proves a file of it{given}. Set what draws to 0 in its configuration, or export what it draws as an input: "
        "export_onnx(model, kwargs=inputs, path=...)"
    )


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors of an output, which is not registered here."""
    found = pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
