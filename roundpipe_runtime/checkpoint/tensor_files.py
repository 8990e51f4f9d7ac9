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

from yobx_flatten.errors import describe_class
from yobx_flatten.errors.dependencies import require
from yobx_flatten.files.document import opened_tensors, write_tensor_file

from ..device.composite import is_wrapper
from ..device.disk import disk_of, leave
from ..errors import CheckpointError, DamagedCheckpointError
from .shards import is_sharded

# Bytes of a file with tensors from a disk, which are in memory while the file is written.
_SHARD_OF_DISK = 128 * 2**20


def need_safetensors() -> None:
    require("safetensors", purpose="a checkpoint", extra="train")


def write_tensors(
    folder: pathlib.Path,
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    shard_bytes: int,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Write one safetensors file, or several files of about ``shard_bytes`` bytes with an index."""
    # tensors: tensors on the host by name; none shares memory with another
    # shard_bytes: largest number of bytes of a file, unless one tensor alone is larger
    # part: index of this process: it writes every `parts`-th file, starting with this one; process 0 also
    # writes the index
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
def open_tensors(folder: pathlib.Path, stem: str) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors that :func:`write_tensors` wrote; values are read from the file when they are accessed."""
    with contextlib.ExitStack() as files:
        found = {}
        for path in [folder / f"{stem}.safetensors", *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))]:
            if path.exists():
                file = files.enter_context(opened_tensors(path, failure=DamagedCheckpointError))
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 # it is not a mapping
        yield found


def names_in_parts(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split tensor names in order into lists of at most ``limit`` bytes; a larger tensor gets a separate list."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if parts[-1] and filled + nbytes > limit:
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


def encode(value: Any, path: str, tensors: MutableMapping[str, torch.Tensor]) -> Any:
    """Encode a nested value for JSON; put its tensors into ``tensors``, under names made from their key paths.

    >>> encode({"step": 3, "betas": (0.9, float("inf"))}, "state", {})
    {'step': 3, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
    """
    # value: nested dictionaries, lists, tuples, sets, counters, numbers, strings, bytes, tensors, arrays of NumPy
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        if not is_wrapper(value) or is_sharded(value):
            return {"$tensor": _put(value, path, tensors)}
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined] # of wrapper subclasses
        parts = {name: encode(getattr(value, name), f"{path}.{name}", tensors) for name in names}
        rest = encode({"context": context, "size": value.size(), "stride": value.stride()}, path, tensors)
        return {"$parts": {"class": describe_class(kind), "parts": parts, "rest": rest}}
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value, path, tensors)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        try:
            tensor = torch.from_numpy(numpy.array(value))
        except TypeError as error:
            raise CheckpointError(f"{path} is an array of {value.dtype}, which torch does not support.") from error
        return {"$numpy": {"$tensor": _put(tensor, path, tensors), "scalar": isinstance(value, numpy.generic)}}
    raise CheckpointError(_refusal(value, path))


def decode(stored: Any, tensors: Mapping[str, torch.Tensor], *, largest_copy: int | None = None) -> Any:
    """Decode a value that :func:`encode` encoded.

    >>> decode({'step': 3, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}, {})
    {'step': 3, 'betas': (0.9, inf)}
    """
    # largest_copy: bytes of the largest tensor that is copied; larger tensors stay mapped. Default: all are copied.
    return _decode(stored, _Copies(tensors, largest_copy))


