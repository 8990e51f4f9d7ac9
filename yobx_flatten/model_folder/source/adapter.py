"""Load a PEFT adapter from a folder, and merge it into its base model or read its LoRA matrices."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...core.files.document import check_regular, damage_as, read_document
from ...core.files.limited import limited
from ...errors import FlattenError, InvalidArgumentError, ModelSourceError, require
from ...errors.failures import first_line, raised_as
from ...registry.recipe.aliases import TransformersModel
from ...runners.adapters import Adapter
from ...runners.ports import FIRST, SECOND
from .packed_weights import KeyDifferences, UnmatchedWeights

ADAPTER = "adapter_config.json"
_MOST_LAYERS = 10_000
_MOST_RANK = 1024  # largest rank of layers without weights in the file
_FIRST = re.compile(r"lora_(embedding_)?A")  # the matrix whose number of rows is the rank
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def holds_adapter(folder: pathlib.Path) -> bool:
    if not (folder / ADAPTER).is_file():
        return False
    files = [path.name for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern)]
    other = min(set(files) - set(_WEIGHTS), default=None)
    if other is not None:
        raise ModelSourceError(
            f"{folder} holds an adapter ({ADAPTER}) and also weights of a model ({other}). Remove one of them."
        )
    return True


def config_of(folder: pathlib.Path, name: str) -> tuple[Any, dict[str, Any]]:
    """Return an adapter's configuration as an object of PEFT, and as the dict in ``adapter_config.json``."""
    require("peft", purpose="a folder of adapters", extra="lora")
    for path in (folder / file for file in _WEIGHTS):
        if path.exists():
            check_regular(path, ModelSourceError)
    stated = read_document(folder / ADAPTER, dict[str, Any], failure=ModelSourceError, finite=False)
    if stated.get("megatron_config") is not None:
        raise ModelSourceError(
            f"{folder / ADAPTER} names a module to import (megatron_core), but no file may choose what is imported. "
            "Remove megatron_config from the file."
        )
    if stated.get("peft_type") == "XLORA":
        raise ModelSourceError(f"{folder / ADAPTER} is for X-LoRA, which is not supported. Pass one of its adapters.")
    import peft

    if stated.get("peft_type") not in list(peft.PeftType):
        raise ModelSourceError(f"{folder / ADAPTER} has peft_type {stated.get('peft_type')!r}, unknown to PEFT.")

    where = f"{folder / ADAPTER} is not a configuration of PEFT"
    replicated = stated.get("layer_replication")
    pairs: list[Any] = replicated if isinstance(replicated, list) else [None]
    fits = all(isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair) for pair in pairs)
    if replicated is not None and not (fits and sum(max(end - first, 1) for first, end in pairs) <= _MOST_LAYERS):
        raise ModelSourceError(
            f"{folder / ADAPTER} states layer_replication = {str(replicated)[:80]}, which is not a list of pairs "
            f"[first, end] with at most {_MOST_LAYERS:,} layers."
        )
    failed = raised_as(lambda error: ModelSourceError(f"{where}: {first_line(error)}"))
    with failed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about each entry of a newer version
        config = peft.PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise InvalidArgumentError(
            f"{name} contains learned prompts (prompt tuning), which exported files do not support. Only adapters "
            "that change layers, such as LoRA, can be exported."
        )
    return config, stated


