"""Private names and the words for a model's cache stand in one file per library, and are there."""

import ast
import pathlib
import re

import pytest

import roundpipe_runtime
import yobx_flatten
from yobx_flatten.core.private_names import Private, lookup_in, of_torch, of_transformers

LIBRARIES = {"torch", "onnxscript", "transformers"}
# torch documents these under their names
PUBLIC = {"torch._check", "torch._assert"}


def is_private(path):
    parts = path.split(".")
    private = [part for part in parts[1:] if part.startswith("_") and not part.startswith("__")]
    return parts[0] in LIBRARIES and bool(private) and parts[1] != "ops" and path not in PUBLIC


def private_uses(source):
    tree, modules, found = ast.parse(source), {"pytree": "torch.utils._pytree"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                modules[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
                found.append((node.lineno, name.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
                found.append((node.lineno, f"{node.module}.{name.name}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            parts, below = [], node
            while isinstance(below, ast.Attribute):
                parts.append(below.attr)
                below = below.value
            if isinstance(below, ast.Name) and below.id in modules:
                found.append((node.lineno, ".".join([modules[below.id], *reversed(parts)])))
    return [(line, path) for line, path in found if is_private(path)]


def test_the_rules_see_imports_attributes_and_words():
    source = (
        "import torch\nimport torch._dynamo.config as c\nfrom torch.export._trace import _export\n"
        "torch._C._functorch\npytree._get_node_type\ntorch._check(True)\ntorch.ops.aten._assert_scalar\n"
    )
    assert sorted({line for line, _ in private_uses(source)}) == [2, 3, 4, 5]
    source = 'f"{name}.past_key_values"\npast_key_values=cache\n"past_key_values.0.key"\ncache_params.layers\n'
    assert [line for line, _ in lines_with_a_word(source)] == [1, 2, 4]


@pytest.mark.parametrize("module", [of_torch, of_transformers], ids=lambda module: module.__name__)
def test_every_name_is_in_the_installed_release(module):
    if module is of_transformers:
        pytest.importorskip("transformers.exporters", reason="transformers before 5.17 has no exporters")
    missing = []
    for name in module._NAMES:
        try:
            getattr(module, name)
        except ImportError as error:
            missing.append(str(error))
    assert not missing


def test_a_name_that_is_gone_states_what_to_use():
    find = lookup_in("torch", {"tracer": Private("torch.fx", "_no_such_tracer", "torch.fx.Tracer")})
    with pytest.raises(ImportError, match=r"torch 2\.\S+ has no torch\.fx\._no_such_tracer(.|\n)*torch\.fx\.Tracer"):
        find("tracer")
    with pytest.raises(AttributeError):
        find("another")


# past_key_values.0.key, past_key_values.length and past_key_values.* are inputs of files
WORD = re.compile(r"(?:past_key_values|cache_params)(?!\.(?:\d|length\b|\*|N\b))")


def lines_with_a_word(source):
    return [(number, line.strip()) for number, line in enumerate(source.splitlines(), 1) if WORD.search(line)]


@pytest.mark.parametrize(
    ("rule", "home"),
    [(private_uses, "/private_names/"), (lines_with_a_word, "yobx_flatten/huggingface/cache_names.py")],
    ids=["private names", "words for a cache"],
)
@pytest.mark.parametrize("package", [yobx_flatten, roundpipe_runtime], ids=lambda package: package.__name__)
def test_they_stand_in_one_place(package, rule, home):
    """A file per library, and a module: a release that renames the cache again changes that module, and no other."""
    root = pathlib.Path(package.__file__).parent
    paths = {path.relative_to(root.parent).as_posix(): path for path in sorted(root.rglob("*.py"))}
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if home not in name}
    assert [f"{name}:{line} {found}" for name, text in sources.items() for line, found in rule(text)] == []
