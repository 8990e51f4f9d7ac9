"""Open a model for an export: load it whole, or read it layer by layer if it is large."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pathlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from ...core.files.document import opened_tensors
from ...errors import InvalidArgumentError, ModelSourceError, NoRoomError
from ...errors.failures import first_line, format_bytes
from ...export.model_facts import memory_available
from ...export.onnx.weights import holds_integers
from ...huggingface.layer_weights import Reader, stream_layers
from ...registry.patches import AttributePatch
from .configuration import class_for, stated_weights
from .find import FoundModel
from .packed_weights import KeyDifferences

# "memory" loads all weights, "stream" reads the weights of a layer when the layer is called
WeightsIn = Literal["auto", "memory", "stream"]
_PART = 4  # "auto" streams weights larger than the free memory divided by this number: an export needs weights twice


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    model: Any  # a Hugging Face model, in evaluation mode
    folder: pathlib.Path | None = None  # the folder or the GGUF file of the model
    is_streamed: bool = False  # whether the weights of a layer are read when the layer is called
    remarks: tuple[str, ...] = ()  # notes for the report
    found: FoundModel | None = None  # for a streamed model, the source from which it can be loaded as a whole
    no_folder: str = ""  # why the folder of a loaded model is unknown; empty for a model given by name
    has_integers: bool = False  # whether the weights were computed from stored integers

    def as_a_whole(self, reason: str) -> OpenedModel:
        """Load all weights of a model that was opened to be read layer by layer; the report names the ``reason``."""
        assert self.found is not None
        assert self.folder is not None
        checkpoint = open_checkpoint(self.folder)
        assert checkpoint is not None
        remarks = (f"the model is loaded as a whole: {reason}.",)
        _check_memory(self.found, checkpoint, self.model.dtype, memory_available(), remarks)
        model, noted = self.found.load_with_remarks(dtype=str(self.model.dtype).removeprefix("torch."))
        return OpenedModel(model, self.folder, remarks=(*remarks, *noted))


def open_model(found: FoundModel, *, dtype: str, weights: WeightsIn, to: str) -> OpenedModel:
    """Load a model that :func:`find_model` found; each layer of a large model reads its weights when called."""
    if weights not in get_args(WeightsIn):
        choices = ", ".join(map(repr, get_args(WeightsIn)))
        raise InvalidArgumentError(f"weights must be one of {choices}, found {weights!r}.")
    if weights == "stream" and to != "onnx":
        raise InvalidArgumentError(f"weights='stream' is for ONNX files, found to={to!r}. Leave weights= out.")
    if weights == "stream" and found.adapter is not None:
        raise InvalidArgumentError(
            f"weights='stream' reads weights as they are stored, but the adapter of {found.name} changes the weights. "
            "Merge the adapter, save the model, and export it; or leave weights='stream' out."
        )
    wanted = getattr(torch, dtype)
    is_packed = found.packing() is not None
    checkpoint = open_checkpoint(found.folder) if found.has_weights and found.folder and not is_packed else None
    if checkpoint is None or found.folder is None:
        if weights == "stream":
            raise InvalidArgumentError(
                f"weights='stream' needs unquantized safetensors files, and {found.name} has none. Leave weights= out."
            )
        model, noted = found.load_with_remarks(dtype=dtype)
        integers = (found.gguf is not None or is_packed) and holds_integers(model)
        return OpenedModel(model, found.reader_folder, remarks=noted, has_integers=integers)
    size, free = checkpoint.bytes_as(wanted), memory_available()
    remarks: tuple[str, ...] = ()
    if weights == "stream" or (weights == "auto" and to == "onnx" and _PART * size > free and found.adapter is None):
        try:
            model, readers, noted = unread_model(found, checkpoint, wanted)
            stream_layers(model, readers)
            shown = f"weights of {format_bytes(size)} were read from {found.name} one by one, for each call of a layer."
            return OpenedModel(model, found.folder, True, (shown, *noted), found)
        except NotStreamableError as reason:
            remarks = (f"the model is loaded as a whole: {reason}.",)
    _check_memory(found, checkpoint, wanted, free, remarks)
    model, noted = found.load_with_remarks(dtype=dtype)
    return OpenedModel(model, found.reader_folder, remarks=(*remarks, *noted))


def _check_memory(
    found: FoundModel, checkpoint: Checkpoint, dtype: torch.dtype, free: int, remarks: tuple[str, ...]
) -> None:
    size, name = checkpoint.bytes_as(dtype), str(dtype).removeprefix("torch.")
    is_mapped = set(checkpoint.types.values()) <= {_TYPES.get(dtype)}  # no stored weight is converted
    if size > free and not is_mapped:
        remedy = remarks[0] if remarks else 'Read them layer by layer:\n    weights="stream" (--weights stream)'
        raise NoRoomError(
            f"The weights of {found.name} take {format_bytes(size)} of memory in {name}, but {format_bytes(free)} are "
            f"available. {remedy[0].upper()}{remedy[1:]}"
        )


_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# Read the weights of a layer from its safetensors file when the layer is called.
#
#     config.json ──> model on meta           names of the model ──> names in the files (transformers renames some)
#     *.safetensors ── memory-mapped, one weight ──> cast ──> layer, or exported file


class NotStreamableError(Exception):
    """Raised if a model's weights cannot be read layer by layer; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Names, shapes and dtypes of the weights in a model's safetensors files."""

    files: Mapping[str, pathlib.Path]  # the file of each weight, by the weight's name in the file
    shapes: Mapping[str, Sequence[int]]  # the shape of each weight
    types: Mapping[str, str]  # the type of each weight, as safetensors names types (`"F16"`)

    def bytes_as(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(math.prod(shape) for shape in self.shapes.values())

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        with opened_tensors(self.files[name], failure=ModelSourceError) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor  # memory-mapped if not converted


def open_checkpoint(folder: pathlib.Path) -> Checkpoint | None:
    """Read names, shapes and dtypes of the weights in a folder; ``None`` if there are no safetensors files."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            held = stated_weights(index, failure=ModelSourceError)
            names = sorted(set(held.values()))
        elif single.is_file():
            names = [single.name]
        else:
            return None
        files: dict[str, pathlib.Path] = {}
        shapes, types = {}, {}
        for name in names:
            with opened_tensors(folder / name, failure=ModelSourceError) as file:
                for key in file.keys():  # noqa: SIM118 # no mapping
                    weight = file.get_slice(key)
                    files[key], shapes[key], types[key] = folder / name, weight.get_shape(), weight.get_dtype()
    except OSError as error:
        raise ModelSourceError(f"The weights in {folder} cannot be read: {first_line(error)}") from error
    missing = min(held.keys() - files.keys(), default=None) if index.is_file() else None
    if missing is not None:
        raise ModelSourceError(f"{folder / held[missing]} lacks {missing}, listed in {index.name}. Download it again.")
    return Checkpoint(files, shapes, types)


