"""Collect and restore the state of a model and of its pipelines for a checkpoint."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from ..device.composite import is_composite, parts_of, plain_numbers, states_of
from ..device.disk import disk_of, leave, page_out
from ..device.transfer import shapes_of
from ..engine.lifecycle import PipelineProgress
from ..errors import CheckpointError
from ..pipeline import RoundPipe, wrapped_model
from .tensor_files import encode, names_in_parts, open_tensors

_PART = 64 * 2**20  # bytes of parameters that are loaded to a disk at a time


def collect_parameters(model: nn.Module, tensors: MutableMapping[str, torch.Tensor]) -> dict[str, Any]:
    """Put a model's parameters and buffers into ``tensors``; a tied weight is stored only under its first name."""
    # returns: the other names of tied weights (`"aliases"`), values that are not tensors (`"extra"`), and digests of
    # frozen quantized weights, which are not stored (`"frozen"`)
    first: dict[int, str] = {}
    aliases, extra = {}, {}
    state = model.state_dict(keep_vars=True)
    left_out = names_left_out(model, state)
    for name, value in state.items():
        if name in left_out:
            continue
        if not isinstance(value, torch.Tensor):
            extra[name] = value
        elif value.device.type == "meta":
            raise CheckpointError(f"{name} is on the meta device, so it has no values to save.")
        elif (known := first.setdefault(id(value), name)) == name:
            encode(value, name, tensors)
        else:
            aliases[name] = known
    return {"aliases": aliases, "extra": extra, "frozen": digests_of_frozen(model) if left_out else {}}


def check_model(
    model: nn.Module, stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, goes_on: bool
) -> None:
    # goes_on: whether the training continues; then dtypes must also be equal
    expected = dict(model.state_dict(keep_vars=True))
    frozen = stored.get("frozen", {})  # earlier versions stored none
    for name in names_left_out(model, expected) if frozen else ():
        del expected[name]
    found = {*tensors, *stored["aliases"], *stored["extra"]}
    missing, unknown = sorted(set(expected) - found), sorted(found - set(expected))
    if missing or unknown:
        raise CheckpointError(
            "The checkpoint is for a different model."
            f"{_format_names('The checkpoint lacks', missing)}{_format_names('The model lacks', unknown)}"
        )
    for name, value in expected.items():
        tensor = tensors.get(stored["aliases"].get(name, name))
        if tensor is None or not isinstance(value, torch.Tensor):
            continue
        if tensor.shape != value.shape or (goes_on and tensor.dtype != value.dtype):
            raise CheckpointError(
                f"The checkpoint is for a different model: {name} is {shapes_of([tensor])} in the checkpoint, and "
                f"{shapes_of([value])} in the model."
            )
    digests = digests_of_frozen(model) if frozen else {}
    changed = [name for name, digest in frozen.items() if digests.get(name) != digest]
    if changed:
        differing = _format_names("Frozen quantized weights have changed since the checkpoint was saved:", changed)
        raise CheckpointError(
            f"The checkpoint is for a different model.{differing} Quantize the same weights in the same way before you "
            "load the checkpoint."
        )


def check_masters(model: nn.Module, stored: Mapping[str, Any]) -> None:
    here = set()  # names of parameters with a master weight
    for prefix, pipeline in pipelines_of(model):
        own = {id(parameter) for parameter in wrapped_model(pipeline).parameters()}
        targets = pipeline.optim_named_parameters()
        here |= {_join(prefix, name) for name, target in targets if id(target) not in own}
    homeless = [name for name in stored["masters"] if name not in here]
    if homeless:
        first, dtype = homeless[0], stored["masters"][homeless[0]].dtype
        raise CheckpointError(
            f"The checkpoint has {dtype} master weights for {len(homeless)} parameters, like {first}; your model lacks "
            f"them. Create the pipeline with master weights of this dtype:\n    RoundPipe(model, optim_dtype={dtype})"
        )


def check_progress(model: nn.Module, stored: Mapping[str, Any]) -> None:
    for entry in stored["pipelines"].values():
        counts = [entry["runs"], *([entry["replicas"]] if entry.get("replicas") is not None else [])]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise TypeError(f"calls (runs) and groups (replicas) must be integers of at least 0, found {counts}")
    targets = optimizer_targets(model)
    for table in (stored["masters"], stored["gradients"], stored["buffers"]):
        for name, value in table.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is not a tensor")
            target = targets.get(name)
            if table is not stored["buffers"] and target is not None and value.shape != target.shape:
                raise CheckpointError(f"The checkpoint is for a different model: its {name} is {shapes_of([value])}.")


