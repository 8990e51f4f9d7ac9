"""Open the tokenizer of an untrusted folder."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

from ...errors.failures import raised_as
from ...errors.messages import first_line
from ...files.document import check_own, read_document
from .configuration import FILES_ONLY
from .gguf_file import gguf_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of which a folder with a tokenizer holds at least one."""

_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
_CONFIG = "tokenizer_config.json"
_LARGEST = 2**30  # bytes; a tokenizer of 260,000 words has 35 million


@dataclasses.dataclass(frozen=True)
class _Stated:
    """What is read of a configuration long after it was opened, and by then ends in an error of Python."""

    tokenizer_class: str | None = None
    model_max_length: float | None = None
    chat_template: str | list[dict[str, str]] | dict[str, str] | None = None
    padding_side: str | None = None
    model_input_names: list[str] | None = None


def open_tokenizer(folder: pathlib.Path, *, failure: type[Exception], **options: Any) -> Any:
    """Return the tokenizer of a folder; no code in the folder runs."""
    # options: further arguments of `from_pretrained`
    import transformers

    if folder.is_file():
        return gguf_tokenizer(folder)
    for path in (path for pattern in _PATTERNS for path in folder.glob(pattern)):
        check_own(path, folder, failure, _LARGEST)  # a pipe would be waited for
    config = folder / _CONFIG
    stated = read_document(config, _Stated, failure=failure, finite=False) if config.exists() else _Stated()
    # for some models transformers looks for their own class where the folder names that of bytes
    is_bytes = stated.tokenizer_class == "ByT5Tokenizer"
    kind: Any = transformers.ByT5Tokenizer if is_bytes else transformers.AutoTokenizer
    with readable(folder, failure):
        return kind.from_pretrained(folder, **FILES_ONLY, **options)


def readable(name: pathlib.Path | str, failure: type[Exception]) -> contextlib.AbstractContextManager[None]:
    """Turn what tokenizers raise, in each library another class, into one error."""
    return raised_as(lambda error: failure(f"The tokenizer in {name} cannot be read: {first_line(error)}"))
