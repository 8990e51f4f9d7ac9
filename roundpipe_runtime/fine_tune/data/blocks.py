"""Tokenized text in rows of one length, split into training rows and held-out rows.

::

    document, end, document, end, doc|ument, end, ...     all tokens in a line, cut every `length` tokens
    row 0                            |row 1
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..errors import FineTuneError
from ..rows import split_rows
from .text_files import END, find_texts, read_texts
from .tokenizer import Tokenizer

# A tokenizer is given so many characters, or texts, at a time: it has its own threads.
_CHARACTERS, _TEXTS = 2**20, 1000


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A tokenized text in rows of one length.

    Attributes:
        tokens: tokens, of shape (rows, length), int32.
        training: indices of the training rows, of shape (rows,).
        held_out: indices of the rows that only evaluation reads.
        left_over: number of tokens at the end that do not fill a row.
        digest: digest that is equal for the same tokens in rows of the same length.
    """

    tokens: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor
    left_over: int
    digest: str

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.tokens.shape[1]

    @property
    def lengths(self) -> None:
        """Rows have one length."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[row].long()
        return {"input_ids": ids, "labels": ids}

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for a batch."""
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def tokens_in(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of some rows."""
        return len(rows) * self.length


def read_blocks(
    names: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    *,
    length: int,
    field: str = "text",
    eval_share: float = 0.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> Blocks:
    """Read and tokenize texts, and return their tokens in rows.

    Args:
        names: files of text or JSON lines, folders of such files or of the library datasets, and patterns.
        tokenizer: tokenizer from :func:`load_tokenizer`.
        length: tokens of a row.
        field: field of JSON lines, and of folders of ``datasets``, that holds the text.
        eval_share: share of the rows that is held out for evaluation, from 0 to 1.
        seed: seed of the choice of these rows.
        vocab_size: vocabulary size of the model, which all tokens must be below. Default: not checked.

    Returns:
        The rows, split into training rows and held-out rows.

    Raises:
        FineTuneError: a text cannot be read, the tokens do not fill a row, or a token is too large.
    """
    paths = find_texts(names)
    tokens = pack(read_texts(paths, field=field), tokenizer)
    if not tokens.numel():
        raise FineTuneError(f"There is no text in {', '.join(map(str, names))}.")
    largest = int(tokens.max())
    if vocab_size is not None and largest >= vocab_size:
        raise FineTuneError(
            f"The model has a vocabulary of {vocab_size}, and the tokenizer {tokenizer.name} makes the token "
            f"{largest}. It belongs to another model."
        )
    return make_blocks(tokens, length=length, eval_share=eval_share, seed=seed)


def pack(pieces: Iterable[str | None], tokenizer: Tokenizer) -> torch.Tensor:
    """Return the tokens of all documents in one sequence, with the end of text after each that is not empty."""
    # pieces: pieces of documents, and `END` after each document
    # tokenizer: tokenizer whose `eos_token_id` ends a document; `None` leaves it out
    store = bytearray()
    end = b"" if tokenizer.eos_token_id is None else torch.tensor([tokenizer.eos_token_id], dtype=torch.int32)
    end_bytes = end if isinstance(end, bytes) else end.numpy().tobytes()
    is_open = False
    for group in _groups(pieces):
        encoded = iter(tokenizer.encode([piece for piece in group if piece is not END]))
        for piece in group:
            if piece is not END:
                store += next(encoded).numpy().tobytes()
            elif is_open:
                store += end_bytes
            is_open = piece is not END and (is_open or bool(piece))
    return torch.frombuffer(store, dtype=torch.int32) if store else torch.empty(0, dtype=torch.int32)


def _groups(pieces: Iterable[str | None]) -> Iterator[list[str | None]]:
    group: list[str | None] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece or "")
        if characters >= _CHARACTERS or len(group) >= 2 * _TEXTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def make_blocks(tokens: torch.Tensor, *, length: int, eval_share: float = 0.0, seed: int = 0) -> Blocks:
    """Cut a sequence of tokens into rows, and hold out a share of the rows for evaluation.

    Args:
        tokens: tokens, of shape (tokens,).
        length: tokens of a row.
        eval_share: share of held-out rows, from 0 to 1; at least one row is held out unless it is 0, and at least one
            is left for training.
        seed: seed of the choice.

    Returns:
        The rows, split into training rows and held-out rows.

    Raises:
        FineTuneError: the tokens do not fill a row, or fill only one where two are needed.

    >>> made = make_blocks(torch.arange(10, dtype=torch.int32), length=3, eval_share=0.3)
    >>> made.tokens.shape, len(made.training), len(made.held_out), made.left_over
    (torch.Size([3, 3]), 2, 1, 1)
    """
    count = tokens.numel() // length
    held_out = min(max(1, round(eval_share * count)), count - 1) if eval_share > 0 else 0
    if count - held_out < 1 or (eval_share > 0 and held_out < 1):
        wanted = "two rows of" if eval_share > 0 and count else "one row of"
        raise FineTuneError(
            f"The text has {tokens.numel()} tokens, which do not fill {wanted} {length}. Give more text, or shorter "
            f"rows: --length {max(2, tokens.numel() // 8)}"
        )
    training, held_out_rows = split_rows(count, eval_share=eval_share, seed=seed)
    rows = tokens[: count * length].view(count, length)
    digest = hashlib.sha256(rows.numpy().data)
    digest.update(str(length).encode())
    return Blocks(
        tokens=rows,
        training=training,
        held_out=held_out_rows,
        left_over=tokens.numel() - count * length,
        digest=digest.hexdigest(),
    )
