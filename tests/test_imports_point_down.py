"""Inside a package imports point down. This file holds the picture, and reads the source to keep it true."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# Lowest row first. A module imports from the rows below its own only, at the top of the file or inside a function.
# `package.*` stands for the modules of a subpackage that have no row of their own.
# The `__init__` of a package lists its contents and may import all of it: it has no row.
LAYERS: dict[str, list[list[str]]] = {
    "yobx_flatten": [
        ["errors", "locking", "uninterrupted"],
        [
            "recipe",
            "static_codec",
            "patches",
            "hashable",
            "keys",
            "log",
            "onnx_operators",
            "undisturbed",
            "swallowed",
            "weights",
            "sizes_in_specs",
            "ignored_inputs",
            "compiled_packages",
            "writable",
        ],
        ["codegen", "onnx_axes", "onnx_graph", "padding", "adapted_shapes"],
        ["mappings"],
        ["fields", "roundtrip", "backends.contract", "backends.waiting", "backends.optree_table", "onnx_file"],
        ["backends.*"],
        ["registry"],
        ["export_hook", "describe", "huggingface.state"],
        ["huggingface.layers"],
        ["huggingface.layer_code"],
        ["huggingface.quick"],
        [
            "huggingface.contiguous",
            "huggingface.layouts",
            "huggingface.loaded",
            "huggingface.model_patches",
            "huggingface.tracing_experts",
            "huggingface.tracing_layers",
            "huggingface.tracing_masks",
            "huggingface.tracing_positions",
            "huggingface.tracing_recurrences",
            "huggingface.tracing_sparse",
        ],
        ["huggingface.tracing_models"],
        ["huggingface.*"],
        ["huggingface.other_caches", "huggingface.sliding_decoder"],
        ["huggingface.known"],
        ["scopes", "decorators", "mirror", "tree", "listing"],
        ["diagnose.contents", "diagnose.conformance"],
        ["diagnose.remedies", "diagnose.inside"],
        ["diagnose.opaque", "diagnose.spec_diff"],
        ["diagnose.drawing", "diagnose.varying", "diagnose.other_messages", "leaf", "compare"],
        ["shapes", "naming"],
        ["storage.elements", "storage.trusted", "storage.matching"],
        ["storage.plain"],
        ["storage.values"],
        ["storage.structure", "storage.run", "storage.ort_values"],
        ["storage.onnx_write"],
        ["storage.onnx_read"],
        ["storage.nested"],
        ["storage.builder", "storage.cases"],
        ["storage.replay"],
        ["replay"],
        ["report", "onnx_replay"],
        ["arguments"],
        ["diagnose.inputs", "diagnose.export_errors"],
        ["record.snapshot", "record.callee", "record.interception"],
        ["record.call", "record.files"],
        ["record.phases", "record.axes"],
        ["record.example", "record.replays"],
        ["record.table"],
        ["record.calls"],
        ["record.recorder"],
        ["testing"],
        ["export"],
        ["onnx_export"],
        ["generate.score_rules"],
        ["generate.slots", "generate.sampling", "generate.settings", "generate.layout"],
        ["generate.generator", "generate.onnx_runner", "generate.program_runner"],
        ["generate.onnx_generator", "generate.program_generator"],
        ["model_folder.classes", "model_folder.manifest", "model_folder.companions"],
        ["model_folder.small"],
        ["model_folder.source"],
        ["model_folder.pieces"],
        ["model_folder.plain_pieces"],
        ["model_folder.tasks", "model_folder.proofs", "model_folder.verify"],
        ["model_folder.write"],
        ["demo"],
        ["cli.output", "cli.failures"],
        ["cli.targets", "cli.running"],
        ["cli.*"],
        ["cli.app"],
        ["cli.reference"],
        ["__main__"],
    ],
    "roundpipe_runtime": [
        ["errors", "forking"],
        ["packed", "chunks", "loss", "schedule", "costs", "worker", "readiness", "timeline", "recompute", "events"],
        ["arguments", "uninterrupted", "block_masks"],
        ["entries"],
        ["planning.footprint", "planning.meta_kernels", "timeline_file", "timeline_totals", "timeline_drawing"],
        ["batch_axes", "part_rows", "join", "simulate", "accelerator", "timeline_picture"],
        ["device"],
        ["microbatch", "partition", "transfer", "parameters", "pinning", "planning.hardware"],
        ["plan", "resident", "optimizer", "piece", "checkpointed"],
        ["config", "run", "scaler", "optim"],
        ["layer_call", "loss_call"],
        ["stage", "classic", "planning.layer_footprint"],
        ["planning.memory_estimate"],
        ["engine"],
        ["pipeline", "planning.report"],
        [
            "huggingface.errors",
            "huggingface.placeholder",
            "huggingface.capture_old",
            "huggingface.configuration",
            "huggingface.adapters",
            "huggingface.chunked_loss",
            "huggingface.trainer_arguments",
        ],
        [
            "huggingface.capture",
        ],
        [
            "huggingface.book",
            "huggingface.auxiliary",
            "huggingface.losses",
            "huggingface.batches",
            "huggingface.caches",
            "huggingface.late_logits",
        ],
        [
            "huggingface.layers",
            "huggingface.smoothing",
            "huggingface.stub",
            "huggingface.report",
            "huggingface.example",
            "huggingface.digest",
        ],
        ["huggingface.program", "huggingface.gradients"],
        ["huggingface.check"],
        ["huggingface.session"],
        ["huggingface.pieces"],
        ["huggingface.discover"],
        ["huggingface.cut"],
        ["huggingface.joined", "huggingface.generation", "huggingface.passed", "huggingface.plan_training"],
        ["huggingface.encoders"],
        ["huggingface.wrap"],
        ["checkpoint.errors", "checkpoint.rng", "checkpoint.tensor_files", "checkpoint.config_files"],
        ["checkpoint.codec", "checkpoint.manifest", "checkpoint.optimizer_state"],
        ["checkpoint.model_state", "checkpoint.folder"],
        ["checkpoint.snapshot"],
        ["checkpoint.save", "huggingface.trainer_checkpoints"],
        ["checkpoint.load", "huggingface.trainer"],
        ["fine_tune.errors"],
        [
            "fine_tune.adapters",
            "fine_tune.byte_tokenizer",
            "fine_tune.interruption",
            "fine_tune.memory",
            "fine_tune.models",
            "fine_tune.order",
            "fine_tune.records",
            "fine_tune.settings",
            "fine_tune.text_files",
        ],
        ["fine_tune.tokenizer"],
        ["fine_tune.blocks", "fine_tune.saved_model"],
        ["fine_tune.training"],
        ["fine_tune.run"],
        ["demo_memory"],
        ["demo", "doctor"],
        ["cli.models", "cli.train_display", "cli.train_options", "cli.quantities"],
        ["cli.plan_output"],
        ["cli.*"],
        ["cli.app"],
        ["__main__"],
    ],
}

# Frameworks that not every user has: imported inside the function that needs them, or by the module named here.
OPTIONAL = {
    "datasets",
    "diffusers",
    "equinox",
    "flax",
    "jax",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "optree",
    "peft",
    "safetensors",
    "transformers",
}
MAY_IMPORT_AT_THE_TOP: dict[str, set[str]] = {
    # "yobx_flatten.backends.jax": {"jax"},
    "roundpipe_runtime.huggingface.trainer": {"transformers"},
    "roundpipe_runtime.huggingface.trainer_checkpoints": {"transformers"},
}


class Import(NamedTuple):
    """One imported name: who imports it, where, and whether that happens when the file is loaded."""

    importer: str
    target: str
    line: int
    at_the_top: bool


@cache
def modules() -> dict[str, Path]:
    """The modules of both packages, by dotted name; a package is named like its directory."""
    found = {}
    for package in LAYERS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_package(module: str) -> bool:
    return modules()[module].name == "__init__.py"


def imports_of(importer: str) -> list[Import]:
    tree = ast.parse(modules()[importer].read_text(encoding="utf-8"))
    return list(_imports(importer, tree, at_the_top=True))


def _imports(importer: str, node: ast.AST, at_the_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, alias.name, child.lineno, at_the_top)
        elif isinstance(child, ast.ImportFrom):
            base = _base(importer, child)
            for alias in child.names:
                # `from .backends import torch_fx` names a module, `from .errors import X` something inside one.
                inner = f"{base}.{alias.name}"
                yield Import(importer, inner if inner in modules() else base, child.lineno, at_the_top)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(importer, child, at_the_top and not inside)


def _base(importer: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = importer.split(".")
    climb = node.level - 1 if is_package(importer) else node.level
    return ".".join([*parts[: len(parts) - climb], *([node.module] if node.module else [])])


def row_of(module: str) -> int | None:
    """The number of the module's row, from below; ``None`` where the table does not know it."""
    package, _, name = module.partition(".")
    family = f"{name.rpartition('.')[0]}.*"
    for pattern in (name, family):
        for number, row in enumerate(LAYERS[package]):
            if pattern in row:
                return number
    return None


