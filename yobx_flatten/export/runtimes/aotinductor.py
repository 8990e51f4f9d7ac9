"""Compile a program to an AOTInductor package: machine code for this machine."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Sequence

import torch
from torch.export import ExportedProgram

from ...errors import MissingDependencyError
from ...private_names.of_torch import aot_compile
from ...runners.aotinductor_runner import IN_PLACE
from ...runners.ports import present_of
from ...runners.signature import KEY, Signature
from ..program.flat_program import flat_program, quietly, signature_of
from ..program.traced import Traced
from .aotinductor_cache import with_buffers
from .aotinductor_products import transposed_weights
from .aotinductor_scans import lift_sizes
from .aotinductor_sizes import refused_when_empty
from .aotinductor_tails import whole_tails


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
    program = flat_program(traced.program)
    _compiled(program, _signature(traced, program), path)


def write_package_in_place(traced: Traced, path: pathlib.Path) -> list[str]:
    """Compile a program whose cache is written in place; return the inputs of it. The block must be open."""
    program = flat_program(traced.program)
    signature = _signature(traced, program)
    pairs = {name: present_of(name) for name in traced.input_names}
    presents = {name: present for name, present in pairs.items() if present in traced.output_names}
    made, kept = with_buffers(program, traced.input_names, traced.output_names, presents)
    _compiled(made, signature, path, kept)
    return kept


def _signature(traced: Traced, program: ExportedProgram) -> Signature:
    signature = signature_of(traced)
    # compiled code does not look at sizes: what an operator of torch refuses is refused before the call
    smallest = {**dict.fromkeys(refused_when_empty(program, signature), 1), **signature.smallest}
    return dataclasses.replace(signature, smallest=smallest)


def _compiled(program: ExportedProgram, signature: Signature, path: pathlib.Path, kept: Sequence[str] = ()) -> None:
    program = transposed_weights(program)
    lift_sizes(program.graph_module)
    try:
        _compile(program, signature, path, kept)
    except ValueError as error:
        if "Cannot view a tensor" not in str(error):
            raise
        # torch 2.13 gives a `cat` of transposed tensors other strides than eager does (GPT-NeoX Japanese)
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        program.graph_module.recompile()
        _compile(program, signature, path, kept)


def _compile(program: ExportedProgram, signature: Signature, path: pathlib.Path, kept: Sequence[str]) -> None:
    written = {IN_PLACE: ",".join(kept)} if kept else {}
    with quietly("torch._inductor"), whole_tails():
        aot_compile(
            program,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": {KEY: signature.to_json(), **written}},
        )
