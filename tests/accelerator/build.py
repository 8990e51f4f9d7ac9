"""The compiled backend: built once for each source and version of torch, by whoever asks first."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

_SOURCES = Path(__file__).parent / "backend"
_BUILT = Path(__file__).parents[2] / "build" / "accelerator"
_COMPILER = os.environ.get("CXX", "c++")
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=late_backend"]


def reason_not_to_build() -> str | None:
    if sys.platform != "linux":
        return "the reference accelerator is for Linux"
    if torch.__version__.split("+")[0].split(".")[:2] != ["2", "13"]:
        return f"the reference accelerator is written for torch 2.13, found {torch.__version__}"
    if _library().exists():
        return None
    if not shutil.which(_COMPILER):
        return f"the reference accelerator needs a C++ compiler, and there is no {_COMPILER}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the reference accelerator needs the headers of Python (python3-dev)"
    return None


def load() -> ModuleType:
    """Return the module of the backend; it is compiled first where that was not done before."""
    library = _library()
    if not library.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        with (_BUILT / "lock").open("w") as lock:  # one process compiles, the others wait for it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location("late_backend", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _library() -> Path:
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {_COMPILER} {_FLAGS}".encode())
    for file in sorted(_SOURCES.iterdir()):
        key.update(file.read_bytes())
    return _BUILT / f"late_backend-{key.hexdigest()[:16]}.so"


def _compile(library: Path) -> None:
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    folders = cpp_extension.library_paths()
    half_done = library.with_suffix(f".{os.getpid()}")
    command = [
        *(_COMPILER, *_FLAGS),
        *(part for folder in includes for part in ("-isystem", folder)),
        *(str(_SOURCES / "backend.cpp"), "-o", str(half_done)),
        *(f"-L{folder}" for folder in folders),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    sys.stderr.write("compiling the reference accelerator, about half a minute\n")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The reference accelerator does not compile:\n{done.stderr[:20000]}")
    for old in _BUILT.glob("late_backend-*.so"):
        old.unlink()
    half_done.rename(library)
