"""A Trainer with a pipeline around its model, the optimizer on the host, and crash-safe checkpoints of all state."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from yobx_flatten.core.files.document import read_document
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.registry.recipe.aliases import Kwargs, TransformersModel

from ...checkpoint import folder as folders
from ...checkpoint.model_state import collect_progress, load_weights, optimizer_targets, restore_progress
from ...checkpoint.shards import cut_like, ranks_of
from ...checkpoint.training_state import check_optimizer, named_state, read_values, restore_optimizer, write_values
from ...device.disk import HOST_IN_MEMORY
from ...device.worker import generator_kept
from ...distributed.ranks.torchrun import own_devices
from ...engine.config import RoundPipeRunConfig, check_compile_options
from ...errors import CheckpointError, CheckpointWarning, ConfigError, CutError, DamagedCheckpointError, warn
from ...optim.disk_store import hold_on_disk
from ...optim.step import OptimizerCtx
from ...pipeline import RoundPipe
from ..wrap import WrappedModel, wrap_model_to_roundpipe

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"  # the file that a Trainer writes last
_SENTINEL = "checkpoint-is-incomplete.txt"  # a file that marks a checkpoint as incomplete, which a signal requested


#     output_dir/checkpoint-6/                            complete, with transformers' files and a manifest
#     output_dir/.checkpoint-9.writing/checkpoint-9/      the Trainer is writing it
#     output_dir/.checkpoint-3.leaving/                   being removed


class PipelineTrainer(Trainer):  # type: ignore[misc] # transformers counts as untyped
    """A Trainer with a pipeline around its model; a checkpoint folder appears only when all its files are written."""

    model: TransformersModel
    _rp_options: dict[str, Any]  # for `wrap_model_to_roundpipe`
    _rp_config: RoundPipeRunConfig
    _rp_pipeline: WrappedModel | None
    _rp_is_converted = False
    _rp_writing_to: pathlib.Path | None = None

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: object, **kwargs: object
    ) -> object:
        """Train as a Trainer does; ``resume_from_checkpoint=True`` resumes from the newest undamaged checkpoint."""
        if resume_from_checkpoint is True:
            # `newest_whole` removes leftovers
            with self.args.main_process_first(local=False, desc="the newest checkpoint"):
                found = newest_whole(pathlib.Path(self.args.output_dir))
            resume_from_checkpoint = found or True  # without a checkpoint, the Trainer raises its error
        elif resume_from_checkpoint and (pathlib.Path(resume_from_checkpoint) / folders.MANIFEST).exists():
            try:
                folders.verify(pathlib.Path(resume_from_checkpoint))
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(
                    f"{error} Continue from the newest complete checkpoint:\n"
                    "    trainer.train(resume_from_checkpoint=True)\n"
                    f"If this checkpoint was changed on purpose, remove its {folders.MANIFEST} instead."
                ) from error
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_output_dir(self, trial: object) -> str:
        return str(self._rp_writing_to or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: object, trial: object, *args: object, **kwargs: object) -> None:
        run = pathlib.Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        if not self.args.should_save:  # rank 0 writes, and files of other ranks are not kept
            with tempfile.TemporaryDirectory() as scratch, self._rp_into(pathlib.Path(scratch)):
                super()._save_checkpoint(model, trial, *args, **kwargs)
            self.accelerator.wait_for_everyone()
            self._rp_name_best(run, name)
            return
        outer = run / f".{name}.writing"
        with contextlib.ExitStack() as stack:
            stack.enter_context(folders.only_writer(run))
            _settle(run)
            stack.callback(shutil.rmtree, outer, ignore_errors=True)
            half = stack.enter_context(folders.appearing(run / name, outer / name))
            with self._rp_into(outer):
                super()._save_checkpoint(model, trial, *args, **kwargs)
            self._rp_name_best(run, name)
            self.state.save_to_json(str(half / _STATE))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / name))
        remove_all_but(run, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def _rp_into(self, folder: pathlib.Path) -> Iterator[None]:
        self._rp_writing_to = folder
        try:
            yield
        finally:
            self._rp_writing_to = None

    def _rp_name_best(self, run: pathlib.Path, name: str) -> None:
        """Set the path of the best checkpoint to its final folder, because the Trainer has set a temporary folder."""
        best = f"checkpoint-{self.state.best_global_step}"
        if self.args.save_strategy != "no" and self.state.best_global_step and (best == name or (run / best).is_dir()):
            self.state.best_model_checkpoint = str(run / best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._rp_writing_to is None:
            super()._push_from_checkpoint(checkpoint_folder)

    @property
    def pipeline(self) -> WrappedModel:
        """The pipeline around ``model``, created at the first access."""
        found = self._rp_pipeline
        if found is None or found.cut.model is not self.model:  # `model_init` creates a model for each training
            if found is not None:
                found.close()
            with generator_kept():  # the generator also decides the order of the data
                found = self._rp_wrapped()
            self._rp_pipeline = found
        return found

    def _rp_wrapped(self) -> WrappedModel:
        if "devices" not in self._rp_options and self.args.world_size > 1 and (share := own_devices()):
            self._rp_options["devices"] = share
        if self.args.torch_compile:
            self._rp_options["compile"] = compile_options(self.args)
        mesh: DeviceMesh | None = None
        if (size := self.args.world_size) > 1:  # the optimizer state is sharded if the optimizer allows it
            makes_it = type(self).create_optimizer is PipelineTrainer.create_optimizer and self.optimizer is None
            kind = str(getattr(self.args.optim, "value", self.args.optim))
            is_known = getattr(self, "optimizer_cls_and_kwargs", None) is None and kind in _ELEMENTWISE
            mesh = init_device_mesh("cpu", (size,) if makes_it and is_known else (size, 1))
        wrap = functools.partial(wrap_model_to_roundpipe, self.model, model_run_config=self._rp_config, mesh=mesh)
        if "example" in self._rp_options:
            return wrap(**self._rp_options)
        config = getattr(self.model, "config", None)
        reads_text = getattr(self.model, "main_input_name", "input_ids") == "input_ids"
        if reads_text and not any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")):
            try:
                return wrap(**self._rp_options)
            except CutError as error:  # models for multiple choice do not run on rows of tokens
                if error.reason != "example" or self._rp_example() is None:
                    raise
        return wrap(example=self._rp_example(), **self._rp_options)

    def _rp_example(self) -> Kwargs | None:
        data = self.train_dataset
        if not hasattr(data, "__getitem__"):
            return None
        collate = self._get_collator_with_removed_columns(self.data_collator)
        return dict(collate([data[0], data[min(1, len(data) - 1)]]))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which must leave batches on the host, because the pipeline copies them to devices."""
        check_arguments(self.args)
        # stages already recompute their activations
        self.args.activation_checkpointing = self.args.gradient_checkpointing = False
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # otherwise the Trainer multiplies the batch size
        super().create_accelerator_and_postprocess()
        check_precision(self.accelerator.mixed_precision)
        self.accelerator.device_placement = False
        self._rp_plain_clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._rp_norm
        if self.args.world_size > 1:
            # a pipeline sums gradients over processes, but DDP takes their mean
            self._rp_plain_backward = self.accelerator.backward
            self.accelerator.backward = self._rp_backward
        # the order of the sum would depend on the number of processes if gradients were accumulated in each process
        self.accelerator.no_sync = lambda model=None: contextlib.nullcontext()

    def _rp_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._rp_plain_backward(loss / self.args.world_size, **kwargs)

    def _rp_norm(self, *args: Any, **options: Any) -> torch.Tensor | None:
        """Clip gradients and return their norm; return ``None`` if the backward has already updated the parameters."""
        is_gone = self.pipeline._rp_options.update == "in_backward"
        return None if is_gone else self._rp_clip_grad_norm(*args, **options)

    def _rp_clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients as accelerate does; with ``replicas``, bitwise equally for any number of processes."""
        if not self._rp_has_groups():
            clipped: torch.Tensor = self._rp_plain_clip(parameters, max_norm, norm_type)
            return clipped
        return self.pipeline.clip_grad_norm_(max_norm, norm_type)

    def _rp_has_groups(self) -> bool:
        return self.pipeline._rp_options.has_groups

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, because the model stays on the host."""

    def _prepare_input(self, data: Any) -> Any:
        return data

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> WrappedModel:
        return self.pipeline

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Return the autocast context of ``bf16=True``, since accelerate adds autocast to models, not to pipelines."""
        if self.accelerator.mixed_precision != "bf16":
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind in sorted({"cpu"} | {device.torch_device.type for device in self.pipeline.devices}):
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        return stack

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer for the parameters that the pipeline gives to optimizers, such as master weights."""
        pipeline, own = self.pipeline, self.model
        try:
            self.model = pipeline  # before transformers 5, `create_optimizer` takes no model
            with OptimizerCtx():
                made: torch.optim.Optimizer = super().create_optimizer()
        finally:
            self.model = own
        if type(made).__module__.startswith("bitsandbytes"):
            given = getattr(self, "optimizer_cls_and_kwargs", None)
            kind, options = given or self.get_optimizer_cls_and_kwargs(self.args, own)
            check_kernels(kind, options, has_copies="optim_dtype" in self._rp_options)
        if pipeline._rp_options.update == "in_backward":
            for name, most in (("max_grad_norm", 0), ("gradient_accumulation_steps", 1)):
                if (found := getattr(self.args, name) or 0) > most:
                    raise ConfigError(
                        f'RoundPipeTrainer: update="in_backward" updates weights during each backward, but '
                        f"{name}={found} needs all gradients first. Give TrainingArguments({name}={most}), or keep "
                        'gradients: RoundPipeTrainer(..., update="in_place").'
                    )
            pipeline.step_with(made)
        return made

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with OptimizerCtx():  # the loop clips the gradients of `parameters()` of the pipeline
            result = super()._inner_training_loop(*args, **kwargs)
        self.pipeline.synchronize()
        return result

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._rp_pipeline is not None:
            self._rp_pipeline.synchronize()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, pipeline = pathlib.Path(output_dir), self.pipeline
        if _saves_by_name(pipeline):
            targets = optimizer_targets(pipeline)
            ranks = ranks_of(pipeline, targets)
            home = pathlib.Path(ranks.exchange(str(folder))[0])  # all processes write into the folder of the first one

            def check_shared() -> None:
                if not home.is_dir():
                    raise CheckpointError(
                        f"{home.parent.parent} is not the same folder on all machines. Train into a folder that all "
                        "machines mount:\n    TrainingArguments(output_dir=...)"
                    )

            ranks.together(check_shared)
            values = {**collect_progress(pipeline), "optimizers": [named_state(self._rp_own_optimizer(), targets)]}
            write_values(home, _PROGRESS, values, ranks=ranks)
            if self.args.should_save and self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            return
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_values(folder, _PROGRESS, collect_progress(pipeline))

    def _rp_own_optimizer(self) -> torch.optim.Optimizer:
        found: Any = self.optimizer
        own: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.pipeline.host != HOST_IN_MEMORY and load_weights(pathlib.Path(resume_from_checkpoint), self.model):
            return
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
        """Load weights whose names in the checkpoint differ from their names in the model, such as weights of experts.

        The Trainer only warns about such weights: https://github.com/huggingface/transformers/issues/43701
        """
        if self._rp_is_converted:
            with generator_kept():
                loaded, info = type(self.model).from_pretrained(
                    folder, config=self.model.config, dtype="auto", output_loading_info=True
                )
            if missing := sorted(info["missing_keys"]):
                model, first = type(self.model).__name__, missing[0]
                raise ConfigError(
                    f"{folder} is for a different model: it lacks {len(missing)} weights of {model}, like {first}."
                )
            self.model.load_state_dict(loaded.state_dict())
            self._rp_is_converted = False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, pipeline, optimizer = pathlib.Path(checkpoint), self.pipeline, self._rp_own_optimizer()
        if _has_shards(folder):
            stored = read_values(folder, _PROGRESS, targets=optimizer_targets(pipeline))
            check_optimizer(optimizer, stored["optimizers"][0], optimizer_targets(pipeline))
            restore_progress(pipeline, stored)
            restore_optimizer(optimizer, stored["optimizers"][0], optimizer_targets(pipeline))
        else:
            if by_name := _saves_by_name(pipeline) and (folder / OPTIMIZER_NAME).is_file():
                _load_whole(folder / OPTIMIZER_NAME, optimizer)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
            if (folder / f"{_PROGRESS}.json").exists():  # which a checkpoint of a plain Trainer lacks
                restore_progress(pipeline, read_values(folder, _PROGRESS, targets=optimizer_targets(pipeline)))
            if not by_name:
                return
        if (folder / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))


