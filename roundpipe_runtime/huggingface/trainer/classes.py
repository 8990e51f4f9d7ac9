"""``transformers.Trainer`` classes whose models run through pipelines. Loading this file imports transformers."""

# Trainer          self.model            the model on the host, for names, configuration, saving and generation
#                  self.model_wrapped    the pipeline around the same parameters, which runs
# per batch        training_step         forward_backward of the pipeline, with gradients on the host
# per step         clipping, optimizer and scheduler of the Trainer, on the host

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from yobx_flatten.huggingface.cache_names import cache_of
from yobx_flatten.registry.patches import AttributePatch
from yobx_flatten.registry.recipe.aliases import PyTree

from ...device.accelerator import DeviceSpec, parse_devices
from ...device.worker import Outcome, generator_kept
from ...distributed.ranks.ranks import Ranks
from ...distributed.ranks.torchrun import own_devices
from ...distributed.replicas.sampler import ReplicaBatchSampler, collate_with_empty
from ...engine.config import RoundPipeRunConfig
from ...errors import ConfigError, format_failure, raise_first
from ...pipeline import RoundPipe
from ...pipeline.live import OtherForward
from ..loss.call_options import SmoothedLoss, is_causal
from ..loss.own_loss import ShareOfOwnLoss, has_labels
from ..wrap import WrappedModel, wrap_model_to_roundpipe
from .pipeline_trainer import PipelineTrainer


class PipelineForward(OtherForward):
    """A model's forward that calls the pipeline around the model; calls with a KV cache run the original forward."""

    def __init__(self, trainer: RoundPipeTrainer, before: Any) -> None:
        super().__init__(trainer._rp_in_autocast(self._run), before)
        self._trainer = trainer
        self._is_running = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # the model itself runs for `generate`, which fills a cache, and when the pipeline checks the model's loss
        if self._is_running or cache_of(kwargs) is not None or kwargs.get("use_cache"):
            model = self._trainer.model
            own = self.before or types.MethodType(type(model).forward, model)
            return own(*args, **kwargs)
        self._is_running = True
        try:
            return self._trainer.pipeline(*args, **kwargs)
        finally:
            self._is_running = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward of the model's class, because a copy of the model must not run through the pipeline."""
        copied = memo[id(self._trainer.model)]
        return types.MethodType(type(copied).forward, copied)


# Options of a Trainer's data loader that a loader of groups also gets.
_KEPT = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
         "persistent_workers")  # fmt: skip


