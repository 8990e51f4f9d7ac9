"""Store one recorded call: tensors as safetensors, structure as JSON. No pickle.

.. code-block:: text

    call-00003.safetensors
        inputs.0  inputs.1 ...  outputs.0 ...                the leaves that are tensors, by their number
        metadata["yobx_flatten.call"]                        {"version": 1, "about": {...},
                                                              "inputs": {"spec": ..., "leaves": [...]}, "outputs": ...}
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import RecordError
from ..errors.dependencies import require
from ..files.document import damage_as, opened_tensors, parse_document, write_tensor_file
from ..files.scratch import publish_files, scratch_for
from ..private_names.of_torch import pytree
from ..recipe.static_codec import check_spec, dump_static, load_static
from .call import About, Fact, Snapshot, libraries_in_use

_KEY, _VERSION, _SUFFIX = "yobx_flatten.call", 1, ".safetensors"


def prepare_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Create the folder for recorded calls; raise RecordError if the folder already contains calls."""
    require("safetensors", purpose="record_calls(..., to=...)")
    path = pathlib.Path(folder)
    if path.is_file():
        raise RecordError(f"{path} is a file, but calls are written to a folder:\n    record_calls(model, to=FOLDER)")
    path.mkdir(parents=True, exist_ok=True)
    if call_files(path):
        raise RecordError(f"{path} holds recorded calls already. Name another folder:\n    record_calls(model, to=...)")
    return path


def call_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of recorded calls in a folder, in the order of the calls."""
    return sorted(folder.glob(f"call-*{_SUFFIX}"))


def write_call(folder: pathlib.Path, parts: Mapping[str, Snapshot], about: About) -> dict[str, Snapshot]:
    """Write one recorded call to a file, and return its inputs and outputs, which are then read from the file."""
    path = folder / f"call-{about.index:05}{_SUFFIX}"
    with scratch_for(path) as half:
        head = {
            "version": _VERSION,
            "about": dataclasses.asdict(about),
            **{name: _to_json(part) for name, part in parts.items()},
        }
        tensors = {
            f"{name}.{number}": _storable(leaf)
            for name, part in parts.items()
            for number, leaf in enumerate(part.leaves())
            if isinstance(leaf, torch.Tensor)
        }
        write_tensor_file(half / path.name, tensors, metadata={_KEY: json.dumps(head)})
        publish_files(half, path)
    return {name: _stored(path, name, part.facts, part.spec) for name, part in parts.items()}


def read_call(path: pathlib.Path) -> tuple[dict[str, Snapshot], About]:
    """Read a recorded call from a file of :func:`write_call`; its tensors are read from the file at each access."""
    require("safetensors", "msgspec", purpose="read_call")
    import msgspec

    with opened_tensors(path, failure=RecordError) as file:
        text = (file.metadata() or {}).get(_KEY)
    if text is None:
        raise RecordError(f"{path} is not a recorded call.")
    head = parse_document(text, dict[str, Any], str(path), failure=RecordError, finite=False)
    with damage_as(RecordError, str(path)):  # torch's reader, and the wrong types of a file
        if head.pop("version") != _VERSION:
            raise RecordError(f"{path} needs a newer yobx-flatten:\n    pip install --upgrade yobx-flatten")
        about = head.pop("about")
        with libraries_in_use():
            parts = {name: _stored(path, name, _facts(part), _spec(path, part)) for name, part in head.items()}
        return parts, msgspec.convert(about, About)


def _stored(path: pathlib.Path, name: str, facts: tuple[Fact, ...], spec: pytree.TreeSpec) -> Snapshot:
    def load() -> Sequence[Any]:
        with opened_tensors(path, failure=RecordError) as file:
            return [
                _from_storable(file.get_tensor(f"{name}.{number}"), fact) if fact.is_tensor else fact.value
                for number, fact in enumerate(facts)
            ]

    return Snapshot(facts, spec, load)


def _to_json(part: Snapshot) -> dict[str, Any]:
    fields = [dump_static(tuple(fact), where=fact.path) for fact in part.facts]
    return {"spec": pytree.treespec_dumps(part.spec), "leaves": fields}


def _facts(part: Mapping[str, Any]) -> tuple[Fact, ...]:
    return tuple(Fact(*load_static(fields)) for fields in part["leaves"])


def _spec(path: pathlib.Path, part: Mapping[str, Any]) -> pytree.TreeSpec:
    check_spec(part["spec"])
    try:
        return pytree.treespec_loads(part["spec"])
    except NotImplementedError as error:  # torch's error for a class that is not registered
        raise RecordError(f"{path}: {error} Register the classes of the arguments before you load the calls.") from None


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    from safetensors.torch import _TYPES

    tensor = tensor.cpu().contiguous()
    # a dtype that the format lacks is stored as bytes; the metadata has the original dtype
    return tensor if tensor.dtype in _TYPES.values() else tensor.reshape(-1).view(torch.uint8)


def _from_storable(tensor: torch.Tensor, fact: Fact) -> torch.Tensor:
    if fact.dtype is None or tensor.dtype is fact.dtype:
        return tensor
    return tensor.view(fact.dtype).reshape(fact.shape)