def _check_stated(model: Any, folder: pathlib.Path, stored: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelSourceError if the adapter's configuration would make PEFT use too much memory or time."""
    stated = read_document(folder / ADAPTER, dict[str, Any], failure=ModelSourceError, finite=False)
    pattern = stated.get("rank_pattern")
    ranks = [stated.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    largest = max([_MOST_RANK, *(len(value) for key, value in stored.items() if _FIRST.search(key))])
    for rank in ranks:
        # only for LoRA: LoKr and LoHa may state a rank that is larger than the matrices
        if stated.get("peft_type") == "LORA" and rank is not None and not (type(rank) is int and rank <= largest):
            raise ModelSourceError(
                f"{folder / ADAPTER} states rank {str(rank)[:40]}, but the adapter's weights allow at most {largest:,}."
            )
    # PEFT runs the initialization of PiSSA and LoftQ before it reads the weights
    if any(len(steps) > 3 for steps in re.findall(r"(?:pissa_niter_|'loftq_iter': )(\d+)", str(stated))):
        raise ModelSourceError(f"{folder / ADAPTER} sets 1,000 or more iterations of PiSSA or LoftQ. The limit is 999.")
    # match each possible pattern with the names of all layers as PEFT does, with limits of time and memory
    held = {key: value for key, value in stated.items() if key.endswith(("_modules", "_pattern", "_to_save"))}
    texts: list[Any] = []
    for value in held.values():
        texts += value if isinstance(value, (list, dict)) else [value]
    patterns = [text for text in texts if isinstance(text, str) and re.escape(text) != text]
    names = [name for name, _ in model.named_modules()]

    def match_all() -> None:
        for pattern in patterns:
            # forms in which PEFT matches a pattern: the name of a layer, the end of a name, or the index of a layer
            forms = (pattern, rf"(^|.*\.){pattern}($|\..*)", rf"(.*\.)?({pattern})$", rf"(?:^|.*?\.){pattern}\.(\d+)\.")
            for form in map(re.compile, forms):
                for name in names:
                    form.fullmatch(name), form.search(name)

    where = f"{folder / ADAPTER} has a pattern ({', '.join(held)})"
    if patterns:
        with raised_as(lambda error: ModelSourceError(f"{where} that cannot be matched with layers: {error}")):
            limited(match_all)


def injected(model: Any, folder: pathlib.Path, name: str, *, choice: UnmatchedWeights) -> tuple[Any, KeyDifferences]:
    """Add the adapter in a folder to the layers of a model; return the ``PeftModel`` and the unmatched weights."""
    import peft

    with warnings.catch_warnings():
        # PEFT warns about missing weights, which are checked below, and reads deprecated attributes of models
        warnings.simplefilter("ignore")
        stored = peft.load_peft_weights(str(folder), device="cpu")
        _check_stated(model, folder, stored)
        adapted = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
        wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        others = set(adapted.state_dict())  # embeddings whose vocabulary was changed are stored whole
        reshaped = [
            (key, tuple(stored[key].shape), tuple(wanted[key].shape))
            for key in wanted.keys() & stored.keys()
            if stored[key].shape != wanted[key].shape
        ]
        differences = KeyDifferences(
            tuple(sorted(wanted.keys() - stored.keys())),
            tuple(sorted(stored.keys() - wanted.keys() - others)),
            tuple(sorted(reshaped)),
        )
        try:
            differences.check(name, f"an adapter of {type(model).__qualname__}", choice, ModelSourceError)
        except ModelSourceError:
            adapted.unload()
            raise
        return adapted, differences


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # the name of an adapter, which is also a file name


def read_adapters(model: TransformersModel, folders: Mapping[str, Any]) -> list[Adapter]:
    """Read LoRA adapters from PEFT folders, given by adapter name; afterwards, the model is as before."""
    if getattr(model, "peft_config", None):
        raise InvalidArgumentError(
            f"This {type(model).__qualname__} has adapters in its layers. Pass the model without adapters, and the "
            "folders of the saved adapters as adapters=."
        )
    found = []
    for name, given in folders.items():
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"adapters: the name {name!r} is not allowed. Use letters, digits, _, - and dots: french=FOLDER"
            )
        folder = pathlib.Path(given)
        if not (folder / ADAPTER).is_file():
            raise ModelSourceError(
                f"adapters: {folder} contains no {ADAPTER}: it is not a PEFT folder. Write one with "
                "PeftModel.save_pretrained(folder)."
            )
        # the adapter must have LoRA matrices only; this is checked before PEFT changes the model
        config = config_of(folder, str(folder))[0]
        import peft

        if config.peft_type.value != "LORA":
            raise _unfit(folder, f"it is {config.peft_type.value}, and exported files can switch LoRA only")
        for entry in ("use_dora", "layer_replication", "target_parameters", "alora_invocation_tokens"):
            if getattr(config, entry, None):
                raise _unfit(folder, f"it has {entry}")
        start = config.init_lora_weights
        if isinstance(start, str) and start != "gaussian":
            raise _unfit(folder, f"it was initialized with {start!r}, which changes the base weights")
        with damage_as(ModelSourceError, str(folder)):
            keys = list(peft.load_peft_weights(str(folder), device="cpu"))
        other = next((key for key in keys if not key.endswith((f".{FIRST}.weight", f".{SECOND}.weight"))), None)
        if other is not None:
            raise _unfit(folder, f"it also contains {other}, which is not a LoRA matrix")
        active = functools.partial(_adapted, model, folder)
        with active() as matrices:
            found.append(Adapter(name, matrices, active))
    return found


def rooms_of(model: TransformersModel, adapters: Sequence[Adapter]) -> dict[str, tuple[int, int]]:
    """Return the input and output size of each layer that an adapter may change, by layer name."""
    if not adapters:  # an adapter that is added later may change all linear layers except the head
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


def _unfit(folder: pathlib.Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The adapter in {folder} cannot be switched at run time: {reason}. Merge the adapter into a separate model:\n"
        f"    yobx-flatten export {folder} -o DIR"
    )


@contextlib.contextmanager
def _adapted(model: TransformersModel, folder: pathlib.Path) -> Iterator[dict[str, torch.Tensor]]:
    """In a ``with`` block, add an adapter to a model, and yield the adapter's matrices; then remove the adapter."""
    trained = [(parameter, parameter.requires_grad, parameter._version) for parameter in model.parameters()]
    layers = [(module, dict(module._modules)) for module in model.modules()]

    def failed(error: BaseException) -> ModelSourceError:
        reason = " ".join(str(error).split())[:300]  # torch writes the sizes on several lines
        return ModelSourceError(f"{folder} is not an adapter of this {type(model).__qualname__}: {reason}")

    try:
        with raised_as(failed, FlattenError, OSError, MemoryError):
            injected(model, folder, str(folder), choice="refuse")
        if any(parameter._version != version for parameter, _, version in trained):
            raise _unfit(folder, "it changes the base weights")
        yield _matrices(model, folder)
    finally:  # PEFT cannot undo an injection that failed
        for module, held in layers:
            module._modules.clear()
            module._modules.update(held)
        for parameter, was, _ in trained:
            parameter.requires_grad_(was)
        with contextlib.suppress(AttributeError):
            del model.peft_config


def _matrices(model: TransformersModel, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the LoRA matrices of a model; the keys are the names of the input tensors of the exported file."""
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
                raise _unfit(folder, f"{name} has more than the two matrix products of LoRA")
            first, second = layer.lora_A[key].weight.detach(), layer.lora_B[key].weight.detach()
            dtype = base.weight.dtype
            found[f"{name}.{FIRST}"] = first.T.to(dtype).contiguous()
            found[f"{name}.{SECOND}"] = (second.T * layer.scaling[key]).to(dtype).contiguous()
    return found
