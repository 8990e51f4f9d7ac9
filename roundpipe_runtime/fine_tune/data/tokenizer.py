"""Load the tokenizer of a training: from the model's folder, from another folder, or the byte tokenizer."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from yobx_flatten.model_folder.source.tokenizer_files import TOKENIZER_FILES, open_tokenizer, readable

from ..errors import FineTuneError
from ..models import ModelSource


class Tokenizer(Protocol):
    """The interface of a tokenizer for a training."""

    name: str
    vocab_size: int
    eos_token_id: int | None

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return the tokens of each text: of shape (tokens,), int32, none added."""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens; ``special`` also that of special ones."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Any:
        """Write the files that transformers reads."""


class FolderTokenizer:
    """A tokenizer of transformers."""

    # inner: tokenizer that `AutoTokenizer` loaded from a folder

    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name
        self.vocab_size = 1 + max(inner.get_vocab().values(), default=-1)  # numbers may have gaps
        self.eos_token_id: int | None = inner.eos_token_id

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return the tokens of each text: of shape (tokens,), int32, none added."""
        # a text is longer than any row, and cut into rows afterwards: nothing to warn of
        with readable(self.name, FineTuneError):
            rows = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [torch.tensor(row, dtype=torch.int32) for row in rows["input_ids"]]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens, with special ones if asked for."""
        return str(self.inner.decode([int(number) for number in ids], skip_special_tokens=not special))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that transformers reads."""
        self.inner.save_pretrained(folder)


def load_tokenizer(source: ModelSource, name: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        source: source of the model.
        name: folder with a tokenizer, or ``"bytes"``. Default: the model's folder or GGUF file; bytes, if the
            folder has no tokenizer and the weights are random.

    Returns:
        The tokenizer.

    Raises:
        FineTuneError: there is no tokenizer, it cannot be read, or the model's vocabulary is too small for it.
    """
    if name is not None and str(name) != "bytes":
        return _from_folder(pathlib.Path(name))
    if name is None and source.gguf is not None:
        return FolderTokenizer(open_tokenizer(source.gguf, failure=FineTuneError), source.name)
    if name is None and source.folder is not None and _has_tokenizer(source.folder):
        return _from_folder(source.folder)
    if name is None and source.has_weights:
        raise FineTuneError(
            f"{source.name} holds weights and no tokenizer. Put its tokenizer files there, or name their folder, or "
            "read bytes: --tokenizer bytes"
        )
    made = ByteTokenizer()
    if made.vocab_size > source.vocab_size:
        raise FineTuneError(
            f"{source.name} has a vocabulary of {source.vocab_size}, and bytes with their special tokens need "
            f'{made.vocab_size}. Write it into config.json: "vocab_size": {made.vocab_size}'
        )
    return made


def _has_tokenizer(folder: pathlib.Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    if not folder.is_dir():
        raise FineTuneError(f"There is no folder {folder}. Name one with a tokenizer, or: --tokenizer bytes")
    if not _has_tokenizer(folder):
        raise FineTuneError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES[:3])}.")
    found = open_tokenizer(folder, failure=FineTuneError)
    return ByteTokenizer() if type(found).__name__ == "ByT5Tokenizer" else FolderTokenizer(found, str(folder))


# A tokenizer without a vocabulary: a token per byte of UTF-8.


_FIRST_BYTE = 3


class ByteTokenizer:
    """A tokenizer without a vocabulary: one token per byte of UTF-8.

    Attributes:
        vocab_size: number of tokens; every token is below it.
        eos_token_id: token after each document.
        pad_token_id: token of padding, not used here but stored for tools that batch.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode(["né"])
    [tensor([113, 198, 172], dtype=torch.int32)]
    >>> tokenizer.decode([113, 198, 172, 1])
    'né'
    """

    vocab_size = _FIRST_BYTE + 256
    eos_token_id: int | None = 1
    pad_token_id = 0
    name = "bytes"

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return the tokens of each text: of shape (bytes,), int32, without the end of text."""
        return [self._encoded(text.encode("utf-8")) for text in texts]

    def _encoded(self, data: bytes) -> torch.Tensor:
        if not data:  # of which torch makes no tensor
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int32) + _FIRST_BYTE

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens; those that are not bytes are left out, incomplete characters become U+FFFD.

        Args:
            ids: tokens in order.
            special: for the signature of other tokenizers; special tokens are left out in either case.

        Returns:
            The text.
        """
        data = bytes(number - _FIRST_BYTE for number in map(int, ids) if 0 <= number - _FIRST_BYTE < 256)
        return data.decode("utf-8", "replace")

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files from which transformers loads its byte tokenizer."""
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
