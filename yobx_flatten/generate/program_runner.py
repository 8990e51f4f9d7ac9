"""A program of ``torch.export`` as a step of a loop: called with leaves by name, whatever they are nested in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from ..declare.scopes import register_flattening_functions
from ..errors import GenerationError
from ..trees.naming import leaf_names, output_names
from .slots import CacheSlot, Port, cache_slots, empty_cache, is_present

__all__ = ["ProgramRunner", "open_program"]


def open_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Load a program that ``ExportedModel.save`` stored.

    Raises:
        GenerationError: when there is no such file, or it is damaged.
    """
    if not os.path.isfile(path):
        raise GenerationError(f"There is no file {os.fspath(path)}.")
    try:
        with _block():
            return torch.export.load(os.fspath(path))
    except Exception as error:  # torch raises whatever its reader of archives does
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GenerationError(f"torch.export cannot load {os.fspath(path)}: {first}") from error


def _block() -> contextlib.AbstractContextManager[Any]:
    import transformers  # noqa: F401 # the block registers the caches of what is imported

    return register_flattening_functions(patch_transformers=True)


class ProgramRunner:
    """One program and the cache of the loop it is in. See :class:`.onnx_runner.OnnxRunner`.

    Args:
        program: exported with keyword arguments.
        name: of the program, for messages.
    """

    def __init__(self, program: ExportedProgram, name: str) -> None:
        self.name = name
        self._spec = program.call_spec.in_spec
        with _block():
            self._module = program.module()
            args, kwargs = pytree.tree_unflatten(list(range(self._spec.num_leaves)), self._spec)
            if args:
                raise GenerationError(f"{name} takes positional arguments, which have no names. Export it with kwargs.")
            self._leaves = leaf_names(kwargs)
            out_spec = program.call_spec.out_spec
            returned = pytree.tree_unflatten(list(range(out_spec.num_leaves)), out_spec)
            self.outputs = output_names(returned, self._leaves)
        self.ports, self._constants = _ports(program, self._leaves)
        self.slots: list[CacheSlot] = cache_slots(self.ports.values())

    def start(self, batch: int) -> dict[str, Any]:
        """Return the cache before the first token."""
        return dict(empty_cache(self.slots, batch))

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run once; see :meth:`.onnx_runner.OnnxRunner.step`."""
        given = {**self._constants, **cache, **feeds}
        leaves = [self._leaf(name, given[name]) for name in self._leaves]
        try:
            with _block(), torch.no_grad():
                args, kwargs = pytree.tree_unflatten(leaves, self._spec)
                found = dict(zip(self.outputs, pytree.tree_leaves(self._module(*args, **kwargs)), strict=True))
        except (RuntimeError, AssertionError, ValueError, IndexError) as error:  # a guard, or an operator
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise GenerationError(f"{self.name} stopped: {first}") from error
        following = {slot.port.name: found.get(slot.present, cache.get(slot.port.name)) for slot in self.slots}
        if not self.slots:
            following = {name: value for name, value in found.items() if is_present(name)}
        return {name: value for name, value in found.items() if not is_present(name)}, following

    def _leaf(self, name: str, value: Any) -> Any:
        port = self.ports.get(name)
        if port is None or not isinstance(value, torch.Tensor):
            return value
        if not port.shape and name.rpartition(".")[2] in ("length", "position"):
            return int(value)  # a counter is a number of Python
        return value.to(port.dtype)


def _ports(program: ExportedProgram, leaves: list[str]) -> tuple[dict[str, Port], dict[str, Any]]:
    """The inputs that are tensors or counters, and the values of those that are part of the program."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    ports, constants = {}, {}
    for name, spec in zip(leaves, specs, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            constants[name] = spec.arg.value
            continue
        value = values[spec.arg.name]
        if isinstance(value, torch.Tensor):
            shape = tuple(size if type(size) is int else None for size in value.shape)
            ports[name] = Port(name, shape, value.dtype)
        else:
            ports[name] = Port(name, (), torch.int64)
    return ports, constants
