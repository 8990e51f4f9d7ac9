"""Static data and classes that a file names, found without importing what the file chose.

A file can come from anywhere. Static data names enums, configurations and functions as ``module:name``, and to look a
name up is to import its module. So a name is looked up in modules that the program has imported already, or in those of
the libraries that this package serves; what is found there must be of the kind that is asked for, and bear that name.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..errors import DamagedFileError, NotRegisteredError
from ..recipe.static_codec import load_static

__all__ = ["SERVED", "import_served", "load_trusted"]

SERVED = ("torch", "numpy", "transformers", "diffusers")
"""Libraries whose modules are imported when a file names them."""


def load_trusted(data: Any) -> Any:
    """Bring static data back, as :func:`.load_static` does, if it names nothing strange.

    Args:
        data: what :func:`yobx_flatten.recipe.static_codec.dump_static` returned, from a file.

    Raises:
        NotRegisteredError: when it names something in a module that is not imported.
        DamagedFileError: when it is not what ``dump_static`` writes.
    """
    _check(data)
    try:
        return load_static(data)
    except Exception as error:
        raise DamagedFileError(f"Static data cannot be read ({type(error).__name__}: {error}).") from error


def import_served(module: str) -> None:
    """Import a module of a library that this package serves, if it is one.

    Raises:
        NotRegisteredError: when the library is not installed, or does not have the module.
    """
    if module in sys.modules or module.partition(".")[0] not in SERVED:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise NotRegisteredError(
            f"The file holds something of {module}, which cannot be imported ({error}):\n    pip install {library}"
        ) from error


def _check(data: Any) -> None:
    if isinstance(data, list):
        for item in data:
            _check(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            if key.startswith("!") and len(data) == 1:
                _check_kind(key[1:], value)
            _check(value)


def _check_kind(kind: str, value: Any) -> None:
    if kind == "dtype":
        if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
            raise DamagedFileError(f"Static data names {value!r}, which is not a dtype of torch.")
        return
    fits = _NAMED.get(kind)
    if fits is None:
        return
    name = value if isinstance(value, str) else value[0] if isinstance(value, list) and value else None
    if not isinstance(name, str) or not fits(_find(name), name):
        raise DamagedFileError(f"Static data names {name!r}, which is no {kind} of that module.")


def _find(name: str) -> Any:
    """What ``module:qualified.name`` stands for, in a module that is imported or may be."""
    module, _, qualified = name.partition(":")
    import_served(module)
    if module not in sys.modules:
        raise NotRegisteredError(
            f"The file holds {qualified} of the module {module}, which is not imported; a file does not choose what is "
            f"imported. Import it first:\n    import {module}"
        )
    found: Any = sys.modules[module]
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found


def _bears(found: Any, name: str) -> bool:
    """Whether something was defined where the file states: a module also holds what it imported itself."""
    return f"{getattr(found, '__module__', None)}:{getattr(found, '__qualname__', None)}" == name


def _is_class(base: type) -> Callable[[Any, str], bool]:
    return lambda found, name: isinstance(found, type) and issubclass(found, base) and _bears(found, name)


def _is_function(found: Any, name: str) -> bool:
    return callable(found) and _bears(found, name) and not _is_of_python(name)


def _is_constant(found: Any, name: str) -> bool:
    return type(found).__module__ == name.partition(":")[0] and not _is_of_python(name)


def _is_of_python(name: str) -> bool:
    """Whether a name is of the standard library, where some functions run what they are given."""
    return name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names - {"__main__"}


def _is_numpy_scalar(found: Any, name: str) -> bool:
    generic = getattr(sys.modules.get("numpy"), "generic", None)
    return generic is not None and isinstance(found, type) and issubclass(found, generic)


_NAMED: dict[str, Callable[[Any, str], bool]] = {
    "flag": _is_class(enum.Flag),
    "enum": _is_class(enum.Enum),
    "namedtuple": lambda found, name: _is_class(tuple)(found, name) and hasattr(found, "_fields"),
    "dataclass": lambda found, name: _is_class(object)(found, name) and dataclasses.is_dataclass(found),
    "config": lambda found, name: (
        _is_class(object)(found, name) and hasattr(found, "from_dict") and hasattr(found, "to_dict")
    ),
    "class": _is_class(object),
    "numpy_dtype": _is_numpy_scalar,
    "numpy": _is_numpy_scalar,
    "function": _is_function,
    "constant": _is_constant,
}
