"""``transformers.Trainer`` whose model runs through a pipeline. Loading this file imports transformers.

::

    Trainer          self.model, the model on the host: its names, configuration, saving, generation
                     self.model_wrapped, what runs; of us the pipeline around the same parameters
    per batch        training_step -> forward_backward of the pipeline: gradients are on the host
    per step         clip, optimizer and scheduler of the Trainer, on these
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ...device.parse import DeviceSpec
from ...engine.config import RoundPipeRunConfig
from ...errors import ConfigError
from ..loss.label_smoothing import SmoothedLoss, is_causal
from ..loss.weights import ShareOfOwnLoss, has_labels
from ..wrapped_model import WrappedModel
from .frozen_models import FrozenModelTrainer
from .group_trainer import GroupTrainer
from .pipeline_trainer import check_overrides
from .saving_trainer import SavingTrainer


class RoundPipeTrainer(FrozenModelTrainer, GroupTrainer, SavingTrainer):
    """A ``transformers.Trainer`` that trains a model larger than the device.

    It takes the arguments of a Trainer and writes the same files: ``from_pretrained`` loads its checkpoints, which
    appear when they are complete. The model stays on the host. ``per_device_train_batch_size`` is the number of rows of
    one batch, which is then cut into microbatches; loss and gradients are those of the whole batch. Under torchrun
    each process has its own devices and a group of this size, and loss and gradients are those of all of them. Each
    process keeps its part of the optimizer's state, if the Trainer makes an optimizer that works on parts.

    Args:
        model: Hugging Face model, or one that :func:`wrap_model_to_roundpipe` has wrapped.
        args: training arguments, as for a Trainer.
        *positional: further arguments, in the order of the Trainer that this one is combined with.
        devices: devices, as for :class:`RoundPipe`. Default: all accelerators, or this process's share of them.
        microbatches: number of microbatches per batch. Default: number of devices + 1.
        keep_parameters: GB of each device for parameters that stay there, or ``"auto"``, as for
            :class:`RoundPipeRunConfig`: for adapters. Default: 0, none stay.
        optim_dtype: dtype, as for :class:`RoundPipe`: ``torch.float32`` for a model of 16 bits.
        example: example, as for :func:`wrap_model_to_roundpipe`. Default: a few tokens; the first two rows
            of the training data, for a model that reads images or sounds, or that does not run on the tokens.
        use_sequential_preset: as for :func:`wrap_model_to_roundpipe`: ``True`` makes a model that cannot be cut an
            error, ``False`` leaves it in one piece. Default: it is cut if it can be.
        replicas: number of groups of ``per_device_train_batch_size`` rows that a batch has; group g is trained by
            process g modulo their number, so that the numbers do not depend on how many there are. Default: number of
            processes.
        host: where the host's part of the training lives, as for :class:`RoundPipe`: ``"memory"``, or ``"disk:DIR"``.
        **options: keyword arguments of a Trainer.

    Raises:
        ConfigError: an argument, or a training argument, is not supported by a pipeline.
    """

    label_smoother: Any
    compute_loss_func: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        devices: DeviceSpec = None,
        microbatches: int | None = None,
        keep_parameters: float | Literal["auto"] | None = None,
        optim_dtype: torch.dtype | None = None,
        example: Mapping[str, Any] | None = None,
        replicas: int | None = None,
        use_sequential_preset: bool | None = None,
        host: str | None = None,
        **options: Any,
    ) -> None:
        check_overrides(type(self))
        given = {
            "devices": devices,
            "optim_dtype": optim_dtype,
            "example": example,
            "replicas": replicas,
            "use_sequential_preset": use_sequential_preset,
            "host": host,
        }
        self._rp_options = {name: value for name, value in given.items() if value is not None}
        self._rp_config = RoundPipeRunConfig(num_microbatch=microbatches, keep_parameters=keep_parameters)
        self._rp_pipeline = None
        options |= self._rp_by_name(model, args, positional)
        model, args = options.pop("model"), options.get("args")
        if isinstance(model, WrappedModel):
            of_runs = {"microbatches": microbatches, "keep_parameters": keep_parameters}
            names = [*self._rp_options, *(name for name, value in of_runs.items() if value is not None)]
            if names:
                raise ConfigError(f"The model is wrapped already: give {', '.join(names)} to wrap_model_to_roundpipe.")
            if args is not None and args.torch_compile:
                raise ConfigError(
                    "The model is wrapped already: torch_compile=True comes too late. Compile its layers there:\n"
                    "    wrap_model_to_roundpipe(model, compile=True)"
                )
            if model.mesh is None and args is not None and args.world_size > 1:
                raise ConfigError(
                    f"The model is wrapped for one process, and there are {args.world_size}. Give the Trainer the "
                    "model itself, or wrap it with a mesh:\n"
                    f'    wrap_model_to_roundpipe(model, mesh=init_device_mesh("cpu", ({args.world_size}, 1)))'
                )
            self._rp_pipeline, model = model, model.cut.model
        super().__init__(model=model, **options)
        if self.label_smoother is not None and is_causal(self.model):
            self.label_smoother = _Shifted(self.label_smoother)

    def _rp_by_name(self, model: Any, args: Any, positional: tuple[Any, ...]) -> Kwargs:
        """The arguments by their names in the next class: the second one of a Trainer may be another model."""
        if not positional and (args is None or isinstance(args, TrainingArguments)):
            return {"model": model, "args": args}
        names = inspect.signature(super().__init__)
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in names.parameters.values()):
            names = inspect.signature(functools.partial(Trainer.__init__, self))
        return {"args": None, **names.bind_partial(model, args, *positional).arguments}

    # -- a batch -----------------------------------------------------------------------------------------------------

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Add the gradient of a batch to those of the model, and return its loss.

        The model's own loss is computed stage by stage, also with label smoothing. A ``compute_loss`` of a subclass
        and a ``compute_loss_func`` are given the joined output of the batch; their gradient goes back through the
        pipeline. So does that of a ``training_step`` of a class after this one: ``class Own(RoundPipeTrainer, Mine)``.

        Args:
            model: pipeline.
            inputs: batch.
            num_items_in_batch: divisor of the loss of an accumulated batch.

        Returns:
            The loss of the batch.
        """
        if not self._rp_is_own_loss(inputs):
            with self._rp_failing_together():
                loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss.to(self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        is_scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if is_scaled:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        if (wanted := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            is_scaled = wanted
        share = 1 if is_scaled else self.current_gradient_accumulation_steps
        if is_scaled and not self.args.average_tokens_across_devices:
            share *= self.args.world_size  # each rank was given the number of its own items
        inputs = dict(self._prepare_inputs(inputs))
        labels: torch.Tensor | None = None
        loss_fn: Callable[[Any, Any], Any] = ShareOfOwnLoss(share)
        if self.label_smoother is not None and "labels" in inputs:
            labels, loss_fn = inputs.pop("labels"), self._rp_smoothed_loss(num_items_in_batch, share)
        with self.compute_loss_context_manager():
            own: torch.Tensor = self.pipeline.forward_backward(
                input_kwargs=inputs, label=labels, loss_fn=loss_fn, run_config=self._rp_config
            )
        return own.to(self.args.device)

    def _rp_is_own_loss(self, inputs: Mapping[str, Any]) -> bool:
        if self._rp_has_other_loss() or not has_labels(self.model, inputs):
            return False
        smoother = self.label_smoother
        smoother = smoother.smoother if isinstance(smoother, _Shifted) else smoother
        return smoother is None or type(smoother) is LabelSmoother or "labels" not in inputs

    def _rp_smoothed_loss(self, num_items_in_batch: torch.Tensor | int | None, share: float) -> SmoothedLoss:
        smoother = self.label_smoother
        is_shifted = isinstance(smoother, _Shifted)
        smoother = smoother.smoother if is_shifted else smoother
        knows_items = "num_items_in_batch" in inspect.signature(smoother.__call__).parameters  # not in transformers 4
        return SmoothedLoss(
            smoother.epsilon,
            shift_labels=is_shifted,
            num_items_in_batch=num_items_in_batch if knows_items else None,
            ignore_index=smoother.ignore_index,
            scale=1 / share,
        )


class RoundPipeSeq2SeqTrainer(RoundPipeTrainer, Seq2SeqTrainer):  # type: ignore[misc] # as above
    """A ``transformers.Seq2SeqTrainer`` that trains a model larger than the device; see :class:`RoundPipeTrainer`."""


class _Shifted:
    """Smooths labels of causal models, which the Trainer knows by the class that it calls: here the pipeline's."""

    def __init__(self, smoother: Any) -> None:
        self.smoother = smoother

    def __call__(self, outputs: PyTree, labels: torch.Tensor, **options: Any) -> Any:
        return self.smoother(outputs, labels, **{"shift_labels": True, **options})
