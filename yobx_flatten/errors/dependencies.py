"""Check which optional libraries are installed, and name the line that installs a missing library."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib

from . import MissingDependencyError


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
