"""Read documents from files of several formats, and tokenize the documents into rows of equal length.

::

    notes.txt             one document
    mails.jsonl           one document per line, its text in the field "text"; in mails.json also a list of objects
    mails.parquet, .csv   one document per row, read by the library datasets
    saved/                written by save_to_disk of the library datasets: one document per row
    corpus/, "*.md"       the files in the folder, in the order of their names
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from yobx_flatten.core.files.document import open_regular
from yobx_flatten.errors import require
from yobx_flatten.errors.failures import first_line, raised_as

from ...errors import FineTuneError
from ..models import Tokenizer

END = None  # after each document

_PLAIN = ("", ".txt", ".text", ".md", ".rst", ".tex", ".py", ".html", ".log")
_JSON = (".jsonl", ".ndjson", ".json")
# Readers of the library `datasets`, and their options. It reads JSON and text otherwise: it makes `datetime` objects of
# dates in JSON and `None` of missing fields, no error names a line, and line ends of text are replaced.
_TABLES: dict[str, dict[str, Any]] = {
    ".parquet": {"path": "parquet"},
    ".csv": {"path": "csv", "keep_default_na": False},
}
ROW_FILES = (*_JSON, *_TABLES)
_PIECE = 2**16  # characters that are read at a time


def find_texts(names: Iterable[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Return all files that the names match, without duplicates; a folder saved by ``datasets`` counts as one file."""
    # names: files, folders and patterns such as `texts/**/*.txt`
    found = [path for name in names for path in _named(os.fspath(name))]
    if not found:
        raise FineTuneError("There is no training data. Name a text (--text FILE) or conversations (--chat FILE).")
    return list(dict.fromkeys(path.resolve() for path in found))


def _named(name: str) -> list[pathlib.Path]:
    path, known = pathlib.Path(name), (*_PLAIN[1:], *ROW_FILES)
    if is_saved(path):
        return [path]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix.lower() in known]
        if not files:
            raise FineTuneError(f"{path} contains no text: no file in it ends in {', '.join(known)}.")
        return files
    if path.exists():
        if path.suffix.lower() not in ("", *known):
            raise FineTuneError(
                f"{name} ends in {path.suffix}, not in one of {', '.join(known)}. If it is plain text, copy it to a "
                ".txt file."
            )
        return [path]
    files = [file for match in sorted(glob.glob(name, recursive=True)) if (file := pathlib.Path(match)).is_file()]
    if not files:
        raise FineTuneError(f"There is no file {name}.")
    return [each for file in files for each in _named(str(file))]


