"""Open the tokenizer of an untrusted folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from typing import Any

from ...errors.failures import first_line, raised_as
from ...files.document import TEXTS, own_files, read_bytes, read_document
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
"""Names of files, of which a folder with a tokenizer contains at least one."""

_CONFIG, _FAST = "tokenizer_config.json", "tokenizer.json"
_MOST_GROWTH = 1000  # largest factor by which the replacements of a tokenizer may lengthen a text


@dataclasses.dataclass(frozen=True)
class _Stated:
    """Types of entries that transformers reads late, where a wrong type would raise an unclear error."""

    tokenizer_class: str | None = None
    model_max_length: float | None = None
    chat_template: str | list[dict[str, str]] | dict[str, str] | None = None
    padding_side: str | None = None
    model_input_names: list[str] | None = None


def _growth(part: Any) -> float:
    """Return the largest factor by which a part of a tokenizer can lengthen a text."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    found = math.prod(map(_growth, inner))
    if isinstance(part, dict) and part.get("type") == "Replace":  # a regular expression may match a single letter
        found *= max(1.0, len(part["content"]) / len(part["pattern"].get("String", "a")))
    return found


def open_tokenizer(folder: pathlib.Path, *, failure: type[Exception], **options: Any) -> Any:
    """Return the tokenizer of a folder; code in the folder never runs."""
    # options: further arguments of `from_pretrained`
    import transformers

    if folder.is_file():
        return gguf_tokenizer(folder)
    own_files(folder, TEXTS, failure)
    config = folder / _CONFIG
    stated = read_document(config, _Stated, failure=failure, finite=False) if config.exists() else _Stated()
    with readable(folder, failure):
        if (folder / _FAST).exists() and b'"Replace"' in read_bytes(folder / _FAST, failure=failure):
            parts = read_document(folder / _FAST, dict[str, Any], failure=failure, finite=False)
            if max(_growth(parts.get("normalizer")), _growth(parts.get("decoder"))) > _MOST_GROWTH:
                raise failure(f"its replacements make a text more than {_MOST_GROWTH:,} times as long")
    # for some model types, AutoTokenizer ignores that the folder names ByT5Tokenizer
    is_bytes = stated.tokenizer_class == "ByT5Tokenizer"
    kind: Any = transformers.ByT5Tokenizer if is_bytes else transformers.AutoTokenizer
    with readable(folder, failure):
        return kind.from_pretrained(folder, **FILES_ONLY, **options)


def readable(name: pathlib.Path | str, failure: type[Exception]) -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, convert the errors of tokenizer libraries to ``failure``."""
    return raised_as(lambda error: failure(f"The tokenizer in {name} cannot be read: {first_line(error)}"))
