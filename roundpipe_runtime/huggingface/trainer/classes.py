"""``transformers.Trainer`` whose model runs through a pipeline. Loading this file imports transformers.

::

    Trainer          self.model, the model on the host: its names, configuration, saving, generation
                     self.model_wrapped, what runs; of us the pipeline around the same parameters
    per batch        training_step -> forward_backward of the pipeline: gradients are on the host
    per step         clip, optimizer and scheduler of the Trainer, on these
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import LabelSmoother

from yobx_flatten.recipe.aliases import Kwargs, PyTree, TransformersModel

from ...device.virtual import DeviceSpec
from ...distributed.ranks.torchrun import own_devices
from ...engine.config import RoundPipeRunConfig
from ...errors import ConfigError
from ...optim.step import OptimizerCtx
from ..errors import CutError
from ..loss.label_smoothing import SmoothedLoss, is_causal
from ..loss.weights import has_labels, own_loss
from ..wrap import WrappedModel, wrap_model_to_roundpipe
from .arguments import check_arguments, check_kernels, check_optimizer, check_precision
from .checkpoints import CheckpointingTrainer
from .group_batches import CheckedLoader, has_rows, loader_of_groups, take_together
from .optimizer_files import (
    has_shards,
    is_sharded,
    load_progress,
    load_shards,
    load_whole,
    save_progress,
    save_shards,
)

__all__ = ["RoundPipeSeq2SeqTrainer", "RoundPipeTrainer"]

# Optimizers that step each number by itself, so that a process can step its own rows.
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


class RoundPipeTrainer(CheckpointingTrainer):
    """A ``transformers.Trainer`` that trains a model larger than the device.

    It takes the arguments of a Trainer and writes the same files: ``from_pretrained`` loads its checkpoints, which
    appear when they are complete. The model stays on the host. ``per_device_train_batch_size`` is the number of rows of
    one batch, which is then cut into microbatches; loss and gradients are those of the whole batch. Under torchrun
    each process has its own devices and a group of this size, and loss and gradients are those of all of them. Each
    process keeps its part of the optimizer's state, if the Trainer makes an optimizer that works on parts.

    Args:
        model: model of transformers, or one that :func:`wrap_model_to_roundpipe` has wrapped.
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
        **options: keyword arguments of a Trainer.

    Raises:
        ConfigError: an argument, or a training argument, is not supported by a pipeline.
    """

    model: TransformersModel
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
        **options: Any,
    ) -> None:
        given = {
            "devices": devices,
            "optim_dtype": optim_dtype,
            "example": example,
            "replicas": replicas,
            "use_sequential_preset": use_sequential_preset,
        }
        self._rp_options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._rp_config = RoundPipeRunConfig(num_microbatch=microbatches, keep_parameters=keep_parameters)
        self._rp_pipeline: WrappedModel | None = None
        self._rp_is_converted = False
        options |= self._rp_by_name(model, args, positional)
        model, args = options.pop("model"), options.get("args")
        if isinstance(model, WrappedModel):
            of_runs = {"microbatches": microbatches, "keep_parameters": keep_parameters}
            names = [*self._rp_options, *(name for name, value in of_runs.items() if value is not None)]
            if names:
                raise ConfigError(f"The model is wrapped already: give {', '.join(names)} to wrap_model_to_roundpipe.")
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

    @property
    def pipeline(self) -> WrappedModel:
        """The pipeline around ``model``, made at the first access."""
        found = self._rp_pipeline
        if found is None or found.cut.model is not self.model:  # ``model_init`` makes a new model for each training
            if found is not None:
                found.close()
            with torch.random.fork_rng(devices=()):  # the data come in the order they would come in anyway
                found = self._rp_wrapped()
            self._rp_pipeline = found
        return found

    def _rp_wrapped(self) -> WrappedModel:
        if "devices" not in self._rp_options and self.args.world_size > 1 and (share := own_devices()):
            self._rp_options["devices"] = share
        wrap = functools.partial(
            wrap_model_to_roundpipe, self.model, model_run_config=self._rp_config, mesh=self._rp_mesh()
        )
        if "example" in self._rp_options:
            return wrap(**self._rp_options)
        config = getattr(self.model, "config", None)
        reads_text = getattr(self.model, "main_input_name", "input_ids") == "input_ids"
        if reads_text and not any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")):
            try:
                return wrap(**self._rp_options)
            except CutError as error:  # a few tokens in a row are not an example for a choice of texts
                if error.reason != "example" or self._rp_example() is None:
                    raise
        return wrap(example=self._rp_example(), **self._rp_options)

    def _rp_mesh(self) -> DeviceMesh | None:
        """The mesh of the processes of torchrun, on which the optimizer's state is in shards if it may be."""
        size: int = self.args.world_size
        if size == 1:
            return None
        makes_it = type(self).create_optimizer is RoundPipeTrainer.create_optimizer and self.optimizer is None
        kind = str(getattr(self.args.optim, "value", self.args.optim))
        is_known = getattr(self, "optimizer_cls_and_kwargs", None) is None and kind in _ELEMENTWISE
        return init_device_mesh("cpu", (size,) if makes_it and is_known else (size, 1))

    def _rp_example(self) -> Kwargs | None:
        """The first two rows of the training data, if they can be read without iterating over it."""
        data = self.train_dataset
        if not hasattr(data, "__getitem__"):
            return None
        collate = self._get_collator_with_removed_columns(self.data_collator)
        return dict(collate([data[0], data[min(1, len(data) - 1)]]))

    # -- where the model is ------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which must leave batches on the host: the pipeline copies what a device needs."""
        check_arguments(self.args)
        # every stage recomputes its activations: once more in each layer would only cost time
        self.args.activation_checkpointing = self.args.gradient_checkpointing = False
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # as the Trainer does for other models that use several devices themselves
        super().create_accelerator_and_postprocess()
        check_precision(self.accelerator.mixed_precision)
        self.accelerator.device_placement = False
        self._rp_plain_clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._rp_clip_grad_norm
        # Sums that stay on a process until the last batch of a step would be added in an order that depends on their
        # number, and take 4 bytes per parameter and group.
        self.accelerator.no_sync = lambda model=None: contextlib.nullcontext()

    def _rp_clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as accelerate does, or with the same bits for any number of processes."""
        if not self._rp_has_groups():
            clipped: torch.Tensor = self._rp_plain_clip(parameters, max_norm, norm_type)
            return clipped
        return self.pipeline.clip_grad_norm_(max_norm, norm_type)

    def _rp_has_groups(self) -> bool:
        return self.pipeline._rp_options.has_groups

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model on the host."""

    def _prepare_input(self, data: Any) -> Any:
        return data

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> WrappedModel:
        return self.pipeline

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context manager for ``bf16=True``, which the accelerator would put into the model's forward."""
        if self.accelerator.mixed_precision != "bf16":
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind in sorted({"cpu"} | {device.torch_device.type for device in self.pipeline.devices}):
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        return stack

    # -- the data ----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the loader of this process's rows; in groups, of which a batch of all processes is made."""
        if not self._rp_has_groups():
            return super().get_train_dataloader()
        prepare = self.accelerator.prepare
        self.accelerator.prepare = lambda loader: loader
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator.prepare = prepare
        if not has_rows(loader):
            return super().get_train_dataloader()
        seed = getattr(self.args, "data_seed", None)
        return loader_of_groups(loader, self.pipeline, self._rp_global_batch(), seed)

    def _rp_global_batch(self) -> int:
        """The rows of a batch of all processes."""
        rows: int = self._train_batch_size
        return rows * self.pipeline.replicas

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the rows of a step of all processes."""
        if not self._rp_has_groups():
            total: int = super().get_total_train_batch_size(args)
            return total
        return self._rp_global_batch() * int(args.gradient_accumulation_steps)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """Return the batches of a step; an error in one process is raised in all.

        Args:
            epoch_iterator: iterator over the batches of an epoch.
            num_batches: number of batches of a step.
            *args: further arguments of a Trainer.
        """
        taken = take_together(epoch_iterator, num_batches, self.pipeline.ranks)
        return super().get_batch_samples(iter(taken), num_batches, *args)

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
        pipeline.

        Args:
            model: pipeline.
            inputs: batch.
            num_items_in_batch: divisor of the loss of an accumulated batch.

        Returns:
            The loss of the batch.
        """
        if not self._rp_is_own_loss(inputs):
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
        loss_fn: Callable[[Any, Any], Any] = functools.partial(_share_of_own_loss, share)
        if self.label_smoother is not None and "labels" in inputs:
            labels, loss_fn = inputs.pop("labels"), self._rp_smoothed_loss(num_items_in_batch, share)
        with self.compute_loss_context_manager():
            own: torch.Tensor = self.pipeline.forward_backward(
                input_kwargs=inputs, label=labels, loss_fn=loss_fn, run_config=self._rp_config
            )
        return own.to(self.args.device)

    def _rp_is_own_loss(self, inputs: Mapping[str, Any]) -> bool:
        is_changed = getattr(self.compute_loss, "__func__", None) is not Trainer.compute_loss
        if is_changed or self.compute_loss_func is not None or not has_labels(self.model, inputs):
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

    # -- a step ------------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer for the pipeline's optimizer parameters.

        Args:
            model: ignored.

        Returns:
            The optimizer.
        """
        pipeline, own = self.pipeline, self.model
        try:
            self.model = (
                pipeline  # whose parameters an optimizer is made of: before transformers 5 that was no argument
            )
            with OptimizerCtx():
                made: torch.optim.Optimizer = super().create_optimizer()
        finally:
            self.model = own
        check_optimizer(made, pipeline)
        if type(made).__module__.startswith("bitsandbytes"):
            given = getattr(self, "optimizer_cls_and_kwargs", None)
            kind, options = given or self.get_optimizer_cls_and_kwargs(self.args, own)
            check_kernels(kind, options, has_copies="optim_dtype" in self._rp_options)
        return made

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with OptimizerCtx():  # the loop clips the gradients of what ``parameters()`` of the pipeline are
            result = super()._inner_training_loop(*args, **kwargs)
        self.pipeline.synchronize()
        return result

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, as the Trainer does. The model has the weights of the last step before: generation runs on it."""
        self.pipeline.synchronize()
        ranks = self.pipeline.ranks
        return super().evaluation_loop(
            CheckedLoader(dataloader, ranks) if ranks.size > 1 else dataloader, *args, **kwargs
        )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._rp_pipeline is not None:
            self._rp_pipeline.synchronize()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = pathlib.Path(output_dir)
        if is_sharded(self.pipeline):
            save_shards(folder, self.pipeline, self._rp_own_optimizer())
            if self.args.should_save and self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            return
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            save_progress(folder, self.pipeline)

    def _rp_own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without what accelerate puts around it."""
        found: Any = self.optimizer
        own: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._rp_load_converted(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._rp_load_converted(self.state.best_model_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        has_others = bool(load_result.missing_keys and load_result.unexpected_keys)
        self._rp_is_converted = has_others and isinstance(self.model, PreTrainedModel)
        if not self._rp_is_converted:
            super()._issue_warnings_after_load(load_result)

    def _rp_load_converted(self, folder: str) -> None:
        """Load weights that are saved under other names than the model has in memory, as experts of mixtures are.

        The Trainer warns, and trains on without these weights: https://github.com/huggingface/transformers/issues/43701
        """
        if self._rp_is_converted:
            with torch.random.fork_rng(devices=()):
                loaded, info = type(self.model).from_pretrained(
                    folder, config=self.model.config, dtype="auto", output_loading_info=True
                )
            if missing := sorted(info["missing_keys"]):
                raise ConfigError(
                    f"{folder} is of another model: it lacks {len(missing)} weights of {type(self.model).__name__}, "
                    f"like {missing[0]}."
                )
            self.model.load_state_dict(loaded.state_dict())
            self._rp_is_converted = False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, pipeline, optimizer = pathlib.Path(checkpoint), self.pipeline, self._rp_own_optimizer()
        if has_shards(folder):
            load_shards(folder, pipeline, optimizer)
        elif is_sharded(pipeline) and (folder / OPTIMIZER_NAME).is_file():
            load_whole(folder / OPTIMIZER_NAME, pipeline, optimizer)
            load_progress(folder, pipeline)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            load_progress(folder, pipeline)
            return
        if (folder / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))


class RoundPipeSeq2SeqTrainer(RoundPipeTrainer, Seq2SeqTrainer):  # type: ignore[misc] # as above
    """A ``transformers.Seq2SeqTrainer`` that trains a model larger than the device; see :class:`RoundPipeTrainer`."""


class _Shifted:
    """Smooths labels of causal models, which the Trainer knows by the class that it calls: here the pipeline's."""

    def __init__(self, smoother: Any) -> None:
        self.smoother = smoother

    def __call__(self, outputs: PyTree, labels: torch.Tensor, **options: Any) -> Any:
        return self.smoother(outputs, labels, **{"shift_labels": True, **options})


def _share_of_own_loss(share: float, outputs: PyTree, labels: Any) -> Any:
    return own_loss(outputs, labels) / share
