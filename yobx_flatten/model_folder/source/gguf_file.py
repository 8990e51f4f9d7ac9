"""Read a model from a GGUF file of llama.cpp: weights, configuration and tokenizer."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import re
import struct
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from ...core.files.document import open_regular
from ...errors import ModelSourceError, require
from ...errors.failures import first_line, raised_as
from .configuration import FILES_ONLY
from .packed_weights import UnmatchedWeights, load_stored

GGUF = ".gguf"

_MAGIC = b"GGUF"

# struct formats of numbers by type code, and the type codes of texts and lists, from the documentation of the format
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_COUNTS = re.compile(r"\.(block_count|expert_count|head_count|head_count_kv|expert_used_count)$")
_MOST_EXPERTS = 10_000  # counts up to this number are accepted, because experts and heads share a tensor


def is_gguf(path: pathlib.Path) -> bool:
    if path.suffix == GGUF:
        return True
    try:
        with open_regular(path, failure=ModelSourceError) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ModelSourceError):
        return False


def gguf_config(path: pathlib.Path) -> Any:
    import transformers

    require("gguf", purpose=f"The model {path}", extra="gguf")
    with open_regular(path, failure=ModelSourceError) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelSourceError(f"{path} is not a GGUF file: it does not begin with GGUF.")
    with _alone(path) as given:
        with open_regular(path, failure=ModelSourceError) as file:
            size = path.stat().st_size
            version, tensors, entries = struct.unpack("<4xIQQ", file.read(24))
            is_known = 2 <= version <= 3  # other versions are big-endian files, which the gguf library reads or refuses
            if is_known and max(tensors, entries) > size:
                raise ValueError(f"the file states {tensors:,} tensors and {entries:,} entries, but has {size:,} bytes")
            for _ in range(entries if is_known else 0):
                key, value = _text(file, size).decode(), _value(file, size)
                # transformers would allocate all layers
                if isinstance(value, int) and _COUNTS.search(key) and value > max(tensors, _MOST_EXPERTS):
                    raise ValueError(f"the file states {key} = {value:,}, but holds only {tensors:,} tensors")
        config = transformers.AutoConfig.from_pretrained(**given)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the loaded weights are not quantized
    config.name_or_path = str(path)  # instead of the temporary folder
    return config


def gguf_weights(
    kind: Any, config: Any, path: pathlib.Path, dtype: Any, *, choice: UnmatchedWeights = "refuse"
) -> tuple[Any, tuple[str, ...]]:
    """Return the model in a GGUF file with dequantized weights, and notes on weights that do not match its class."""
    # choice: what to do if weights do not match the class; by default, unused weights are left out with a note
    with _alone(path) as given:
        folder = given.pop("pretrained_model_name_or_path")
        how: dict[str, Any] = {"choice": "unused" if choice == "refuse" else choice, "dtype": dtype}
        loaded, differences = load_stored(kind, folder, str(path), failure=ModelSourceError, **how, **given)
    with torch.device("meta"):  # without memory for weights
        plain = kind(config)
    _reader.cache_clear()
    for name in vars(loaded).keys() - vars(plain).keys():  # attributes that transformers sets on quantized models
        delattr(loaded, name)
    loaded.config, loaded.name_or_path = config, config.name_or_path
    return loaded, differences.remarks()


def gguf_tokenizer(path: pathlib.Path) -> Any:
    return _tokenizer(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # an export opens the tokenizer several times, which takes seconds for 50,000 words
def _tokenizer(path: pathlib.Path, changed: int) -> Any:
    import transformers

    with _alone(path) as given:
        return transformers.AutoTokenizer.from_pretrained(**given)


def _value(file: BinaryIO, size: int, kind: int | None = None) -> object:
    """Read the value of a GGUF metadata entry; return a number or a text, or ``None`` for a list."""
    kind = struct.unpack("<I", file.read(4))[0] if kind is None else kind
    if kind in _NUMBERS:
        return struct.unpack(_NUMBERS[kind], file.read(struct.calcsize(_NUMBERS[kind])))[0]
    if kind == _TEXT:
        return _text(file, size)
    if kind != _ARRAY:
        raise ValueError(f"the file has an entry of the unknown type {kind}")
    inner, count = struct.unpack("<IQ", file.read(12))
    if count > size:
        raise ValueError(f"the file is damaged: it states a list of {count:,} entries, but has only {size:,} bytes")
    if inner in _NUMBERS:
        file.seek(count * struct.calcsize(_NUMBERS[inner]), io.SEEK_CUR)
    else:
        for _ in range(count):
            _value(file, size, inner)
    return None


def _text(file: BinaryIO, size: int) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > size:
        raise ValueError(f"the file is damaged: it states a string of {length:,} bytes, but has only {size:,} bytes")
    return file.read(length)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """In a ``with`` block, yield arguments with which ``from_pretrained`` reads a GGUF file in a temporary folder.

    The temporary folder has only the GGUF file, so that transformers cannot run Python files. Errors are converted.
    """

    def failure(error: BaseException) -> ModelSourceError:
        if isinstance(error, ModelSourceError):
            return ModelSourceError(str(error))
        if isinstance(error, (OSError, MemoryError)):
            return ModelSourceError(f"{path} cannot be read: {first_line(error)}")
        return ModelSourceError(
            f"{path} cannot be read as a model ({type(error).__name__}: {first_line(error).rstrip('.')})."
        )

    def read(given: Any) -> Any:
        return _reader(pathlib.Path(given).resolve(), os.stat(given).st_mtime_ns)

    # stderr is redirected, because transformers has no option to hide these progress bars
    with raised_as(failure), contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        import gguf

        (pathlib.Path(folder) / path.name).symlink_to(path.resolve())
        found = gguf.GGUFReader, gguf.get_tensor_name_map
        # transformers would read the metadata three times, and calls the second function for each module
        gguf.GGUFReader = read  # type: ignore[misc,assignment]
        gguf.get_tensor_name_map = functools.cache(found[1])
        try:
            yield {"pretrained_model_name_or_path": folder, "gguf_file": path.name, **FILES_ONLY}
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = found  # type: ignore[misc]


@functools.lru_cache(maxsize=1)
def _reader(path: pathlib.Path, changed: int) -> Any:
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(path)
