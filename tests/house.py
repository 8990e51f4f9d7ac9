"""How large the packages are and how their code is cut up, next to what `pyproject.toml` allows: ``make house``.

A number can only go down: a change that needs more lines in a folder states what it takes away there.
"""

import ast
import tomllib
from collections import Counter
from pathlib import Path

__all__ = ["budgets", "measured"]

ROOT = Path(__file__).parents[1]
PACKAGES = ("yobx_flatten", "roundpipe_runtime")
WIDE = 6  # arguments of a constructor, at most
SMALL = 100  # lines of a file, at least


def measured() -> dict[str, int]:
    """Count the lines of each folder, and what makes a reader leave the file."""
    found: Counter[str] = Counter()
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    importers, subclasses, classes = Counter[Path](), Counter[str](), set[str]()
    for path, tree in trees.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        package, *inner = path.relative_to(ROOT).parts
        found["/".join((package, inner[0])) if len(inner) > 1 else package] += lines
        found["lines"] += lines
        found["files"] += 1
        found["longest_file"] = max(found["longest_file"], lines)
        found["small_files"] += lines < SMALL and not path.name.startswith("__")
        importers.update(imported(path, tree, trees))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1
                found["longest_function"] = max(found["longest_function"], length)
            elif isinstance(node, ast.ClassDef):
                found["wide_constructors"] += arguments(node) > WIDE
                classes.add(node.name)
                subclasses.update(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
    alone = [path for path, count in importers.items() if count == 1 and path.name != "__init__.py"]
    found["files_with_one_importer"] = len(alone)
    found["bases_with_one_subclass"] = sum(subclasses[name] == 1 for name in classes)
    for name in PACKAGES:
        inside = {path.relative_to(ROOT / name).parts[0] for path in trees if path.is_relative_to(ROOT / name)}
        found[f"{name}_rooms"] = len(inside - {"__init__.py", "__main__.py"})
    found["tests"] = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return dict(found)


def imported(path: Path, tree: ast.Module, known: dict[Path, ast.Module]) -> set[Path]:
    """Return the files of the packages that a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if node.level else ROOT
            module = base.joinpath(*(node.module or "").split("."))
            for name in node.names:
                places = (module / f"{name.name}.py", module / name.name / "__init__.py", module.with_suffix(".py"))
                found |= set([place for place in (*places, module / "__init__.py") if place in known][:1])
    return found - {path}


def arguments(node: ast.ClassDef) -> int:
    """Return the number of arguments that the constructor of a class takes."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return len(part.args.posonlyargs + part.args.args + part.args.kwonlyargs) - 1
    if not any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return 0
    fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    return sum("ClassVar" not in field and "init=False" not in field for field in fields)


def budgets() -> dict[str, int]:
    """Return `[tool.house]` of `pyproject.toml`."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["house"]


if __name__ == "__main__":
    found, allowed = measured(), budgets()
    for name in sorted(found):
        print(f"{name:34} {found[name]:6} of {allowed.get(name, 0):6}")
