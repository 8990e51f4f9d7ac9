"""Find the object that a file names as ``module:name``, without importing or calling code that the file chooses.

Names are resolved only in imported modules, and in a fixed table of modules in which model libraries define caches,
outputs and configurations. An object of an unexpected type, or whose own name is not the name in the file, is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

from ...errors import NotRegisteredError, StaticDataError, describe_class

# The modules that a file may import; they only define classes.
_KNOWN = re.compile(
    r"numpy|ml_dtypes"
    r"|transformers\.(?:cache_utils|modeling_outputs|configuration_utils|tokenization_utils_base|feature_extraction_utils)"
    r"|transformers\.models\.(?P<model>[a-z0-9_]+)\.(?:modeling|configuration)_(?P=model)"
    r"|diffusers\.(?:utils\.outputs|(?:models|pipelines|schedulers)(?:\.[a-z0-9][a-z0-9_]*)+)"
)


def import_known(module: str) -> None:
    """Import a module if the fixed table of modules that a file may import contains it; otherwise do nothing."""
    if module in sys.modules or _KNOWN.fullmatch(module) is None:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise NotRegisteredError(
            f"The file contains an object of the module {module}, which cannot be imported ({error}):\n    pip install "
            f"{library}"
        ) from error


def find_named(name: object, kind: str) -> Any:
    """Return the class, function or constant that a file names as ``module:name``, or refuse an unsafe name."""
    # kind: the expected kind, a key of `_FITS`
    if not isinstance(name, str):
        raise StaticDataError(f"A file contains {describe_class(name)} instead of the name of a {kind}.")
    module, _, qualified = name.partition(":")
    import_known(module)
    if module not in sys.modules:
        raise NotRegisteredError(
            f"The file holds {qualified} of the module {module}, which is not imported, and a file cannot cause an "
            f"import. Import it first:\n    import {module}"
        )
    found: Any = sys.modules[module]
    for part in qualified.split("."):
        # a module's own dictionary: `getattr` would run its __getattr__
        found = vars(found).get(part) if isinstance(found, type(sys)) else getattr(found, part, None)
    if not _FITS[kind](found, name):
        raise StaticDataError(f"A file names {name!r}, which is not a {kind} that a file may use.")
    return found


def _bears(found: object, name: str) -> bool:
    """Return whether ``name`` consists of the module and the qualified name under which the object was defined."""
    return f"{getattr(found, '__module__', None)}:{getattr(found, '__qualname__', None)}" == name


def _is_of_python(name: str) -> bool:
    """Return whether a name belongs to the standard library, which has classes that execute their arguments."""
    return name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names - {"__main__"}


# built-in types that static data may use as element types or container factories
_BUILTINS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_PLAIN = {f"builtins:{cls.__name__}" for cls in _BUILTINS}
_PLAIN |= {"builtins:NoneType", "builtins:object", "collections:OrderedDict", "collections:deque"}


def _is_class(base: type) -> Callable[[Any, str], bool]:
    return lambda found, name: (
        isinstance(found, type)
        and issubclass(found, base)
        and _bears(found, name)
        and (name in _PLAIN or not _is_of_python(name))
    )


# standard functions that only compute from their arguments
_FUNCTIONS = ("abs", "all", "any", "divmod", "len", "max", "min", "pow", "round", "sorted", "sum")
_PURE = {f"builtins:{name}" for name in _FUNCTIONS} | {"json:dumps", "json:loads"}
_PURE_MODULES = ("cmath", "math", "operator", "_operator")


def _is_function(found: object, name: str) -> bool:
    is_function = callable(found) and not isinstance(found, type) and _bears(found, name)
    module, _, qualified = name.partition(":")
    is_pure = name in _PURE or (module in _PURE_MODULES and qualified != "call")
    return is_function and (is_pure or not _is_of_python(name))


_SENTINELS = {"builtins:Ellipsis", "builtins:NotImplemented", "dataclasses:MISSING", "dataclasses:KW_ONLY"}


def _is_constant(found: object, name: str) -> bool:
    is_constant = type(found).__module__ == name.partition(":")[0]
    return is_constant and (name in _SENTINELS or not _is_of_python(name))


def _is_numpy_scalar(found: object, name: str) -> bool:
    generic = getattr(sys.modules.get("numpy"), "generic", None)
    return generic is not None and isinstance(found, type) and issubclass(found, generic)


def _is_config(found: object, name: str) -> bool:
    # `from_dict` of a class that is not a transformers configuration may run any code
    base = getattr(sys.modules.get("transformers.configuration_utils"), "PretrainedConfig", None)
    return base is not None and isinstance(found, type) and issubclass(found, base) and _bears(found, name)


_FITS: dict[str, Callable[[Any, str], bool]] = {
    "flag": lambda found, name: isinstance(found, type) and issubclass(found, enum.Flag) and _bears(found, name),
    "enum": lambda found, name: isinstance(found, type) and issubclass(found, enum.Enum) and _bears(found, name),
    "namedtuple": lambda found, name: (
        _is_class(tuple)(found, name) and hasattr(found, "_fields") and not hasattr(found, "__del__")
    ),
    # without `__del__`, so that no code runs when an instance is deleted
    "dataclass": lambda found, name: (
        _is_class(object)(found, name) and dataclasses.is_dataclass(found) and not hasattr(found, "__del__")
    ),
    "config": _is_config,
    "class": _is_class(object),
    "numpy scalar": _is_numpy_scalar,
    "function": _is_function,
    "constant": _is_constant,
}
