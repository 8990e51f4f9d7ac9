"""Put tokenized conversations into rows: one conversation per row, or several in a row of fixed length."""

# one per row    A A A A A         padded on the right to the longest row of the batch
#                B B B . .
# packed         A A A A A B B B   A and B do not attend to each other
# positions      0 1 2 3 4 0 1 2

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ...errors import FineTuneError
from ...huggingface.batches import keeps_texts_apart
from ..models import Tokenizer
from .conversations import ChatTokens, Encoder, read_conversations
from .text_files import Blocks, check_vocabulary, find_texts, split_rows

_IGNORED = -100  # label that the loss of transformers ignores


@dataclasses.dataclass(frozen=True)
class ChatRows:
    """Conversations in rows.

    Attributes:
        ids: tokens of each row, int32.
        labels: ``ids``, with -100 for tokens that are excluded from the loss.
        positions: for packed rows, the position of each token in its conversation. Empty for other rows.
        training: indices of the training rows, of shape (rows,).
        held_out: indices of the rows that only evaluation reads.
        length: largest number of tokens that a row can have.
        conversations: number of conversations.
        left_out: number of conversations that were left out, because their first ``length`` tokens have no answer.
        cut: number of conversations that were cut to ``length`` tokens.
        digest: hash of the rows, which is equal for equal rows.
        pads_alike: whether all batches are padded to the longest row of the data set.
    """

    ids: list[torch.Tensor]
    labels: list[torch.Tensor]
    positions: list[torch.Tensor]
    training: torch.Tensor
    held_out: torch.Tensor
    length: int
    conversations: int
    left_out: int
    cut: int
    digest: str
    pads_alike: bool = False

    @property
    def lengths(self) -> torch.Tensor | None:
        """Number of tokens of each row."""
        return torch.tensor([len(ids) for ids in self.ids])

    @property
    def counted(self) -> int:
        """Number of tokens that count for the loss."""
        return sum(int((labels != _IGNORED).sum()) for labels in self.labels)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        found = {"input_ids": self.ids[row].long(), "labels": self.labels[row].long()}
        return {**found, "position_ids": self.positions[row].long()} if self.positions else found

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the model arguments for a batch of rows, which are padded on the right."""
        lengths = [len(row["input_ids"]) for row in rows]
        # groups in different processes must be padded to the same length to give bitwise identical results
        longest = max(map(len, self.ids)) if self.pads_alike else max(lengths, default=0)

        def padded(name: str, value: int) -> torch.Tensor:
            given = [row[name] for row in rows]
            return torch.stack([nn.functional.pad(one, (0, longest - len(one)), value=value) for one in given])

        batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", _IGNORED)}
        if self.positions:  # the padding is a separate conversation
            places = [torch.cat([row["position_ids"], torch.arange(longest - len(row["labels"]))]) for row in rows]
            return {**batch, "position_ids": torch.stack(places)}
        return {**batch, "attention_mask": (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()}

    def tokens_in(self, rows: Sequence[int]) -> int:
        """Return the total number of tokens of the given rows."""
        return sum(len(self.ids[row]) for row in rows)


Rows: TypeAlias = Blocks | ChatRows
"""Rows of tokens, of text or of conversations, that a training reads."""


def read_chats(
    names: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    *,
    length: int,
    template: pathlib.Path | None = None,
    ignored: Collection[str] = (),
    packed: bool = False,
    eval_share: float = 0.0,
    seed: int = 0,
    vocab_size: int | None = None,
) -> ChatRows:
    """Read conversations and return rows of tokens, in which only the tokens of answers count for the loss.

    Args:
        names: files of JSON, Parquet or CSV, folders of such files, folders saved by datasets, or glob patterns.
        tokenizer: tokenizer of a model with a chat template.
        length: largest number of tokens of a row; longer conversations are cut.
        template: file with a chat template. Default: the tokenizer's chat template.
        ignored: names of fields to ignore in rows and messages. The fields ``id`` and ``tool_call_id`` are always
            ignored. Other fields are an error if the chat template does not use them.
        packed: whether a row holds as many conversations as fit.
        eval_share: share of the rows that is held out for evaluation, from 0 to 1.
        seed: seed for the choice of the held-out rows.
        vocab_size: vocabulary size of the model, which all tokens must be below. Default: not checked.

    Returns:
        The rows, split into training rows and held-out rows.

    Raises:
        FineTuneError: a row of a file is not a conversation, the chat template omits a message, a field of a message or
            a field of a row, or no conversation has an answer in its first ``length`` tokens. A token that is not below
            ``vocab_size`` is also an error, and so are too few rows to hold one out.
    """
    encode = Encoder(tokenizer, template)
    found = [encode(conversation) for conversation in read_conversations(find_texts(names), ignored)]
    if not found:
        raise FineTuneError(f"There are no conversations in {', '.join(map(str, names))}.")
    check_vocabulary(max((max(one.ids) for one in found if one.ids), default=0), vocab_size, tokenizer)
    return make_chat_rows(found, length=length, packed=packed, eval_share=eval_share, seed=seed)


def make_chat_rows(
    conversations: Sequence[ChatTokens], *, length: int, packed: bool = False, eval_share: float = 0.0, seed: int = 0
) -> ChatRows:
    """Return conversations in rows of tokens, and hold out a share of the rows for evaluation.

    Args:
        conversations: tokens of each conversation.
        length: largest number of tokens of a row; longer conversations are cut.
        packed: whether a row holds as many conversations as fit.
        eval_share: share of the rows that is held out for evaluation, from 0 to 1.
        seed: seed for the choice of the held-out rows.

    Returns:
        The rows, split into training rows and held-out rows.

    Raises:
        FineTuneError: no conversation has an answer in its first ``length`` tokens, or there are too few rows to hold
            one out.

    >>> chats = [ChatTokens([1, 2, 3], [False, True, True]), ChatTokens([4, 5], [False, True])]
    >>> rows = make_chat_rows(chats, length=5, packed=True)
    >>> rows[0]["labels"].tolist(), rows[0]["position_ids"].tolist()
    ([-100, 2, 3, -100, 5], [0, 1, 2, 0, 1])
    """
    # no token predicts the first token
    cut = [ChatTokens(one.ids[:length], [False, *one.counts[1:length]]) for one in conversations]
    kept = [one for one in cut if any(one.counts)]
    if not kept:
        longest = max(len(one.ids) for one in conversations)
        lacks = f"in its first {length} tokens. Use longer rows: --length {longest}"
        if longest <= length:
            lacks = "to train on: the chat template marks no tokens of answers. Use another --chat-template"
        raise FineTuneError(f"None of {len(conversations)} conversations has an answer {lacks}")
    rows = _packed([len(one.ids) for one in kept], length) if packed else [[number] for number in range(len(kept))]
    if eval_share > 0 and len(rows) < 2:
        raise FineTuneError("All data fits in one row, so no row is left for evaluation. Use --eval-share 0")

    def joined(part: Callable[[ChatTokens], Iterable[int]]) -> list[torch.Tensor]:
        parts = ([part(kept[number]) for number in row] for row in rows)
        return [torch.tensor([*itertools.chain(*row)], dtype=torch.int32) for row in parts]

    ids = joined(lambda one: one.ids)
    labels = joined(lambda one: [id_ if counts else _IGNORED for id_, counts in zip(one.ids, one.counts, strict=True)])
    positions = joined(lambda one: range(len(one.ids))) if packed else []
    training, held_out = split_rows(len(rows), eval_share=eval_share, seed=seed)
    digest = hashlib.sha256(str(length).encode())
    for tensor in (*ids, *labels, *positions):
        digest.update(tensor.numpy().tobytes() + b"|")
    return ChatRows(
        ids=ids,
        labels=labels,
        positions=positions,
        training=training,
        held_out=held_out,
        length=length,
        conversations=len(kept),
        left_out=len(conversations) - len(kept),
        cut=sum(len(one.ids) > length for one in conversations),
        digest=digest.hexdigest(),
    )


def _packed(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return the indices of the conversations in each row, so that rows of ``length`` tokens have little free space."""
    rows_with_room: dict[int, list[list[int]]] = collections.defaultdict(list)
    rows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):  # longest first, into the fullest row
        needed = lengths[number]
        room = min((left for left, found in rows_with_room.items() if found and left >= needed), default=None)
        if room is None:
            room = length
            rows.append([])
            rows_with_room[room].append(rows[-1])
        row = rows_with_room[room].pop()
        row.append(number)
        rows_with_room[room - needed].append(row)
    return rows


def check_packing(model: nn.Module) -> None:
    if not keeps_texts_apart(model):  # the model would train on other contexts
        raise FineTuneError(
            f"{type(model).__name__} may mix packed conversations, so losses would be wrong. Leave --pack out"
        )