class _Copies(Mapping[str, torch.Tensor]):
    """A mapping that copies each tensor when it is read, except tensors of more than ``largest`` bytes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], largest: int | None) -> None:
        self._tensors, self._largest = tensors, largest

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor.clone() if self._largest is None or tensor.nbytes <= self._largest else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _decode(stored: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(stored, list):
        return [_decode(item, tensors) for item in stored]
    if not isinstance(stored, dict):
        return stored
    tag = next(iter(stored), "")
    if len(stored) == 1 and tag.startswith("$"):
        if tag == "$tensor":
            return tensors[stored[tag]]
        if tag == "$numpy":
            array = tensors[stored[tag]["$tensor"]].numpy().copy()
            return array[()] if stored[tag]["scalar"] else array
        return _READERS[tag](stored[tag], tensors)
    return {key: _decode(item, tensors) for key, item in stored.items()}


def _decode_parts(stored: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    # A file must not import code, so the class must be registered with torch as safe to load.
    known = {describe_class(kind): kind for kind in torch.serialization.get_safe_globals() if isinstance(kind, type)}
    kind: Any = known.get(stored["class"])
    if kind is None or not hasattr(kind, "__tensor_unflatten__"):
        module, _, name = stored["class"].rpartition(".")
        raise CheckpointError(
            f"The checkpoint contains tensors of class {name}, which torch does not know. Import the class first:\n"
            f"    import {module}"
        )
    rest = _decode(stored["rest"], tensors)
    return kind.__tensor_unflatten__(_decode(stored["parts"], tensors), rest["context"], rest["size"], rest["stride"])


def _put(tensor: torch.Tensor, path: str, tensors: MutableMapping[str, torch.Tensor]) -> str:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_sharded(tensor)
    if not is_plain or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{path} is a {type(tensor).__qualname__} of layout {tensor.layout}, and a checkpoint contains dense "
            "tensors only. Store its parts."
        )
    name, count = path, 1
    while name in tensors:  # {"a.b": x, "a": {"b": y}}
        count += 1
        name = f"{path}~{count}"
    tensors[name] = tensor.detach()
    return name


def _encode_items(value: Any, path: str, tensors: MutableMapping[str, torch.Tensor]) -> list[Any]:
    return [encode(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]


def _encode_dict(value: dict[Any, Any], path: str, tensors: MutableMapping[str, torch.Tensor]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    return {"$pairs": _encode_pairs(value, path, tensors)}


def _encode_pairs(value: dict[Any, Any], path: str, tensors: MutableMapping[str, torch.Tensor]) -> list[Any]:
    return [[encode(key, path, tensors), encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]


def _refusal(value: Any, path: str) -> str:
    kind = type(value)
    message = f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot contain."
    if isinstance(value, torch.Generator):
        return f"{message} Store its state:\n    generator.get_state()"
    if callable(getattr(value, "state_dict", None)):
        return f"{message} Store its state:\n    {path.rpartition('.')[2]}.state_dict()"
    return f"{message} Supported are dictionaries, lists, tuples, sets, numbers, strings, bytes, tensors and arrays."


_Writer = Callable[[Any, str, MutableMapping[str, torch.Tensor]], Any]
_WRITERS: dict[type, _Writer] = {
    dict: _encode_dict,
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

_Reader = Callable[[Any, Mapping[str, torch.Tensor]], Any]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found


def _pairs(stored: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(item, tensors) for key, item in stored}


_READERS: dict[str, _Reader] = {
    "$pairs": _pairs,
    "$parts": _decode_parts,
    "$tuple": lambda stored, tensors: tuple(_decode(stored, tensors)),
    "$size": lambda stored, tensors: torch.Size(stored),
    "$set": lambda stored, tensors: set(_decode(stored, tensors)),
    "$ordered": lambda stored, tensors: collections.OrderedDict(_pairs(stored, tensors)),
    "$counter": lambda stored, tensors: collections.Counter(_pairs(stored, tensors)),
    "$deque": lambda stored, tensors: collections.deque(_decode(stored["items"], tensors), stored["maxlen"]),
    "$float": lambda stored, tensors: float(stored),
    "$bytes": lambda stored, tensors: bytes.fromhex(stored),
    "$complex": lambda stored, tensors: complex(stored),
    "$dtype": lambda stored, tensors: _dtype(stored),
    "$device": lambda stored, tensors: torch.device(stored),
}
