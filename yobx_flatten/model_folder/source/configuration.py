"""Read untrusted model configurations, and refuse impossible numbers of layers or weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ...errors import ModelSourceError
from ...errors.failures import first_line, format_bytes, raised_as
from ...export.model_facts import memory_available
from ...files.document import check_regular, inside, read_configuration, read_document
from ...recipe.static_codec import objection_to

FILES_ONLY: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for every ``from_pretrained``; without ``False``, transformers asks on the terminal whether to run code."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MOST_PARAMETERS = 300_000  # tensors; a model of 61 layers with 384 experts has 70,000


def read_config(
    file: pathlib.Path,
    name: str,
    *,
    failure: type[Exception],
    remedy: str = "",
    runs_code: bool = False,
    of_code: str = "",
) -> Any:
    """Read a ``config.json`` as a configuration of transformers."""
    import transformers

    stated = read_configuration(file, dict[str, Any], failure=failure, remedy=remedy)
    objection = objection_to(stated)
    if objection is not None:
        raise failure(f"{file} {objection}.{remedy and ' '}{remedy}")
    code = own_code(stated)
    if code and not runs_code:
        raise failure(
            f"{name} needs its own code ({code}, in auto_map of config.json), which is not run. {of_code or remedy}"
        )

    def refused(error: BaseException) -> Exception:
        reason = first_line(error).rstrip(".")
        return failure(f"{name} is not a configuration of transformers: {reason}.{remedy and ' '}{remedy}")

    with raised_as(refused):  # transformers, huggingface_hub and JSON each raise their own errors
        if runs_code and "auto_map" in stated:
            return transformers.AutoConfig.from_pretrained(file.parent, **{**FILES_ONLY, "trust_remote_code": True})
        return transformers.AutoConfig.from_pretrained(file, **FILES_ONLY)


def write_json(path: pathlib.Path, contents: Mapping[str, Any]) -> None:
    """Write a mapping to a JSON file with indentation."""
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def change_json(path: pathlib.Path, entries: Mapping[str, Any]) -> None:
    """Set entries of a JSON file; an entry of ``None`` is removed."""
    held = {**read_document(path, dict[str, Any], failure=ModelSourceError, finite=False), **entries}
    write_json(path, {name: value for name, value in held.items() if name not in entries or value is not None})


def bytes_of_weights(folder: pathlib.Path, *, failure: type[Exception]) -> int:
    """Return the bytes of all weight files in a folder; 0 without weights."""
    for index in (index for pattern in _WEIGHTS for index in folder.glob(f"{pattern}.index.json")):
        stated_weights(index, failure=failure)
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    for file in files:
        check_regular(file, failure)
    return sum(file.stat().st_size for file in files)


def stated_weights(index: pathlib.Path, *, failure: type[Exception]) -> dict[str, str]:
    """Return the file name of each weight by the weight's name, from the index file of a folder."""
    held = read_document(index, _Index, failure=failure, finite=False).weight_map
    for name in set(held.values()):
        inside(index.parent, name, failure)
    return held


@dataclasses.dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


@contextlib.contextmanager
def bounded_weights(name: str, *, failure: type[Exception], stored: int = 0) -> Iterator[None]:
    """In a ``with`` block, raise an error if a model is made with more weights than the memory can hold."""
    # stored: bytes of the files with the weights; 0 for random weights
    thread = threading.get_ident()
    most = max(memory_available(), 4 * stored)  # files may be memory-mapped, and converted to a wider dtype
    count = size = 0

    def add(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal count, size
        if parameter is None or threading.get_ident() != thread:
            return
        count, size = count + 1, size + parameter.nbytes
        if size > most:
            raise failure(
                f"The configuration of {name} is of a model that is too large: its first {count} weights take "
                f"{format_bytes(size)} already, and {format_bytes(most)} are available."
            )
        if count > _MOST_PARAMETERS:
            raise failure(f"The configuration of {name} is of a model with more than {_MOST_PARAMETERS:,} weights.")

    # each model class raises its own errors for impossible sizes
    loading = raised_as(lambda error: failure(f"The model in {name} cannot be loaded: {first_line(error)}"), failure)
    with torch.nn.modules.module.register_module_parameter_registration_hook(add), loading:
        yield


ON_PURPOSE = "If you trust its author: trust_remote_code=True (--trust-remote-code)."
"""End of an error message: what to type, in Python and on the command line, to run the Python files of a model."""


def own_code(stated: Mapping[str, Any]) -> str:
    """Return the class in the checkpoint's own code that a configuration needs; ``""`` if transformers has it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    named = stated.get("auto_map")
    if not isinstance(named, Mapping):
        return ""
    # code of a tokenizer or a processor is not needed
    classes = [str(named[key]) for key in sorted(named) if key.startswith(("AutoConfig", "AutoModel"))]
    wanted = [name for name in stated.get("architectures") or () if isinstance(name, str)]
    is_known = stated.get("model_type") in CONFIG_MAPPING and all(hasattr(transformers, name) for name in wanted)
    return "" if is_known or not classes else classes[0]


def own_auto_class(config: Any) -> Any:
    """Return the transformers auto class that loads a model with the code in its folder; ``None`` if there is none."""
    import transformers

    named: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    kinds = [key for key in named if key.startswith("AutoModel") and hasattr(transformers, key)]
    wanted = set(getattr(config, "architectures", None) or ())
    fitting = [key for key in kinds if str(named[key]).rpartition(".")[2] in wanted]
    return getattr(transformers, (fitting or kinds)[0]) if kinds else None
