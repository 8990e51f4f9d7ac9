"""Collect the state of a training, write it to the files of a checkpoint, and read it back."""

# model.safetensors       parameters and buffers, by the model's own names      config.json, for transformers
# training.safetensors    other tensors: moments, master weights, gradients, states of random generators
# training.json           values that are not tensors: hyperparameters, counters, position in the training data
# shards/                 tensors that are sharded over several processes

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yobx_flatten.core.files.document import read_document

from ..device.disk import disk_of
from ..errors import CheckpointError, DamagedCheckpointError
from ..optim.disk_store import hold_on_disk
from ..pipeline import wrapped_model
from .model_state import collect_parameters, collect_progress, optimizer_targets
from .shards import CheckpointRanks, cut_like, is_sharded, own_copies, read_shards, write_shards
from .tensor_files import decode, encode, open_tensors, write_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

STEM = "training"  # of the files of values other than weights
_SHARD_BYTES = 5 * 10**9  # bytes of a file, unless one tensor is larger
_SMALL = 4096  # bytes; smaller tensors are copied, so that they do not keep the mapping of their file
_WEIGHTS = "weights:"  # prefix for weights of a model that is itself sharded


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingObjects:
    optimizers: Sequence[Any] = ()  # optimizers of the model
    schedulers: Sequence[Any] = ()  # objects with `state_dict` and `load_state_dict`
    scaler: Any = None  # object with `state_dict` and `load_state_dict`


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingState:
    texts: Mapping[str, str]  # contents of text files, by name
    model: Mapping[str, Tensor]  # tensors of the model, by name
    training: Mapping[str, Tensor]  # tensors of everything else
    shards: Mapping[str, DTensor]  # tensors that this process has a part of

    def write(self, folder: pathlib.Path, shard_bytes: int, ranks: CheckpointRanks) -> None:
        def write_own() -> None:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder.parent} is not the same folder on all machines. Save to a folder that all machines mount."
                )
            write_tensors(folder, "model", self.model, shard_bytes, ranks.rank, ranks.size)
            if ranks.rank == 0:
                for name, text in self.texts.items():
                    (folder / name).write_text(text, encoding="utf-8")
                write_tensors(folder, STEM, self.training, shard_bytes)

        ranks.together(write_own)
        if self.shards:
            write_shards(folder, self.shards, ranks.group, shard_bytes)


