"""Importing a package costs what it must: no optional framework, no thread, no accelerator."""

import json
import subprocess
import sys

import pytest

OPTIONAL = ["diffusers", "flax", "jax", "onnx", "onnxruntime", "onnxscript", "optree", "rich", "transformers"]

# Prints what the import did, as one JSON object.
PROGRAM = f"""
import json, sys, threading
import torch
threads = threading.active_count()
import {{package}}
print(json.dumps({{{{
    "optional": [name for name in {OPTIONAL} if name in sys.modules],
    "threads": threading.active_count() - threads,
    "cxx_pytree": "torch.utils._cxx_pytree" in sys.modules,
    "accelerator": torch.cuda.is_initialized(),
}}}}))
"""


@pytest.mark.parametrize("package", ["yobx_flatten", "roundpipe_runtime"])
def test_an_import_brings_nothing_but_the_package_and_torch(package):
    """In a fresh process the import loads no optional framework, starts no thread and touches no accelerator."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(package=package)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "optional": [],
        "threads": 0,
        "cxx_pytree": False,
        "accelerator": False,
    }
