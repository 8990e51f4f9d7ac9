"""The programs that are measured: this runtime, and what else trains a model with help of the host.

Everyone trains the weights of ``make_model`` in bfloat16 on the same tokens with fused AdamW and PyTorch's attention,
recomputes the activations of each layer, and clips no gradient.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.gpu.rows import Row, batch, make_model

__all__ = ["COMPILED", "CUDA_ONLY", "NEEDS", "PROGRAMS", "Program", "missing"]

LEARNING_RATE = 1e-4


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that is ready to train."""

    model: nn.Module
    accumulate: Callable[[], float]  # forward and backward of all microbatches; the loss
    update: Callable[[], object]  # step of the optimizer, after which gradients are zero
    finish: Callable[[], object] = _nothing  # waits for a step that runs next to the caller


# -- this runtime, and the one whose interface it has ------------------------------------------------------------------


def _pipeline(row: Row, device: torch.device, *, is_async: Literal[False, True, "exact"]) -> Program:
    from roundpipe_runtime import OptimizerCtx, RoundPipeRunConfig, wrap_model_to_roundpipe

    model, ids = make_model(row, device), batch(row)
    pipe = wrap_model_to_roundpipe(
        model,
        model_run_config=RoundPipeRunConfig(num_microbatch=row.microbatches, recompute_grain=row.grain),
        optim_dtype=_master(row),
        devices="virtual:1" if device.type == "cpu" else [device],
        check=False,  # a cut is compared with the model in tests
        lower_threshold=0,
    )
    with OptimizerCtx():
        optimizer = _adamw(pipe)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Program(
        model,
        lambda: float(pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})),
        lambda: pipe.step(step, is_async=is_async),
        pipe.synchronize,
    )


def _ours(row: Row, device: torch.device) -> Program:
    return _pipeline(row, device, is_async=False)


def _ours_exact(row: Row, device: torch.device) -> Program:
    return _pipeline(row, device, is_async="exact")


def _ours_async(row: Row, device: torch.device) -> Program:
    return _pipeline(row, device, is_async=True)


def _roundpipe(row: Row, device: torch.device) -> Program:
    """RoundPipe 0.1.1, whose steps are asynchronous by default; there a loss is a sum over microbatches."""
    runtime = importlib.import_module("roundpipe")
    model, ids = make_model(row, device), batch(row)
    config = runtime.RoundPipeRunConfig(num_microbatch=row.microbatches, recompute_grain=row.grain)
    pipe = runtime.wrap_model_to_roundpipe(model, model_run_config=config, optim_dtype=_master(row))
    with runtime.OptimizerCtx():
        optimizer = _adamw(pipe)

    def accumulate() -> float:
        return float(
            pipe.forward_backward(
                input_kwargs={"input_ids": ids, "labels": ids},
                loss_fn=lambda outputs, _: outputs.loss / row.microbatches,
            )
        )

    return Program(
        model,
        accumulate,
        lambda: pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True),
        pipe.synchronize,
    )


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _microbatches(row: Row, device: torch.device) -> list[torch.Tensor]:
    return list(batch(row).to(device).chunk(row.microbatches))


def _plain(
    row: Row,
    device: torch.device,
    model: nn.Module,
    update: Callable[[], object],
    *,
    cast: bool = False,
) -> Program:
    """A loop over microbatches. With ``cast``, weights in float32 are used in bfloat16."""
    parts = _microbatches(row, device)

    def accumulate() -> float:
        total = torch.zeros((), device=device)
        for ids in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=cast):
                loss = model(input_ids=ids, labels=ids).loss / len(parts)
            loss.backward()
            total += loss.detach()
        return float(total)

    return Program(model, accumulate, update)


def _checkpointed(row: Row, device: torch.device) -> nn.Module:
    model = make_model(row, device).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _resident(row: Row, device: torch.device) -> Program:
    """Everything stays on the device, with master weights in float32 where there are some."""
    model = _checkpointed(row, device)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    master = _master(row)
    if master is None or all(weight.dtype == master for weight in weights):
        optimizer = _adamw(model, device)
        return _plain(row, device, model, lambda: (optimizer.step(), optimizer.zero_grad()))
    masters = [nn.Parameter(weight.detach().to(master)) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=_is_fused(device))

    def update() -> None:
        for weight, copy in zip(weights, masters, strict=True):
            copy.grad = weight.grad.to(copy.dtype)
            weight.grad = None
        optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(weights, masters, strict=True):
                weight.copy_(copy)
                copy.grad = None

    return _plain(row, device, model, update)


