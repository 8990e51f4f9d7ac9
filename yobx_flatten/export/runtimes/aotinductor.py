"""Compile a program to an AOTInductor package: machine code for this machine."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil

import torch
from torch.export import ExportedProgram

from ...errors import MissingDependencyError
from ...private_names.of_torch import aot_compile
from ...runners.signature import KEY, Signature
from ..program.flat_program import flat_program, quietly, signature_of
from ..program.traced import Traced
from .aotinductor_scans import lift_sizes
from .aotinductor_sizes import refused_when_empty
from .aotinductor_tails import whole_tails

__all__ = ["check_compiler", "write_package"]


def check_compiler(caller: str) -> None:
    """Check that there is a C++ compiler."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")):
        raise MissingDependencyError(
            f"{caller} compiles C++, and there is no g++, clang++ or cl here. Install one, or name it:\n"
            "    apt install g++\n    export CXX=/path/to/g++"
        )


def write_package(traced: Traced, path: pathlib.Path) -> None:
    """Compile a program. The block must be open."""
    # path: the file to write, with the suffix `.pt2`
    signature, program = signature_of(traced), flat_program(traced.program)
    # compiled code does not look at sizes: what an operator of torch refuses is refused before the call
    smallest = {**dict.fromkeys(refused_when_empty(program, signature), 1), **signature.smallest}
    signature = dataclasses.replace(signature, smallest=smallest)
    lift_sizes(program.graph_module)
    try:
        _compile(program, signature, path)
    except ValueError as error:
        if "Cannot view a tensor" not in str(error):
            raise
        # torch 2.13 gives a `cat` of transposed tensors other strides than eager does (GPT-NeoX Japanese)
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        program.graph_module.recompile()
        _compile(program, signature, path)


def _compile(program: ExportedProgram, signature: Signature, path: pathlib.Path) -> None:
    with quietly("torch._inductor"), whole_tails():
        aot_compile(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {KEY: signature.to_json()}},
        )
