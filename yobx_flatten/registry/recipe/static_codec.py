"""Convert the static part of a node (torch: *context*, JAX: *aux*) to JSON and back, without loss.

A file names classes, functions and constants as ``module:name``. Names are resolved only in imported modules, and in a
fixed table of modules in which model libraries define caches, outputs and configurations. An object of an unexpected
type is refused, as is a class or function that was defined under a different name.

A value that JSON would change, such as a tuple, is stored as a dict with the single key ``"!<kind>"``. Otherwise, the
static data in a loaded program would differ from the static data of its inputs, so the program would refuse the inputs.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...errors import NotRegisteredError, StaticDataError, describe_class
from ...errors.failures import result_or
from .aliases import Static

_PLAIN = (str, int, float, bool, type(None))
_Put = Callable[[Any, str], Any]  # (part, its path in the whole) -> JSON


class _Kind(NamedTuple):
    fits: Callable[[Any], bool]
    to_json: Callable[[Any, _Put], Any]
    from_json: Callable[[Any], Any]


def is_array(value: object) -> bool:
    """Return whether a value is a tensor, a NumPy array or a JAX array; tracers of JAX count as arrays."""
    return isinstance(value, torch.Tensor) or _is_of("numpy", "ndarray", value) or _is_of("jax", "Array", value)


def dump_static(value: Static, *, where: str = "") -> Any:
    """Convert static data to values that :mod:`json` can write, such as ``{"!tuple": ["relu", None]}``."""
    # where: name of the value in messages, such as `"State.window"`
    if type(value) in _PLAIN:
        return value

    def put(part: Static, step: str) -> Any:
        return dump_static(part, where=f"{where or 'static'}{step}")

    if type(value) is list:
        return [put(x, f"[{i}]") for i, x in enumerate(value)]
    if type(value) is dict and all(type(k) is str and not k.startswith("!") for k in value):
        return {k: put(x, f"[{k!r}]") for k, x in value.items()}
    for kind, row in _KINDS.items():
        if row.fits(value):
            try:
                return {f"!{kind}": row.to_json(value, put)}
            except _NoNameError as error:
                raise StaticDataError(
                    f"Static data holds {describe_class(error.args[0])}{_at(where)}, which another process cannot "
                    "import by name. Define the class or function at the top level of a module."
                ) from None
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise StaticDataError(
            f"Static data holds {describe_class(value)}{_at(where)}, a dynamic size of a trace. Static data is "
            "constant in a program, so f_flatten must return this size among the children, as an int."
        )
    raise StaticDataError(
        f"Static data holds {describe_class(value)}{_at(where)}, which cannot be stored with a tree spec. Flatten the "
        "value as a child if it changes between calls; otherwise store it as strings or numbers."
    )


def load_static(data: Static) -> Static:
    if isinstance(data, list):
        return [load_static(x) for x in data]
    if not isinstance(data, dict):
        # specs are compared by ==, and in a container a NaN equals only the same object: return `math.nan` for each NaN
        return math.nan if data != data else data
    if len(data) == 1:
        (key, value), *_ = data.items()
        if key.startswith("!"):
            if key[1:] not in _KINDS:
                raise StaticDataError(
                    f"A stored tree spec holds static data of kind {key[1:]!r}, which this version of yobx_flatten "
                    "does not know. Update the package: pip install --upgrade yobx-flatten"
                )
            return _KINDS[key[1:]].from_json(value)
    return {k: load_static(x) for k, x in data.items()}


def check_static(value: Static, *, where: str = "") -> None:
    """Raise an error for static data that cannot be stored as JSON, or that differs after it is stored and loaded."""
    # where: name of the value in the message, such as `"State.window"`

    def failed(error: Exception) -> bool:
        if isinstance(error, StaticDataError):
            raise error
        return False

    # an __eq__ or a from_dict can raise any error; a list compares its items by identity first, so `math.nan` fits
    if not result_or(lambda: [load_static(dump_static(value, where=where))] == [value], failed):
        raise StaticDataError(
            f"Static data holds {describe_class(value)}{_at(where)}, which is not equal to itself after it is stored "
            "and loaded: a loaded program would refuse its own inputs. Give the class an __eq__ that compares "
            "contents and returns a bool, or store numbers instead."
        )


def _at(where: str) -> str:
    return f" at {where}" if where else ""


class _NoNameError(Exception): ...


def _found_name(value: object) -> str | None:
    name = f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', None)}"
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return name if found is value else None


def _name_of(value: object) -> str:
    if (name := _found_name(value)) is None:
        raise _NoNameError(value)
    return name


def _constant_name(value: object) -> str | None:
    """Return the name of a constant, such as equinox's ``MISSING``, in the module that defines its class."""
    module = type(value).__module__
    contents = getattr(sys.modules.get(module), "__dict__", {}).copy()  # another thread may import it meanwhile
    return next((f"{module}:{name}" for name, found in contents.items() if found is value), None)


