"""A tokenizer without a vocabulary: a token per byte of UTF-8.

::

    0 padding    1 end of text    2 unknown    3 ... 258: byte 0 ... byte 255

These are the numbers of ByT5 (Xue et al., 2021, arXiv 2105.13626): its class in transformers reads what is saved
here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

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
