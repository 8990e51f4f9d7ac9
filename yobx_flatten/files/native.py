"""Guard torch's archive writer, which ends the process when a write fails, for example on a full disk.

Its destructor writes the end of the archive, and an error there is thrown where C++ allows none.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def file_for_torch(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a new file whose writes never fail; what failed is raised at the end."""
    with _Lenient(path, "wb") as file:
        try:
            yield file
        finally:
            if file.failure is not None:
                raise file.failure


class _Lenient(io.FileIO):
    """Notes the first error of a write, and drops what comes after it."""

    failure: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override] # what torch passes
        left = memoryview(data)
        try:
            while self.failure is None and len(left):
                left = left[super().write(left) :]
        except BaseException as error:  # Ctrl-C in here would also end the process
            self.failure = error
        return len(data)
