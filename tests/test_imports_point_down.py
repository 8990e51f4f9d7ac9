"""What import-linter cannot say (its contracts are in pyproject.toml): which imports stand at the top of a file."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import yobx_flatten

ROOT = Path(__file__).parent.parent

PACKAGES = ("yobx_flatten", "roundpipe_runtime")

# Frameworks that not every user has: imported inside the function that needs them, or by the module named here.
OPTIONAL = {
    "datasets", "diffusers", "equinox", "flax", "jax", "onnx", "onnxruntime", "onnxscript", "optree", "peft",
    "safetensors", "transformers", "trl",
}  # fmt: skip
MAY_IMPORT_AT_THE_TOP: dict[str, set[str]] = {
    # "yobx_flatten.registry.tables": {"jax"},
    "yobx_flatten.generate.model_of_files": {"transformers"},
    "yobx_flatten.generate.stand_ins": {"transformers"},
    "roundpipe_runtime.fine_tune.trainer": {"transformers"},
    "roundpipe_runtime.huggingface.trainer.pipeline_trainer": {"transformers"},
    "roundpipe_runtime.huggingface.trainer.classes": {"transformers"},
}


class Import(NamedTuple):
    importer: str
    target: str
    line: int
    at_the_top: bool


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(importer: str) -> list[Import]:
    tree = ast.parse(modules()[importer].read_text(encoding="utf-8"))
    return list(_imports(importer, tree, at_the_top=True))


def _imports(importer: str, node: ast.AST, at_the_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, alias.name, child.lineno, at_the_top)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parts = importer.split(".")
                climb = child.level - (modules()[importer].name == "__init__.py")
                base = ".".join([*parts[: len(parts) - climb], *([child.module] if child.module else [])])
            for alias in child.names:
                # `from .backends import torch_fx` names a module, `from .errors import X` something inside one.
                inner = f"{base}.{alias.name}"
                yield Import(importer, inner if inner in modules() else base, child.lineno, at_the_top)
        else:
            for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or for_types
            yield from _imports(importer, child, at_the_top and not inside)


def where(found: Import) -> str:
    return f"{modules()[found.importer].relative_to(ROOT)}:{found.line}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_packages_depend_in_one_direction_and_optional_frameworks_are_not_imported_at_the_top(module):
    """`yobx_flatten` knows nothing of the runtime, which uses its public names; loading a file asks for torch alone."""
    allowed = MAY_IMPORT_AT_THE_TOP.get(module, set())
    at_the_top = [found for found in imports_of(module) if found.at_the_top]
    late = [where(found) for found in at_the_top if found.target.partition(".")[0] in OPTIONAL - allowed]
    assert late == [], "move it into the function that needs it"
    package = module.partition(".")[0]
    is_command_line = module.startswith(("roundpipe_runtime.cli.", "roundpipe_runtime.__main__"))
    shared = (
        ("yobx_flatten.core.terminal", "yobx_flatten.cli.", "yobx_flatten.model_folder.") if is_command_line else ()
    )
    inner = (
        ".errors.failures",
        *(f".core.{name}" for name in ("compare", "effects", "interrupts")),
        *(".huggingface.cache_names", ".core.lazy_names", ".core.private_names.of_torch", ".registry.recipe.aliases"),
        *(f".model_folder.source.{name}" for name in ("configuration", "packed_weights")),
        # one way to read one weight
        *(f".model_folder.source.{name}" for name in ("find", "gguf_file", "open")),
        # one way to a disk, and one to run what a file chooses
        *(f".core.files.{name}" for name in ("document", "limited", "scratch", "tensors")),
        ".registry.patches",  # one way to replace an attribute for a while
    )
    public = {f"yobx_flatten{inside}" for inside in ("", *inner)}
    public |= {f"yobx_flatten.{folder}" for folder in yobx_flatten._HOMES}
    foreign = [found for found in imports_of(module) if found.target.partition(".")[0] in set(PACKAGES) - {package}]
    wrong = [
        f"{where(found)} imports {found.target}"
        for found in foreign
        if package == "yobx_flatten" or (found.target not in public and not found.target.startswith(shared))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reader_sees_every_way_to_write_an_import(monkeypatch, tmp_path):
    source = tmp_path / "known.py"
    source.write_text(
        "import transformers.cache_utils\n"
        "from ..errors import RoundTripError\n"
        "from .. import trees\n"
        "from . import layers\n"
        "from yobx_flatten.registry import REGISTRY\n"
        "if True:\n"
        "    import onnx\n"
        "def late():\n"
        "    import jax\n",
        encoding="utf-8",
    )
    files = dict.fromkeys(["yobx_flatten.trees", "yobx_flatten.huggingface.layers"], ROOT)
    files["yobx_flatten.huggingface.known"] = source
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: files)
    assert [found[1:] for found in imports_of("yobx_flatten.huggingface.known")] == [
        ("transformers.cache_utils", 1, True),
        ("yobx_flatten.errors", 2, True),
        ("yobx_flatten.trees", 3, True),
        ("yobx_flatten.huggingface.layers", 4, True),
        ("yobx_flatten.registry", 5, True),
        ("onnx", 7, True),
        ("jax", 9, False),
    ]
