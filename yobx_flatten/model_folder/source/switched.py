"""Read LoRA adapters with PEFT; their matrices become inputs of a file."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import FlattenError, InvalidArgumentError, ModelSourceError
from ...errors.failures import raised_as
from ...export.room import Adapter
from ...files.document import damage_as
from ...recipe.aliases import TransformersModel
from ...runners.adapters import FIRST, SECOND
from .adapter import ADAPTER, config_of, injected

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ENDS = (f".{FIRST}.weight", f".{SECOND}.weight")


def check_adapter_name(name: str) -> None:
    """Refuse names that are no names of files."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"adapters: {name!r} is not a name of an adapter. Write letters, digits, _, - and dots: french=FOLDER"
        )


def read_adapters(model: TransformersModel, folders: Mapping[str, Any]) -> list[Adapter]:
    """Read the adapters of a model; the model is as it was afterwards."""
    # folders: by name of the adapter the folder that PEFT wrote
    if getattr(model, "peft_config", None):
        raise InvalidArgumentError(
            f"This {type(model).__qualname__} has adapters in its layers. Pass the model without them, and the folders "
            "that they were saved to as adapters=."
        )
    found = []
    for name, given in folders.items():
        check_adapter_name(name)
        folder = pathlib.Path(given)
        if not (folder / ADAPTER).is_file():
            raise ModelSourceError(
                f"adapters: {folder} holds no {ADAPTER}: it is not a folder of PEFT. Write one with "
                "PeftModel.save_pretrained(folder)."
            )
        _check_kind(config_of(folder, str(folder))[0], folder)
        _check_names(folder)
        active = functools.partial(_adapted, model, folder)
        with active() as matrices:
            found.append(Adapter(name, matrices, active))
    return found


def rooms_of(model: TransformersModel, adapters: list[Adapter]) -> dict[str, tuple[int, int]]:
    """Return the layers that adapters change, with their inputs and outputs; without adapters all linear ones."""
    if not adapters:
        from transformers.pytorch_utils import Conv1D

        head = model.get_output_embeddings()
        linear = {name: one for name, one in model.named_modules() if isinstance(one, (torch.nn.Linear, Conv1D))}
        sizes = {name: tuple(one.weight.shape) for name, one in linear.items() if one is not head}
        return {name: size if isinstance(linear[name], Conv1D) else size[::-1] for name, size in sizes.items()}
    found = {}
    for adapter in adapters:
        for name, matrix in adapter.matrices.items():
            layer, _, which = name.rpartition(".")
            if which == FIRST:
                found[layer] = matrix.shape[0], adapter.matrices[f"{layer}.{SECOND}"].shape[1]
    return found


def _check_kind(config: Any, folder: pathlib.Path) -> None:
    """Refuse what is not a product of two matrices next to a layer."""
    if config.peft_type.value != "LORA":
        raise _unfit(folder, f"it is {config.peft_type.value}, and exported files can switch LoRA only")
    for name in ("use_dora", "layer_replication", "target_parameters", "alora_invocation_tokens"):
        if getattr(config, name, None):
            raise _unfit(folder, f"it has {name}")
    start = config.init_lora_weights
    if isinstance(start, str) and start != "gaussian":
        raise _unfit(folder, f"it began with {start!r}, which changes the weights of the model itself")


def _check_names(folder: pathlib.Path) -> None:
    """Refuse other weights than those of the two products, before PEFT puts them into the model."""
    import peft

    with damage_as(ModelSourceError, str(folder)):
        stored = peft.load_peft_weights(str(folder), device="cpu")
    other = next((name for name in stored if not name.endswith(_ENDS)), None)
    if other is not None:
        raise _unfit(folder, f"it also holds {other}")


def _unfit(folder: pathlib.Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The adapter in {folder} cannot be switched at run time: {reason}. Merge it into a separate model:\n"
        f"    yobx-flatten export {folder} -o DIR"
    )


@contextlib.contextmanager
def _adapted(model: TransformersModel, folder: pathlib.Path) -> Iterator[dict[str, torch.Tensor]]:
    """Let a model compute with an adapter inside; yield its matrices. The model is as it was afterwards."""
    trained = [(parameter, parameter.requires_grad, parameter._version) for parameter in model.parameters()]
    layers = [(module, dict(module._modules)) for module in model.modules()]

    def failed(error: BaseException) -> ModelSourceError:
        reason = " ".join(str(error).split())[:300]  # torch names the sizes in further lines
        return ModelSourceError(f"{folder} is not an adapter of this {type(model).__qualname__}: {reason}")

    try:
        # of PEFT, and of torch where sizes differ
        with raised_as(failed, FlattenError, OSError, MemoryError):
            injected(model, folder, str(folder), choice="refuse")
        if any(parameter._version != version for parameter, _, version in trained):
            raise _unfit(folder, "it changes the weights of the model itself")
        yield _matrices(model, folder)
    finally:  # also where PEFT failed half-way, which has no way back
        for module, held in layers:
            module._modules.clear()
            module._modules.update(held)
        for parameter, was, _ in trained:
            parameter.requires_grad_(was)
        with contextlib.suppress(AttributeError):
            del model.peft_config


def _matrices(model: TransformersModel, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The matrices of an adapter that is in the layers of a model, by name of the input."""
    from peft.tuners import lora
    from transformers.pytorch_utils import Conv1D

    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, lora.LoraLayer):
            continue
        base = layer.get_base_layer()
        if type(layer) is not lora.Linear or not isinstance(base, (torch.nn.Linear, Conv1D)):
            raise _unfit(folder, f"{name} is {type(base).__qualname__}, and only linear layers have room for adapters")
        for key in layer.lora_A:
            if getattr(layer, "lora_variant", {}).get(key) is not None or layer.lora_B[key].bias is not None:
                raise _unfit(folder, f"{name} computes more than two products")
            first, second = layer.lora_A[key].weight.detach(), layer.lora_B[key].weight.detach()
            dtype = base.weight.dtype
            found[f"{name}.{FIRST}"] = first.T.to(dtype).contiguous()
            found[f"{name}.{SECOND}"] = (second.T * layer.scaling[key]).to(dtype).contiguous()
    return found