WITH_A_ROW = [module for module in modules() if not is_package(module)]


def where(found: Import) -> str:
    return f"{modules()[found.importer].relative_to(ROOT)}:{found.line}"


@pytest.mark.parametrize("module", WITH_A_ROW)
def test_every_module_has_a_row(module):
    """A new file has its place in the picture before anybody imports it."""
    package, _, name = module.partition(".")
    assert row_of(module) is not None, (
        f"{module} has no place in the picture. Add it to a row of LAYERS[{package!r}] in {Path(__file__).name},\n"
        f"above every module that it imports, e.g. as a row of its own:\n"
        f'        ["{name}"],\n'
        f"and to docs/dev/architecture.md."
    )


@pytest.mark.parametrize("module", WITH_A_ROW)
def test_imports_point_down(module):
    """A module imports only from the rows below its own."""
    row = row_of(module)
    if row is None:
        pytest.skip("reported by test_every_module_has_a_row")
    package = module.partition(".")[0]
    inner = [found for found in imports_of(module) if found.target.partition(".")[0] == package]
    wrong = [
        f"{where(found)} imports {found.target}, which is not below {module}"
        for found in dict.fromkeys(inner)
        if (target_row := row_of(found.target)) is not None and target_row >= row
    ]
    # The package itself is the table of contents, above everything.
    wrong += [f"{where(found)} imports {package} itself" for found in inner if found.target == package]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", sorted(modules()))
