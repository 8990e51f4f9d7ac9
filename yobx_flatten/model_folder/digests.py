"""Record and check SHA-256 digests of the files of a folder.

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
    """Return the SHA-256 of files by name, in hexadecimal digits."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_digests(folder: pathlib.Path, expected: Mapping[str, str]) -> None:
    """Check that files are those that were exported."""
    for name, digest in expected.items():
        inside(folder, name, DamagedFileError)
        if digests(folder, [name]) != {name: digest}:
            raise DamagedFileError(
                f"{folder / name} is not the file that was exported: copy it again, or export again."
            )
