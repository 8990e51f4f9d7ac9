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
    # names: the `globals()` of its `__init__`; what was found once is kept there
    # homes: modules of the package; a name of its `__all__`, or of theirs, is that of the first which has it
    # special: names that need more than an import, and what makes each of them; none by default
    # returns: the two functions. Folders of the package are also found, and a name that is nowhere is an
    # `AttributeError`.
    package, makers = names["__name__"], dict(special or {})

    def find(name: str) -> Any:
        if name in makers:
            return makers[name](name)
        if not name.startswith("__"):  # which Python itself and tools look for in every module
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