def test_optional_frameworks_are_not_imported_at_the_top(module):
    """Loading a file asks for torch and nothing else that a user may not have."""
    allowed = MAY_IMPORT_AT_THE_TOP.get(module, set())
    wrong = [
        f"{where(found)} imports {found.target}: move it into the function that needs it"
        for found in imports_of(module)
        if found.at_the_top and found.target.partition(".")[0] in OPTIONAL - allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", sorted(modules()))
def test_packages_depend_in_one_direction(module):
    """`yobx_flatten` knows nothing of the runtime; the runtime uses the public names of `yobx_flatten` only.

    Its command line is made of the same pieces as the other one.
    """
    package = module.partition(".")[0]
    is_command_line = module.startswith(("roundpipe_runtime.cli.", "roundpipe_runtime.__main__"))
    shared = ("yobx_flatten.cli.", "yobx_flatten.model_folder.") if is_command_line else ()
    foreign = [found for found in imports_of(module) if found.target.partition(".")[0] in LAYERS.keys() - {package}]
    wrong = [
        f"{where(found)} imports {found.target}"
        for found in foreign
        if package == "yobx_flatten" or (found.target != "yobx_flatten" and not found.target.startswith(shared))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_picture_names_no_module_twice():
    """A module stands in one row."""
    for rows in LAYERS.values():
        names = [name for row in rows for name in row]
        assert sorted(names) == sorted(set(names))


def test_the_reader_sees_every_way_to_write_an_import(monkeypatch, tmp_path):
    """Absolute, relative, climbing, of a submodule, and inside a function: each is resolved."""
    source = tmp_path / "known.py"
    source.write_text(
        "import transformers.cache_utils\n"
        "from ..errors import RoundTripError\n"
        "from .. import recipe\n"
        "from . import layers\n"
        "from yobx_flatten.registry import REGISTRY\n"
        "if True:\n"
        "    import onnx\n"
        "def late():\n"
        "    import jax\n",
        encoding="utf-8",
    )
    files = dict.fromkeys(["yobx_flatten.recipe", "yobx_flatten.huggingface.layers"], ROOT)
    files["yobx_flatten.huggingface.known"] = source
    monkeypatch.setattr(sys.modules[__name__], "modules", lambda: files)
    assert [found[1:] for found in imports_of("yobx_flatten.huggingface.known")] == [
        ("transformers.cache_utils", 1, True),
        ("yobx_flatten.errors", 2, True),
        ("yobx_flatten.recipe", 3, True),
        ("yobx_flatten.huggingface.layers", 4, True),
        ("yobx_flatten.registry", 5, True),
        ("onnx", 7, True),
        ("jax", 9, False),
    ]
