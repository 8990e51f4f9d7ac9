"""The columns of heads: is the loss of the whole batch computed, with its gradients, for any number of microbatches.

All in float64 where the model knows it, so that a difference is a mistake and not rounding. A model that is refused by
an error of this package is neither right nor wrong: the cell holds the error.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .cases import DifferenceError, SkipColumnError
from .cut_cases import distance, no_cache, worst_gradient
from .heads import make_head
from .heads_batches import LabelledBatch, batch_for, loss_of
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "NEEDS", "HeadTrial", "RefusedError", "run_type"]

TOLERANCE = 1e-5
# of models that do not run in float64
TOLERANCE_SINGLE = 1e-3
_ROWS = 5


class RefusedError(SkipColumnError):
    """The package refuses the model or the batch, with an error of its own."""


class HeadTrial:
    """One class on its way through the columns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: dict[str, None] = {}
        self._pipeline: tuple[Any, Any] | None = None

    @functools.cached_property
    def model(self) -> Any:
        """The model, in float64 where it runs in it, in evaluation mode."""
        model = make_head(self.name)
        found = batch_for(self.name, model)
        wide = copy.deepcopy(model).double()
        with contextlib.suppress(Exception):  # models without experts refuse
            wide.set_experts_implementation("eager")
        try:
            made = LabelledBatch(self.name, wide, found.form, found.kind).make(_ROWS, 1)
            loss = loss_of(copy.deepcopy(wide)(**made, **no_cache(wide)))
            loss.backward()  # type: ignore[union-attr]  # None has no backward: an error like the others
        except Exception:  # parts in float32, whatever the dtype of the model
            wide = model
        self._found = LabelledBatch(self.name, wide, found.form, found.kind)
        return wide

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> dict[str, Any]:
        """A batch of the model."""
        model = self.model
        return {**self._found.make(rows, seed, some_missing=some_missing), **no_cache(model)}

    @property
    def tolerance(self) -> float:
        """The largest difference that is rounding."""
        return TOLERANCE if next(self.model.parameters()).dtype is torch.float64 else TOLERANCE_SINGLE

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the loss of the plain model is another one each time."""
        return len({self._plain(self.batch(_ROWS, 1), seed)[1] for seed in (0, 0, 1)}) > 1

    def _plain(self, batch: dict[str, Any], seed: int = 0, *, training: bool = False) -> tuple[Any, float]:
        plain = copy.deepcopy(self.model).train(training)
        torch.manual_seed(seed)
        loss = loss_of(plain(**copy.deepcopy(batch)))
        if loss is None:
            raise SkipColumnError("the model computes no loss of such a batch")
        loss.backward()
        return plain, loss.item()

    def expected(self, batch: dict[str, Any]) -> tuple[Any, float]:
        """The plain model with its gradients, and its loss.

        Raises:
            SkipColumnError: there is nothing to compare with.
        """
        if self.is_random:
            raise SkipColumnError("the loss of the plain model is another one each time: it draws random numbers")
        try:
            plain, loss = self._plain(batch)
        except SkipColumnError:
            raise
        except Exception as error:  # whatever a model does not take
            raise SkipColumnError(f"the plain model raises {type(error).__name__}: {error}") from error
        if not torch.tensor(loss).isfinite():
            raise SkipColumnError(f"the loss of the plain model is {loss}")
        return plain, loss

    @contextlib.contextmanager
    def piped(self) -> Iterator[tuple[Any, Any]]:
        """The pipeline and the model in it; made anew after an error.

        Raises:
            RefusedError: an error of the package in the block.
        """
        from roundpipe_runtime.errors import RoundPipeError
        from roundpipe_runtime.huggingface import wrap_model_to_roundpipe

        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if self._pipeline is None:
                    model = copy.deepcopy(self.model)
                    example = self.batch(2, 0)
                    self._pipeline = (
                        wrap_model_to_roundpipe(model, lower_threshold=0, example=example, devices="virtual:2"),
                        model,
                    )
                self._pipeline[1].zero_grad()
                yield self._pipeline
        except RoundPipeError as error:
            self.close()
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            from roundpipe_runtime.errors import RoundPipeWarning

            for one in said:
                if issubclass(one.category, RoundPipeWarning):
                    self.notes[" ".join(str(one.message).split())] = None

    def close(self) -> None:
        """End the pipeline, if there is one."""
        if self._pipeline is not None:
            self._pipeline[0].close()
            self._pipeline = None

    def stated(self, errors: dict[str, float]) -> dict[str, Any]:
        """What a cell holds: the differences, and what the package said."""
        made: dict[str, Any] = {key: _significant(error) for key, error in errors.items()}
        if self.tolerance != TOLERANCE:
            made["dtype"] = "float32"
        if self.notes:
            made["notes"] = [note[:200] for note in self.notes]
        return made

    def check(self, batch: dict[str, Any], errors: dict[str, float]) -> dict[str, Any]:
        """Return what the cell holds, if nothing is wrong.

        Raises:
            DifferenceError: something is.
        """
        for what, error in errors.items():
            if not error <= self.tolerance:
                notes = "; ".join(note[:90] for note in self.notes)
                raise DifferenceError(
                    f"{what} off by {error:.1e}{self._cause(batch)}" + (f" [{notes}]" if notes else "")
                )
        return self.stated(errors)

    def _cause(self, batch: dict[str, Any]) -> str:
        """Whether the plain model answers otherwise to a part of the batch."""
        from roundpipe_runtime.batch.splitting import split

        try:
            plain = copy.deepcopy(self.model)
            with torch.no_grad():
                whole = plain(**batch)
                parts = [plain(**part.kwargs) for part in split((), dict(batch), None, 3)]
            key = next(key for key, value in whole.items() if "loss" not in key and isinstance(value, torch.Tensor))
            joined = torch.cat([part[key] for part in parts])
            off = distance(joined, whole[key], 0.0)
        except Exception:  # a help to the reader, which needs an output that can be compared
            return ""
        return f" (rows depend on each other: {key} of parts is off by {off:.1e})" if off > self.tolerance else ""

    def of_torch(self, batch: dict[str, Any], model: Any) -> bool:
        """Whether the gradients are those of the plain model that is given the rows of each microbatch by itself.

        The answers to parts are those to the batch, so the kernels of the backward are what makes a difference.
        """
        from roundpipe_runtime.batch.splitting import split

        if self._cause(batch):
            return False
        plain = copy.deepcopy(self.model)
        try:
            for part in split((), dict(batch), None, 3):
                loss = loss_of(plain(**part.kwargs))
                (loss * (len(next(iter(part.kwargs.values()))) / _ROWS)).backward()  # type: ignore[operator]
        except Exception:  # a loss that is not a mean over rows
            return False
        return worst_gradient(model, plain) <= self.tolerance


def built(trial: HeadTrial) -> dict[str, Any]:
    """The small configuration makes a model, and a batch with labels has a loss."""
    return {"parameters": sum(p.numel() for p in trial.model.parameters()), "labels": sorted(trial.batch(2, 0))}


def _fused(count: int, some_missing: bool = False) -> Callable[[HeadTrial], dict[str, Any]]:
    def column(trial: HeadTrial) -> dict[str, Any]:
        from roundpipe_runtime import RoundPipeRunConfig

        batch = trial.batch(_ROWS, 1, some_missing=some_missing)
        plain, expected = trial.expected(batch)
        with trial.piped() as (pipeline, model):
            found = pipeline.forward_backward(
                input_kwargs=copy.deepcopy(batch), run_config=RoundPipeRunConfig(num_microbatch=count)
            )
        errors = {"loss": _off(found.item(), expected), "gradients": worst_gradient(model, plain)}
        if count == 3 and errors["loss"] <= trial.tolerance < errors["gradients"] and trial.of_torch(batch, model):
            raise SkipColumnError(
                "the plain model has other gradients where it is given a row alone: torch computes them"
            )
        return trial.check(batch, errors)

    return column


def called(trial: HeadTrial) -> dict[str, Any]:
    """Called like the model, in 3 microbatches, and ``loss.backward()``."""
    from roundpipe_runtime import RoundPipeRunConfig

    batch = trial.batch(_ROWS, 2)
    plain, expected = trial.expected(batch)
    with trial.piped() as (pipeline, model):
        outputs = pipeline(**copy.deepcopy(batch), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        found = loss_of(outputs)
        if found is None:
            raise DifferenceError("the output has no loss")
        found.backward()
    return trial.check(batch, {"loss": _off(found.item(), expected), "gradients": worst_gradient(model, plain)})


def trained(trial: HeadTrial) -> dict[str, Any]:
    """Three steps of SGD in training mode, with another number of rows each: the losses of the plain model.

    Batch norm normalises microbatches, as in a loop over them: such models train in one.
    """
    from roundpipe_runtime import RoundPipeRunConfig

    normalises = any(isinstance(one, _BatchNorm) for one in trial.model.modules())
    run = RoundPipeRunConfig(num_microbatch=1 if normalises else 3)
    batches = [trial.batch(rows, 10 + rows) for rows in (5, 4, 3)]
    if len({trial._plain(batches[0], seed, training=True)[1] for seed in (0, 1)}) > 1:
        raise SkipColumnError("in training mode, the loss of the plain model is another one each time")
    plain = copy.deepcopy(trial.model).train()
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.01), []
    for batch in batches:
        loss = loss_of(plain(**copy.deepcopy(batch)))
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    if not torch.tensor(expected).isfinite().all():
        raise SkipColumnError(f"the losses of the plain model are {expected}")
    trial.close()
    found = []
    with trial.piped() as (pipeline, model):
        pipeline.train()
        own = torch.optim.SGD(pipeline.optim_parameters(), lr=0.01)
        for batch in batches:
            loss = pipeline.forward_backward(input_kwargs=copy.deepcopy(batch), run_config=run)
            pipeline.step(lambda: (own.step(), own.zero_grad()))
            found.append(loss.item())
        pipeline.synchronize()
    errors = {"loss": max(_off(*pair) for pair in zip(found, expected, strict=True))}
    held = dict(plain.state_dict())
    errors["weights"] = max(
        distance(value.detach(), held[name].detach(), 1e-3)
        for name, value in model.state_dict().items()
        if value.is_floating_point() and value.numel()
    )
    trial.close()
    made = trial.check(batches[0], errors)
    return {**made, "batch norm": "in one microbatch"} if normalises else made


def _off(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-6)


def _significant(value: float) -> float:
    return float(f"{value:.1g}")


COLUMNS: dict[str, Callable[[HeadTrial], dict[str, Any]]] = {
    "built": built,
    "1 microbatch": _fused(1),
    "2 microbatches": _fused(2),
    "3 microbatches": _fused(3),
    "rows without labels": _fused(3, some_missing=True),
    "called": called,
    "trained": trained,
}
NEEDS = dict.fromkeys([name for name in COLUMNS if name != "built"], "built")


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: Any, events: TextIO
) -> None:
    """Run columns of one name in this process, as `worker.run_type` does for the other matrix."""
    be_quiet()
    run_columns(HeadTrial(name), columns, known, events, (COLUMNS, NEEDS))
