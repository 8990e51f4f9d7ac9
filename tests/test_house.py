"""The shape of the code: files in a folder, and docstrings of what is internal."""

import ast
import importlib
import inspect
import pathlib
import re

from tests import house

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("yobx_flatten", "roundpipe_runtime")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MOST_FILES_IN_A_FOLDER = 25


def test_the_house_is_within_its_budgets():
    """The numbers of `[tool.house]` can only go down; `make house` prints the table."""
    found, allowed = house.measured(), house.budgets()
    assert set(found) == set(allowed)
    assert {name: count for name, count in found.items() if count > allowed[name]} == {}, "take as much away"


def resolve(name):
    first, *parts = name.split(".")
    found, path = importlib.import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def documented():
    names = {f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__}
    for page in (*(ROOT / "docs" / "api").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")):
        module = None
        for line in page.read_text(encoding="utf-8").splitlines():
            if current := re.match(r"\.\. (?:py:)?currentmodule:: (\S+)", line.strip()):
                module = current[1]
            if entry := re.match(r"\.\. auto(?:class|function|exception|method):: (\S+)", line.strip()):
                names.add(entry[1] if entry[1].startswith(PACKAGES) else f"{module}.{entry[1]}")
            if entry := re.match(r"\.\. automodule:: (\S+)", line.strip()):
                names |= {f"{entry[1]}.{name}" for name in importlib.import_module(entry[1]).__all__}
    found = set()
    for name in names:
        value = inspect.unwrap(resolve(name))
        classes = value.__mro__ if inspect.isclass(value) else [value]
        for one in classes:
            if getattr(one, "__module__", "").startswith(PACKAGES) and hasattr(one, "__qualname__"):
                found.add((pathlib.Path(inspect.getsourcefile(one)), one.__qualname__))
    return found


def with_sections(path, public):

    def visit(node, outer, is_public):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, outer, is_public)
                continue
            name = f"{outer}.{child.name}" if outer else child.name
            is_function = not isinstance(child, ast.ClassDef)
            is_private = child.name.startswith("_") and not child.name.startswith("__")
            is_known = (path, name) in public or (is_function and is_public and not is_private)
            text = ast.get_docstring(child) or ""
            if not is_known and re.search(r"^(Args|Attributes|Returns|Yields|Raises):$", text, re.MULTILINE):
                yield name
            yield from visit(child, f"{name}.<locals>" if is_function else name, is_known and not is_function)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "", False)


def test_a_docstring_of_what_is_internal_has_no_list_of_arguments():
    public = documented()
    assert len(public) > 200
    assert [f"{path.relative_to(ROOT)}: {name}" for path in FILES for name in with_sections(path, public)] == []
