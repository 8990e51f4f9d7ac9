"""Read and write safetensors files under the names that transformers uses, and encode nested states as JSON.

::

    model.safetensors                                            all tensors, if they fit into one shard
    model-00001-of-00002.safetensors, model-00002-of-..., model.safetensors.index.json
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from yobx_flatten.core.files.document import opened_tensors, write_tensor_file
from yobx_flatten.errors import describe_class, require

from ..device.composite import is_wrapper
from ..device.disk import disk_of, leave
from ..errors import CheckpointError, DamagedCheckpointError
from .shards import is_sharded

_SHARD_OF_DISK = 128 * 2**20  # bytes of a file with tensors from a disk, which are in memory while it is written


def need_safetensors() -> None:
    require("safetensors", purpose="a checkpoint", extra="train")


def write_tensors(
    folder: pathlib.Path, stem: str, tensors: Mapping[str, Tensor], shard_bytes: int, part: int = 0, parts: int = 1
) -> None:
    """Write one safetensors file, or several files of about ``shard_bytes`` bytes with an index."""
    # tensors: tensors on the host by name; none shares memory with another
    # shard_bytes: largest number of bytes of a file, unless one tensor alone is larger
    # part: index of this process, which writes every `parts`-th file from there on; process 0 also writes the index
    if any(disk_of(tensor) is not None for tensor in tensors.values()):
        shard_bytes = min(shard_bytes, _SHARD_OF_DISK)
    shards = names_in_parts({name: tensor.nbytes for name, tensor in tensors.items()}, shard_bytes)
    where = {}
    for number, names in enumerate(shards, 1):
        of_all = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"{stem}{of_all}.safetensors"
        if (number - 1) % parts == part:
            write_tensor_file(folder / file, {name: tensors[name] for name in names}, metadata={"format": "pt"})
            leave([tensors[name] for name in names])
        where.update(dict.fromkeys(names, file))
    if len(shards) > 1 and part == 0:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


@contextlib.contextmanager
def open_tensors(folder: pathlib.Path, stem: str) -> Iterator[Mapping[str, Tensor]]:
    """Yield the tensors that :func:`write_tensors` wrote; values are read from the file when they are accessed."""
    with contextlib.ExitStack() as files:
        found = {}
        for path in [folder / f"{stem}.safetensors", *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))]:
            if path.exists():
                file = files.enter_context(opened_tensors(path, failure=DamagedCheckpointError))
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 # it is not a mapping
        yield found


def names_in_parts(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split tensor names into lists, so that the tensors of each list have at most ``limit`` bytes."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if parts[-1] and filled + nbytes > limit:  # a tensor above the limit is alone in its list
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += nbytes
    return parts


# Encode nested states as JSON and separate tensors. No pickle: only data can be read back.
#
#     {"lr": 0.1, "betas": (0.9, 0.99), "exp_avg": tensor}
#         -> {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "exp_avg": {"$tensor": "path.exp_avg"}}    and the tensor
#
# A tensor that contains tensors, such as an 8-bit moment, is stored as these tensors, with the name of its class.


def encode(value: Any, path: str, tensors: MutableMapping[str, Tensor]) -> Any:
    """Encode a nested value for JSON, and put the tensors of this value into ``tensors``, named by their key paths.

    >>> encode({"step": 3, "betas": (0.9, float("inf"))}, "state", {})
    {'step': 3, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
    """
    # value: nested dictionaries, lists, tuples, sets, counters, numbers, strings, bytes, tensors, arrays of NumPy
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        if not is_wrapper(value) or is_sharded(value):
            return {"$tensor": _put(value, path, tensors)}
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined] # of wrapper subclasses
        parts = {name: encode(getattr(value, name), f"{path}.{name}", tensors) for name in names}
        rest = encode({"context": context, "size": value.size(), "stride": value.stride()}, path, tensors)
        return {"$parts": {"class": describe_class(kind), "parts": parts, "rest": rest}}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if kind in _WRITERS:
        return _WRITERS[kind](value, path, tensors)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        try:
            tensor = torch.from_numpy(numpy.array(value))
        except TypeError as error:
            raise CheckpointError(
                f"{path} is an array of {value.dtype}, which torch does not support. Store a list:\n    x.tolist()"
            ) from error
        return {"$numpy": {"$tensor": _put(tensor, path, tensors), "scalar": isinstance(value, numpy.generic)}}
    message = f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot contain."
    if isinstance(value, torch.Generator):
        raise CheckpointError(f"{message} Store its state:\n    generator.get_state()")
    if callable(getattr(value, "state_dict", None)):
        raise CheckpointError(f"{message} Store its state:\n    {path.rpartition('.')[2]}.state_dict()")
    raise CheckpointError(
        f"{message} Supported are dictionaries, lists, tuples, sets, numbers, strings, bytes, tensors and arrays."
    )


def decode(stored: Any, tensors: Mapping[str, Tensor], *, largest_copy: int | None = None) -> Any:
    """Decode a value that :func:`encode` encoded.

    >>> decode({'step': 3, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}, {})
    {'step': 3, 'betas': (0.9, inf)}
    """
    # largest_copy: bytes of the largest tensor that is copied; larger tensors stay mapped. Default: all are copied.

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        return tensor.clone() if largest_copy is None or tensor.nbytes <= largest_copy else tensor

    return _decode(stored, read)


def _decode(stored: Any, read: _Read) -> Any:
    if isinstance(stored, list):
        return [_decode(item, read) for item in stored]
    if not isinstance(stored, dict):
        return stored
    tag = next(iter(stored), "")
    if len(stored) == 1 and tag.startswith("$"):
        return _READERS[tag](stored[tag], read)
    return {key: _decode(item, read) for key, item in stored.items()}


def _decode_numpy(stored: Any, read: _Read) -> Any:
    array = read(stored["$tensor"]).numpy().copy()
    return array[()] if stored["scalar"] else array


def _decode_parts(stored: Any, read: _Read) -> Any:
    # A file must not import code, so the class must be registered with torch as safe to load.
    known = {describe_class(kind): kind for kind in torch.serialization.get_safe_globals() if isinstance(kind, type)}
    kind: Any = known.get(stored["class"])
    if kind is None or not hasattr(kind, "__tensor_unflatten__"):
        module, _, name = stored["class"].rpartition(".")
        raise CheckpointError(
            f"The checkpoint contains tensors of class {name}, which torch loads only after an import. First write:\n"
            f"    import {module}"
        )
    rest = _decode(stored["rest"], read)
    return kind.__tensor_unflatten__(_decode(stored["parts"], read), rest["context"], rest["size"], rest["stride"])


def _put(tensor: Tensor, path: str, tensors: MutableMapping[str, Tensor]) -> str:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) or is_sharded(tensor)
    if not is_plain or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{path} is a {type(tensor).__qualname__} of layout {tensor.layout}, but a checkpoint contains only dense "
            "tensors. Store a dense tensor:\n    x.to_dense()"
        )
    name, count = path, 1
    while name in tensors:  # {"a.b": x, "a": {"b": y}}
        name, count = f"{path}~{count + 1}", count + 1
    tensors[name] = tensor.detach()
    return name


def _encode_items(value: Any, path: str, tensors: MutableMapping[str, Tensor]) -> list[Any]:
    return [encode(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]


def _encode_pairs(value: dict[Any, Any], path: str, tensors: MutableMapping[str, Tensor]) -> list[Any]:
    return [[encode(key, path, tensors), encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]


_Writer = Callable[[Any, str, MutableMapping[str, Tensor]], Any]
_WRITERS: dict[type, _Writer] = {
    dict: lambda value, path, tensors: {"$pairs": _encode_pairs(value, path, tensors)},
    list: _encode_items,
    tuple: lambda value, path, tensors: {"$tuple": _encode_items(value, path, tensors)},
    torch.Size: lambda value, path, tensors: {"$size": list(value)},
    set: lambda value, path, tensors: {"$set": _encode_items(sorted(value, key=repr), path, tensors)},
    collections.OrderedDict: lambda value, path, tensors: {"$ordered": _encode_pairs(value, path, tensors)},
    collections.Counter: lambda value, path, tensors: {"$counter": _encode_pairs(value, path, tensors)},
    collections.deque: lambda value, path, tensors: {
        "$deque": {"items": _encode_items(value, path, tensors), "maxlen": value.maxlen}
    },
    bytes: lambda value, path, tensors: {"$bytes": value.hex()},
    complex: lambda value, path, tensors: {"$complex": repr(value)},
    torch.dtype: lambda value, path, tensors: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, path, tensors: {"$device": str(value)},
}

_Read = Callable[[str], Tensor]  # the tensor of a name


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found


def _pairs(stored: Any, read: _Read) -> dict[Any, Any]:
    return {_decode(key, read): _decode(item, read) for key, item in stored}


_READERS: dict[str, Callable[[Any, _Read], Any]] = {
    "$tensor": lambda stored, read: read(stored),
    "$numpy": _decode_numpy,
    "$pairs": _pairs,
    "$parts": _decode_parts,
    "$tuple": lambda stored, read: tuple(_decode(stored, read)),
    "$size": lambda stored, read: torch.Size(stored),
    "$set": lambda stored, read: set(_decode(stored, read)),
    "$ordered": lambda stored, read: collections.OrderedDict(_pairs(stored, read)),
    "$counter": lambda stored, read: collections.Counter(_pairs(stored, read)),
    "$deque": lambda stored, read: collections.deque(_decode(stored["items"], read), stored["maxlen"]),
    "$float": lambda stored, read: float(stored),
    "$bytes": lambda stored, read: bytes.fromhex(stored),
    "$complex": lambda stored, read: complex(stored),
    "$dtype": lambda stored, read: _dtype(stored),
    "$device": lambda stored, read: torch.device(stored),
}
