"""Add LoRA adapters to a model, or replace linear layers of a model for quantization-aware training."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from yobx_flatten.errors import require

from ..device.worker import generator_kept
from ..errors import ConfigError, FineTuneError
from ..huggingface.quantize import linear_layers


@dataclasses.dataclass(frozen=True)
class Lora:
    """Settings of low-rank adapters, LoRA (Hu et al., 2021, arXiv 2106.09685).

    Attributes:
        rank: rank of the two matrices of an adapter.
        alpha: numerator of the scale of an adapter, which is ``alpha / rank``.
        targets: suffixes of the names of modules that get an adapter; empty for all linear layers except the head.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Read LoRA settings from a text ``rank[,alpha[,target,...]]``; by default, alpha is twice the rank.

        Raises:
            FineTuneError: the text does not have the form ``rank[,alpha[,target,...]]``.

        >>> Lora.parse("8")
        Lora(rank=8, alpha=16, targets=())
        >>> Lora.parse("4,4,q_proj,v_proj").targets
        ('q_proj', 'v_proj')
        """
        rank, *rest = (part.strip() for part in text.split(","))
        alpha = rest[0] if rest else rank
        if not (rank.isdecimal() and alpha.isdecimal() and int(rank) and int(alpha) and all(rest)):
            raise FineTuneError(
                f"--lora {text}: expected RANK, RANK,ALPHA or RANK,ALPHA,TARGETS: --lora 8   --lora 8,16   --lora "
                "8,16,q_proj,v_proj"
            )
        return cls(int(rank), int(alpha) if rest else 2 * int(rank), tuple(rest[1:]))


def add_lora(model: nn.Module, lora: Lora, *, seed: int = 0) -> nn.Module:
    """Add LoRA adapters to a model, freeze all other weights, and return PEFT's wrapper of the model.

    Args:
        model: Hugging Face model.
        lora: settings of the adapters.
        seed: seed of the adapters' initial weights.

    Returns:
        PEFT's wrapper of the model.

    Raises:
        MissingDependencyError: PEFT is not installed.
        FineTuneError: the model has no module whose name ends with a target.
    """
    require("peft", purpose="add_lora", extra="lora")
    import peft

    check_targets(model, lora.targets)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets) or "all-linear", task_type="CAUSAL_LM"
    )
    with generator_kept(), quiet_peft():
        torch.manual_seed(seed)
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    modules = dict(model.named_modules())
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)}
            raise FineTuneError(
                f"{type(model).__name__} has no module {target}. Its linear layers are {', '.join(sorted(linear))}."
            )


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Context manager that hides harmless warnings of PEFT 0.21."""
    # PEFT reads an attribute of transformers 5.23 by its old name, cannot merge into weights of torchao, and searches
    # for the configuration of a GGUF file in a folder and on the Hub.
    of_gguf = "Could not find a config file|Unable to fetch remote file"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", f"TorchaoLoraLinear was instantiated|{of_gguf}", category=UserWarning)
        yield


AwareBits: TypeAlias = Literal["int4", "int8"]
"""Integer types for quantization-aware training."""

_BLOCK = 32
_LEAST = 2.0**-24  # the smallest number of float16

# Train a model in the integers that are shipped, and save these integers.
#
#     weight (+ B A of LoRA) ──> blocks of 32: integers, and a scale in float16 ──> integers x scales ──> product
#               gradient     <────────────────── as if nothing were rounded ────────────────────────────────┘
#
# The layers of torchao cannot round the sum of weight and adapters. Their scales are float32, so the saved integers
# and float16 scales would differ from those of the training.