def newest_whole(run: pathlib.Path) -> pathlib.Path | None:
    """Return the undamaged checkpoint with the most steps; warn about damaged checkpoints with more steps."""
    if run.is_dir():
        with contextlib.suppress(CheckpointError, OSError), folders.only_writer(run):  # another process may be writing
            _settle(run)
    errors = []
    for path in sorted(_checkpoints(run), key=folders.step_of, reverse=True):
        try:
            if (path / folders.MANIFEST).exists():
                folders.verify(path)
            elif not _is_whole(path):
                raise DamagedCheckpointError(f"{path}: {_STATE}, which is written last, is missing or truncated.")
        except DamagedCheckpointError as error:
            errors.append(str(error))
            warn(f"A checkpoint is incomplete, so the previous one is tried. {error}", CheckpointWarning)
        else:
            return path
    if errors:
        raise DamagedCheckpointError("No checkpoint is complete:\n    " + "\n    ".join(errors))
    return None


def _settle(run: pathlib.Path) -> None:
    """Move the complete checkpoints of a killed process to their final folders, and remove its other checkpoints."""
    for half in sorted(run.glob(".checkpoint-*.writing/checkpoint-*")):
        if folders.is_complete(half) and not (run / half.name).exists():
            half.rename(run / half.name)
    folders.remove_leftovers(run)