def restore_parameters(model: nn.Module, stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    state: dict[str, Any] = dict(tensors)
    state.update({name: tensors[known] for name, known in stored["aliases"].items()})
    state.update(stored["extra"])
    if any(disk_of(parameter) is not None for parameter in model.parameters()):
        _load_in_parts(model, state)
    else:
        model.load_state_dict(state, strict=not stored.get("frozen"))  # names were checked


def load_weights(folder: pathlib.Path, model: nn.Module) -> bool:
    """Load weights from safetensors files into a model; return ``False`` if names or shapes do not match the model."""
    with open_tensors(folder, "model") as tensors:
        state = {n: v for n, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
        first: dict[int, str] = {}
        for name, value in state.items():  # a file stores a tied weight once, under any of its names
            if name in tensors or id(value) not in first:
                first[id(value)] = name
        if set(tensors) != set(first.values()) or any(tensors[n].shape != state[n].shape for n in tensors):
            return False
        _load_in_parts(model, dict(tensors))
    return True


def _load_in_parts(model: nn.Module, state: Mapping[str, Any]) -> None:
    places = model.state_dict(keep_vars=True)
    sizes = {name: value.nbytes if isinstance(value, torch.Tensor) else 0 for name, value in state.items()}
    for names in names_in_parts(sizes, _PART):
        model.load_state_dict({name: state[name] for name in names}, strict=False)  # all of them were checked
        leave([places[name] for name in names if isinstance(places.get(name), torch.Tensor)], written=True)
        for name in names:
            if isinstance(state[name], torch.Tensor):  # mapped from its file
                page_out(state[name])


def collect_progress(model: nn.Module) -> dict[str, Any]:
    """Return the training state of a model's pipelines that is not in the model's state dict.

    This state contains each pipeline's numbers of calls and of groups, the master weights, and buffers that are not in
    the state dict. It also contains the gradients that no optimizer step has used yet.
    """
    pipelines, masters = {}, {}
    for prefix, pipeline in pipelines_of(model):
        progress = pipeline.progress()
        pipelines[prefix] = {"runs": progress.runs, "replicas": progress.replicas}
        masters.update({_join(prefix, name): master for name, master in progress.masters.items()})
    persistent = set(model.state_dict(keep_vars=True))
    targets = optimizer_targets(model)
    return {
        "pipelines": pipelines,
        "masters": masters,
        "gradients": {name: target.grad for name, target in targets.items() if target.grad is not None},
        "buffers": {name: buffer for name, buffer in model.named_buffers() if name not in persistent},
    }


def restore_progress(model: nn.Module, stored: Mapping[str, Any]) -> None:
    for name, value in stored["buffers"].items():
        path, _, last = name.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue  # buffers outside the state dict can differ between versions of a model
        buffer = owner._buffers.get(last)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            with torch.no_grad():
                buffer.copy_(value)
        elif buffer is not None:
            owner._buffers[last] = value.to(buffer.device)
    for target in optimizer_targets(model).values():
        target.grad = None
    gradients = dict(stored["gradients"])
    for prefix, pipeline in pipelines_of(model):
        names = {_join(prefix, name): name for name, _ in pipeline.optim_named_parameters()}
        known = stored["pipelines"].get(prefix)
        pipeline.load_progress(
            PipelineProgress(
                pipeline.progress().runs if known is None else known["runs"],
                {names[name]: master for name, master in stored["masters"].items() if name in names},
                {own: gradients.pop(name) for name, own in names.items() if name in gradients},
                None if known is None else known.get("replicas"),  # earlier versions stored none
            )
        )
    for name, parameter in nn.Module.named_parameters(model):
        if name in gradients:
            parameter.grad = gradients[name]


def optimizer_targets(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, for each parameter name, the tensor that an optimizer updates: the master weight or the parameter."""
    found: dict[str, nn.Parameter] = {}
    for prefix, pipeline in pipelines_of(model):
        found.update(pipeline.optim_named_parameters(prefix))
    for name, parameter in nn.Module.named_parameters(model):
        found.setdefault(name, parameter)
    return found


def pipelines_of(model: nn.Module) -> list[tuple[str, RoundPipe]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, RoundPipe)]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _format_names(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" {what} {', '.join(names[:3])}{more}."


# Leave frozen quantized weights out of a checkpoint, and identify them by a digest.


def names_left_out(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of frozen quantized weights and their scales, which a checkpoint does not contain."""
    # state: `model.state_dict(keep_vars=True)`
    frozen = {name for name, value in state.items() if isinstance(value, torch.Tensor) and is_composite(value)}
    if not frozen:
        return set()
    owners = {name.rpartition(".")[0] for name in frozen}
    registered = {id(one) for one in (*nn.Module.parameters(model), *nn.Module.buffers(model))}
    others = [name.split(".") for name, value in state.items() if id(value) not in registered]
    inside = {".".join(path) for path in others for end in range(len(path)) if ".".join(path[:end]) in owners}
    return frozen | inside


def digests_of_frozen(model: nn.Module) -> dict[str, str]:
    owners = {id(p): module for module in nn.Module.modules(model) for p in module._parameters.values()}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or not is_composite(value):
            continue
        digests = []
        for part in parts_of([value, *(slot.value for slot in states_of(owners[id(value)]))]):
            numbers = plain_numbers(part).cpu().contiguous()
            what = f"{numbers.dtype} {tuple(numbers.shape)} ".encode()
            digests.append(hashlib.sha256(what + numbers.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
        # the order is not part of the digest: a library may move tensors between a weight and its module
        found[name] = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()
    return found
