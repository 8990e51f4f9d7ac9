"""Read a model from a GGUF file, in which llama.cpp keeps weights, configuration and tokenizer."""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
from collections.abc import Iterator
from typing import Any

from ...errors import ModelSourceError
from ...errors.dependencies import require
from ...errors.failures import raised_as
from ...errors.messages import first_line
from ...files.document import check_regular

__all__ = ["GGUF", "gguf_config", "gguf_tokenizer", "gguf_weights", "is_gguf"]

GGUF = ".gguf"

_MAGIC = b"GGUF"


def is_gguf(path: pathlib.Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name or its first bytes."""
    if path.suffix == GGUF:
        return True
    try:
        check_regular(path, ModelSourceError)
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ModelSourceError):
        return False


def gguf_config(path: pathlib.Path) -> Any:
    """Return the configuration of a GGUF file."""
    import transformers

    require("gguf", purpose=f"The model {path}", extra="gguf")
    check_regular(path, ModelSourceError)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelSourceError(f"{path} is not a GGUF file: it does not begin with GGUF.")
    with _readable(path):
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file; the weights are loaded in full
    return config


def gguf_weights(kind: Any, config: Any, path: pathlib.Path, dtype: Any) -> Any:
    """Return the model of a GGUF file, with its weights in full."""
    with _readable(path):
        loaded, found = kind.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    wrong = sorted(map(str, (*found["missing_keys"], *found["mismatched_keys"])))
    if wrong:
        raise ModelSourceError(f"{path} lacks {len(wrong)} weights of {kind.__qualname__}: {', '.join(wrong[:5])}.")
    # without what transformers keeps for a quantised model
    model = kind(config).to(dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def gguf_tokenizer(path: pathlib.Path) -> Any:
    """Return the tokenizer of a GGUF file."""
    return _tokenizer(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # read for each text; of 50,000 words that takes seconds
def _tokenizer(path: pathlib.Path, changed: int) -> Any:
    import transformers

    with _readable(path):
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Read a file of a stranger, silently; what libraries raise becomes one error."""

    def failure(error: BaseException) -> ModelSourceError:
        if isinstance(error, (OSError, MemoryError)):
            return ModelSourceError(f"{path} cannot be read: {first_line(error)}")
        return ModelSourceError(
            f"{path} cannot be read as a model ({type(error).__name__}: {first_line(error).rstrip('.')})."
        )

    # bars that no option of transformers turns off
    with raised_as(failure), contextlib.redirect_stderr(io.StringIO()):
        yield
