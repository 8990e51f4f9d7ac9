"""Batches for heads: what a class reads, tried in the forms that there are, with the labels of its task.

Rows differ where a loss could count them: labels are ignored here and there, objects of a picture are few or many.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .cut_cases import batch_of
from .heads import NoLossError
from .heads_inputs import inputs_of
from .heads_labels import labels_of, without_some

__all__ = ["LabelledBatch", "NoBatchError", "batch_for", "loss_of"]

# tasks whose batches the cut matrix makes, and the family that it has for them
_OF_CUT = {
    "causal_lm": "causal",
    "image_text_to_text": "image",
    "multimodal_lm": "image",
    "seq_to_seq_causal_lm": "seq2seq",
    "speech_seq_2_seq": "speech",
}

Batch = dict[str, Any]


class NoBatchError(RuntimeError):
    """No batch is known with which the class computes a loss."""


# what transformers states of heads that have a place for a loss, and none
_UNTRAINABLE = (
    "not implemented yet",
    "not supported",
    "not yet supported",
    "not trainable",
    "does not support training",
    "is not implemented",
)


class LabelledBatch:
    """How a class is given a batch with labels: found once, made again with other rows.

    Attributes:
        form: the number of the form of inputs.
        kind: the number of the form of labels.
    """

    def __init__(self, name: str, model: Any, form: int, kind: int) -> None:
        self.name, self.model, self.form, self.kind = name, model, form, kind

    def make(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """Return a batch of so many rows.

        Args:
            rows: the rows.
            seed: the seed of the numbers.
            some_missing: whether the first two rows have no labels of each kind.
        """
        inputs = _nth(_inputs(self.name, self.model, rows, seed), self.form)
        inputs = _cast(inputs, dtype := next(self.model.parameters()).dtype)
        labels = _cast(_nth(_labels(self.name, self.model, inputs, seed), self.kind), dtype)
        made = {**inputs, **labels}
        return without_some(self.model, made, labels) if some_missing else made


def batch_for(name: str, model: Any) -> LabelledBatch:
    """Find the form of a batch with which a model computes a loss that has a gradient.

    Raises:
        NoBatchError: none of those that are known is one; the reasons of the last ones are stated.
    """
    said: list[str] = []
    with contextlib.suppress(StopIteration):
        for form, inputs in enumerate(_inputs(name, model, 2, 0)):
            try:
                for kind, _ in enumerate(_labels(name, model, inputs, 0)):
                    made = LabelledBatch(name, model, form, kind)
                    try:
                        loss = loss_of(model(**made.make(5, 1)))
                    except Exception as error:  # whatever a model raises for a batch of another form
                        if any(words in str(error) for words in _UNTRAINABLE):
                            raise NoLossError(f"transformers does not train it: {error}") from error
                        said.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
                        continue
                    if loss is not None and loss.numel() == 1 and loss.requires_grad and loss.isfinite():
                        return made
                    said.append("its output has no loss" if loss is None else f"its loss is {loss!r:.60}")
            except NoLossError:
                raise
            except Exception as error:  # the inputs were none
                said.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    raise NoBatchError("; ".join(list(dict.fromkeys(said))[:3]) or "nothing is known that it reads")


def loss_of(outputs: Any) -> torch.Tensor | None:
    """Return the loss that a model computed, if any."""
    found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple) and outputs and isinstance(outputs[0], torch.Tensor):
        found = outputs[0] if outputs[0].numel() == 1 else None
    return found


def _inputs(name: str, model: Any, rows: int, seed: int) -> Iterator[Batch]:
    family = _OF_CUT.get(name.partition(":")[0])
    if family is not None:
        with contextlib.suppress(Exception):  # a class that reads something else than its family
            made = batch_of(f"{family}:{model.config.model_type}", model, rows, seed)
            yield {key: value for key, value in made.items() if key != "labels"}
    yield from inputs_of(name.partition(":")[0], model, rows, torch.Generator().manual_seed(seed))


def _labels(name: str, model: Any, inputs: Batch, seed: int) -> Iterator[Batch]:
    return labels_of(name.partition(":")[0], model, inputs, torch.Generator().manual_seed(seed + 100))


def _nth(items: Iterator[Batch], index: int) -> Batch:
    for number, item in enumerate(items):
        if number == index:
            return item
    raise NoBatchError("the form of the batch is not there for other rows")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list):
        return [_cast(one, dtype) for one in value]
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    return value


def takes(model: Any) -> frozenset[str]:
    """Return the names of the arguments of a model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)
