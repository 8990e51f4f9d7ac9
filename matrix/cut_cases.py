"""The columns of the cut matrix: is a model cut, is it exact, does it train like the plain one.

Everything after "cut" runs in float64, so that a difference is a mistake and not rounding.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch

from .cases import DifferenceError, SkipColumnError
from .media import IMAGE_TOKEN, encoder_inputs, picture_of, reads_media
from .models import make_model, split_name
from .particular_batches import PARTICULAR_BATCHES
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "NEEDS", "CutTrial", "batch_of", "run_type"]

TOLERANCE = 1e-6
# more than this is not rounding, not even where a model computes parts in float32 whatever its dtype
ROUNDING = 1e-3
_LENGTH = 12
_IGNORED = -100


@dataclasses.dataclass
class CutTrial:
    """One type on its way through the columns."""

    name: str

    @functools.cached_property
    def model(self) -> Any:
        """The model, in float32."""
        return make_model(self.name)

    def wrapped(self, model: Any, devices: int, microbatches: int) -> Any:
        """The model in a pipeline."""
        from roundpipe_runtime import RoundPipeRunConfig
        from roundpipe_runtime.huggingface import wrap_model_to_roundpipe

        return wrap_model_to_roundpipe(
            model,
            use_sequential_preset=True,
            lower_threshold=0,
            model_run_config=RoundPipeRunConfig(num_microbatch=microbatches),
            example=batch_of(self.name, model, 2, 0),
            devices=f"virtual:{devices}",
        )


def batch_of(name: str, model: Any, rows: int, seed: int, padding: int = 3) -> dict[str, Any]:
    """Return a batch for a model of the matrix, with padding and labels where the model has them.

    Args:
        name: the type.
        model: the model of `make_model`.
        rows: the rows of the batch.
        seed: the seed of the numbers.
        padding: tokens of padding that the first row begins with.
    """
    generator = torch.Generator().manual_seed(seed)
    taken = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    text = model.config.get_text_config(decoder=True)
    high = min(getattr(text, "vocab_size", IMAGE_TOKEN), IMAGE_TOKEN)
    dtype = next(model.parameters()).dtype
    if model.config.model_type == "kyutai_speech_to_text":
        shape: tuple[int, ...] = (rows, _LENGTH, 1 + model.config.num_codebooks)
    else:
        shape = (rows, _LENGTH)
    tokens = torch.randint(4, high, shape, generator=generator)
    mask = torch.ones((rows, _LENGTH), dtype=torch.int64)
    mask[0, :padding] = 0
    made: dict[str, Any]
    if particular := PARTICULAR_BATCHES.get(model.config.model_type):
        found = particular(model, {"input_ids": tokens, "attention_mask": mask}, generator)
        made = {key: value.to(dtype) if value.is_floating_point() else value for key, value in found.items()}
        if "decoder_input_ids" in taken and model.config.is_encoder_decoder:
            made.setdefault("decoder_input_ids", tokens.flip(1)[:, :8])
        labelled = made.get("decoder_input_ids", made["input_ids"])
        return _labelled(model, made, labelled, None if "decoder_input_ids" in made else made["attention_mask"])
    if reads_media(model):
        made = {key: value.to(dtype) for key, value in encoder_inputs(model, rows, generator).items()}
        made["decoder_input_ids"] = tokens
        return _labelled(model, made, tokens, None)
    pictures = picture_of(model, rows, generator) if split_name(name)[0] == "image" else None
    if pictures is not None:
        read, length = pictures
        places = tokens.new_full((rows, length), IMAGE_TOKEN)
        tokens = torch.cat([tokens[:, :3], places, tokens[:, 3:]], dim=1)
        mask = torch.cat([mask[:, :3], torch.ones_like(places), mask[:, 3:]], dim=1)
        made = {"input_ids": tokens, "attention_mask": mask}
        made |= {key: v.to(dtype) if v.is_floating_point() else v for key, v in read.items()}
        for key in ("mm_token_type_ids", "token_type_ids"):
            if key in taken:
                made[key] = (tokens == IMAGE_TOKEN).long()
        return _labelled(model, made, tokens, mask)
    made = {"input_ids": tokens}
    if "pixel_values" in taken and taken["pixel_values"].default is inspect.Parameter.empty:
        size = model.config.vision_config.image_size
        made["pixel_values"] = torch.randn((rows, 3, size, size), generator=generator).to(dtype)
    if "attention_mask" in taken or takes_all:
        made["attention_mask"] = mask
    if "decoder_input_ids" in taken:
        made["decoder_input_ids"] = tokens.flip(1)[:, :8]
        return _labelled(model, made, made["decoder_input_ids"], None)
    return _labelled(model, made, tokens, mask if "attention_mask" in made else None)


def _labelled(model: Any, made: dict[str, Any], tokens: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
    if "labels" not in inspect.signature(model.forward).parameters or tokens.dim() != 2:
        return made
    labels = tokens.clone()
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):  # of some models it has no rows for pictures and sounds
        labels[labels >= head.out_features] = _IGNORED
    if mask is not None:
        labels[mask == 0] = _IGNORED
    labels[0, -4:] = _IGNORED
    try:
        with torch.no_grad():
            model(**made, labels=labels, **no_cache(model))
    except (ValueError, TypeError):  # labels of another shape than the tokens, pictures that are missing
        return made
    return {**made, "labels": labels}


# -- columns ---------------------------------------------------------------------------------------------------------


def cut_column(trial: CutTrial) -> dict[str, Any]:
    """The model is cut, and the cut computes what the model does, in float32."""
    from roundpipe_runtime.huggingface import cut

    report = cut(trial.model, batch_of(trial.name, trial.model, 2, 0)).report
    if report.is_whole:
        raise RefusedError("; ".join(f"{reason}: {message}" for reason, message in report.refused))
    assert report.equivalence is not None
    return {
        "lists": list(report.lists),
        "calls": len(report.pieces) - report.phases,
        "phases": report.phases,
        "outputs": _significant(report.equivalence.outputs),
        "gradients": _significant(report.equivalence.gradients),
    }


class RefusedError(RuntimeError):
    """The model stays in one piece."""


def microbatches(trial: CutTrial) -> dict[str, Any]:
    """Five rows in three microbatches on two devices: logits, loss and every gradient of the whole batch."""
    model = _double(trial)
    plain = copy.deepcopy(model)
    batch = batch_of(trial.name, model, 5, 1)
    expected = plain(**batch, **no_cache(model))
    loss = _loss(expected)
    loss.backward()
    with _closing(trial.wrapped(model, 2, 3)) as pipeline:
        fused = "labels" in batch
        if fused:
            found, outputs = pipeline.forward_backward(input_kwargs=batch, return_outputs=True)
        else:
            outputs = pipeline(**batch)
            found = _loss(outputs)
            found.backward()
        worst = {
            "loss": distance(found.detach(), loss.detach(), 0.0),
            "logits": distance(_logits(outputs).detach(), _logits(expected).detach(), 0.0),
            "gradients": worst_gradient(model, plain),
        }
    limit = TOLERANCE
    if TOLERANCE < worst["gradients"] < ROUNDING:
        worst["rounding"] = _rounding(plain, batch)
        limit = max(TOLERANCE, 3 * worst["rounding"])
    for what, error in worst.items():
        if not error <= limit:
            _check_rows_independent(plain, batch, expected)
            raise DifferenceError(f"{what} differ by {error:.1e} from those of the whole batch")
    return {what: _significant(error) for what, error in worst.items()}


def trained(trial: CutTrial) -> dict[str, Any]:
    """Three steps with another batch each: the losses of the reference model."""
    model = _double(trial)
    if "labels" not in batch_of(trial.name, model, 2, 0):
        raise SkipColumnError("the model takes no labels")
    expected: list[float] = []
    for padding in (3, 0):  # the gradient of a row that sees nothing but padding is NaN in some models
        batches = [batch_of(trial.name, model, rows, 2 + rows, padding) for rows in (3, 4, 3)]
        expected = _plain_losses(copy.deepcopy(model), batches)
        if all(map(math.isfinite, expected)):
            break
    found = []
    with _closing(trial.wrapped(model, 2, 2)) as pipeline:
        optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=0.05)
        for batch in batches:
            found.append(pipeline.forward_backward(input_kwargs=batch).item())
            pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    if not all(map(math.isfinite, expected)):
        raise SkipColumnError("the loss of the reference model is not finite")
    error = max(abs(one - other) / max(abs(other), 1e-12) for one, other in zip(found, expected, strict=True))
    if not error <= ROUNDING:
        raise DifferenceError(f"losses {found}, expected {expected}")
    return {"losses": _significant(error)}


def _plain_losses(plain: Any, batches: list[dict[str, Any]]) -> list[float]:
    found = []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for batch in batches:
        loss = plain(**batch, **no_cache(plain)).loss
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def _double(trial: CutTrial) -> Any:
    """The model in float64, with experts in a loop: the product of groups of matrices knows no float64.

    A few models mix it with float32 and do not run; they stay as they are.
    """
    model = make_model(trial.name).double()
    with contextlib.suppress(Exception):  # models without experts refuse
        model.set_experts_implementation("eager")
    try:
        _loss(copy.deepcopy(model)(**batch_of(trial.name, model, 2, 0), **no_cache(model))).backward()
    except RuntimeError:
        return make_model(trial.name)
    return model


def _check_rows_independent(plain: Any, batch: dict[str, Any], expected: Any) -> None:
    """Do not blame the pipeline where the reference model answers otherwise to a part of the batch."""
    from roundpipe_runtime.batch.splitting import split
    from roundpipe_runtime.huggingface.batches import split_pictures

    cut = split_pictures(plain.config, batch)
    with torch.no_grad():
        parts = split((), batch, None, 3, split_input=cut)
        found = torch.cat([_logits(plain(**part.kwargs, **no_cache(plain))) for part in parts])
    if distance(found, _logits(expected), 0.0) > TOLERANCE:
        raise SkipColumnError(
            "rows of the reference model depend on each other: it answers otherwise to a part of the batch"
        )


def _rounding(plain: Any, batch: dict[str, Any]) -> float:
    """How far the reference model's gradients are from those of a multiple of its loss, divided again.

    Models that compute parts in float32, whatever their dtype, round in another way then.
    """
    found = []
    for scale in (3.0, 7.0, 0.1):
        other = copy.deepcopy(plain)
        other.zero_grad()
        (_loss(other(**batch, **no_cache(plain))) * scale).backward()
        for parameter in other.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        found.append(worst_gradient(other, plain))
    return max(found)


def no_cache(model: Any) -> dict[str, Any]:
    from roundpipe_runtime.huggingface.cutting.cut import without_cache

    return without_cache(model, {})


@contextlib.contextmanager
def _closing(pipeline: Any) -> Iterator[Any]:
    try:
        yield pipeline
    finally:
        pipeline.close()


def _logits(outputs: Any) -> torch.Tensor:
    found = outputs.logits if getattr(outputs, "logits", None) is not None else outputs[0]
    assert isinstance(found, torch.Tensor)
    return found


def _loss(outputs: Any) -> torch.Tensor:
    if getattr(outputs, "loss", None) is not None:
        loss: torch.Tensor = outputs.loss
        return loss
    logits = torch.where(_logits(outputs).isfinite(), _logits(outputs), 0.0)
    return torch.tanh(logits).square().mean()


def worst_gradient(model: Any, plain: Any) -> float:
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    finite = [torch.where(gradient.isfinite(), gradient, 0.0) for gradient in expected.values()]
    typical = max((gradient.norm().item() / gradient.numel() ** 0.5 for gradient in finite), default=0.0)
    zeros = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    return max(
        (distance(found.get(n, zeros[n]), expected.get(n, zeros[n]), 0.1 * typical) for n in {*found, *expected}),
        default=0.0,
    )


def distance(found: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    if found.shape != expected.shape:
        return float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, found.double() - expected.double()).norm().item()
    scale = torch.where(expected.isfinite(), expected, 0.0).double().norm().item()
    return difference / max(scale, least * expected.numel() ** 0.5, 1e-30) if difference else 0.0


def _significant(value: float) -> float:
    return float(f"{value:.1g}")


COLUMNS: dict[str, Callable[[CutTrial], dict[str, Any]]] = {
    "built": lambda trial: {"parameters": sum(p.numel() for p in trial.model.parameters())},
    "cut": cut_column,
    "microbatches": microbatches,
    "trained": trained,
}

NEEDS = {"cut": "built", "microbatches": "cut", "trained": "microbatches"}


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: Any, events: TextIO
) -> None:
    """Run columns of one type in this process, as `worker.run_type` does for the other matrix."""
    be_quiet()
    run_columns(CutTrial(name), columns, known, events, (COLUMNS, NEEDS))
