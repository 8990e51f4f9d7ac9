"""Dequantize the weights of 4-bit and 8-bit checkpoints: GPTQ, AWQ, compressed-tensors, torchao.

To load 4-bit or 8-bit checkpoints, transformers needs libraries that require a GPU and cannot be installed everywhere.
A weight is ``(integer - zero point) * scale`` in float32, from which ``quantize="keep"`` computes the integers again.
"""

# model.layers.0.mlp.up_proj.qweight, .qzeros, .scales  ──>  model.layers.0.mlp.up_proj.weight, in float32

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch

from ...core.files.document import damage_as, read_tensors
from ...errors import ModelSourceError
from .configuration import stated_weights

Tensors = dict[str, torch.Tensor]


class Packing(NamedTuple):
    names: tuple[str, ...]  # name endings of the tensors of one weight; every weight has the first tensor
    unpack: Callable[[Tensors], torch.Tensor]  # computes a weight from these tensors


def packing_of(config: Any, name: str) -> Packing | None:
    """Return how a checkpoint stores quantized weights; ``None`` if there are none in a supported format."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    held: Mapping[str, Any] = stated if isinstance(stated, Mapping) else stated.to_dict()
    method = str(held.get("quant_method") or "").lower().rpartition(".")[2]
    reader = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "torchao": _torchao}.get(method)
    found = None if reader is None else reader(held)
    if not isinstance(found, str):
        return found
    raise ModelSourceError(
        f"{name} is quantized by {method}{found}. Supported are GPTQ in 4 and 8 bits, AWQ in 4 bits (gemm), "
        "compressed-tensors in 4 and 8 bits (pack-quantized) and weight-only torchao (Int8WeightOnlyConfig, "
        "IntxWeightOnlyConfig). Load the model with its quantization library, save it unquantized, and pass its folder."
    )


def unpacked_weights(folder: pathlib.Path, packing: Packing, name: str) -> Tensors:
    """Return all weights of a checkpoint by name; quantized weights are converted to float32."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    named = {file for index in indices for file in stated_weights(index, failure=ModelSourceError).values()}
    files = sorted(folder / file for file in named) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelSourceError(f"{name} is quantized, but lacks safetensors files. Convert its weights to safetensors.")
    held: Tensors = {}
    for file in files:
        held.update(read_tensors(file, failure=ModelSourceError))
    main = f".{packing.names[0]}"
    found: Tensors = {}
    for key in [key for key in held if key.endswith(main)]:
        layer = key.removesuffix(main)
        parts = {part: held.pop(f"{layer}.{part}") for part in packing.names if f"{layer}.{part}" in held}
        with damage_as(ModelSourceError, f"{layer} of {name}"):
            found[f"{layer}.weight"] = packing.unpack(parts)
    if not found:
        raise ModelSourceError(f"{name} has no quantized weights (*{main}). Delete quantization_config in config.json.")
    return {**held, **found}


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 numbers into integers of ``bits`` bits along a new last axis, the lowest bits first."""
    if packed.dtype is not torch.int32:
        raise TypeError(f"expected packed integers of int32, found {packed.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields: torch.Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return fields


def _gptq(stated: Mapping[str, Any]) -> Packing | str:
    bits, form = stated.get("bits"), stated.get("checkpoint_format") or "gptq"
    if bits not in (4, 8) or form not in ("gptq", "gptq_v2"):
        return f" in {bits} bits ({form})"
    added = 1 if form == "gptq" else 0  # this format stores zero points minus one

    def unpack(parts: Tensors) -> torch.Tensor:
        numbers = _fields(parts["qweight"], bits).transpose(1, 2).flatten(0, 1)  # packed along the inputs
        zeros, scales = _fields(parts["qzeros"], bits).flatten(1), parts["scales"].float()
        if added and bool((zeros == 2**bits - 1).any()):  # libraries disagree on the overflow
            raise ValueError("a zero point is out of range")
        groups = len(scales)
        each = parts.get("g_idx", torch.arange(len(numbers)) // -(-len(numbers) // groups)).long()
        return ((numbers - zeros[each] - added) * scales[each]).T.contiguous()

    return Packing(("qweight", "qzeros", "scales", "g_idx"), unpack)


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # in which AWQ packs eight columns into one integer, for its kernels


def _awq(stated: Mapping[str, Any]) -> Packing | str:
    bits, form = stated.get("bits", stated.get("w_bit")), str(stated.get("version") or "gemm").lower()
    if bits != 4 or form.rpartition(".")[2] != "gemm":
        return f" in {bits} bits ({form})"

    def unpack(parts: Tensors) -> torch.Tensor:
        numbers, zeros = (_fields(parts[name], 4)[..., _AWQ_ORDER].flatten(1) for name in ("qweight", "qzeros"))
        scales = parts["scales"].float()
        each = torch.arange(len(numbers)) // (len(numbers) // len(scales))
        return ((numbers - zeros[each]) * scales[each]).T.contiguous()

    return Packing(("qweight", "qzeros", "scales"), unpack)


def _compressed(stated: Mapping[str, Any]) -> Packing | str:
    form, groups = stated.get("format"), stated.get("config_groups") or {}
    kinds = [group.get("weights") or {} for group in groups.values()]
    widths = {kind.get("num_bits") for kind in kinds}
    rounded = any(group.get("input_activations") or group.get("output_activations") for group in groups.values())
    if form != "pack-quantized" or widths not in ({4}, {8}) or any(kind.get("type") != "int" for kind in kinds):
        return f" ({form})"
    if rounded:
        return f" ({form}, with quantized activations)"
    (bits,) = widths

    def unpack(parts: Tensors) -> torch.Tensor:
        rows, columns = parts["weight_shape"].tolist()
        scales, half = parts["weight_scale"].float(), 2 ** (bits - 1)
        numbers = _fields(parts["weight_packed"], bits).flatten(1)[:, :columns]
        zeros = torch.full_like(scales, half, dtype=torch.int32)
        if "weight_zero_point" in parts:
            zeros = _fields(parts["weight_zero_point"], bits).transpose(1, 2).flatten(0, 1)[:rows]
        each = parts.get("weight_g_idx", torch.arange(columns) // -(-columns // scales.shape[1])).long()
        return (numbers - zeros[:, each]) * scales[:, each]

    names = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"
    return Packing(names, unpack)


# torchao configurations that leave activations unquantized, and those with one configuration per layer name
_OF_TORCHAO = {"Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "FqnToConfig", "ModuleFqnToConfig"}


def _torchao(stated: Mapping[str, Any]) -> Packing | str:
    others = sorted(set(_configs(stated.get("quant_type"))) - _OF_TORCHAO)
    if others or not list(_configs(stated.get("quant_type"))):
        return f" ({', '.join(others) or 'in a form that its configuration does not name'})"

    def unpack(parts: Tensors) -> torch.Tensor:
        numbers, scales = parts["_weight_qdata"], parts["_weight_scale"].float()
        if numbers.dtype is not torch.int8 or scales.dim() != 2 or numbers.shape[1] % scales.shape[1]:
            raise TypeError(f"expected int8 weights in blocks, found {numbers.dtype} of shape {tuple(numbers.shape)}")
        zeros = parts.get("_weight_zero_point", torch.zeros_like(scales))
        blocks = numbers.float().unflatten(1, (scales.shape[1], -1))
        weights: torch.Tensor = ((blocks - zeros.float()[..., None]) * scales[..., None]).flatten(1)
        return weights

    return Packing(("_weight_qdata", "_weight_scale", "_weight_zero_point"), unpack)


def _configs(stated: Any) -> Iterator[str]:
    if not isinstance(stated, Mapping):
        return
    name = stated.get("_type")
    if isinstance(name, str) and name.endswith("Config"):
        yield name
    for inner in stated.values():
        yield from _configs(inner)


UnmatchedWeights = Literal["refuse", "unused", "random"]
"""If the weights of a folder do not match the model class, ``"refuse"`` raises an error that names the weights,
``"unused"`` ignores weights that the class lacks, and ``"random"`` also draws weights that the folder lacks."""

_NAMED = 5  # largest number of weights that a message names


@dataclasses.dataclass(frozen=True)
class KeyDifferences:
    missing: tuple[str, ...] = ()  # names of weights that the folder lacks
    unused: tuple[str, ...] = ()  # names of weights that the class does not have
    # names of weights that have another shape in the folder, with that shape and the class's
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def check(
        self, name: str, kind: str, choice: UnmatchedWeights, failure: type[Exception], *, option: str = ""
    ) -> None:
        # option: how the user writes the choice, such as `"--unmatched-weights {}"`; by default in Python and on the
        # command line
        typed = option or 'unmatched_weights="{0}" (--unmatched-weights {0})'
        own = f"Pass a folder with {kind} weights, or set architectures in config.json to the class of the weights."
        on_purpose = f"To use random weights on purpose: {typed.format('random')}"
        if self.missing and choice != "random":
            raise failure(f"{name} lacks {_weights(self.missing)} of {kind}, which would be random. {own} {on_purpose}")
        if self.reshaped and choice != "random":
            shown = [f"{key} has shape {stored}, but {kind} takes {wanted}" for key, stored, wanted in self.reshaped]
            raise failure(f"{name}: {_some(shown, '; ')}. Weights that do not fit would be random. {own} {on_purpose}")
        if self.unused and choice == "refuse":
            raise failure(
                f"{name} holds {_weights(self.unused)}, which {kind} does not have: heads of other tasks, as in "
                f"many published folders, or weights of another class. {own} To leave them out on purpose:\n"
                f"    {typed.format('unused')}"
            )

    def remarks(self) -> tuple[str, ...]:
        random, made = [*self.missing, *(name for name, _, _ in self.reshaped)], []
        if random:
            made.append(f"weights with random values, because the folder does not contain them: {_some(random)}.")
        if self.unused:
            made.append(f"weights that were left out, because the class does not have them: {_some(self.unused)}.")
        return tuple(made)


def load_stored(
    kind: Any,
    folder: Any,
    name: str,
    *,
    choice: UnmatchedWeights,
    failure: type[Exception],
    option: str = "",
    seed: int = 0,
    **options: Any,
) -> tuple[Any, KeyDifferences]:
    # choice: what to do if weights do not match the class; options: further arguments of `from_pretrained`
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        # ignore_mismatched_sizes: weights with other shapes are listed in `found` instead of an error
        loaded, found = kind.from_pretrained(folder, **options, ignore_mismatched_sizes=True, output_loading_info=True)
    reshaped = sorted((key, tuple(stored), tuple(wanted)) for key, stored, wanted in found["mismatched_keys"])
    missing = sorted(set(found["missing_keys"]) - {key for key, _, _ in reshaped})
    differences = KeyDifferences(tuple(missing), tuple(sorted(found["unexpected_keys"])), tuple(reshaped))
    differences.check(name, type(loaded).__qualname__, choice, failure, option=option)
    return loaded, differences


def _weights(names: Collection[str]) -> str:
    return f"{'the weight' if len(names) == 1 else f'{len(names)} weights,'} {_some(names)}"


def _some(names: Iterable[str], between: str = ", ") -> str:
    shown = list(names)
    left = len(shown) - _NAMED
    return between.join(shown[:_NAMED]) + (f" and {left} more" if left > 0 else "")
