"""Check training arguments for those that a pipeline does not support, before anything runs."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from yobx_flatten.errors.failures import raised_as

from ...engine.compiled import check_compile_options
from ...errors import ConfigError

# Smaller parameters than 4,096 numbers have moments in 32 bits, also with optimizers of 8 bits.
_WITH_8_BITS = 8192

# field of TrainingArguments -> why it is not supported, and what to write instead
_UNSUPPORTED = {
    "fp16_full_eval": "it would move the model to the accelerator. Load the model with dtype=torch.float16",
    "bf16_full_eval": "it would move the model to the accelerator. Load the model with dtype=torch.bfloat16",
    "auto_find_batch_size": "the memory of a device depends on the microbatch. Give microbatches= a larger number",
    "fsdp": "a pipeline has its own devices and ranks. Leave it out",
    "deepspeed": "a pipeline has its own devices and ranks. Leave it out",
    "parallelism_config": "a pipeline has its own devices and ranks. Leave it out",
}


def check_arguments(args: Any) -> None:
    """Check training arguments for those that a pipeline does not support."""
    for name, reason in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise ConfigError(f"RoundPipeTrainer: {name}={getattr(args, name)!r} is not supported: {reason}.")
    if args.torch_compile:
        check_compile_options(compile_options(args))
    if args.fp16:
        check_precision("fp16")
    if args.world_size > 1 and "gloo" not in torch.distributed.get_backend_config():
        raise ConfigError(
            f"RoundPipeTrainer: {args.world_size} processes exchange gradients, which are on the host, and their "
            f"backend is {torch.distributed.get_backend_config()!r}. Give them one for the host:\n"
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
            f"RoundPipeTrainer: optim={optimizer!r} steps within the backward of a layer, which is over on the device "
            'before the host has the gradient. Use optim="adamw_torch".'
        )


def compile_options(args: Any) -> dict[str, str]:
    """Return the keyword arguments of ``torch.compile`` that training arguments state."""
    found = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in found.items() if value is not None}


def check_kernels(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], *, has_copies: bool) -> None:
    """Check that an optimizer of bitsandbytes steps parameters on the host, by a step of a small one."""
    # has_copies: whether it works on copies of the parameters, because of `optim_dtype`
    if has_copies and options.get("optim_bits") == 8:
        raise ConfigError(
            "RoundPipeTrainer: optim_dtype makes copies of the parameters for the optimizer, and the Trainer asks "
            "bitsandbytes for 32 bits of the embeddings themselves, which the optimizer does not have. Use "
            'optim="adamw_torch"; its state costs the device nothing.'
        )
    parameter = nn.Parameter(torch.zeros(_WITH_8_BITS))
    parameter.grad = torch.zeros_like(parameter)

    def refused(error: Exception) -> ConfigError:
        return ConfigError(
            f"RoundPipeTrainer: {kind.__module__}.{kind.__name__} does not step parameters on the host, where those of "
            f"a pipeline are ({type(error).__name__}: {str(error)[:120]}). "
            'Use optim="adamw_torch"; its state costs the device nothing.'
        )

    with raised_as(refused):  # a release raises what it likes for a kernel that it does not have
        kind([parameter], **options).step()


def check_precision(precision: str) -> None:
    """Check that mixed precision does not scale gradients: they are on the host, the scale is on the accelerator."""
    # precision: mixed precision of the accelerator, which an `accelerate` configuration can also set
    if precision not in ("no", "bf16"):
        raise ConfigError(
            f"RoundPipeTrainer: mixed precision {precision!r} is not supported. Use bf16=True; or load the model with "
            "dtype=torch.bfloat16 and give optim_dtype=torch.float32."
        )


def check_overrides(kind: type[Trainer]) -> None:
    """Check that a class that is combined with RoundPipeTrainer overrides nothing that a pipeline does otherwise."""
    mro = kind.__mro__[: kind.__mro__.index(Trainer)]
    own = [base for base in mro if base.__module__.startswith("roundpipe_runtime.")]
    replaced = {
        name
        for base in own
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and hasattr(Trainer, name) and "__class__" not in _free_names(value)
    }
    for base in mro[mro.index(own[-1]) + 1 :]:
        hidden = sorted(replaced.intersection(vars(base))) if not base.__module__.startswith("transformers.") else []
        if hidden:
            names = ", ".join(f"{base.__name__}.{name}" for name in hidden)
            raise ConfigError(
                f"{kind.__name__}: {names} would never be called, as a pipeline does that in another way, in a class "
                f"that comes before. Derive it from the Trainer of the pipeline, if it is to be called instead:\n"
                f"    class {base.__name__}(RoundPipeTrainer): ..."
            )


def _free_names(function: types.FunctionType) -> tuple[str, ...]:
    """Names that a function has from around it: ``__class__`` is among them if it calls ``super()``."""
    return function.__code__.co_freevars
