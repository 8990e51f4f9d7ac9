"""Add to errors the names of libraries whose installed version is newer than the newest tested version."""

from __future__ import annotations

import contextlib
import dataclasses

from .failures import noted_on_failure

NEWEST_TRIED = {"torch": "2.15.0", "transformers": "5.24.0", "onnxruntime": "1.32.0"}
"""The newest version of each library with which all tests were run; CONTRIBUTING.md explains how to update them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Untried:
    library: str
    installed: str
    tried: str

    def __str__(self) -> str:
        return f"{self.library} {self.installed} is newer than the newest tried ({self.tried})"


def untried_versions() -> list[Untried]:
    """Return the libraries whose installed version is newer than the newest tested version. Nothing is imported."""
    import importlib.metadata  # takes a tenth of a second, in which Ctrl-C would print a stack trace

    from packaging.version import InvalidVersion, Version

    found = []
    for library, tried in NEWEST_TRIED.items():
        try:
            installed = Version(importlib.metadata.version(library)).public  # `2.13.0+cpu` is 2.13.0
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        if Version(installed) > Version(tried):
            found.append(Untried(library, installed, tried))
    return found


def possible_cause() -> str:
    """Return a sentence that names newer library versions as a possible cause; empty if all versions are tested."""
    untried = untried_versions()
    they = "it" if len(untried) == 1 else "they"
    return f"{', and '.join(map(str, untried))}: {they} may be the cause" if untried else ""


class VersionDependentError(Exception):
    """An error that a newer version of a library may cause: its text ends with :func:`possible_cause`."""

    def __str__(self) -> str:
        text, line = super().__str__(), possible_cause()
        return text if not line or line in text else f"{text}\n{line}"


def without_cause(error: BaseException) -> str:
    """Return the text of an error without :func:`possible_cause`, to embed the text in another message."""
    text, line = str(error), possible_cause()
    return text.removesuffix(f"\n{line}") if line and isinstance(error, VersionDependentError) else text


def naming_untried_versions() -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, add the sentence of :func:`possible_cause` as a note (``add_note``) to errors."""

    def note_for(error: Exception) -> str:
        line = possible_cause()
        is_named = isinstance(error, VersionDependentError) or line in getattr(error, "__notes__", ())
        return "" if is_named else line

    return noted_on_failure(note_for)
