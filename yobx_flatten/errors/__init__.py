"""All exceptions of the package, and checks of the installed libraries: missing, or newer than the tested versions.

Each message names the object found, its class and position, and a remedy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
from typing import NamedTuple

from .failures import noted_on_failure, result_or

__all__ = [
    "AlreadyRegisteredError", "CacheStructureError", "DamagedFileError", "DynamicShapesError", "FlattenError",
    "FolderExistsError", "ForeignFileError", "GenerationError", "InvalidArgumentError", "InvalidRegistrationError",
    "MissingDependencyError", "ModelSourceError", "NoRoomError", "NotRegisteredError", "RecordError",
    "ReplacedFunctionWarning", "ReplayError", "RoundTripError", "SpecMismatchError", "StaticDataError",
    "StoredFileError", "UnsetFieldError", "UnsupportedLayerError", "UntrustedFileError",
]  # fmt: skip

NEWEST_TRIED = {"torch": "2.15.0", "transformers": "5.24.0", "onnxruntime": "1.32.0"}
"""The newest version of each library with which all tests were run; CONTRIBUTING.md explains how to update them."""


class Untried(NamedTuple):
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
    """An error that a newer version of a library may cause; its text ends with the text of :func:`possible_cause`."""

    def __str__(self) -> str:
        text, line = super().__str__(), possible_cause()
        return text if not line or line in text else f"{text}\n{line}"


def without_cause(error: BaseException) -> str:
    """Return the text of an error without the sentence of :func:`possible_cause`, to quote it in another message."""
    text, line = str(error), possible_cause()
    return text.removesuffix(f"\n{line}") if line and isinstance(error, VersionDependentError) else text


def naming_untried_versions() -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, add the sentence of :func:`possible_cause` as a note (``add_note``) to errors."""

    def note_for(error: Exception) -> str:
        line = possible_cause()
        is_named = isinstance(error, VersionDependentError) or line in getattr(error, "__notes__", ())
        return "" if is_named else line

    return noted_on_failure(note_for)


class FlattenError(Exception):
    """Base class of the errors of this package.

    Errors about a model, its caches and its programs also derive from ``VersionDependentError``: their text ends with
    the names of libraries whose installed version is newer than the newest tested version.
    """


class ReplacedFunctionWarning(UserWarning):
    """A library function that is usually replaced during a trace was not replaced: its parameters are unexpected.

    A comparison of the exported program with the model shows whether the library function changes the results.
    """


class InvalidArgumentError(FlattenError, TypeError):
    """A function was called with an argument that the function cannot use."""


class InvalidRegistrationError(FlattenError, TypeError):
    """The object to register is not a class, or the given flattening functions do not fit the class."""


class AlreadyRegisteredError(FlattenError, ValueError):
    """The class to register is already registered with different functions."""


class ModelSourceError(VersionDependentError, FlattenError, ValueError):
    """A model (name, folder or file) is not found, or cannot be loaded."""


class NotRegisteredError(VersionDependentError, FlattenError, LookupError):
    """A class is not registered, or was registered by another package and cannot be unregistered."""


class RoundTripError(VersionDependentError, FlattenError, ValueError):
    """An object changes when it is flattened and unflattened."""


class SpecMismatchError(VersionDependentError, FlattenError, ValueError):
    """The nested structure of an input differs from the structure of the example with which a program was exported."""


class StaticDataError(VersionDependentError, FlattenError, TypeError):
    """The static part of a registered object (torch: *context*) is of a type that cannot be stored."""


class UnsetFieldError(VersionDependentError, FlattenError, AttributeError):
    """An object lacks an attribute that its flatten function reads, such as a slot that was never set."""


class CacheStructureError(VersionDependentError, FlattenError, ValueError):
    """A KV cache is in a state that cannot be flattened or unflattened."""


class UnsupportedLayerError(CacheStructureError):
    """A KV cache contains a layer of a class that this version of the package does not know."""


