"""Check which optional libraries are installed, and name the line that installs a missing one."""

from __future__ import annotations

import importlib.util

from . import MissingDependencyError


def is_installed(library: str) -> bool:
    """Return whether a library can be imported, without importing it.

    >>> is_installed("torch"), is_installed("no_such_library")
    (True, False)
    """
    try:
        return importlib.util.find_spec(library) is not None
    except ImportError:  # from another library's import hook
        return False


def require(*libraries: str, purpose: str, extra: str | None = None) -> None:
    """Raise an error with the line to type if a library is not installed. Nothing is imported.

    >>> require("torch", purpose="export_program")
    >>> require("no_such_library", purpose="a picture")
    Traceback (most recent call last):
        ...
    yobx_flatten.errors.MissingDependencyError: a picture needs no_such_library, which is not installed:
        pip install no_such_library
    """
    # extra: extra of this package that installs them, several with commas; `None` if they are installed by name
    missing = [library for library in libraries if not is_installed(library)]
    if missing:
        line = " ".join(missing) if extra is None else f"'yobx-flatten[{extra}]'"
        named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        are = "is" if len(missing) == 1 else "are"
        raise MissingDependencyError(f"{purpose} needs {named}, which {are} not installed:\n    pip install {line}")
