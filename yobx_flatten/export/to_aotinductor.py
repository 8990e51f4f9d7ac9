"""A program as a package of AOTInductor: machine code of this machine, compiled with its C++ compiler."""

from __future__ import annotations

import os
import pathlib
import shutil

import torch

from ..errors import MissingDependencyError
from ..runners.signature import KEY
from .flat_program import flat_program, quietly, signature_of
from .scan_sizes import lift_sizes
from .traced import Traced

__all__ = ["check_compiler", "write_package"]


def check_compiler(caller: str) -> None:
    """Check that there is a C++ compiler.

    Args:
        caller: the function that the user called.

    Raises:
        MissingDependencyError: when there is none, with what to install.
    """
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")):
        raise MissingDependencyError(
            f"{caller} compiles C++, and there is no g++, clang++ or cl here. Install one, or name it:\n"
            "    apt install g++\n    export CXX=/path/to/g++"
        )


def write_package(traced: Traced, path: pathlib.Path) -> None:
    """Compile a program. The block must be open.

    Args:
        traced: the program.
        path: the file to write, with the suffix ``.pt2``.
    """
    signature, program = signature_of(traced), flat_program(traced.program)
    lift_sizes(program.graph_module)
    with quietly("torch._inductor"):
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {KEY: signature.to_json()}},
        )
