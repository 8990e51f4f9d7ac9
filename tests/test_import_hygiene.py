"""Importing a package costs what it must: no optional framework, no thread, no accelerator."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh_process
from yobx_flatten.errors import install_line

OURS = ("yobx_flatten", "roundpipe_runtime")
OPTIONAL = ["diffusers", "flax", "jax", "onnx", "onnxruntime", "onnxscript", "optree", "rich", "transformers"]

PACKAGES = pytest.mark.parametrize("package", ["yobx_flatten", "roundpipe_runtime"])


def interpreted(program, *options, arguments=()):
    """An interpreter that has imported nothing."""
    return subprocess.run([sys.executable, *options, "-c", program, *arguments], capture_output=True, text=True)


# Prints what the import did, as one JSON object.
PROGRAM = f"""
import json, sys, threading
import torch
threads = threading.active_count()
from {{package}} import *
print(json.dumps({{{{
    "optional": [name for name in {OPTIONAL} if name in sys.modules],
    "threads": threading.active_count() - threads,
    "cxx_pytree": "torch.utils._cxx_pytree" in sys.modules,
    "accelerator": torch.cuda.is_initialized(),
}}}}))
"""


@PACKAGES
def test_an_import_brings_nothing_but_the_package_and_torch(package):
    done = interpreted(PROGRAM.format(package=package), "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"optional": [], "threads": 0, "cxx_pytree": False, "accelerator": False}


@PACKAGES
def test_names_are_imported_when_they_are_asked_for(package):
    """Without the library that checks files, which a machine without a network may lack, all are there."""
    program = f"""
import sys
sys.modules["msgspec"] = None
import {package} as package
print("torch" in sys.modules, hasattr(package, "__wrapped__"), "torch" in sys.modules)
print([name for name in package.__all__ if not hasattr(package, name)], set(package.__all__) - set(dir(package)))
print(package.errors.__name__, hasattr(package, "nothing_of_that_name"))
"""
    done = interpreted(program)
    assert done.stdout.splitlines() == ["False False False", "[] set()", f"{package}.errors False"]


def test_what_is_imported_from_the_packages_exists():
    """Also inside functions of programs that no test runs."""
    missing, root = [], Path(__file__).parent.parent
    for folder in ("yobx_flatten", "roundpipe_runtime", "matrix", "benchmarks", "examples", "docs", "tests"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in OURS or node.level:
                    continue
                module = importlib.import_module(node.module)
                names = [name.name for name in node.names if name.name != "*" and not hasattr(module, name.name)]
                lost = [name for name in names if importlib.util.find_spec(f"{node.module}.{name}") is None]
                missing += [f"{path.relative_to(root)}:{node.lineno} {node.module} has no {name}" for name in lost]
    assert missing == []


# The two lines of an installed command, with Ctrl-C when a certain module begins to be imported.
INTERRUPTED = """
import signal, sys
sys.modules.pop(sys.argv[1], None)  # a measurement of coverage has imported `typing` when the process starts
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)  # in this thread; the handler has run when the call returns
            except KeyboardInterrupt:  # as libraries do that try an import
                pass
sys.meta_path.insert(0, Interrupt())
from {package}.__main__ import main
sys.exit(main(["env"] if "{package}" == "yobx_flatten" else ["doctor"]))
"""


@PACKAGES
@pytest.mark.parametrize(
    "module", ["typing", "yobx_flatten.core.terminal.command_line", "typer", "torch", "torch.nn.functional"]
)
def test_ctrl_c_during_imports_is_one_line(package, module):
    done = interpreted(INTERRUPTED.format(package=package), arguments=[module])
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith(": interrupted, nothing was written\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("block", ["no_grad", "inference_mode", "enable_grad"])
def test_names_may_be_asked_for_where_no_gradients_are_computed(block):
    """An import can come late, in the middle of a user's own block."""
    program = f"""
import torch, roundpipe_runtime, yobx_flatten
with torch.{block}():
    for package in (roundpipe_runtime, yobx_flatten):
        for name in package.__all__:
            getattr(package, name)
    from roundpipe_runtime.engine.layer_graph import _LOOSE
print(_LOOSE)
"""
    done = interpreted(program)
    assert done.returncode == 0, done.stderr
    from roundpipe_runtime.engine.layer_graph import _LOOSE

    assert int(done.stdout) == _LOOSE  # as it is where gradients are computed


# An installation without some libraries: nobody finds them, whoever looks.
WITHOUT = """
import importlib.machinery, sys
class Without:
    find_distributions = importlib.machinery.PathFinder.find_distributions
    invalidate_caches = importlib.machinery.PathFinder.invalidate_caches
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            {found}
        return importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
import roundpipe_runtime, yobx_flatten
for name in ("RoundPipeTrainer", "RoundPipeSeq2SeqTrainer"):
    try:
        getattr(roundpipe_runtime, name)
    except yobx_flatten.MissingDependencyError as error:
        print(error)
"""


@pytest.mark.parametrize("found", ["return None", "raise ModuleNotFoundError(name)"])
@pytest.mark.parametrize(
    ("missing", "named"),
    [(["transformers"], "transformers"), (["transformers", "accelerate"], "transformers and accelerate")],
)
def test_a_trainer_says_what_it_needs(missing, named, found):
    program = WITHOUT.format(missing=missing, found=found)
    are = "is" if len(missing) == 1 else "are"
    assert fresh_process.run("-c", program).stdout.splitlines() == [
        line
        for name in ("RoundPipeTrainer", "RoundPipeSeq2SeqTrainer")
        for line in (f"{name} needs {named}, which {are} not installed:", f"    {install_line('transformers,train')}")
    ]
