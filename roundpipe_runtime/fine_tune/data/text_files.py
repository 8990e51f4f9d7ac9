"""Read text files, JSON lines and folders of `datasets`, document by document and in pieces.

::

    notes.txt           one document
    mails.jsonl         one document per line, its text in the field "text"
    saved/              what save_to_disk of the library datasets wrote: one document per row
    corpus/, "*.md"     the files in there, in the order of their names
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from yobx_flatten.errors.dependencies import require
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.files.document import open_regular

from ..errors import FineTuneError

# After each document.
END = None

_PLAIN = ("", ".txt", ".text", ".md", ".rst", ".tex", ".py", ".html", ".log")
_LINES = (".jsonl", ".ndjson", ".json")
# UTF-32 first: its mark begins with that of UTF-16
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Characters of a long file that are read at a time.
_PIECE = 2**16


def find_texts(names: Iterable[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Return the files, and the folders of ``datasets``, that names refer to, each once."""
    # names: files, folders and patterns such as `texts/**/*.txt`
    found = [path for name in names for path in _named(os.fspath(name))]
    if not found:
        raise FineTuneError("No text was named: --text FILE, or conversations: --chat FILE")
    return list(dict.fromkeys(path.resolve() for path in found))


def read_texts(paths: Sequence[pathlib.Path], *, field: str = "text") -> Iterator[str | None]:
    """Yield the pieces of all documents in order, and ``END`` after each document."""
    # field: field of JSON lines, and of folders of `datasets`, that holds the text
    for path in paths:
        if path.is_dir():
            yield from _saved(path, field)
        elif path.suffix.lower() in _LINES:
            yield from _lines(path, field)
        else:
            yield from _plain(path)


def _named(name: str) -> list[pathlib.Path]:
    path = pathlib.Path(name)
    if path.is_dir():
        return [_saved_folder(path)] if is_saved(path) else _in_folder(path)
    if path.exists():
        if path.suffix.lower() not in (*_PLAIN, *_LINES):
            known = ", ".join([*_PLAIN[1:], *_LINES])
            raise FineTuneError(
                f"{name} ends in {path.suffix}, and that is not among {known}. Is it plain text? Copy it to a .txt."
            )
        return [path]
    if glob.has_magic(name):
        matches = sorted(pathlib.Path(match) for match in glob.glob(name, recursive=True))
        if files := [match for match in matches if match.is_file()]:
            return [each for file in files for each in _named(str(file))]
    raise FineTuneError(f"There is no file {name}.")


def _in_folder(folder: pathlib.Path) -> list[pathlib.Path]:
    wanted = (*_PLAIN[1:], *_LINES)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix.lower() in wanted]
    if not files:
        raise FineTuneError(f"{folder} holds no text: no file in it ends in {', '.join(wanted)}.")
    return files


def check_encoding(path: pathlib.Path) -> None:
    """Refuse text in UTF-16 or UTF-32, by the mark at its begin or by its zeros: UTF-8 has a zero for none but NUL."""
    with open_regular(path, failure=FineTuneError) as file:
        begin = file.read(4096)
    found = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)
    zeros = begin[::2].count(0), begin[1::2].count(0)
    if found is None and sum(zeros) > len(begin) // 4:
        found = "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE"
    if found is not None:
        raise FineTuneError(f"{path} is text in {found}, or not text. Write it in UTF-8: {_iconv(found, path)}")


def _iconv(encoding: str, path: pathlib.Path) -> str:
    return f"iconv -f {encoding} -t UTF-8 {path} > {path.with_suffix(f'.utf8{path.suffix}')}"


# -- a file of text ----------------------------------------------------------------------------------------------------


def _plain(path: pathlib.Path) -> Iterator[str | None]:
    check_encoding(path)
    held: list[str] = []  # of the line that is not at its end; joined once, as a line may be as long as the file
    with io.TextIOWrapper(open_regular(path, failure=FineTuneError), encoding="utf-8-sig", newline="") as file:
        try:
            while text := file.read(_PIECE):
                # a piece ends with a line, so that no word is cut
                whole, newline, rest = text.rpartition("\n")
                if newline:
                    yield "".join([*held, whole, newline])
                    held.clear()
                held.append(rest)
        except UnicodeDecodeError as error:
            raise FineTuneError(
                f"{path} is not text in UTF-8 ({error.reason}). If it is text in Latin-1: {_iconv('LATIN1', path)}"
            ) from error
    if rest := "".join(held):
        yield rest
    yield END


# -- JSON lines --------------------------------------------------------------------------------------------------------


def json_lines(path: pathlib.Path, wanted: str) -> Iterator[tuple[str, Any]]:
    """Yield what each line of a file holds, with file and line."""
    check_encoding(path)
    with open_regular(path, failure=FineTuneError) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also of what is not UTF-8, or nested deeply
                raise FineTuneError(f"{path}:{number} is not JSON. {wanted}") from error
            yield f"{path}:{number}", row


def _lines(path: pathlib.Path, field: str) -> Iterator[str | None]:
    wanted = f'Each line must be an object like {{"{field}": "..."}}'
    for place, row in json_lines(path, wanted):
        if not isinstance(row, dict):
            raise FineTuneError(f"{place} is a {type(row).__name__}. {wanted}")
        yield _checked(row, field, place)
        yield END


def _checked(row: dict[str, Any], field: str, place: str) -> str:
    text = row.get(field)
    if isinstance(text, list):
        raise FineTuneError(
            f"{place} has a list in {field!r}, which is not text. If these are the messages of a conversation: --chat "
            f"{place.split(':')[0]}"
        )
    if not isinstance(text, str):
        if field in row:
            raise FineTuneError(f"{place} has a {type(text).__name__} in {field!r}, which is not text: --field NAME")
        found = ", ".join(row) or "nothing"
        raise FineTuneError(f"{place} has no text in {field!r}. It has {found}: --field NAME")
    return text.encode("utf-8", "replace").decode("utf-8")  # JSON can spell halves of characters


# -- folders of datasets -----------------------------------------------------------------------------------------------


def is_saved(folder: pathlib.Path) -> bool:
    """Report whether the library ``datasets`` has saved a folder."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def _saved_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder of one data set: of several that were saved together, the one for training."""
    if not (folder / "dataset_dict.json").is_file():
        return folder
    if is_saved(folder / "train"):
        return folder / "train"
    splits = ", ".join(str(path) for path in sorted(folder.iterdir()) if path.is_dir())
    raise FineTuneError(f"{folder} holds several data sets, and none is called train. Name one: {splits}")


def _saved(folder: pathlib.Path, field: str) -> Iterator[str | None]:
    for place, row in saved_rows(folder, field):
        yield _checked(row, field, place)
        yield END


def saved_rows(folder: pathlib.Path, field: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a folder of ``datasets``, each with folder and number."""
    # field: the only column that is read. Default: all.
    require("datasets", purpose=f"{folder}, which datasets wrote,", extra="data")
    import datasets

    # errors of Arrow, of JSON, of the file system
    with raised_as(lambda error: FineTuneError(f"{folder} cannot be read: {' '.join(str(error).split())[:200]}")):
        rows = datasets.load_from_disk(str(folder))
    if field is not None:
        if field not in rows.column_names:
            _checked(dict.fromkeys(rows.column_names), field, str(folder))
        rows = rows.select_columns([field])
    for number, row in enumerate(rows):
        yield f"{folder}, row {number}", row
