"""Run a program of ``torch.export`` on tensors that are passed by input name."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from ..core.private_names.of_torch import pytree
from ..declare.scopes import options_in_use, register_flattening_functions
from ..errors import FlattenError, GenerationError, NotRegisteredError, ReplayError, UntrustedFileError, is_installed
from ..errors.failures import first_line, raised_as
from ..trace.program import arguments_of, traced_inputs
from ..trees.walk import leaf_names, output_names
from .ports import CacheSlot, Port, cache_slots, split_cache


def open_program(
    path: str | os.PathLike[str], *, trust: bool = False, failure: type[FlattenError] = GenerationError
) -> ExportedProgram:
    # trust: whether the caller knows who wrote the file: torch's reader runs pickles and texts of the file as code
    # failure: class of the error if the file is missing or damaged
    file = os.fspath(path)
    if not os.path.isfile(file):
        raise failure(f"There is no file {file}.")
    if not trust:
        raise UntrustedFileError(
            f"{file} is a program of torch.export, and torch.export.load runs code that is stored in it. If "
            "you know who wrote it, pass trust=True (--trust). Reading ONNX files runs no code in them."
        )
    if is_installed("transformers"):
        import transformers  # noqa: F401 # the with block registers the caches of imported libraries

    # torch passes on all errors of its reader of archives
    failed = raised_as(lambda e: failure(f"torch.export cannot load {file}: {first_line(e)}"), NotRegisteredError)
    with failed, register_flattening_functions(**options_in_use()):
        return torch.export.load(file)


class ProgramRunner:
    # options: the options of `register_flattening_functions`; by default for all imported libraries

    runtime: ClassVar[str] = "torch.export"

    def __init__(
        self, program: ExportedProgram, name: str = "the program", *, options: Mapping[str, bool] | None = None
    ) -> None:
        self.name = name
        self._spec = program.call_spec.in_spec  # the property makes a new one at each call
        self._program, self._options = program, options_in_use() if options is None else options
        with self._block():
            self.module: torch.nn.Module = program.module()

    def _block(self) -> contextlib.AbstractContextManager[Any]:
        return register_flattening_functions(**self._options)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._block():
            return self.module(*args, **kwargs)

    @functools.cached_property
    def _leaves(self) -> list[str]:
        with self._block():
            args, kwargs = pytree.tree_unflatten(list(range(self._spec.num_leaves)), self._spec)
            # the parameters of `forward`; torch names the first argument of `*rest` rest_0
            names = self._program.module_call_graph[0].signature.forward_arg_names or ()
            if len(args) > len(names):
                raise GenerationError(
                    f"{self.name} has positional arguments without names, but inputs are passed by name. Use kwargs:\n"
                    "    torch.export.export(module, (), kwargs)"
                )
            return leaf_names({**dict(zip(names, args, strict=False)), **kwargs})

    @functools.cached_property
    def _interface(self) -> tuple[dict[str, Port], dict[str, Any]]:
        # the inputs that are tensors or counters, and the values of the constant inputs
        ports, constants = {}, {}
        inputs = arguments_of(self._program), traced_inputs(self._program)
        for name, argument, value in zip(self._leaves, *inputs, strict=True):
            if isinstance(argument, ConstantArgument):
                constants[name] = argument.value
            elif isinstance(value, torch.Tensor):
                shape = tuple(size if type(size) is int else None for size in value.shape)
                ports[name] = Port(name, shape, value.dtype)
            else:
                ports[name] = Port(name, (), torch.int64)
        return ports, constants

    @property
    def ports(self) -> Mapping[str, Port]:
        return self._interface[0]

    @functools.cached_property
    def outputs(self) -> Sequence[str]:
        spec = self._program.call_spec.out_spec
        with self._block():
            return output_names(pytree.tree_unflatten(list(range(spec.num_leaves)), spec), self._leaves)

    @functools.cached_property
    def slots(self) -> Sequence[CacheSlot]:
        return cache_slots(self.ports.values(), self.outputs)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        # a guard or an operator can raise any error
        with raised_as(lambda e: ReplayError(f"torch.export fails on these inputs: {first_line(e)}")):
            return self._call({name: inputs[name] for name in self.ports})

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return dict(tensors)

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        try:
            found = self._call({**cache, **feeds})
        except (RuntimeError, AssertionError, ValueError, IndexError) as error:  # a guard, or an operator
            raise GenerationError(f"{self.name} stopped: {first_line(error)}") from error
        return split_cache(found, self.slots, cache)

    def _call(self, values: Mapping[str, Any]) -> dict[str, Any]:
        ports, constants = self._interface
        given = {**constants, **values}
        leaves = []
        for name in self._leaves:
            value = given[name]
            # a program takes a counter of the cache as a Python number
            counts = name in ports and not ports[name].shape and name.rpartition(".")[2] in ("length", "position")
            leaves.append(int(value) if counts and isinstance(value, torch.Tensor) else value)
        with self._block(), torch.no_grad():
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            return dict(zip(self.outputs, pytree.tree_leaves(self.module(*args, **kwargs)), strict=True))
