"""How many lines and files the packages have, by folder, next to what `pyproject.toml` allows: ``make house``.

A budget can only go down: a change that needs more lines in a folder states what it takes away there.
"""

import ast
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("yobx_flatten", "roundpipe_runtime")


class Found(NamedTuple):
    lines: dict[str, int]  # by folder below a package; files next to the folders count for the package
    files: int
    longest_file: int
    longest_function: int  # lines of its body, without the docstring


def measured() -> Found:
    lines: dict[str, int] = {}
    longest_file = longest_function = files = 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            inner = path.relative_to(ROOT).parts
            folder = "/".join(inner[:2]) if len(inner) > 2 else package
            count = len(text.splitlines())
            lines[folder] = lines.get(folder, 0) + count
            longest_file, files = max(longest_file, count), files + 1
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                    longest_function = max(longest_function, (body[-1].end_lineno or 0) - body[0].lineno + 1)
    return Found(lines, files, longest_file, longest_function)


def budgets() -> dict[str, int]:
    """Return `[tool.house]` of `pyproject.toml`: lines by folder, and the three other numbers."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["house"]


if __name__ == "__main__":
    found, allowed = measured(), budgets()
    for name, count in sorted(found.lines.items()):
        print(f"{name:34} {count:6} of {allowed.get(name, 0):6}")
    print(f"{'all lines':34} {sum(found.lines.values()):6}")
    for name in ("files", "longest_file", "longest_function"):
        print(f"{name:34} {getattr(found, name):6} of {allowed[name]:6}")