def collect_state(model: nn.Module, parts: TrainingObjects, data: Mapping[str, Any], *, copy: bool) -> TrainingState:
    weights: dict[str, Tensor] = {}
    state = {
        "model": collect_parameters(model, weights),
        "progress": collect_progress(model),
        "optimizers": [named_state(optimizer, optimizer_targets(model)) for optimizer in parts.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "data": dict(data),
        "random": random_state(),
    }
    rest: dict[str, Tensor] = {}
    encoded = {key: encode(value, key, rest) for key, value in state.items()}
    texts = {f"{STEM}.json": json.dumps(encoded, allow_nan=False), **config_files(model)}
    shards = {name: tensor for name, tensor in rest.items() if is_sharded(tensor)}
    shards |= {f"{_WEIGHTS}{name}": tensor for name, tensor in weights.items() if is_sharded(tensor)}
    return TrainingState(
        texts,
        _on_host({name: tensor for name, tensor in weights.items() if not is_sharded(tensor)}, copy=copy),
        _on_host({name: tensor for name, tensor in rest.items() if name not in shards}, copy=copy),
        own_copies(shards, copy=copy),
    )


def read_weights(
    folder: pathlib.Path, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    like = {f"{_WEIGHTS}{name}": target for name, target in targets.items()}
    shards = read_shards(folder, lambda name: name.startswith(_WEIGHTS), like)
    found = {**tensors, **{name.removeprefix(_WEIGHTS): tensor for name, tensor in shards.items()}}
    return {name: cut_like(tensor, targets.get(name, tensor)) for name, tensor in found.items()}


def _references(stored: Any) -> Iterator[str]:
    if isinstance(stored, dict):
        if "$tensor" in stored:
            yield stored["$tensor"]
        for value in stored.values():
            yield from _references(value)
    elif isinstance(stored, list):
        for value in stored:
            yield from _references(value)


def write_values(
    folder: pathlib.Path, stem: str, values: Mapping[str, Any], ranks: CheckpointRanks | None = None
) -> None:
    """Write nested values to ``{stem}.json``, tensors to ``{stem}.safetensors``, and sharded tensors to ``shards/``."""
    # ranks: processes that write together; all of them call it. Default: this process alone.
    ranks = ranks or CheckpointRanks()
    tensors: dict[str, Tensor] = {}
    encoded = {key: encode(value, key, tensors) for key, value in values.items()}
    shards = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}

    def write() -> None:
        whole = {name: tensor for name, tensor in tensors.items() if name not in shards}
        (folder / f"{stem}.json").write_text(json.dumps(encoded, allow_nan=False), encoding="utf-8")
        write_tensors(folder, stem, _on_host(whole, copy=False), _SHARD_BYTES)

    ranks.on_first(write)
    if shards:
        write_shards(folder, own_copies(shards, copy=False), ranks.group, _SHARD_BYTES)


def read_values(
    folder: pathlib.Path, stem: str, only: Sequence[str] | None = None, *, targets: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Read the nested values that :func:`write_values` wrote; ``only`` lists the keys to read."""
    # targets: parameters that optimizers update, by name; states, gradients and master weights of sharded parameters
    # are read as shards. Default: everything is whole.
    stored = read_document(folder / f"{stem}.json", dict[str, Any], failure=DamagedCheckpointError)
    wanted = {key: stored[key] for key in (stored if only is None else only)}
    # the parameter to which each stored tensor belongs, by the name of the stored tensor
    progress = wanted.get("progress", wanted)  # a Trainer stores only the progress
    tables = [progress.get("masters", {}), progress.get("gradients", {})]
    tables = [{name: {"": value} for name, value in table.items()} for table in tables]
    tables += [optimizer["state"] for optimizer in wanted.get("optimizers", [])]
    places = {
        value["$tensor"]: targets[name]
        for table in tables
        for name, values in table.items()
        if targets and name in targets and isinstance(values, dict)
        for value in values.values()
        if isinstance(value, dict) and "$tensor" in value
    }
    with open_tensors(folder, stem) as tensors:
        read = {**tensors, **read_shards(folder, set(_references(wanted)).__contains__, places)}
        read.update({name: cut_like(read[name], target) for name, target in places.items() if name in read})
        # tensors for a disk stay mapped, and are copied one at a time
        largest = _SMALL if any(disk_of(target) is not None for target in places.values()) else None
        return {key: decode(value, read, largest_copy=largest) for key, value in wanted.items()}


def _on_host(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory, as safetensors files require."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        is_own = plain.untyped_storage().data_ptr() != memory
        # A file stores each tensor as a whole, so views and slices of shared memory are copied.
        if not is_own and (copy or memory in seen or plain.untyped_storage().nbytes() != plain.nbytes):
            plain = plain.clone()
        seen.add(memory)
        found[name] = plain
    return found


def config_files(model: nn.Module) -> dict[str, str]:
    inner = wrapped_model(model)
    library = sys.modules.get("transformers.modeling_utils")  # a Hugging Face model has imported it
    if library is None or not isinstance(inner, library.PreTrainedModel):
        return {}
    config = copy.deepcopy(inner.config)
    config.architectures, config.dtype = [type(inner).__name__], str(inner.dtype).removeprefix("torch.")
    files = {"config.json": config.to_json_string()}
    if inner.can_generate() and inner.generation_config is not None:
        files["generation_config.json"] = inner.generation_config.to_json_string()
    return files


def random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    kind, library = _accelerator()
    if library is not None:
        states = [library.get_rng_state(number) for number in range(library.device_count())]
        state["accelerator"] = {"type": kind, "states": states}
    return state


def check_random_state(state: dict[str, Any]) -> None:
    """Raise an error if a stored state of a random generator is invalid; no generator is changed."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])  # raises if the state is invalid
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in state:
        numpy.random.RandomState().set_state(state["numpy"])
    for library, number, generator in _states_for_accelerators(state):
        present = library.get_rng_state(number)  # compared: not every backend can create generators
        if (generator.dtype, generator.shape) != (present.dtype, present.shape):
            kind = state["accelerator"]["type"]
            raise TypeError(f"the entry {kind}:{number} is not a state of a random generator")


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    for library, number, generator in _states_for_accelerators(state):
        library.set_rng_state(generator, number)


def _states_for_accelerators(state: dict[str, Any]) -> Iterator[tuple[Any, int, Tensor]]:
    stored, (kind, library) = state.get("accelerator"), _accelerator()
    if stored is not None and library is not None and kind == stored["type"]:
        for number, generator in enumerate(stored["states"][: library.device_count()]):
            yield library, number, generator


def _accelerator() -> tuple[str, Any]:
    """Return the type and the torch module of the accelerator in use, without initializing an unused accelerator."""
    device = torch.accelerator.current_accelerator()
    library = None if device is None else torch.get_device_module(device)
    # a library without `is_initialized` is initialized by its import
    if device is None or not getattr(library, "is_initialized", lambda: True)():
        return "", None
    return device.type, library


def named_state(optimizer: torch.optim.Optimizer, targets: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of an optimizer, in which parameters are identified by name instead of number."""
    names = _names(optimizer, targets)
    state = optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    called = dict(zip(numbers, (name for group in names for name in group), strict=True))
    groups = [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": own}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    rest = {key: value for key, value in state["state"].items() if key not in called}
    by_name = {called[number]: value for number, value in state["state"].items() if number in called}
    return {"class": type(optimizer).__name__, "param_groups": groups, "state": by_name, "rest": rest}


def check_optimizer(optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    found, expected = [group["params"] for group in stored["param_groups"]], _names(optimizer, targets)
    own, saved = type(optimizer).__name__, stored["class"]
    if saved != own:
        raise CheckpointError(f"The checkpoint contains the state of {saved}, but your optimizer is {own}.")
    if len(found) != len(expected):
        raise CheckpointError(
            f"The optimizer has {len(expected)} parameter groups; the checkpoint has {len(found)}. Use the same groups."
        )
    for number, (there, here) in enumerate(zip(found, expected, strict=True)):
        differing = sorted(set(there) ^ set(here))
        if differing:
            raise CheckpointError(
                f"Parameter group {number} has {len(here)} parameters in the optimizer, and {len(there)} in the "
                f"checkpoint. Not in both: {', '.join(differing[:3])}{' and others' if len(differing) > 3 else ''}."
            )


def restore_optimizer(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], targets: Mapping[str, Tensor]
) -> None:
    numbers: dict[str, int] = {}
    groups, all_names = [], _names(optimizer, targets)
    for group, own, names in zip(stored["param_groups"], optimizer.param_groups, all_names, strict=True):
        numbers.update({name: len(numbers) + place for place, name in enumerate(names)})
        kept = {"param_names": own["param_names"]} if "param_names" in own else {}
        groups.append({**group, **kept, "params": [numbers[name] for name in names]})
    state = {numbers[name]: value for name, value in stored["state"].items()}
    optimizer.load_state_dict({"state": {**state, **stored["rest"]}, "param_groups": groups})
    for name, values in stored["state"].items():
        loaded = getattr(optimizer, "state", {}).get(targets[name], {})
        # torch casts the state to the dtype of its parameter: https://github.com/pytorch/pytorch/issues/43706
        for key, value in values.items():
            now = loaded.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                loaded[key] = value.to(now.device)
        hold_on_disk(optimizer, targets[name])


def _names(optimizer: torch.optim.Optimizer, targets: Mapping[str, Tensor]) -> list[list[str]]:
    called = {id(target): name for name, target in targets.items()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in called:
                raise CheckpointError(
                    f"Parameter {index} in group {number} of the optimizer does not belong to the model. Make the "
                    "optimizer from\n"
                    "    model.optim_parameters()"
                )
    return [[called[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