class GroupLoader(DataLoader[Any]):
    """A data loader that yields this process's rows of each batch."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr] # it is a ReplicaBatchSampler


def take_together(batches: Iterator[Any], count: int, ranks: Ranks) -> list[Any]:
    """Return the next batches of this process; if one process fails, its error is raised in all processes."""
    found: list[Any] = []
    with Outcome() as outcome:
        found = list(itertools.islice(batches, count))
    failure = outcome.error
    raise_first(failure, ranks.exchange(None if failure is None else format_failure(failure)))
    return found


class CheckedLoader:
    """A data loader that raises an error in all processes if loading a batch fails in one process."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader, self._ranks = loader, ranks

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while taken := take_together(batches, 1, self._ranks):
            yield from taken

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class RoundPipeTrainer(PipelineTrainer):
    """A ``transformers.Trainer`` that trains models larger than the memory of a device.

    The arguments and the written files are the same as for the Trainer. A checkpoint folder appears only when all of
    its files are written, and ``from_pretrained`` can load it. The model stays in CPU memory.
    ``per_device_train_batch_size`` is the number of rows of one batch, which is split into microbatches. Loss and
    gradients are computed for the whole batch. Under torchrun, each process trains its own rows on its own devices.
    Loss and gradients are then computed for the rows of all processes. If the Trainer creates an elementwise optimizer,
    such as AdamW, each process stores a part of the optimizer's state.

    Args:
        model: Hugging Face model, or a model that :func:`wrap_model_to_roundpipe` has wrapped.
        args: training arguments, as for a Trainer.
        *positional: further positional arguments, which are passed to the base class, such as ``transformers.Trainer``.
        devices: devices, as for :class:`RoundPipe`. Default: all accelerators, or this process's share of them.
        microbatches: number of microbatches per batch; by default, the number of devices + 1.
        keep_parameters: GB of each device's memory for parameters that stay on the device after use, or ``"auto"``, as
            for :class:`RoundPipeRunConfig`. Default: 0. Frozen parameters that stay on a device are not uploaded again.
        optim_dtype: dtype in which the optimizer works, as for :class:`RoundPipe`. If the parameters of the model are
            in float16 or bfloat16, pass ``torch.float32``.
        example: example batch with which the model is split, as for :func:`wrap_model_to_roundpipe`. By default, the
            example is a few tokens, or two rows of the training data if the model cannot run on tokens alone.
        use_sequential_preset: as for :func:`wrap_model_to_roundpipe`. ``True``: raise an error if the model cannot be
            split. ``False``: do not split the model. Default: split the model if possible.
        replicas: number of groups of ``per_device_train_batch_size`` rows in a batch. Default: number of processes.
            With ``N`` processes, process ``g % N`` trains group number ``g``. Results are equal for every ``N``.
        host: where the host stores the training state, as for :class:`RoundPipe`: ``"memory"``, or ``"disk:DIR"``.
        update: which weights the optimizer updates, and when, as for :class:`RoundPipe`. ``"in_backward"`` requires
            ``max_grad_norm=0`` and ``gradient_accumulation_steps=1``.
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
        update: Literal["masters", "in_place", "in_backward"] | None = None,
        **options: Any,
    ) -> None:
        check_overrides(type(self))
        given = {"devices": devices, "optim_dtype": optim_dtype, "example": example, "replicas": replicas}
        given |= {"use_sequential_preset": use_sequential_preset, "host": host, "update": update}
        self._rp_options = {name: value for name, value in given.items() if value is not None}
        self._rp_config = RoundPipeRunConfig(num_microbatch=microbatches, keep_parameters=keep_parameters)
        self._rp_pipeline = None
        if positional or not isinstance(args, TrainingArguments | None):
            # positional arguments by the parameter names of the next Trainer class in the MRO
            taken = inspect.signature(super().__init__)
            if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.parameters.values()):
                taken = inspect.signature(functools.partial(Trainer.__init__, self))
            options |= {"args": None, **taken.bind_partial(model, args, *positional).arguments}
            model, args = options.pop("model"), options["args"]
        else:
            options["args"] = args
        if isinstance(model, WrappedModel):
            of_runs = {"microbatches": microbatches, "keep_parameters": keep_parameters}
            names = [*self._rp_options, *(name for name, value in of_runs.items() if value is not None)]
            if names:
                raise ConfigError(f"The model is wrapped already: pass {', '.join(names)} to wrap_model_to_roundpipe.")
            if args is not None and args.torch_compile:
                raise ConfigError(
                    "The model is wrapped already: torch_compile=True has no effect. Write instead:\n"
                    "    wrap_model_to_roundpipe(model, compile=True)"
                )
            if model.mesh is None and args is not None and args.world_size > 1:
                raise ConfigError(
                    f"The model is wrapped for one process, but there are {args.world_size} processes. Give the "
                    "Trainer the model itself, or wrap it with a mesh:\n"
                    f'    wrap_model_to_roundpipe(model, mesh=init_device_mesh("cpu", ({args.world_size}, 1)))'
                )
            self._rp_pipeline, model = model, model.cut.model
        super().__init__(model=model, **options)
        if self.label_smoother is not None and is_causal(self.model):
            self.label_smoother = _Shifted(self.label_smoother)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Add the gradient of a batch to the accumulated gradient, and return the loss of the batch.

        The model's own loss is computed in microbatches, also with label smoothing. A custom ``compute_loss``,
        ``compute_loss_func`` or ``training_step`` gets the joined output of the batch, and the backward of its loss
        runs through the pipeline.

        Args:
            model: pipeline.
            inputs: batch.
            num_items_in_batch: number of labels in all accumulated batches, by which the loss is divided.

        Returns:
            The loss of the batch.
        """
        is_shifted = isinstance(self.label_smoother, _Shifted)
        smoother = self.label_smoother.smoother if is_shifted else self.label_smoother
        is_known = smoother is None or type(smoother) is LabelSmoother or "labels" not in inputs
        if self._rp_has_other_loss() or not has_labels(self.model, inputs) or not is_known:
            self._rp_is_before_backward = True
            try:
                loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            except Exception as error:  # raised in all processes, so that no process waits forever
                if self._rp_is_before_backward and self.args.world_size > 1:
                    self.pipeline.ranks.exchange(format_failure(error))
                raise
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
            share *= self.args.world_size  # each rank got the number of its own items
        inputs = dict(self._prepare_inputs(inputs))
        labels: torch.Tensor | None = None
        loss_fn: Callable[[Any, Any], Any] = ShareOfOwnLoss(share)
        if smoother is not None and "labels" in inputs:
            labels = inputs.pop("labels")
            # smoothers of transformers 4 take no number of items
            knows_items = "num_items_in_batch" in inspect.signature(smoother.__call__).parameters
            count = num_items_in_batch if knows_items else None
            loss_fn = SmoothedLoss(smoother.epsilon, is_shifted, count, smoother.ignore_index, 1 / share)
        with self.compute_loss_context_manager():
            own: torch.Tensor = self.pipeline.forward_backward(
                input_kwargs=inputs, label=labels, loss_fn=loss_fn, run_config=self._rp_config
            )
        return own.to(self.args.device)

    # Preference trainers compare the model with frozen models, such as a reference or a reward model. With adapters,
    # the reference is the model without adapters:
    #
    #     accelerator.prepare_model(reference, evaluation_mode=True)     another pipeline, on the same devices
    #     with model.disable_adapter(): trainer.model(**batch)           the pipeline of the model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._rp_frozen: list[WrappedModel] = []
        self._rp_plain_prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = self._rp_prepare_model

    def _rp_prepare_model(self, model: nn.Module, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> Any:
        """Wrap a model in a pipeline if it is only evaluated; prepare any other model as accelerate does."""
        if isinstance(model, RoundPipe):
            return model
        if not evaluation_mode:
            return self._rp_plain_prepare(model, *args, evaluation_mode=evaluation_mode, **kwargs)
        config = RoundPipeRunConfig(num_microbatch=self._rp_config.num_microbatch)
        with generator_kept():  # the generator also decides the order of the data
            if self._rp_pipeline is not None:
                devices = self._rp_pipeline.devices
            else:  # those of the pipeline around the model, which is not created yet
                if "devices" not in self._rp_options:
                    share = own_devices() if self.args.world_size > 1 else None
                    self._rp_options["devices"] = share or None
                devices = self._rp_options["devices"] = parse_devices(self._rp_options["devices"])
            frozen = wrap_model_to_roundpipe(model, devices=devices, model_run_config=config, pin_model="off")
        self._rp_frozen.append(frozen)
        if self.accelerator.mixed_precision == "bf16":
            own = frozen.forward
            frozen.__dict__["forward"] = functools.wraps(own, updated=())(self._rp_in_autocast(own))
        return frozen

    def _rp_in_autocast(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.autocast_smart_context_manager():
                return forward(*args, **kwargs)

        return run

    def close(self) -> None:
        """End the threads of all pipelines; the pipeline around the model is created again when needed."""
        for frozen in self._rp_frozen:
            frozen.close()
        if self._rp_pipeline is not None:
            self._rp_pipeline.close()
            self._rp_pipeline = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._rp_called_through_pipeline():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._rp_called_through_pipeline():
            return super().evaluate(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self._rp_called_through_pipeline():
            return super()._precompute_ref_logps(*args, **kwargs)

    def _rp_called_through_pipeline(self) -> contextlib.AbstractContextManager[None]:
        held = None if getattr(self, "model_init", None) is not None else self.model.__dict__
        if held is None or isinstance(held.get("forward"), PipelineForward) or self.pipeline.cut.report.is_whole:
            return contextlib.nullcontext()
        other = PipelineForward(self, held.get("forward"))
        return AttributePatch(held, "forward", functools.wraps(self.model.forward, updated=())(other))

    def get_train_dataloader(self) -> Any:
        # the `compute_loss` of a subclass may compare rows, so each process then gets the batches of the plain Trainer
        if not self._rp_has_groups():
            return super().get_train_dataloader()
        if self.args.world_size > 1 and self._rp_has_other_loss():
            if self.pipeline.replicas != self.args.world_size:
                raise ConfigError(
                    f"{type(self).__name__} computes its own loss in each process, so a batch must have one group of "
                    f"rows per process ({self.args.world_size} groups). Leave replicas={self.pipeline.replicas} out."
                )
            return super().get_train_dataloader()
        prepare = self.accelerator.prepare
        self.accelerator.prepare = lambda loader: loader
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator.prepare = prepare
        # a stream, whose batch sampler is infinite, and a loader of whole batches draw no single rows by index
        if type(loader.batch_sampler) is not BatchSampler or isinstance(loader.dataset, IterableDataset):
            return super().get_train_dataloader()
        sampler: Any = loader.batch_sampler.sampler
        size, drop_last = self._rp_global_batch(), loader.batch_sampler.drop_last
        collate, tail = loader.collate_fn, len(sampler) % size
        if type(sampler) is RandomSampler:  # the order depends only on the epoch and a seed, as accelerate's does
            from accelerate.data_loader import SeedableRandomSampler

            sampler = SeedableRandomSampler(
                data_source=sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=sampler.generator or torch.Generator(),
                data_seed=getattr(self.args, "data_seed", None),
            )
        if 0 < tail < self.pipeline.replicas and not drop_last:  # a process gets no row of the last batch
            collate = collate_with_empty(collate, loader.dataset[0])
        return GroupLoader(
            loader.dataset,
            batch_sampler=ReplicaBatchSampler(BatchSampler(sampler, size, drop_last), self.pipeline),
            collate_fn=collate,
            **{name: getattr(loader, name) for name in _KEPT},
        )

    def _rp_has_other_loss(self) -> bool:
        """Return whether a subclass or ``compute_loss_func`` replaces the Trainer's loss or training step."""
        if self.compute_loss_func is not None:
            return True
        # in `class Own(RoundPipeTrainer, Mine)`, the step of `Mine` comes after this class
        for name, method in (("compute_loss", self.compute_loss), ("training_step", super().training_step)):
            function = getattr(method, "__func__", None)
            if function is not getattr(Trainer, name) or not function.__module__.startswith("transformers."):
                return True
        return False

    def _rp_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._rp_is_before_backward = False
        raise_first(None, self.pipeline.ranks.exchange(None))
        super()._rp_backward(loss, **kwargs)

    def _rp_global_batch(self) -> int:
        return int(self._train_batch_size) * self.pipeline.replicas

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        if not self._rp_has_groups():
            return int(super().get_total_train_batch_size(args))
        return self._rp_global_batch() * int(args.gradient_accumulation_steps)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> Any:
        """Return the batches of an optimizer step; raise an error of one process in all processes."""
        taken = take_together(epoch_iterator, num_batches, self.pipeline.ranks)
        return super().get_batch_samples(iter(taken), num_batches, *args)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for the optimizer step, which may run in the background, and evaluate as the Trainer does."""
        self.pipeline.synchronize()
        if self.pipeline.ranks.size > 1:
            dataloader = CheckedLoader(dataloader, self.pipeline.ranks)
        return super().evaluation_loop(dataloader, *args, **kwargs)


def check_overrides(kind: type[Trainer]) -> None:
    """Raise an error if a class combined with RoundPipeTrainer overrides a method that RoundPipeTrainer replaces."""
    mro = kind.__mro__[: kind.__mro__.index(Trainer)]
    own = [base for base in mro if base.__module__.startswith("roundpipe_runtime.")]
    replaced = {
        name
        for base in own
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and hasattr(Trainer, name)
        if "__class__" not in value.__code__.co_freevars  # it does not call `super()`
    }
    for base in mro[mro.index(own[-1]) + 1 :]:
        hidden = sorted(replaced.intersection(vars(base))) if not base.__module__.startswith("transformers.") else []
        if hidden:
            names = ", ".join(f"{base.__name__}.{name}" for name in hidden)
            raise ConfigError(
                f"{kind.__name__}: {names} would never be called, because RoundPipeTrainer comes first in the base "
                "classes and has methods of these names. Derive the class from RoundPipeTrainer instead:\n"
                f"    class {base.__name__}(RoundPipeTrainer): ..."
            )


class RoundPipeSeq2SeqTrainer(RoundPipeTrainer, Seq2SeqTrainer):  # type: ignore[misc] # as above
    """A ``transformers.Seq2SeqTrainer`` that trains a model larger than the device; see :class:`RoundPipeTrainer`."""


class _Shifted:
    """Label smoother that shifts labels, because the Trainer does not recognize a causal model inside a pipeline."""

    def __init__(self, smoother: Any) -> None:
        self.smoother = smoother

    def __call__(self, outputs: PyTree, labels: torch.Tensor, **options: Any) -> Any:
        return self.smoother(outputs, labels, **{"shift_labels": True, **options})
