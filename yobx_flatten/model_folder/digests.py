"""Digests of the files of a folder: what is damaged, or was exchanged by mistake, is found before it is opened.

A digest does not prove who wrote a file, since the author of the file can also write the manifest. So it does not stand
for trust.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable, Mapping

from ..errors import DamagedFileError
from ..files.document import inside

__all__ = ["check_digests", "digests"]


def digests(folder: pathlib.Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files by name, in hexadecimal digits.

    Args:
        folder: the folder of the files.
        names: their names.
    """
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_digests(folder: pathlib.Path, expected: Mapping[str, str]) -> None:
    """Check that files are those that were exported.

    Args:
        folder: the folder of the files.
        expected: SHA-256 by name.

    Raises:
        DamagedFileError: naming the first that is missing or another one.
    """
    for name, digest in expected.items():
        inside(folder, name, DamagedFileError)
        if digests(folder, [name]) != {name: digest}:
            raise DamagedFileError(
                f"{folder / name} is not the file that was exported: copy it again, or export again."
            )
