"""Quantize the linear layers of a model, one weight at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from yobx_flatten.errors import require

from ..device.composite import is_composite
from ..device.disk import return_freed
from ..errors import ConfigError
from .cutting.call_log import candidates

FewBits: TypeAlias = Literal["nf4", "fp4", "int8"]
"""Quantized formats: ``"nf4"`` and ``"fp4"`` (bitsandbytes, 4 bits with 8-bit scales), and ``"int8"`` (torchao)."""

_BLOCK = 64  # weights per scale, as in QLoRA (Dettmers et al., 2023, arXiv 2305.14314)


def quantize_frozen(
    model: nn.Module, kind: FewBits = "nf4", *, weights: Callable[[str], torch.Tensor] | None = None
) -> nn.Module:
    """Quantize the linear layers of a model in place, and freeze all of its weights.

    Only linear layers inside a list of modules are quantized; embeddings, norms and the head stay unchanged. Weights of
    a model on ``meta`` are read one after the other, and each weight is quantized before the next weight is read.

    Args:
        model: Hugging Face model, or any module that keeps its layers in an ``nn.ModuleList``.
        kind: ``"nf4"`` or ``"fp4"``, 4 bits of bitsandbytes, or ``"int8"``, 8 bits of torchao.
        weights: function from the name of a weight on ``meta`` to its values; without it, the weights stay on ``meta``.

    Returns:
        The model itself.

    Raises:
        ConfigError: ``kind`` is unknown; a tensor from ``weights`` has a different shape; the model has no linear layer
            in a list; or a buffer on ``meta`` is not in the state dict.
        MissingDependencyError: bitsandbytes or torchao is not installed.

    >>> model = nn.Sequential(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]))
    >>> quantize_frozen(model, "int2")
    Traceback (most recent call last):
        ...
    roundpipe_runtime.errors.ConfigError: quantize_frozen: kind must be one of nf4, fp4, int8, found 'int2'.
    """
    if kind not in get_args(FewBits):
        raise ConfigError(f"quantize_frozen: kind must be one of {', '.join(get_args(FewBits))}, found {kind!r}.")
    require("torchao" if kind == "int8" else "bitsandbytes", purpose=kind, extra="quantized")
    if not (chosen := dict(linear_layers(model))):
        raise ConfigError(f"quantize_frozen: {type(model).__name__} has no linear layer in a ModuleList or Sequential.")
    buffers = [(path, one) for path, one in model.named_buffers(remove_duplicate=False) if one.is_meta]
    if weights and (unread := {path for path, _ in buffers}.difference(model.state_dict())):
        raise ConfigError(
            f"quantize_frozen: the buffer {min(unread)!r} is on meta, but not in the state dict, so the function "
            "passed as weights= cannot load it. Keep buffers in memory when the model is made:\n"
            "    with accelerate.init_empty_weights(): model = AutoModelForCausalLM.from_config(config)"
        )
    model.requires_grad_(False)
    read = _Weights(weights)
    inside = set(map(id, chosen.values()))
    for prefix, module in model.named_modules():
        if id(module) not in inside:
            for name, parameter in module._parameters.items():
                module._parameters[name] = read.parameter(f"{prefix}.{name}" if prefix else name, parameter)
    for path, buffer in buffers if weights else ():
        owner, _, last = path.rpartition(".")
        model.get_submodule(owner)._buffers[last] = read.numbers(path, buffer).clone()
    quantize = _eight_bits if kind == "int8" else partial(_four_bits, kind=kind)
    for name, layer in chosen.items():
        made = quantize(layer, read.numbers(f"{name}.weight", layer._parameters["weight"]))
        made._parameters["bias"] = read.parameter(f"{name}.bias", layer._parameters["bias"])
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made.train(layer.training))
        return_freed()  # the quantization of a weight needs more memory than its result
    return model


def count_weights(model: nn.Module) -> int:
    """Return the number of weights of a model, including packed quantized weights.

    >>> count_weights(nn.Linear(3, 2))
    8
    """
    found: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter.numel()
                if isinstance(module, nn.Linear) and is_composite(parameter):
                    found[id(parameter)] = module.in_features * module.out_features
    return sum(found.values())


class _Weights:
    """Reads the values of a model's weights that are on ``meta``; a tied weight is read once."""

    def __init__(self, read: Callable[[str], torch.Tensor] | None) -> None:
        self._read = read
        self._known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def parameter(self, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Load the values of a parameter if it is on ``meta``, and return the parameter."""
        if parameter is None or not parameter.is_meta or self._read is None:
            return parameter
        if id(parameter) not in self._known:
            made = nn.Parameter(self.numbers(name, parameter).clone(), requires_grad=False)
            self._known[id(parameter)] = parameter, made
        return self._known[id(parameter)][1]

    def numbers(self, name: str, parameter: torch.Tensor | None) -> torch.Tensor:
        assert parameter is not None
        if not parameter.is_meta or self._read is None:
            return parameter.detach()
        found = self._read(name).detach()
        if found.shape != parameter.shape:
            raise ConfigError(
                f"quantize_frozen: weights({name!r}) returned shape {tuple(found.shape)}, but the weight has "
                f"shape {tuple(parameter.shape)}."
            )
        return found


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield name and module of each linear layer inside a list of layers, except layers with tied weights."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for found in candidates(model):
        for path, layer in found.layers.items():
            for name, module in layer.named_modules():
                if type(module) is nn.Linear and uses[id(module.weight)] == 1:
                    yield f"{path}.{name}" if name else path, module


def _four_bits(linear: nn.Linear, weight: torch.Tensor, kind: str) -> nn.Linear:
    import bitsandbytes

    how: dict[str, Any] = {"compress_statistics": True, "quant_type": kind}
    numbers, state = bitsandbytes.functional.quantize_4bit(weight.contiguous(), blocksize=_BLOCK, **how)
    made: nn.Linear = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype, device="meta", **how
    )
    made.weight = bitsandbytes.nn.Params4bit(
        numbers, requires_grad=False, quant_state=state, blocksize=_BLOCK, module=made, bnb_quantized=True, **how
    )
    made.quant_state = state
    return made


def _eight_bits(linear: nn.Linear, weight: torch.Tensor) -> nn.Linear:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    around = nn.Sequential(made)
    quantize_(around, Int8WeightOnlyConfig())
    found = around[0]
    assert isinstance(found, nn.Linear)
    return found