def _is_of(library: str, name: str, value: object) -> bool:
    cls = getattr(sys.modules.get(library), name, None)
    return cls is not None and isinstance(value, cls)


def _numpy_dtype(name: str) -> Any:
    return importlib.import_module("numpy").dtype(find_named(name, "numpy scalar"))


def _is_numpy_dtype(value: Any) -> bool:
    # the scalar class determines a dtype, except structured dtypes and non-native byte orders
    name = _found_name(value.type) if _is_of("numpy", "dtype", value) else None
    return name is not None and _numpy_dtype(name) == value


def _numpy_scalar(name: str, content: str) -> Any:
    return importlib.import_module("numpy").frombuffer(bytes.fromhex(content), _numpy_dtype(name))[0]


def _load_dataclass(name: str, values: dict[str, Any]) -> Any:
    cls = find_named(name, "dataclass")
    obj = object.__new__(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    if not values.keys() <= fields:  # such as __class__, which would change the object's class
        raise StaticDataError(f"The stored {name} has fields {sorted(values.keys() - fields)}, which its class lacks.")
    for field, value in values.items():
        object.__setattr__(obj, field, load_static(value))
    return obj


def _load_namedtuple(name: str, values: list[Any]) -> Any:
    cls = find_named(name, "namedtuple")
    if len(values) != len(cls._fields):
        raise StaticDataError(f"The stored {name} has {len(values)} fields, but its class has {len(cls._fields)}.")
    return tuple.__new__(cls, [load_static(value) for value in values])  # without the constructor of the class


def _load_config(name: str, text: str) -> Any:
    values = json.loads(text)
    # these keys name code to load with the configuration
    if not isinstance(values, dict) or values.keys() & {"auto_map", "custom_pipelines"}:
        raise StaticDataError(f"The stored configuration {name} names code to run, so it is not loaded.")
    objection = objection_to(values)
    if objection is not None:
        raise StaticDataError(f"A file holds a configuration {name} that {objection}.")
    return find_named(name, "config").from_dict(values)


def _load_dtype(name: object) -> torch.dtype:
    found = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise StaticDataError(f"A file names {name!r}, which is not a dtype of torch.")
    return found


def _put_all(values: Iterable[object], put: _Put) -> list[Any]:
    return [put(x, f"[{i}]") for i, x in enumerate(values)]


def _put_sorted(values: Iterable[object], put: _Put) -> list[Any]:
    return _put_all(sorted(values, key=repr), put)


def _put_items(values: dict[Any, Any], put: _Put) -> list[Any]:
    return [[put(k, f" key {k!r}"), put(x, f"[{k!r}]")] for k, x in values.items()]


def _load_items(data: list[Any]) -> dict[Any, Any]:
    # `dict` of an object that a file names could call functions: each pair stays a list until it is unpacked
    return {load_static(k): load_static(x) for k, x in data}


# The first row that fits is used, so a subclass is before its base class.
_KINDS: dict[str, _Kind] = {
    # combined and empty flags have no name
    "flag": _Kind(
        lambda v: isinstance(v, enum.Flag),
        lambda v, put: [_name_of(type(v)), v.value],
        lambda d: find_named(d[0], "flag")(d[1]),
    ),
    "enum": _Kind(
        lambda v: isinstance(v, enum.Enum),
        lambda v, put: [_name_of(type(v)), v.name],
        lambda d: find_named(d[0], "enum")[d[1]],
    ),
    "size": _Kind(lambda v: type(v) is torch.Size, lambda v, put: list(v), torch.Size),
    "tuple": _Kind(lambda v: type(v) is tuple, _put_all, lambda d: tuple(load_static(x) for x in d)),
    "namedtuple": _Kind(
        lambda v: isinstance(v, tuple) and hasattr(v, "_fields"),
        lambda v, put: [_name_of(type(v)), [put(x, f".{name}") for name, x in zip(v._fields, v, strict=True)]],
        lambda d: _load_namedtuple(*d),
    ),
    "set": _Kind(lambda v: type(v) is set, _put_sorted, lambda d: {load_static(x) for x in d}),
    "frozenset": _Kind(lambda v: type(v) is frozenset, _put_sorted, lambda d: frozenset(load_static(x) for x in d)),
    "dict": _Kind(lambda v: type(v) is dict, _put_items, _load_items),
    "ordered": _Kind(lambda v: type(v) is OrderedDict, _put_items, lambda d: OrderedDict(_load_items(d))),
    "dtype": _Kind(lambda v: isinstance(v, torch.dtype), lambda v, put: str(v).removeprefix("torch."), _load_dtype),
    "device": _Kind(lambda v: isinstance(v, torch.device), lambda v, put: str(v), torch.device),
    "slice": _Kind(
        lambda v: isinstance(v, slice),
        lambda v, put: [put(v.start, ".start"), put(v.stop, ".stop"), put(v.step, ".step")],
        lambda d: slice(*(load_static(x) for x in d)),
    ),
    "range": _Kind(lambda v: isinstance(v, range), lambda v, put: [v.start, v.stop, v.step], lambda d: range(*d)),
    "complex": _Kind(lambda v: type(v) is complex, lambda v, put: [v.real, v.imag], lambda d: complex(*d)),
    "bytes": _Kind(lambda v: type(v) is bytes, lambda v, put: v.hex(), bytes.fromhex),
    "class": _Kind(lambda v: isinstance(v, type), lambda v, put: _name_of(v), lambda d: find_named(d, "class")),
    "numpy_dtype": _Kind(_is_numpy_dtype, lambda v, put: _name_of(v.type), _numpy_dtype),
    "numpy": _Kind(
        lambda v: _is_of("numpy", "generic", v) and _is_numpy_dtype(v.dtype) and not v.dtype.hasobject,
        lambda v, put: [_name_of(v.dtype.type), v.tobytes().hex()],
        lambda d: _numpy_scalar(*d),
    ),
    # transformers configurations, which several caches store
    "config": _Kind(
        lambda v: callable(getattr(v, "to_dict", None)) and callable(getattr(type(v), "from_dict", None)),
        lambda v, put: [_name_of(type(v)), json.dumps(v.to_dict(), sort_keys=True, default=str)],
        lambda d: _load_config(*d),
    ),
    "dataclass": _Kind(
        lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type),
        lambda v, put: [
            _name_of(type(v)),
            {f.name: put(getattr(v, f.name), f".{f.name}") for f in dataclasses.fields(v)},
        ],
        lambda d: _load_dataclass(*d),
    ),
    "function": _Kind(
        lambda v: callable(v) and _found_name(v) is not None,
        lambda v, put: _name_of(v),
        lambda d: find_named(d, "function"),
    ),
    "constant": _Kind(
        lambda v: _constant_name(v) is not None, lambda v, put: _constant_name(v), lambda d: find_named(d, "constant")
    ),
}