@dataclasses.dataclass(frozen=True)
class Grid:
    """A format of quantized weights: integers of ``bits`` bits, with a float16 scale per block of weights."""

    bits: int

    def integers(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rounded weights in blocks, as whole numbers stored in float32, and the scale of each block."""
        blocks = weight.detach().float().unflatten(1, (-1, _BLOCK))
        half = 2 ** (self.bits - 1)
        scales = blocks.abs().amax(2, keepdim=True).div_(half - 0.5).half().float().clamp_min_(_LEAST)
        return (blocks / scales).round_().clamp_(-half, half - 1), scales

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        numbers, scales = self.integers(weight)
        return numbers.mul_(scales).flatten(1).to(weight.dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
        return grid.rounded(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its quantized weight, and trains the unquantized weight or LoRA adapters."""

    def __init__(self, linear: nn.Linear, grid: Grid, lora: Lora | None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.grid = linear.weight, linear.bias, grid
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.train(linear.training)
        if lora is not None:
            self.scaling = lora.alpha / lora.rank
            self.lora_a = nn.Parameter(self.weight.new_empty(lora.rank, self.in_features))
            self.lora_b = nn.Parameter(self.weight.new_zeros(self.out_features, lora.rank))
            nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def merged(self) -> torch.Tensor:
        """Return the weight before rounding, plus its LoRA adapter if there is one."""
        if self.lora_a is None or self.lora_b is None:
            return self.weight
        return torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scaling)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = _Rounded.apply(self.merged(), self.grid)  # type: ignore[no-untyped-call] # of torch
        return nn.functional.linear(input, rounded, self.bias)


def quantize_aware(model: nn.Module, kind: AwareBits = "int4", *, lora: Lora | None = None, seed: int = 0) -> nn.Module:
    """Prepare a model, in place, for quantization-aware training: linear layers round their weights to integers.

    Only linear layers in the model's lists of layers, with a multiple of 32 input features, are replaced. The embedding
    and the head are rounded to 8 bits, and are not trained. The function :func:`save_model` saves the weights of the
    replaced layers as integers with scales. ``export_folder(folder, quantize="keep")`` exports the same integers.

    Args:
        model: Hugging Face causal language model in float32.
        kind: ``"int4"`` or ``"int8"``, the type of the integers. In a row of a weight matrix, 32 weights share a scale.
        lora: settings of LoRA adapters. The adapters are added to the weights before rounding, and only the adapters
            are trained. By default there are no adapters. All weights except embedding and head are then trained.
        seed: seed of the initial adapters.

    Returns:
        The model itself.

    Raises:
        ConfigError: ``kind`` is unknown, a weight is not in float32, or no layer has a multiple of 32 input features.
        FineTuneError: the model has no module whose name ends with a target of ``lora``.
    """
    if kind not in get_args(AwareBits):
        raise ConfigError(f"quantize_aware: kind must be int4 or int8, found {kind!r}.")
    if others := {str(p.dtype).removeprefix("torch.") for p in model.parameters()} - {"float32"}:
        raise ConfigError(
            f"quantize_aware: {type(model).__name__} has weights in {min(others)}, but only float32 can represent "
            "the rounded weights (integers times scales) exactly. Use model.float(), or --dtype float32"
        )
    chosen = {name: layer for name, layer in linear_layers(model) if layer.in_features % _BLOCK == 0}
    if not chosen:
        raise ConfigError(
            f"quantize_aware: {type(model).__name__} has no layers with an nn.Linear whose in_features is a multiple "
            f"of {_BLOCK}. Train without --quantize-aware, and quantize at export: yobx-flatten export --quantize int4"
        )
    targets = () if lora is None else lora.targets
    check_targets(model, targets)
    if lora is not None:
        model.requires_grad_(False)
    with generator_kept(), torch.no_grad():
        torch.manual_seed(seed)
        for name, layer in chosen.items():
            learns = not targets or f".{name}".endswith(tuple(f".{target}" for target in targets))
            made = RoundedLinear(layer, Grid(4 if kind == "int4" else 8), lora if learns else None)
            model.set_submodule(name, made)
        tables = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator] # of transformers
        for weight in {table.weight for table in tables if table is not None}:  # the same tensor if they are tied
            weight.requires_grad_(False)
            if weight.shape[1] % _BLOCK == 0:
                weight.copy_(Grid(8).rounded(weight))
    return model


def rounded_layers(model: nn.Module) -> dict[str, RoundedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, RoundedLinear)}


def packed_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a model's state dict in the format of compressed-tensors, and the quantization configuration."""
    layers, state = rounded_layers(model), model.state_dict()
    for name, layer in layers.items():
        for part in ("weight", "lora_a", "lora_b"):
            state.pop(f"{name}.{part}", None)
        numbers, scales = layer.grid.integers(layer.merged())
        numbers = numbers.flatten(1).add_(2 ** (layer.grid.bits - 1)).to(torch.uint8)
        if layer.grid.bits == 4:
            numbers = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
        state[f"{name}.weight_packed"] = numbers.contiguous().view(torch.int32)
        state[f"{name}.weight_scale"] = scales.squeeze(2).half()
        state[f"{name}.weight_shape"] = torch.tensor(layer.weight.shape)
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    weights = {"num_bits": next(iter(layers.values())).grid.bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": _BLOCK}
    return state, {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [name for name in linear if name not in layers],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def unrounded_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict for a model with plain linear layers: weights plus LoRA adapters, rounded."""
    layers, state = rounded_layers(model), model.state_dict()
    for name, layer in layers.items():
        for part in ("lora_a", "lora_b"):
            state.pop(f"{name}.{part}", None)
        state[f"{name}.weight"] = layer.grid.rounded(layer.merged())
    return state