class DynamicShapesError(VersionDependentError, FlattenError, ValueError):
    """A ``dynamic_shapes`` specification does not fit the inputs."""


class ReplayError(VersionDependentError, FlattenError, ValueError):
    """An exported program returns different values than the eager model; ``error.report`` lists all test cases.

    Attributes:
        report: the :class:`~yobx_flatten.export.proof.report.ExportReport` of the export; ``None`` without an export.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class RecordError(VersionDependentError, FlattenError, ValueError):
    """Recorded calls are missing, do not contain what was requested, or cannot be read."""


class StoredFileError(FlattenError, ValueError):
    """A file, such as an exported model or stored inputs, cannot be read."""


class DamagedFileError(StoredFileError):
    """A file is truncated, or its contents are inconsistent."""


class ForeignFileError(StoredFileError):
    """A file was written by another program or a newer version of this package, or contains data of another kind."""


class UntrustedFileError(StoredFileError):
    """Reading a file would run code that the file contains, and the caller did not pass ``trust=True``."""


class FolderExistsError(FlattenError, FileExistsError):
    """The folder to write is not empty."""


class GenerationError(VersionDependentError, FlattenError, RuntimeError):
    """An exported file cannot generate text: it is missing, has unexpected inputs or outputs, or fails when run."""


class NoRoomError(FlattenError, OSError):
    """Memory or disk space is too small for the export; nothing was written."""


class MissingDependencyError(FlattenError, ImportError):
    """An optional library is needed, but not installed."""


def describe_class(obj: object) -> str:
    """Return the full name of a class, or a short description of an object that is not a class.

    >>> describe_class(int)
    'builtins.int'
    >>> describe_class(3)
    'the int 3'
    """
    if isinstance(obj, type):
        return f"{obj.__module__}.{obj.__qualname__}"
    if obj is None:
        return "None"
    name = type(obj).__name__

    def shown() -> str:
        text = " ".join(repr(obj).split())  # on one line
        return f"the {name} {text if len(text) <= 60 else text[:57] + '...'}"

    # a user's __repr__ can raise any error
    return result_or(shown, lambda error: f"a {name}, whose __repr__ raises {type(error).__name__}")


def is_installed(library: str) -> bool:
    """Return whether a library is installed, without importing the library."""
    try:
        return importlib.util.find_spec(library) is not None
    except ImportError:  # raised by another library's import hook
        return False


def install_line(extra: str) -> str:
    """Return the pip command that installs an extra (optional dependencies) from the source of this package."""
    import importlib.metadata  # these three imports would delay the start of a command line
    import urllib.parse
    import urllib.request

    checkout = pathlib.Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():  # the package runs from a checkout
        return f"pip install -e '{checkout}[{extra}]'"
    source = "yobx-flatten"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # PEP 610: pip stores the folder or the wheel from which a distribution was installed
        noted = importlib.metadata.distribution(source).read_text("direct_url.json") or "{}"
        url = urllib.parse.urlsplit(json.loads(noted).get("url", ""))
        path = pathlib.Path(urllib.request.url2pathname(url.path))
        if url.scheme == "file" and path.exists():
            source = str(path)
    return f"pip install '{source}[{extra}]'"


def require(*libraries: str, purpose: str, extra: str | None = None) -> None:
    """Raise an error with the install command if one of the libraries is not installed. Nothing is imported.

    >>> require("torch", purpose="export_program")
    >>> require("no_such_library", purpose="a picture")
    Traceback (most recent call last):
        ...
    yobx_flatten.errors.MissingDependencyError: a picture needs no_such_library, which is not installed:
        pip install no_such_library
    """
    # extra: extra of this package that installs the libraries, several with commas; `None` to install them by name
    missing = [library for library in libraries if not is_installed(library)]
    if missing:
        line = f"pip install {' '.join(missing)}" if extra is None else install_line(extra)
        named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        are = "is" if len(missing) == 1 else "are"
        raise MissingDependencyError(f"{purpose} needs {named}, which {are} not installed:\n    {line}")