_FACTORIES = {cls.__name__ for cls in (list, dict, set, tuple, int, float, str, bool)}


def check_spec(text: str) -> None:
    """Raise an error if torch would import a module for an enum or a ``defaultdict`` factory in a stored tree spec."""
    for node in _dicts(text):
        context = node.get("context")
        if node.get("type") == "collections.defaultdict":
            factory = context if isinstance(context, dict) else {}
            name = factory.get("default_factory_name")
            is_built_in = isinstance(name, str) and name in _FACTORIES
            if not is_built_in or factory.get("default_factory_module") != "builtins":
                raise StaticDataError(f"A stored defaultdict must have a built-in default_factory, found {name!r}.")
        for part in _dicts(context):
            if "__enum__" in part:
                find_named(part.get("fqn"), "enum")


def _dicts(tree: object) -> Iterator[dict[str, Any]]:
    if isinstance(tree, str):
        try:
            tree = json.loads(tree)
        except (ValueError, RecursionError):  # a class may store any text as context
            return
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


_COUNTS = re.compile(r"(layers?|experts?|depths?|blocks|stages|heads|num_labels)$")
_MOST = 10_000  # layers or experts; current models have some hundred layers
_MOST_LABELS = 100_000  # current models have 1,000 to 22,000 labels


def objection_to(stated: Mapping[str, Any]) -> str | None:
    """Return the reason why a stored model configuration is refused, or ``None`` if it is accepted.

    >>> objection_to({"num_hidden_layers": 32, "text_config": {"num_labels": 10**9}})
    'states num_labels = 1,000,000,000, but the limit is 100,000'
    >>> objection_to({"attn_implementation": "owner/kernel"})
    "states attn_implementation = 'owner/kernel', code from the Hub: remove it to use transformers' implementation"
    """
    names = stated.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return f"has architectures = {names!r}, which is not a list of names"
    # all items of a list have the dotted path of the list
    waiting: list[tuple[str, Any]] = [("", stated)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend((f"{key}.{name}".lstrip("."), below) for name, below in value.items())
        elif isinstance(value, list):
            waiting.extend((key, below) for below in value)
        last = key.rpartition(".")[2]
        if type(value) is int and _COUNTS.search(last):
            most = _MOST_LABELS if last.endswith("labels") else _MOST
            if value > most:
                return f"states {last} = {value:,}, but the limit is {most:,}"
        if isinstance(value, str) and "attn_implementation" in key and "/" in value:
            return f"states {key} = {value!r}, code from the Hub: remove it to use transformers' implementation"
    return None


# -- the names in a file -----------------------------------------------------------------------------------------------

# The modules that a file may import; they only define classes.
_KNOWN = re.compile(
    r"numpy|ml_dtypes"
    r"|transformers\.(?:cache_utils|modeling_outputs|configuration_utils|tokenization_utils_base|feature_extraction_utils)"
    r"|transformers\.models\.(?P<model>[a-z0-9_]+)\.(?:modeling|configuration)_(?P=model)"
    r"|diffusers\.(?:utils\.outputs|(?:models|pipelines|schedulers)(?:\.[a-z0-9][a-z0-9_]*)+)"
)


def import_known(module: str) -> None:
    """Import a module that a file names, if the module is one of those that files may import."""
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
            f"The file contains {qualified} of the module {module}, which is not imported. Loading a file imports only "
            f"modules of known libraries. Import the module first:\n    import {module}"
        )
    found: Any = sys.modules[module]
    for part in qualified.split("."):
        # a module's own dictionary: `getattr` would run its __getattr__
        found = vars(found).get(part) if isinstance(found, type(sys)) else getattr(found, part, None)
    if not _FITS[kind](found, name):
        raise StaticDataError(f"A file names {name!r}, which is not a {kind} that a file may use.")
    return found


def _bears(found: object, name: str) -> bool:
    """Return whether an object was defined under ``name``, which has the form ``module:name``."""
    return f"{getattr(found, '__module__', None)}:{getattr(found, '__qualname__', None)}" == name


def _is_of_python(name: str) -> bool:
    """Return whether a name belongs to the standard library, which has classes that execute their arguments."""
    return name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names - {"__main__"}


# built-in types that static data may use as element types or container factories
_BUILTINS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_PLAIN_NAMES = {f"builtins:{cls.__name__}" for cls in _BUILTINS}
_PLAIN_NAMES |= {"builtins:NoneType", "builtins:object", "collections:OrderedDict", "collections:deque"}


def _is_class(base: type) -> Callable[[Any, str], bool]:
    return lambda found, name: (
        isinstance(found, type)
        and issubclass(found, base)
        and _bears(found, name)
        and (name in _PLAIN_NAMES or not _is_of_python(name))
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
