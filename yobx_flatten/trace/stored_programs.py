"""Load stored programs faster, also before their classes are imported.

What torch works out again for each record is worked out once. Each of thousands of records asks for the types of its
fields, which Python reads from the annotations of its class. The sizes of each tensor are texts that sympy parses, and
nearly all of them were parsed for a tensor before.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from ..private_names.of_torch import pytree

# class -> the globals that its annotations were read with, and the types of its fields
_HINTS: dict[type, tuple[Any, dict[str, Any]]] = {}


def importing_classes(read: Callable[..., Any], libraries: Callable[[], Collection[str]]) -> Callable[..., Any]:
    """Return a reader of stored tree specs that first imports the modules of classes which are not registered.

    Only modules of some libraries are imported, which register their classes then: a file chooses no other.
    """

    @functools.wraps(read)
    def json_to_treespec(schema: object) -> Any:
        for name in _names_of_classes(schema):
            # asked again for each: a module registers several
            module = name.rpartition(".")[0]
            unknown = name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and module not in sys.modules
            if unknown and module.partition(".")[0] in libraries():
                importlib.import_module(module)
        return read(schema)

    return json_to_treespec


def _names_of_classes(schema: object) -> Iterator[str]:
    """The names under which the classes of a stored specification are registered."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for child in schema.get("children_spec") or ():
            yield from _names_of_classes(child)


def remembering_hints(typing: ModuleType) -> types.SimpleNamespace:
    """Return a ``typing`` for the module that reads programs, whose ``get_type_hints`` reads a class once."""

    @functools.wraps(typing.get_type_hints)
    def get_type_hints(
        obj: object, globalns: dict[str, Any] | None = None, *more: Any, **options: Any
    ) -> dict[str, Any]:
        if more or options or not isinstance(obj, type):
            found: dict[str, Any] = typing.get_type_hints(obj, globalns, *more, **options)
            return found
        given_for, hints = _HINTS.get(obj, (None, None))
        if hints is None or given_for is not globalns:
            hints = typing.get_type_hints(obj, globalns)
            _HINTS[obj] = globalns, hints
        return hints

    return types.SimpleNamespace(**{**vars(typing), "get_type_hints": get_type_hints})


def remembering_expressions(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``GraphModuleDeserializer._parse_sym_expr`` that parses the same text with the same example size once.

    What it does besides, to the symbols of the program, has the same effect the second time.
    """

    @functools.wraps(parse)
    def _parse_sym_expr(self: Any, expr_str: str, hint: object = None) -> Any:
        symbols = self.symbol_name_to_symbol  # a new one for each program
        known = vars(self).get("_yobx_expressions")
        if known is None or known[0] is not symbols:
            known = self._yobx_expressions = (symbols, {})
        key = expr_str, hint
        if key not in known[1]:
            known[1][key] = parse(self, expr_str, hint)
        return known[1][key]

    return _parse_sym_expr


# Make the inputs of AOTInductor packages contiguous where the compiled code expects it.


_KEY = "yobx_flatten.contiguous"  # in the metadata of a package: 1 or 0 for each tensor among its inputs
_METADATA = "aot_inductor.metadata"


def remembering_strides(flatten_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Make the version of ``_aoti_flatten_inputs`` (``torch._inductor.compile_fx``) that notes what is contiguous."""

    @functools.wraps(flatten_inputs)
    def _aoti_flatten_inputs(*args: Any, **kwargs: Any) -> Any:
        inputs, options = flatten_inputs(*args, **kwargs)
        contiguous = "".join(str(int(leaf.is_contiguous())) for leaf in inputs if isinstance(leaf, torch.Tensor))
        return inputs, {**options, _METADATA: {**options.get(_METADATA, {}), _KEY: contiguous}}

    return _aoti_flatten_inputs


def called_contiguous(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make the version of ``AOTICompiledModel.__call__`` that passes such inputs contiguous."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        contiguous = self.get_metadata().get(_KEY)
        if contiguous is None:
            return call(self, *args, **kwargs)
        return call(type(self)(_Runner(self.loader, contiguous)), *args, **kwargs)

    return __call__


class _Runner:
    """The loader of a package, as its call sees it."""

    def __init__(self, loader: Any, contiguous: str) -> None:
        self._loader, self._contiguous = loader, contiguous

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def boxed_run(self, inputs: list[Any]) -> Any:
        """Run; a wrong number of inputs is refused by the package itself."""
        wanted = self._contiguous.ljust(len(inputs), "0")[: len(inputs)]
        found = [leaf.contiguous() if one == "1" else leaf for leaf, one in zip(inputs, wanted, strict=True)]
        inputs.clear()  # as the loader does with what it has taken
        return self._loader.boxed_run(found)
