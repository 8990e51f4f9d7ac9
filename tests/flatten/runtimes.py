"""Which runtimes are there."""

import os
import shutil

import pytest


def needs_runtime(name):
    """Skip what asks for a runtime, or for the compiler of one, that is not installed."""
    if name in ("openvino", "executorch"):
        pytest.importorskip(name)
    if name == "aotinductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("AOTInductor needs a C++ compiler")
