"""Docstrings of public names: every parameter, what is returned, and an example."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import roundpipe_runtime
import yobx_flatten

PACKAGES = (yobx_flatten, roundpipe_runtime)
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
NOTHING = (None, "None", inspect.Signature.empty)
# Users get these from a function and never make one; their docstrings list attributes.
MADE_BY_US = {"Call", "Checkpoint", "RecordedCalls", "WrappedModel"}


class Documented(NamedTuple):
    path: str
    function: Any
    doc: str

    @property
    def parameters(self) -> list[str]:
        names = inspect.signature(self.function).parameters
        return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def folders() -> list[Any]:
    names = [package.__name__ for package in PACKAGES]
    for package in PACKAGES:
        names += [found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.") if found.ispkg]
    return [module for module in map(importlib.import_module, names) if hasattr(module, "__all__")]


def public() -> dict[str, Any]:
    found = {}
    for module in reversed(folders()):
        for name in module.__all__:
            obj = getattr(module, name)
            found[id(obj)] = f"{module.__name__}.{name}", obj
    return dict(sorted(found.values(), key=lambda pair: pair[0]))


PUBLIC = public()


def documented_functions() -> Iterator[Documented]:
    for path, cls in PUBLIC.items():
        if inspect.isfunction(cls):
            yield Documented(path, cls, inspect.getdoc(cls) or "")
        if not inspect.isclass(cls) or getattr(cls, "_is_protocol", False) or issubclass(cls, Exception):
            continue
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                yield Documented(f"{path}.{name}", function, inspect.getdoc(function) or "")
            elif name == "__init__" and "__dataclass_fields__" not in vars(cls) and cls.__name__ not in MADE_BY_US:
                yield Documented(path, function, inspect.getdoc(cls) or "")


def sections(doc: str) -> dict[str, str]:
    _, *parts = SECTION.split(doc)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def undescribed(documented: Documented) -> list[str]:
    args = sections(documented.doc).get("Args", "")
    names = {name for line in re.findall(r"^ +([\w *,]+):", args, re.MULTILINE) for name in re.findall(r"\w+", line)}
    return [name for name in documented.parameters if name not in names]


@pytest.mark.parametrize("documented", list(documented_functions()), ids=lambda found: found.path)
def test_every_parameter_and_what_a_function_returns_is_described(documented):
    assert documented.doc
    assert len(documented.parameters) < 2 or undescribed(documented) == []
    function = PUBLIC.get(documented.path)
    if not inspect.isfunction(function) or inspect.signature(function).return_annotation in NOTHING:
        return
    has_section = bool({"Returns", "Yields"} & set(sections(documented.doc)))
    assert has_section or (len(documented.parameters) < 2 and re.match(r"Return|Report|Yield|Estimate", documented.doc))


@pytest.mark.parametrize(
    "name",
    [
        f"{package.__name__}.{name}"
        for package in PACKAGES
        for name in package.__all__
        if callable(obj := getattr(package, name)) and not (inspect.isclass(obj) and issubclass(obj, Exception))
    ],
)
def test_the_names_at_the_top_have_an_example(name):
    package, _, name = name.rpartition(".")
    assert ">>> " in (inspect.getdoc(getattr(importlib.import_module(package), name)) or "")


def test_the_reader_of_sections_knows_the_headings():
    assert sections("First.\n\nArgs:\n    a: one.\n\nReturns:\n    Two.\n") == {
        "Args": "\n    a: one.\n\n",
        "Returns": "\n    Two.\n",
    }