def is_saved(folder: pathlib.Path) -> bool:
    """Whether ``save_to_disk`` of the library ``datasets`` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def read_texts(paths: Sequence[pathlib.Path], *, field: str = "text") -> Iterator[str | None]:
    """Yield the texts of documents, each in one or several strings, and ``END`` (``None``) after each document."""
    # field: field of JSON and of tables that holds the text
    wanted = f'Each line must be an object like {{"{field}": "..."}}'
    for path in paths:
        if not path.is_dir() and path.suffix.lower() in _PLAIN:
            yield from _plain(path)
            yield END
            continue
        for place, row in read_rows(path, wanted, field):
            if not isinstance(row, dict):
                raise FineTuneError(f"{place} is a {type(row).__name__}. {wanted}")
            text = row.get(field)
            if isinstance(text, list):
                raise FineTuneError(
                    f"{place} has a list in {field!r}, not text. If the list has messages: --chat {path}"
                )
            if not isinstance(text, str):
                fields = f"Its fields: {', '.join(row) or 'nothing'}. Name one: --field NAME"
                found = f", but a {type(text).__name__}: --field NAME" if field in row else f". {fields}"
                raise FineTuneError(f"{place} has no text in {field!r}{found}")
            yield from (whole_characters(text), END)


def whole_characters(text: str) -> str:
    """Replace unpaired surrogates, which JSON can contain but UTF-8 cannot, by ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(path: pathlib.Path) -> Iterator[str]:
    with _opened(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        try:
            while lines := file.readlines(_PIECE):  # pieces end at a line break, so that no word is split
                yield "".join(lines)
        except UnicodeDecodeError as error:
            raise FineTuneError(f"{path} is not UTF-8 ({error.reason}). {_iconv('LATIN1', path)}") from error


def _opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a text file, and raise an error if its encoding is probably UTF-16 or UTF-32."""
    file = open_regular(path, failure=FineTuneError)
    begin = file.read(4096)
    file.seek(0)
    zeros = begin[::2].count(0), begin[1::2].count(0)  # in UTF-16 and UTF-32, ASCII text has zero bytes
    if sum(zeros) > len(begin) // 4 or begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        file.close()
        has_mark, of_four = begin.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")), sum(zeros) > len(begin) // 2
        order = "" if has_mark else "LE" if zeros[1] > zeros[0] else "BE"
        found = f"UTF-{32 if of_four else 16}{order}"
        raise FineTuneError(f"{path} is not UTF-8, but perhaps {found}. {_iconv(found, path)}")
    return file


def _iconv(encoding: str, path: pathlib.Path) -> str:
    return f"Convert it: iconv -f {encoding} -t UTF-8 {path} > {path.with_suffix(f'.utf8{path.suffix}')}"


def read_rows(path: pathlib.Path, wanted: str, field: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield ``FILE:LINE`` or ``FILE, row NUMBER`` for each row of a data file, and the row itself."""
    # wanted: sentence for errors about the form of a row
    # field: the only column of a table that is read. Default: all.
    if path.is_dir() or path.suffix.lower() in _TABLES:
        yield from _table(path, field)
        return
    with _opened(path) as file:
        if path.suffix.lower() == ".json" and file.peek(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            try:
                rows = json.loads(file.read())
            except (ValueError, RecursionError) as error:
                raise FineTuneError(f"{path} is not JSON: {error}") from error
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8, and for deep nesting
                raise FineTuneError(f"{path}:{number} is not JSON. {wanted}") from error
            yield f"{path}:{number}", row


def _table(path: pathlib.Path, field: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    require("datasets", purpose=f"Reading {path}", extra="data")
    import datasets

    # Arrow, JSON and the file system raise different exceptions
    with raised_as(lambda error: FineTuneError(f"{path} cannot be read: {first_line(error)}"), FineTuneError):
        if path.is_dir():
            rows = datasets.load_from_disk(str(path))
        else:
            options = _TABLES[path.suffix.lower()]
            rows = datasets.load_dataset(**options, data_files=str(path), split="train", streaming=True)
        if isinstance(rows, dict) and "train" not in rows:
            parts = ", ".join(str(path / name) for name in sorted(rows))
            raise FineTuneError(f"{path} holds several data sets, and none is called train. Name one: {parts}")
        rows = rows["train"] if isinstance(rows, dict) else rows
        if field is not None and field in (rows.column_names or ()):
            rows = rows.select_columns([field])
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row


def split_rows(count: int, *, eval_share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the training rows, and of the rows that are held out for evaluation.

    >>> [len(part) for part in split_rows(10, eval_share=0.25, seed=0)]
    [8, 2]
    """
    # eval_share: share of held-out rows, from 0 to 1; above 0, at least one row is held out. If there are two or more
    # rows, at least one is left for training.
    held_out = min(max(1, round(eval_share * count)), count - 1) if eval_share > 0 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values


# A tokenizer with several threads gets about this many characters, or texts, at a time.
_CHARACTERS, _TEXTS = 2**20, 1000


# Tokenized text in rows of one length, split into training rows and held-out rows.
#
#     document, end, document, end, doc|ument, end, ...     all tokens in a line, cut every `length` tokens
#     row 0                            |row 1


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A tokenized text in rows of equal length.

    Attributes:
        tokens: tokens, of shape (rows, length), int32.
        training: indices of the training rows, of shape (rows,).
        held_out: indices of the rows that only evaluation reads.
        left_over: number of tokens at the end of the text that do not fill a row.
        digest: hash that is equal for equal tokens in rows of equal length.
    """

    tokens: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor
    left_over: int
    digest: str
    lengths: ClassVar[None] = None  # all rows have the same length

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[row].long()
        return {"input_ids": ids, "labels": ids}

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for a batch."""
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def tokens_in(self, rows: Sequence[int]) -> int:
        """Return the total number of tokens of the given rows."""
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
        names: files of text, JSON, Parquet or CSV; folders that contain such files; folders that the library datasets
            saved; and patterns of file names such as ``"texts/*.txt"``.
        tokenizer: tokenizer from :func:`load_tokenizer`.
        length: number of tokens per row.
        field: field of JSON, and column of tables, that holds the text.
        eval_share: share of the rows that is held out for evaluation, from 0 to 1.
        seed: seed for the choice of the held-out rows.
        vocab_size: vocabulary size of the model, which all tokens must be below. Default: not checked.

    Returns:
        The rows, split into training rows and held-out rows.

    Raises:
        FineTuneError: a text cannot be read, the tokens do not fill a row, or a token id is not below ``vocab_size``.
    """
    paths = find_texts(names)
    tokens = pack(read_texts(paths, field=field), tokenizer)
    if not tokens.numel():
        raise FineTuneError(f"There is no text in {', '.join(map(str, names))}.")
    check_vocabulary(int(tokens.max()), vocab_size, tokenizer)
    return make_blocks(tokens, length=length, eval_share=eval_share, seed=seed)


def check_vocabulary(largest: int, vocab_size: int | None, tokenizer: Tokenizer) -> None:
    if vocab_size is not None and largest >= vocab_size:
        raise FineTuneError(
            f"The model has a vocabulary of {vocab_size} tokens, but the tokenizer {tokenizer.name} produces the token "
            f"id {largest}. Use the model's tokenizer: --tokenizer DIR"
        )


def pack(pieces: Iterable[str | None], tokenizer: Tokenizer) -> torch.Tensor:
    """Tokenize all documents into one sequence, with an end-of-text token after each non-empty document."""
    # pieces: pieces of documents, and `END` after each document
    # tokenizer: tokenizer whose `eos_token_id` ends a document; `None` adds no such token
    eos = tokenizer.eos_token_id
    end = b"" if eos is None else torch.tensor([eos], dtype=torch.int32).numpy().tobytes()
    group: list[str | None] = []
    store, characters, is_open = bytearray(), 0, False

    def tokenize() -> None:
        texts = [piece for piece in group if piece is not None]
        encoded = iter(tokenizer.encode(texts) if texts else ())
        for piece in group:
            store.extend(end if piece is END else next(encoded).numpy().tobytes())
        group.clear()

    for piece in pieces:
        if piece or (piece is END and is_open):  # an empty document has no end
            group.append(piece)
            characters += len(piece or "")
        is_open = piece is not END and (is_open or bool(piece))
        if characters >= _CHARACTERS or len(group) >= 2 * _TEXTS:
            tokenize()
            characters = 0
    tokenize()
    return torch.frombuffer(store, dtype=torch.int32) if store else torch.empty(0, dtype=torch.int32)


def make_blocks(tokens: torch.Tensor, *, length: int, eval_share: float = 0.0, seed: int = 0) -> Blocks:
    """Cut a sequence of tokens into rows, and hold out a share of the rows for evaluation.

    Args:
        tokens: sequence of tokens, of shape (tokens,).
        length: number of tokens per row.
        eval_share: share of the rows that is held out for evaluation, from 0 to 1. If the share is above 0, at least
            one row is held out, and at least one row is left for training.
        seed: seed for the choice of the held-out rows.

    Returns:
        The rows, split into training rows and held-out rows.

    Raises:
        FineTuneError: the tokens do not fill a row, or they fill only one row and ``eval_share`` is above 0.

    >>> made = make_blocks(torch.arange(10, dtype=torch.int32), length=3, eval_share=0.3)
    >>> made.tokens.shape, len(made.training), len(made.held_out), made.left_over
    (torch.Size([3, 3]), 2, 1, 1)
    """
    count = tokens.numel() // length
    training, held_out = split_rows(count, eval_share=eval_share, seed=seed)
    if not len(training) or (eval_share > 0 and not len(held_out)):
        wanted = "two rows of" if eval_share > 0 and count else "one row of"
        raise FineTuneError(
            f"The text has {tokens.numel()} tokens, which do not fill {wanted} {length}. Give more text, or shorter "
            f"rows: --length {max(2, tokens.numel() // 8)}"
        )
    rows = tokens[: count * length].view(count, length)
    digest = hashlib.sha256(rows.numpy().data)
    digest.update(str(length).encode())
    return Blocks(
        tokens=rows,
        training=training,
        held_out=held_out,
        left_over=tokens.numel() - count * length,
        digest=digest.hexdigest(),
    )
