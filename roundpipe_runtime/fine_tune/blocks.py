"""Tokens in rows of one length, and which of them are kept from the training.

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

from .errors import FineTuneError
from .text_files import END, find_texts, read_texts
from .tokenizer import Tokenizer

__all__ = ["Blocks", "make_blocks", "pack", "read_blocks"]

# A tokenizer is given so many characters, or texts, at a time: it has threads of its own.
_CHARACTERS, _TEXTS = 2**20, 1000


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A text in rows.

    Attributes:
        tokens: of shape (rows, length), int32.
        training: numbers of the rows that are learnt from, of shape (rows,).
        held_out: numbers of those that are not, and that evaluation reads.
        left_over: tokens at the end that fill no row.
        digest: tells whether two are of the same tokens in rows of the same length.
    """

    tokens: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor
    left_over: int
    digest: str

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.tokens.shape[1]


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
    """Read texts, and return their tokens in rows.

    Args:
        names: files of text or JSON lines, folders of such or of the library datasets, patterns.
        tokenizer: from :func:`load_tokenizer`.
        length: tokens of a row.
        field: of JSON lines, and of folders of ``datasets``, that holds the text.
        eval_share: share of the rows that is kept for evaluation, from 0 to 1.
        seed: of the choice of these.
        vocab_size: of the model, which the tokens must be below.

    Raises:
        FineTuneError: a text cannot be read, or all of it fills no row, or a token is too large.
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
    """Return the tokens of all documents in a line, with the end of text behind each document that is not empty.

    Args:
        pieces: of documents, and ``END`` behind each.
        tokenizer: whose ``eos_token_id`` ends a document; ``None`` leaves it out.

    Returns:
        Of shape (tokens,), int32, the only copy of them.
    """
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
    """Cut a line of tokens into rows, and keep a share of the rows for evaluation.

    Args:
        tokens: of shape (tokens,).
        length: tokens of a row.
        eval_share: from 0 to 1; at least one row is kept unless it is 0, and at least one is left to learn from.
        seed: of the choice.

    Raises:
        FineTuneError: the tokens fill no row, or one only where two are needed.

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
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    rows = tokens[: count * length].view(count, length)
    digest = hashlib.sha256(rows.numpy().data)
    digest.update(str(length).encode())
    return Blocks(
        tokens=rows,
        training=order[held_out:].sort().values,
        held_out=order[:held_out].sort().values,
        left_over=tokens.numel() - count * length,
        digest=digest.hexdigest(),
    )
