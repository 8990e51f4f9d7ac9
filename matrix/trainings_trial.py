"""One row of the matrix of trainings: the reference model, its batches, the pipeline next to it.

All in float64 where the model knows it, so that a difference is a mistake and not rounding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .cases import DifferenceError, SkipColumnError
from .cut_cases import distance, no_cache, worst_gradient
from .heads import make_head
from .heads_batches import LabelledBatch, batch_for, loss_of

__all__ = ["ROWS", "TOLERANCE", "HeadTrial", "RefusedError", "Trial"]

TOLERANCE = 1e-5
# of models that do not run in float64
TOLERANCE_SINGLE = 1e-3
ROWS = 5

Batch = dict[str, Any]


class RefusedError(SkipColumnError):
    """The package refuses the model or the batch, with one of its errors."""


class Trial:
    """A model, its batches and its loss, on their way through the columns.

    Attributes:
        name: the row.
        notes: what the package warned of, and the classes of the warnings.
        gives_example: whether the model is cut with its own batch, or with the tokens that the package makes.
    """

    gives_example = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: dict[str, type[Warning]] = {}
        self._pipeline: tuple[Any, Any] | None = None

    # -- what a kind of row states

    @functools.cached_property
    def model(self) -> Any:
        """The reference model, in evaluation mode."""
        raise NotImplementedError

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """A batch of the model with its labels; with none in the first two rows, if that is asked for."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """The loss of the reference model, or of a pipeline that is called like it."""
        found = loss_of(model(**batch))
        if found is None:
            raise SkipColumnError("the model computes no loss of such a batch")
        return found

    def fused(self, pipeline: Any, batch: Batch, count: int) -> torch.Tensor:
        """Forward and backward of a batch in microbatches; returns the loss."""
        from roundpipe_runtime import RoundPipeRunConfig

        found: torch.Tensor = pipeline.forward_backward(
            input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=count)
        )
        return found

    def example(self) -> Batch:
        """What the model is cut with: the first two rows."""
        return self.batch(2, 0)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """What trains."""
        return torch.optim.SGD(parameters, lr=0.01)

    # -- what all have in common

    @property
    def tolerance(self) -> float:
        """The largest difference that is rounding."""
        if next(self.model.parameters()).dtype is not torch.float64:
            return TOLERANCE_SINGLE
        # transformers computes CTC in float32, so a sum over microbatches is rounded, and three steps enlarge it
        return 10 * TOLERANCE if self.name.startswith("ctc:") else TOLERANCE

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the loss of the reference model is another one each time."""
        return len({str(self.plain(self.batch(ROWS, 1), seed)[1]) for seed in (0, 0, 1)}) > 1  # NaN is NaN again

    def plain(self, batch: Batch, seed: int = 0, *, training: bool = False) -> tuple[Any, float]:
        """The reference model with its gradients, and its loss."""
        plain = copy.deepcopy(self.model).train(training)
        torch.manual_seed(seed)
        loss = self.loss(plain, copy.deepcopy(batch))
        loss.backward()
        return plain, loss.item()

    def expected(self, batch: Batch) -> tuple[Any, float]:
        """The reference model with its gradients, and its loss.

        Raises:
            SkipColumnError: there is nothing to compare with.
        """
        with _of_plain():
            if self.is_random:
                raise SkipColumnError(
                    "the loss of the reference model is another one each time: it draws random numbers"
                )
            plain, loss = self.plain(batch)
        if not torch.tensor(loss).isfinite():
            raise SkipColumnError(f"the loss of the reference model is {loss}")
        if not all(p.grad.isfinite().all() for p in plain.parameters() if p.grad is not None):
            raise SkipColumnError("a gradient of the reference model is not finite")
        return plain, loss

    def losses(self, batches: list[Batch]) -> tuple[Any, list[float]]:
        """The reference model after a step with each batch in training mode, and its losses.

        Raises:
            SkipColumnError: there is nothing to compare with.
        """
        with _of_plain():
            if len({str(self.plain(batches[0], seed, training=True)[1]) for seed in (0, 1)}) > 1:
                raise SkipColumnError("in training mode, the loss of the reference model is another one each time")
            plain = copy.deepcopy(self.model).train()
            optimizer, found = self.optimizer([p for p in plain.parameters() if p.requires_grad]), []
            for batch in batches:
                loss = self.loss(plain, copy.deepcopy(batch))
                loss.backward()
                found.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        if not torch.tensor(found).isfinite().all():
            raise SkipColumnError(f"the losses of the reference model are {found}")
        return plain, found

    @contextlib.contextmanager
    def piped(self) -> Iterator[tuple[Any, Any]]:
        """The pipeline and the model in it, made anew after an error.

        Raises:
            RefusedError: an error of the package in the block.
        """
        from roundpipe_runtime.errors import RoundPipeError, RoundPipeWarning
        from roundpipe_runtime.huggingface import wrap_model_to_roundpipe

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                if self._pipeline is None:
                    model = copy.deepcopy(self.model)
                    example = self.example() if self.gives_example else None
                    made = wrap_model_to_roundpipe(model, lower_threshold=0, example=example, devices="virtual:2")
                    self._pipeline = (made, model)
                self._pipeline[1].zero_grad()
                yield self._pipeline
            except RoundPipeError as error:
                self.close()
                raise RefusedError(f"{type(error).__name__}: {error}") from error
            except BaseException:
                self.close()
                raise
            finally:
                for one in said:
                    if issubclass(one.category, RoundPipeWarning):
                        self.notes[" ".join(str(one.message).split())] = one.category

    def close(self) -> None:
        """End the pipeline, if there is one."""
        if self._pipeline is not None:
            self._pipeline[0].close()
            self._pipeline = None

    def check(self, batch: Batch, errors: dict[str, float]) -> dict[str, Any]:
        """Return what a cell holds, if nothing is wrong: the differences, and what the package warned of.

        Raises:
            DifferenceError: something is.
        """
        from roundpipe_runtime.errors import UnevenSplitWarning

        for what, error in errors.items():
            if not error <= self.tolerance:
                if stated := [note for note, kind in self.notes.items() if issubclass(kind, UnevenSplitWarning)]:
                    raise RefusedError(f"a warning states it: {stated[0]}")
                notes = "; ".join(note[:90] for note in self.notes)
                cause = self.cause(batch)
                raise DifferenceError(f"{what} off by {error:.1e}{cause}" + (f" [{notes}]" if notes else ""))
        made: dict[str, Any] = {key: float(f"{error:.1g}") for key, error in errors.items()}
        if self.tolerance != TOLERANCE:
            made["dtype"] = "float32"
        if self.notes:
            made["notes"] = [note[:400] for note in self.notes]
        return made

    def cause(self, batch: Batch) -> str:
        """Whether the reference model answers otherwise to a part of the batch, in words."""
        try:
            with torch.no_grad():
                key, whole = _answer(self.model(**copy.deepcopy(batch)))
                parts = [_answer(self.model(**part))[1] for part in _parts(self.model, batch)]
            off = distance(torch.cat(parts), whole, 0.0)
        except Exception:  # a help to the reader, which needs an output that can be compared
            return ""
        return f" (rows depend on each other: {key} of parts is off by {off:.1e})" if off > self.tolerance else ""

    def of_torch(self, batch: Batch, model: Any) -> bool:
        """Whether the gradients are those of the reference model that is given the rows of each microbatch by itself.

        The answers to parts are those to the batch, and so is what goes back into them: so it is the kernels of the
        backward that compute something else for fewer rows.
        """
        if self.cause(batch):
            return False
        plain, parted = copy.deepcopy(self.model), copy.deepcopy(self.model)
        try:
            outputs = plain(**copy.deepcopy(batch))
            key, whole = _answer(outputs)
            (back,) = torch.autograd.grad(self.loss(lambda **given: outputs, batch), whole)
            taken = 0
            for part in _parts(self.model, batch):
                answer = parted(**part)[key]
                answer.backward(back[taken : taken + len(answer)])
                taken += len(answer)
        except Exception:  # a loss of more than one output, or of another shape
            return self._is_parted_otherwise(batch)
        return worst_gradient(model, parted) <= self.tolerance or self._is_parted_otherwise(batch)

    def _is_parted_otherwise(self, batch: Batch) -> bool:
        """Whether the reference model has other gradients of an answer where it is given the batch in parts.

        The answers themselves are the same, so it is the way back that differs.
        """
        given = {key: value for key, value in batch.items() if "label" not in key}
        try:
            outputs = self.model(**copy.deepcopy(given))
            names = [key for key, one in outputs.items() if isinstance(one, torch.Tensor) and one.requires_grad]
            return any(self._goes_back_otherwise(key, given) for key in names)
        except Exception:  # a help to the reader, which needs outputs that can be compared
            return False

    def _goes_back_otherwise(self, key: str, given: Batch) -> bool:
        plain, parted = copy.deepcopy(self.model), copy.deepcopy(self.model)
        whole, taken = plain(**copy.deepcopy(given))[key].square().sum(), 0.0
        whole.backward()
        for part in _parts(self.model, given):
            found = parted(**part)[key].square().sum()
            found.backward()
            taken += found.item()
        is_same = abs(taken - whole.item()) <= self.tolerance * abs(whole.item())
        return is_same and worst_gradient(parted, plain) > self.tolerance