def unread_model(
    found: FoundModel, checkpoint: Checkpoint, dtype: torch.dtype
) -> tuple[Any, dict[str, Reader], tuple[str, ...]]:
    """Return a model with parameters on the meta device, functions that read their values, and notes for the report."""
    assert found.folder is not None
    if found.runs_code:
        raise NotStreamableError("the model's class is not part of transformers")
    if getattr(found.config, "quantization_config", None) is not None:
        raise NotStreamableError("the model's weights are quantised")
    # only parameters are on the meta device: buffers hold values that the class computes
    config, register, here = copy.deepcopy(found.config), torch.nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if type(param) is torch.nn.Parameter and not param.is_meta and threading.get_ident() == here:
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    with AttributePatch(torch.nn.Module, "register_parameter", on_meta), torch.random.fork_rng(devices=[]):
        model = class_for(config)._from_config(config, dtype=dtype)
    model.config.name_or_path = model.name_or_path = str(found.folder)
    model.config.dtype = dtype  # transformers 4 keeps the dtype of config.json
    if model.can_generate() and (found.folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(found.folder, local_files_only=True)
    model.eval()
    kept = [*(getattr(model, "_keep_in_fp32_modules", None) or ())] if dtype is torch.float16 else []
    if dtype is not torch.float32:
        kept += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if kept:
        raise NotStreamableError(f"the module {kept[0]} stays in float32")
    sources = _sources(model, checkpoint)
    for name, buffer in model.named_buffers():
        if name in sources:
            buffer.copy_(checkpoint.read(sources[name], dtype))
    alike: dict[int, list[str]] = {}  # the names of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        alike.setdefault(id(parameter), []).append(name)
    tied = [(alike[id(parameter)], parameter) for _, parameter in model.named_parameters()]
    differences = _differences(model, checkpoint, sources, tied)
    differences.check(found.name, type(model).__qualname__, found.unmatched_weights, ModelSourceError)
    if differences.missing or differences.reshaped:
        raise NotStreamableError("weights that its files lack, or have in another shape, get random values")
    readers: dict[str, Reader] = {}
    for names, _ in tied:
        held = list(dict.fromkeys(sources[name] for name in names if name in sources))
        first = checkpoint.read(held[0], dtype) if len(held) > 1 else None
        if first is not None and not all(first.equal(checkpoint.read(other, dtype)) for other in held[1:]):
            raise NotStreamableError(f"the weights {', '.join(names)} are tied, but differ in the files")
        readers |= dict.fromkeys(names, functools.partial(checkpoint.read, held[0], dtype))
    return model, readers, differences.remarks()


def _differences(
    model: Any, checkpoint: Checkpoint, sources: Mapping[str, str], tied: Sequence[tuple[list[str], torch.nn.Parameter]]
) -> KeyDifferences:
    """Return which weights are missing in a checkpoint, are not used by the model, or differ in shape."""
    missing, reshaped = [], []
    for names, parameter in tied:
        held = [sources[name] for name in names if name in sources]
        shape = tuple(checkpoint.shapes[held[0]]) if held else ()
        if not held:
            missing.append(names[0])
        elif shape != tuple(parameter.shape):
            reshaped.append((names[0], shape, tuple(parameter.shape)))
    state = model.state_dict(keep_vars=True)
    left = sorted(checkpoint.files.keys() - {key for name, key in sources.items() if name in state})
    buffers = [name for name, _ in model.named_buffers()]
    # buffers that older versions of transformers stored, and that are computed now
    old = {r"rotary_emb\.inv_freq": "rotary_emb.inv_freq", r"(^|\.)position_ids$": "position_ids"}
    known = [pattern for pattern, ending in old.items() if any(name.endswith(ending) for name in buffers)]
    known += getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [name for name in left if not any(re.search(pattern, name) for pattern in known)]
    return KeyDifferences(tuple(missing), tuple(unused), tuple(reshaped))


def _sources(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Return a dict from each weight's name in the model to its name in the checkpoint files."""
    state = dict(model.state_dict(keep_vars=True))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4: names differ only by the prefix of the base model
        prefix = f"{model.base_model_prefix}."
        names = {key: [key, prefix + key, key.removeprefix(prefix)] for key in checkpoint.files}
        return {name: key for key, others in names.items() for name in others if name in state}
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for key in checkpoint.files:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is not None and name in state:
            raise NotStreamableError(f"{name} is combined from several weights in the files")
        found[name] = key
    return found