def _fsdp(row: Row, device: torch.device) -> Program:
    """Weights, gradients and optimizer on the host; each layer is on the device while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.distributed.init_process_group(backend, init_method=f"file://{file.name}2", rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    model = _checkpointed(row, device)
    policy: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
    if _master(row) is not None:  # on the host, so that the device has no float32 copy of all layers at once
        model = model.to("cpu").float()
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer.to(device), **policy)
    fully_shard(model.to(device), **policy)
    optimizer = _adamw(model)
    return _plain(row, device, model, lambda: (optimizer.step(), optimizer.zero_grad()))


def _torchao(row: Row, device: torch.device) -> Program:
    """Weights and gradients stay on the device, the optimizer is on the host."""
    from torchao.optim import CPUOffloadOptimizer

    model = _checkpointed(row, device)
    is_wide = _master(row) is not None
    if is_wide:
        model = model.float()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = CPUOffloadOptimizer(weights, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return _plain(row, device, model, lambda: (optimizer.step(), optimizer.zero_grad()), cast=is_wide)


def _deepspeed(row: Row, device: torch.device) -> Program:
    """ZeRO-3 with parameters and optimizer on the host, in pinned memory; its own Adam."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = make_model(row, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    narrow = _master(row) is None
    options = {"fp32_optimizer_states": False} if narrow else {}
    optimizer = DeepSpeedCPUAdam(weights, lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True, **options)
    on_host = {"device": "cpu", "pin_memory": True}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": row.batch // row.microbatches,
            "gradient_accumulation_steps": row.microbatches,
            "gradient_clipping": 0.0,
            "bf16": {
                "enabled": True,
                **({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if narrow else {}),
            },
            "zero_optimization": {
                "stage": 3,
                "offload_param": on_host,
                "offload_optimizer": on_host,
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
        },
        dist_init_required=True,
    )
    parts = _microbatches(row, engine.device)

    def accumulate() -> float:
        total = 0.0
        for number, ids in enumerate(parts, 1):
            # otherwise it counts calls of step(), and some batch after one without a step would update half-way
            engine.set_gradient_accumulation_boundary(number == len(parts))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)  # which divides it by the number of microbatches
            total += loss.detach() / len(parts)
        return float(total)

    return Program(model, accumulate, engine.step)


# -- all ---------------------------------------------------------------------------------------------------------------


def _master(row: Row) -> torch.dtype | None:
    return torch.float32 if row.states == "float32" else None


def _is_fused(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


def _adamw(model: nn.Module, device: torch.device | None = None) -> torch.optim.Optimizer:
    """AdamW of what trains, fused where its parameters are on the host or on a GPU."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=device is None or _is_fused(device))


PROGRAMS: dict[str, Callable[[Row, torch.device], Program]] = {
    "this runtime": _ours,
    "this runtime, exact": _ours_exact,
    "this runtime, async": _ours_async,
    "PyTorch, resident": _resident,
    "FSDP2, CPU offload": _fsdp,
    "RoundPipe 0.1.1": _roundpipe,
    "DeepSpeed ZeRO-3 offload": _deepspeed,
    "torchao CPU offload": _torchao,
}
# What a program needs next to torch and transformers: the name of a folder that `--wheels` fills, and modules.
NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "RoundPipe 0.1.1": ("roundpipe", ("roundpipe", "beartype", "requests")),
    "DeepSpeed ZeRO-3 offload": ("deepspeed", ("deepspeed", "hjson", "pydantic")),
    "torchao CPU offload": ("torchao", ("torchao",)),
}

# What a program compiles when it is used first, which takes minutes.
COMPILED = {
    "DeepSpeed ZeRO-3 offload": """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):  # there is none of the second kind for CUDA
    if builder := get_accelerator().create_op_builder(name):
        builder.load()
""",
}

# Programs that read their rank and an address from the environment, as a launcher sets them.
LAUNCHED = ("DeepSpeed ZeRO-3 offload",)

CUDA_ONLY = ("RoundPipe 0.1.1", "torchao CPU offload")


def missing(program: str, row: Row, paths: Sequence[str] = ()) -> list[str]:
    """Modules that are not installed here, and that this program needs for this row."""
    # paths: folders in which a process of the program looks in addition
    names = list(NEEDS.get(program, ("", ()))[1])
    names += ["peft"] if row.adapters else []
    names += ["bitsandbytes"] if row.few_bits else []
    return [name for name in names if PathFinder.find_spec(name, [*paths, *sys.path]) is None]