@contextlib.contextmanager
def _of_plain() -> Iterator[None]:
    """State that it is the reference model that raises."""
    try:
        yield
    except SkipColumnError:
        raise
    except Exception as error:  # whatever a model does not take
        raise SkipColumnError(f"the reference model raises {type(error).__name__}: {error}") from error


def _answer(outputs: Any) -> tuple[str, torch.Tensor]:
    """The first output that is not a loss, and its name."""
    return next((key, value) for key, value in outputs.items() if "loss" not in key and isinstance(value, torch.Tensor))


def _parts(model: Any, batch: Batch) -> list[Batch]:
    """The batch in three parts, pictures with their rows."""
    from roundpipe_runtime.batch.splitting import split
    from roundpipe_runtime.huggingface.batches import split_pictures

    given = copy.deepcopy(batch)
    return [dict(part.kwargs) for part in split((), given, None, 3, split_input=split_pictures(model.config, given))]


class HeadTrial(Trial):
    """A class of transformers with a head, and its own loss.

    Attributes:
        problem: the ``problem_type`` of its configuration.
    """

    problem: str | None = None

    @functools.cached_property
    def model(self) -> Any:
        """The model, in float64 where it runs in it."""
        model = make_head(self.name, problem=self.problem)
        found = batch_for(self.name, model)
        wide = copy.deepcopy(model).double()
        with contextlib.suppress(Exception):  # models without experts refuse
            wide.set_experts_implementation("eager")
        for one in (wide, model):  # some have parts in float32, whatever the dtype of the model, or its numbers
            self._found = LabelledBatch(self.name, one, found.form, found.kind)
            for self._options in (no_cache(one), {}):  # some give the option to a part that knows none
                with contextlib.suppress(Exception):
                    loss = self.loss(copy.deepcopy(one), {**self._found.make(ROWS, 1), **self._options})
                    loss.backward()
                    if loss.isfinite():
                        return one
        return model

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """A batch of the class."""
        assert self.model is not None  # which finds the form
        return {**self._found.make(rows, seed, some_missing=some_missing), **self._options}