def remove_all_but(run: pathlib.Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints until ``limit`` are left, but never the newest or the best checkpoint."""
    # limit: number of checkpoints to keep; `None` and 0 keep all
    if not limit or limit < 0:
        return
    ages = {path: (path.stat().st_mtime_ns, folders.step_of(path)) for path in _checkpoints(run)}
    newest_first = sorted(ages, key=lambda path: ages[path], reverse=True)
    whole = [path for path in newest_first if _is_whole(path)]
    kept = whole[:1] + [path for path in whole[1:] if best is not None and path == pathlib.Path(best)]
    kept += [path for path in whole if path not in kept][: max(0, limit - len(kept))]
    for path in newest_first:
        if path not in kept:
            folders.remove_checkpoint(path)


def _checkpoints(run: pathlib.Path) -> list[pathlib.Path]:
    inside = run.iterdir() if run.is_dir() else ()
    return [path for path in inside if _NAME.fullmatch(path.name) and path.is_dir()]


def _is_whole(path: pathlib.Path) -> bool:
    """Return whether all files of a checkpoint exist, without reading their contents."""
    if (path / folders.MANIFEST).exists():
        return folders.is_complete(path)
    try:
        read_document(path / _STATE, dict[str, Any], failure=DamagedCheckpointError, finite=False)
    except (OSError, DamagedCheckpointError):
        return False
    return not (path / _SENTINEL).exists()


# Optimizers that update each element separately, so that a process can step a part of a parameter.
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Elements of a trial parameter; moments of fewer than 4,096 elements have 32 bits, even in 8-bit optimizers.
_WITH_8_BITS = 8192
# Reason why a training argument is not supported, and what to write instead, by the name of the argument.
_UNSUPPORTED = {
    "fp16_full_eval": "it would move the model to the accelerator. Load the model with dtype=torch.float16",
    "bf16_full_eval": "it would move the model to the accelerator. Load the model with dtype=torch.bfloat16",
    "auto_find_batch_size": "the memory of a device depends on the microbatch. Give microbatches= a larger number",
    **dict.fromkeys(
        ("fsdp", "deepspeed", "parallelism_config"), "a pipeline has its own devices and ranks. Leave it out"
    ),
}


def check_arguments(args: Any) -> None:
    for name, reason in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise ConfigError(f"RoundPipeTrainer: {name}={getattr(args, name)!r} is not supported: {reason}.")
    if args.torch_compile:
        check_compile_options(compile_options(args))
    if args.fp16:
        check_precision("fp16")
    if args.world_size > 1 and "gloo" not in torch.distributed.get_backend_config():
        raise ConfigError(
            f"RoundPipeTrainer: {args.world_size} processes exchange gradients in CPU memory, but their backend is "
            f"{torch.distributed.get_backend_config()!r}. Choose a backend that includes the CPU:\n"
            '    TrainingArguments(..., ddp_backend="cpu:gloo,cuda:nccl")  # "gloo" where nothing else needs nccl'
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise ConfigError(
            "RoundPipeTrainer: dispatch_batches=True is not supported: it would put batches on the accelerator. Leave "
            "it out of accelerator_config."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise ConfigError(
            f"RoundPipeTrainer: optim={optimizer!r} updates weights inside the backward pass, before their gradients "
            'have reached the host. Use optim="adamw_torch".'
        )


def compile_options(args: Any) -> dict[str, str]:
    found = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in found.items() if value is not None}


def check_kernels(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], *, has_copies: bool) -> None:
    """Check that a bitsandbytes optimizer can update parameters on the host, by a step on a small parameter."""
    # has_copies: whether the optimizer works on copies of the parameters, because of `optim_dtype`
    if has_copies and options.get("optim_bits") == 8:
        raise ConfigError(
            "RoundPipeTrainer: 8-bit optimizers cannot be combined with optim_dtype. The Trainer gives 32-bit states "
            'to embeddings of the model, but not to their copies in optim_dtype. Use optim="adamw_torch"; its state '
            "needs no device memory."
        )
    parameter = nn.Parameter(torch.zeros(_WITH_8_BITS))
    parameter.grad = torch.zeros_like(parameter)

    def refused(error: Exception) -> ConfigError:
        return ConfigError(
            f"RoundPipeTrainer: {kind.__module__}.{kind.__name__} cannot update parameters in CPU memory, where a "
            f'pipeline keeps them ({type(error).__name__}: {str(error)[:120]}). Use optim="adamw_torch"; its state '
            "needs no device memory."
        )

    with raised_as(refused):  # a release may raise any error for a missing kernel
        kind([parameter], **options).step()


def check_precision(precision: str) -> None:
    """Raise an error for fp16 mixed precision: its loss scale is on a device, but gradients are in CPU memory."""
    if precision not in ("no", "bf16"):
        raise ConfigError(
            f"RoundPipeTrainer: mixed precision {precision!r} is not supported. Use bf16=True; or load the model with "
            "dtype=torch.bfloat16 and give optim_dtype=torch.float32."
        )


# A checkpoint also has the state of the pipeline, whole or in shards of several processes:
#
#     optimizer.pt                       the optimizer of one process, or of a mesh without shards
#     roundpipe.json, .safetensors       number of runs, for seeds; master weights; with shards or a disk, also the
#                                        optimizer by name, written and read one tensor after the other
#     shards/                            the rows of each of several processes, readable by any number of processes

_PROGRESS = "roundpipe"  # name of the files that a plain Trainer does not write


def _saves_by_name(pipeline: RoundPipe) -> bool:
    """Report whether optimizer state is saved by parameter name, because it is sharded or may not fit into memory."""
    return pipeline.ranks.num_shards > 1 or pipeline.host != HOST_IN_MEMORY


def _has_shards(folder: pathlib.Path) -> bool:
    file = folder / f"{_PROGRESS}.json"
    return file.exists() and "optimizers" in read_document(file, dict[str, Any], failure=DamagedCheckpointError)


def _load_whole(file: pathlib.Path, optimizer: torch.optim.Optimizer) -> None:
    """Load this process's shard of an optimizer state that was saved without shards."""
    stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    held: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
    numbers = [group["params"] for group in stored["param_groups"]]
    if [len(group) for group in numbers] != [len(group) for group in held]:
        raise CheckpointError(f"{file} is for a different optimizer: its groups have different numbers of parameters.")
    for number, target in ((n, t) for ns, ts in zip(numbers, held, strict=True) for n, t in zip(ns, ts, strict=True)):
        state: dict[str, Any] = stored["state"].get(number, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == target.numel():
                state[key] = cut_like(value, target)
    optimizer.load_state_dict(stored)
    for target in (target for group in held for target in group):
        hold_on_disk(optimizer, target)
