"""All exceptions of the package. Each message names the object found, its class and position, and a remedy."""

from __future__ import annotations

from .failures import result_or
from .tried_versions import VersionDependentError

__all__ = [
    "AlreadyRegisteredError", "CacheStructureError", "DamagedFileError", "DynamicShapesError", "FlattenError",
    "FolderExistsError", "ForeignFileError", "GenerationError", "InvalidArgumentError", "InvalidRegistrationError",
    "MissingDependencyError", "ModelSourceError", "NoRoomError", "NotRegisteredError", "RecordError",
    "ReplacedFunctionWarning", "ReplayError", "RoundTripError", "SpecMismatchError", "StaticDataError",
    "StoredFileError", "UnsetFieldError", "UnsupportedLayerError", "UntrustedFileError",
]  # fmt: skip


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
    """The nested values in a file cannot be read."""


class DamagedFileError(StoredFileError):
    """A file of nested values is truncated, or its contents are inconsistent."""


class ForeignFileError(StoredFileError):
    """A file was written by another program or a newer version of this package, or contains data of another kind."""


class UntrustedFileError(StoredFileError):
    """Reading a file would run code that the file contains, and the caller did not state that the file is trusted."""


class FolderExistsError(FlattenError, FileExistsError):
    """The folder to write is not empty."""


class GenerationError(VersionDependentError, FlattenError, RuntimeError):
    """An exported file cannot generate text: the file is missing, has other inputs or outputs, or fails when run."""


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
