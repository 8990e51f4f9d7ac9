"""Add labels to an example, so that a cut is checked as it will be trained."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ..adapters import model_inside
from ..loss.weights import label_names, loss_of

# The names that transformers gives to logits, by those of their labels.
_LOGITS = {
    "start_positions": "start_logits",
    "end_positions": "end_logits",
    "next_sentence_label": "seq_relationship_logits",
}


def with_labels(model: nn.Module, kwargs: Kwargs) -> Kwargs:
    """Return an example with labels, if the model takes some with which it returns a loss.

    Labels are tried: tokens for logits of tokens, classes or numbers for logits of rows.
    """
    # returns: the example with labels; as it was given, if none of those that were tried give a finite loss
    taken = inspect.signature(model_inside(model).forward).parameters
    names = sorted(label_names(model) & set(taken))
    if not names or any(kwargs.get(name) is not None for name in names):
        return kwargs
    with torch.no_grad():
        outputs = model(**kwargs)
        for labels in _candidates(names, kwargs, outputs):
            try:
                loss = loss_of(model(**kwargs, **labels))
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError, AssertionError):
                continue  # labels of another form
            if loss is not None and bool(loss.isfinite()):
                return {**kwargs, **labels}
    return kwargs


def _candidates(names: list[str], kwargs: Kwargs, outputs: PyTree) -> Iterator[dict[str, torch.Tensor]]:
    """Labels to try, for all names at once and then for "labels" alone."""
    tokens = [value for name in ("decoder_input_ids", "input_ids", "inputs") if (value := kwargs.get(name)) is not None]
    if not tokens:
        return
    rows = len(tokens[0])
    places = {name: torch.arange(rows) + 1 for name in names if name in _LOGITS and name != "next_sentence_label"}
    others = {name: torch.arange(rows) % 2 for name in names if name == "next_sentence_label"}
    found = _logits(outputs)
    of_rows = [torch.arange(rows) % 2, torch.linspace(-1, 1, rows)]
    of_tokens = [value for value in tokens if found is not None and found.shape[:2] == value.shape]
    if found is not None and found.dim() == 3:
        of_tokens = [value.remainder(found.shape[-1]) for value in of_tokens]
    for labels in [*of_tokens, *of_rows]:
        own = {"labels": labels} if "labels" in names else {}
        yield {**own, **places, **others}
        if own and (places or others):
            yield own
        if not own:
            return


def _logits(outputs: PyTree) -> torch.Tensor | None:
    found: Any = getattr(outputs, "logits", None)
    if found is None:
        found = getattr(outputs, "prediction_logits", None)
    return found if isinstance(found, torch.Tensor) else None
