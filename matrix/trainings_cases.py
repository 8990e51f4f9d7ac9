"""The columns of trainings: the loss of the whole batch with its gradients, for any number of microbatches.

Where this package refuses to train, the cell holds its error, and no number is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .cases import SkipColumnError
from .cut_cases import distance, worst_gradient
from .heads_batches import NoBatchError
from .models import split_name
from .trainings_kinds import KINDS
from .trainings_trial import ROWS, HeadTrial, RefusedError, Trial
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "NEEDS", "run_type"]

# tasks whose configurations have a ``problem_type``
_OF_PROBLEMS = ("sequence_classification", "image_classification", "video_classification")
_OF_TEXT = (
    "adapter:",
    "causal_lm:",
    "masked_lm:",
    "multiple_choice:",
    "next_sentence_prediction:",
    "own_loss:",
    "pretraining:",
    "question_answering:",
    "seq_to_seq_causal_lm:",
    "sequence_classification:",
    "token_classification:",
)


def built(trial: Trial) -> dict[str, Any]:
    """The small configuration makes a model, and a batch with labels has a loss."""
    return {"parameters": sum(p.numel() for p in trial.model.parameters()), "batch": sorted(trial.batch(2, 0))}


def _fused(count: int, *, some_missing: bool = False) -> Callable[[Trial], dict[str, Any]]:
    """One call of ``forward_backward`` on five rows."""

    def column(trial: Trial) -> dict[str, Any]:
        batch = trial.batch(ROWS, 1, some_missing=some_missing)
        plain, expected = trial.expected(batch)
        with trial.piped() as (pipeline, model):
            found = trial.fused(pipeline, copy.deepcopy(batch), count)
        return _compared(trial, batch, (found.item(), model), (expected, plain))

    return column


def other_labels(trial: Trial) -> dict[str, Any]:
    """Train on numbers, and on several labels, instead of one class per row: two other losses, in 3 microbatches."""
    if split_name(trial.name)[0] not in _OF_PROBLEMS:
        raise SkipColumnError("its task knows one kind of labels")
    made: dict[str, Any] = {}
    for problem in ("regression", "multi_label_classification"):
        other = HeadTrial(trial.name)
        other.problem = problem
        try:
            if not other.batch(2, 0)["labels"].is_floating_point():
                raise SkipColumnError("the class knows one kind of labels")
            found = _fused(3)(other)
        except NoBatchError as error:
            raise SkipColumnError(f"the class knows one kind of labels: {error}") from error
        finally:
            other.close()
        made |= {f"{problem}, {key}" if isinstance(value, float) else key: value for key, value in found.items()}
    return made


def called(trial: Trial) -> dict[str, Any]:
    """Called like the model, in 3 microbatches, and ``loss.backward()``."""
    from roundpipe_runtime import RoundPipeRunConfig

    batch = trial.batch(ROWS, 2)
    plain, expected = trial.expected(batch)
    with trial.piped() as (pipeline, model):
        run = RoundPipeRunConfig(num_microbatch=3)
        found = trial.loss(lambda **given: pipeline(**given, roundpipe_run_config=run), copy.deepcopy(batch))
        found.backward()
    return _compared(trial, batch, (found.item(), model), (expected, plain))


def _compared(trial: Trial, batch: dict[str, Any], found: tuple[float, Any], expected: tuple[float, Any]) -> Any:
    errors = {"loss": _off(found[0], expected[0]), "gradients": worst_gradient(found[1], expected[1])}
    if errors["loss"] <= trial.tolerance < errors["gradients"] and trial.of_torch(batch, found[1]):
        raise SkipColumnError(
            "the reference model itself has other gradients where it is given the rows of a microbatch alone"
        )
    return trial.check(batch, errors)


def trained(trial: Trial) -> dict[str, Any]:
    """Three steps in training mode, with another number of rows each: the losses and weights of the reference model.

    Models that gather statistics in training, as batch norm does, gather those of each microbatch, as in a loop over
    them: they train in one.
    """
    batches = [trial.batch(rows, 10 + rows) for rows in (5, 4, 3)]
    plain, expected = trial.losses(batches)
    before = dict(trial.model.named_buffers())
    gathers = any(not torch.equal(value, before[name]) for name, value in plain.named_buffers() if name in before)
    found = []
    with trial.piped() as (pipeline, model):
        pipeline.train()
        own = trial.optimizer([p for p in pipeline.optim_parameters() if p.requires_grad])
        for batch in batches:
            found.append(trial.fused(pipeline, copy.deepcopy(batch), 1 if gathers else 3).item())
            pipeline.step(lambda: (own.step(), own.zero_grad()))
        pipeline.synchronize()
    held = plain.state_dict()
    errors = {
        "loss": max(_off(*pair) for pair in zip(found, expected, strict=True)),
        "weights": max(
            distance(value.detach(), held[name].detach(), 1e-3)
            for name, value in model.state_dict().items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        ),
    }
    trial.close()
    made = trial.check(batches[0], errors)
    return {**made, "statistics": "in one microbatch"} if gathers else made


def no_example(trial: Trial) -> dict[str, Any]:
    """Cut with the tokens that the package makes, which have no labels: three microbatches of a batch with labels."""
    if not _of_text(trial):
        raise SkipColumnError("a model that reads something else than texts is cut with an example")
    trial.close()
    trial.gives_example = False
    try:
        return _fused(3)(trial)
    except RefusedError as error:
        if getattr(error.__cause__, "reason", None) == "example":
            raise SkipColumnError("it asks for an example: the tokens that the package makes are none") from error
        raise
    finally:
        trial.close()
        trial.gives_example = True


def _of_text(trial: Trial) -> bool:
    return trial.name.startswith(_OF_TEXT) and not {"pixel_values", "input_features"} & set(trial.batch(2, 0))


def _off(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-6)


COLUMNS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "built": built,
    "1 microbatch": _fused(1),
    "2 microbatches": _fused(2),
    "3 microbatches": _fused(3),
    "rows without labels": _fused(3, some_missing=True),
    "other labels": other_labels,
    "called": called,
    "trained": trained,
    "no example": no_example,
}
NEEDS = dict.fromkeys([name for name in COLUMNS if name != "built"], "built")


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: Any, events: TextIO
) -> None:
    """Run columns of one name in this process, as `worker.run_type` does for the other matrix."""
    be_quiet()
    trial = KINDS.get(split_name(name)[0], HeadTrial)(name)
    own = getattr(trial, "columns", {})
    run_columns(trial, columns, known, events, ({**COLUMNS, **own}, NEEDS))
