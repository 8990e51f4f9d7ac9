"""Check what a stored program would make torch run: only what ``torch.export.save`` writes passes.

torch's reader is not made for files of strangers. Next to its pickles, which :mod:`.stored_pickles` is about, it

- loads machine code and objects that stand among the entries of the archive,
- has sympy evaluate each size as Python, and compiles conditions on inputs to a function,
- generates a module's source, in which names and keys stand as they are,
- looks operators up by name, also one that maps a file,
- imports modules that tree specs name.

So the document of the program is read first, and anything in these places that is not of the form that torch writes is
refused: a name is one, a size is made of sizes, an operator is one of torch's, with no file among its arguments.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from ...errors import DamagedFileError, StaticDataError, UntrustedFileError
from ...private_names.of_torch import GetAttrKey, OpOverload, pytree
from ...recipe.stored_specs import check_spec, is_plain
from .stated_expressions import is_guard, is_size

__all__ = ["REMEDY", "check_archive", "check_keys"]

REMEDY = "If you know who wrote the file:\n    trust=True, on the command line --trust"

_ENTRIES = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/\w+|\.format_version|\.storage_alignment|extra/.*"
    r"|models/[\w.-]+\.json|data/(?:weights|constants|sample_inputs)/[\w.-]+",
    re.DOTALL,
)
_PAYLOADS = re.compile(r"(?:weight|tensor)_\d+")  # others are objects: of opaque classes, by pickle, and of TorchScript
_IDENTIFIER = re.compile(r"(?:[A-Za-z_]\w*)?", re.ASCII)
_DOTTED = re.compile(r"[\w.-]*")
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z_]*\d{0,6}")

_NAMESPACES = ("aten", "prims", "transformers", "torchvision", "quantized_decomposed")
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)
# Texts that say how to compute. The other one is the `filename` of aten::from_file.
_TEXTS = re.compile(
    "a|activation|algorithm|api_name|approximate|assert_msg|b|driver|equation|indexing|interpolation|mode|norm|ord|p"
    "|pad_mode|padding|padding_side|reduce|rounding_mode|s|side|UPLO"
)
_CONTROL = re.compile(
    r"torch\.ops\.higher_order\.(?:associative_scan|auto_functionalized(?:_v2)?|cond|flex_attention(?:_backward)?"
    "|hints_wrapper|invoke_subgraph|map_impl|out_dtype|scan|strict_mode|tag_activation_checkpoint|while_loop"
    "|wrap_activation_checkpoint|wrap_with_autocast|wrap_with_set_grad_enabled)"
)
_ARITHMETIC = re.compile(
    r"_operator\.(?:getitem|add|mul|sub|truediv|ge|le|gt|lt|eq|ne|floordiv|mod|and_|or_|not_|pow|neg|pos|abs|[lr]shift)"
    r"|math\.(?:ceil|floor|trunc)|(?:builtins\.)?round"
    r"|torch\.(?:sym_(?:float|int|ite|max|min|not|sqrt|sum)|_sym_sqrt|_C\._set_grad_enabled)"
    r"|torch\.amp\.autocast_mode\._(?:enter|exit)_autocast|torch\.autograd\.grad_mode\.set_grad_enabled"
    r"|torch\.fx\.experimental\.symbolic_shapes\.cast_symbool_to_symint_guardless"
)


def check_archive(path: str | os.PathLike[str]) -> None:
    """Refuse a program for which torch would run more than operators on tensors."""
    from torch.export.pt2_archive import PT2ArchiveReader  # with sympy, which takes long

    shown = os.fspath(path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type for entry in entries) or sum(x.file_size for x in entries) > os.path.getsize(path):
        raise DamagedFileError(f"{shown} is compressed, which torch.export.save does not do.")
    with PT2ArchiveReader(shown) as reader:  # what it does not find, torch does not load
        for name in reader.get_file_names():
            if _ENTRIES.fullmatch(name) is None:
                _refuse(shown, f"holds {name!r}, which does not belong to a program")
            if name.endswith(".json") and name.startswith(("models/", "data/")):
                document = json.loads(reader.read_bytes(name))
                if name.startswith("models/"):
                    _Program(shown).check(document)
                else:
                    _check_payloads(shown, document)


def check_keys(program: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Refuse example inputs under keys that would be code in the conditions on them."""
    for keys, _ in pytree.tree_flatten_with_path(program.example_inputs)[0]:
        for key in keys:
            name = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
            is_field = isinstance(key, GetAttrKey)
            if not (isinstance(name, int) or (_is_identifier(name) if is_field and name else is_plain(name))):
                _refuse(os.fspath(path), f"has an input under the key {name!r:.200}")


