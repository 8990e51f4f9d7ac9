"""Import the names of a package on first use, so that a command line starts without torch."""

from __future__ import annotations

import importlib
import importlib.util

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazy_names(
    names: dict[str, Any], homes: Sequence[str], special: Mapping[str, Callable[[str], Any]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package whose public names are imported when first used.

    Source: `PEP 562 <https://peps.python.org/pep-0562/>`_.
    """
    # names: the `globals()` of the package, which also cache the names that were found
    # homes: modules of the package, searched in order. If a module has an `__all__`, only the names in it are found.
    # special: functions that make a value, by the name of the value; none by default
    package, makers = names["__name__"], dict(special or {})

    def find(name: str) -> Any:
        if name in makers:
            return makers[name](name)
        if not name.startswith("__"):  # Python and tools look up such names in every module
            if importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            for home in homes:
                module = importlib.import_module(f"{package}.{home}")
                if name in getattr(module, "__all__", names["__all__"]) and name in vars(module):
                    return names.setdefault(name, getattr(module, name))
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    def all_names() -> list[str]:
        known = (getattr(importlib.import_module(f"{package}.{home}"), "__all__", ()) for home in homes)
        return sorted({*names, *makers, *names["__all__"], *(name for home in known for name in home)})

    return find, all_names