def _refuse(shown: str, what: str) -> NoReturn:
    raise UntrustedFileError(f"{shown} {what}, and loading it may run code. {REMEDY}")


def _check_payloads(shown: str, document: Any) -> None:
    for key, value in _entries(document):
        if key == "path_name" and not (isinstance(value, str) and _PAYLOADS.fullmatch(value)):
            _refuse(shown, f"holds {value!r}, an object that torch makes by calling its class")


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a document with its value; what stands in a list goes by the key of the list."""
    waiting = [("", tree)]
    while waiting:
        key, one = waiting.pop()
        yield key, one
        if isinstance(one, dict):
            waiting.extend(one.items())
        elif isinstance(one, list):
            waiting.extend((key, value) for value in one)


class _Program:
    """Goes through the document of a program once."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._known: set[tuple[str, str]] = set()  # most texts come again and again
        self._checks: dict[str, tuple[Callable[[str], bool], str]] = {
            "name": (_is_identifier, "the name"),
            "as_name": (_is_identifier, "the name"),
            "forward_arg_names": (_is_identifier, "the argument"),
            "parameter_name": (_is_dotted, "the parameter"),
            "buffer_name": (_is_dotted, "the buffer"),
            "tensor_constant_name": (_is_dotted, "the constant"),
            "custom_obj_name": (_is_dotted, "the constant"),
            "fqn": (_is_dotted, "the module"),
            "expr_str": (is_size, "the size"),
            "guards_code": (is_guard, "the condition"),
            "target": (_is_operator, "the operator"),
            "as_operator": (_is_operator, "the operator"),
        }

    def check(self, document: Any) -> None:
        """Refuse the document, or return."""
        waiting: list[tuple[str, Any, bool]] = [("", document, False)]
        while waiting:
            key, value, in_node = waiting.pop()
            if isinstance(value, str):
                self._check_text(key, value, in_node)
            elif isinstance(value, dict):
                if key == "range_constraints":
                    for symbol in value:
                        self._require(_SYMBOL.fullmatch(symbol) is not None, "the symbol", symbol)
                in_node = key == "nodes" or (in_node and key != "graph")  # a graph among the inputs of a node
                waiting.extend((name, inner, in_node) for name, inner in value.items())
            elif isinstance(value, list):
                waiting.extend((key, inner, in_node) for inner in value)

    def _check_text(self, key: str, text: str, in_node: bool) -> None:
        if (key, text) in self._known:
            return
        if key in ("in_spec", "out_spec"):
            self._check_spec(text)
        elif key in self._checks:
            fits, what = self._checks[key]
            self._require(fits(text), what, text)
        elif key in ("as_string", "as_strings") and not in_node:
            # a text among the inputs of the program stands between quotes in the conditions on them
            self._require(is_plain(text), "the text", text)
            return
        self._known.add((key, text))

    def _check_spec(self, text: str) -> None:
        try:
            check_spec(text)
        except StaticDataError as error:
            _refuse(self._shown, f"has a tree spec that cannot be read ({error})")
        for _, node in _entries(json.loads(text)):
            if isinstance(node, dict) and node.get("type") in _DICTS and isinstance(node.get("context"), str):
                keys = json.loads(node["context"])
                for key in keys if isinstance(keys, list) else ():
                    self._require(not isinstance(key, str) or is_plain(key), "the key", key)

    def _require(self, fits: bool, what: str, text: str) -> None:
        if not fits:
            _refuse(self._shown, f"has {what} {text[:200]!r}")


_DICTS = ("builtins.dict", "collections.OrderedDict", "torch.fx.immutable_collections.immutable_dict")


def _is_identifier(text: str) -> bool:
    return _IDENTIFIER.fullmatch(text) is not None


def _is_dotted(text: str) -> bool:
    return _DOTTED.fullmatch(text) is not None


def _is_operator(text: str) -> bool:
    """Whether a name is that of an operator that computes with what it is given, and reads and writes no file."""
    if _ARITHMETIC.fullmatch(text) or _CONTROL.fullmatch(text):
        return True
    found = _OPERATOR.fullmatch(text)
    if found is None or found[1] not in _NAMESPACES:
        return False
    operator: Any = torch.ops
    for part in found.groups():
        operator = getattr(operator, part, None)
        if operator is None:  # not in this torch, which states that itself
            return True
    if not isinstance(operator, OpOverload):
        return False
    arguments = operator._schema.arguments
    return all("str" not in str(argument.type) or _TEXTS.fullmatch(argument.name) for argument in arguments)
