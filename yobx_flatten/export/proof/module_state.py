"""Call a module without changing it: on copies of its state, with a random seed of its own."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

__all__ = ["draws_random_numbers", "own_attributes", "own_written_state", "seeded", "undisturbed", "written_state"]


@contextlib.contextmanager
def undisturbed(module: torch.nn.Module, written: Collection[str] = ()) -> Iterator[Callable[[], bool]]:
    """Call a module inside: what it writes to its buffers and attributes, or puts in their place, is gone afterwards.

    Its own tensors stand aside meanwhile, with the same identity, content and version afterwards, also after an
    exception. Parameters, which are large and which few modules write to, are shared but for those that are named.
    """
    # module: a module; copies stand in the place of its buffers, and of tensors that are plain attributes
    # written: names of parameters that its `forward` also writes to
    # returns: A context manager; inside, a function that returns whether the module has put other values in attributes
    # that are no buffers since then: what a program of it cannot hold
    found = []
    copies: dict[int, torch.Tensor] = {}  # what is tied stays tied
    for prefix, owner in module.named_modules():
        for held in (owner._buffers, owner._parameters):
            found.append((held, dict(held)))
            for name, tensor in held.items():
                if tensor is None or (held is owner._parameters and f"{prefix}.{name}".lstrip(".") not in written):
                    continue
                if id(tensor) not in copies:
                    copies[id(tensor)] = _copy(tensor)
                held[name] = copies[id(tensor)]
    try:
        with own_attributes(module):
            attributes = [(vars(owner), dict(vars(owner))) for owner in module.modules()]

            def changed() -> bool:
                return any(
                    held.keys() != before.keys() or any(held[name] is not value for name, value in before.items())
                    for held, before in attributes
                )

            yield changed
    finally:
        for held, before in found:
            held.clear()
            held.update(before)


@contextlib.contextmanager
def own_attributes(module: torch.nn.Module) -> Iterator[Mapping[int, torch.Tensor]]:
    """Call a module inside: what it puts into attributes that are neither buffers nor parameters is gone afterwards.

    A trace runs in-place operations on a tensor that is a plain attribute, and leaves symbols in attributes. What is in
    dictionaries, lists and sets among the attributes is also restored: transformers notes in an attribute that it has
    added hooks, and one without the other would add them twice.
    """
    # module: a module; copies stand in the place of tensors among the attributes
    found = [(vars(owner), dict(vars(owner))) for owner in module.modules()]
    values = [value for _, before in found for value in before.values()]
    filled: list[tuple[Any, Any]] = [(one, one.copy()) for one in values if type(one) in _CONTAINERS]
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for held, before in found:
        for name, value in before.items():
            if isinstance(value, torch.Tensor):
                held[name] = copies.setdefault(id(value), (value, _copy(value)))[1]
    try:
        yield {id(copy): tensor for tensor, copy in copies.values()}
    finally:
        for held, before in found:
            held.clear()
            held.update(before)
        for container, items in filled:
            container.clear()
            (container.extend if type(container) is list else container.update)(items)


_CONTAINERS = {dict, collections.OrderedDict, list, set}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the same random numbers at every entry; the caller's generators are as they were afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def written_state(program: ExportedProgram) -> list[str]:
    """Name the buffers, parameters and other tensors of its module that a program writes to, in order of its inputs."""
    signature = program.graph_signature
    names = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.kind in (InputKind.BUFFER, InputKind.PARAMETER, InputKind.CONSTANT_TENSOR) and spec.target is not None
    }
    found = {*signature.buffers_to_mutate.values(), *getattr(signature, "parameters_to_mutate", {}).values()}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        writes = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if any(given.get(flag) is True for flag in _LEARNS):
            writes |= _STATISTICS  # batch_norm writes to them, and its schema does not state it
        found |= {names.get(_root(given.get(name)), "") for name in writes}
    return [name for name in names.values() if name in found]


_STATISTICS = {"running_mean", "running_var"}
_LEARNS = ("training", "train", "use_input_stats")


def _root(node: object) -> str:
    """The input that a written tensor is, or is a view of; a view may be one of several."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.args:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not (schema.returns and schema.returns[0].alias_info is not None):
            return ""
        node = node.args[0]
    return node.name if isinstance(node, torch.fx.Node) else ""


def own_written_state(program: ExportedProgram, written: Collection[str]) -> None:
    """Give a program copies of what it writes to: it shares the tensors of the module that was exported."""
    # program: the program; its state is changed in place
    for name in written:
        # buffers of persistent=False are not part of a state dict: torch keeps them with the constants
        held = program.state_dict if name in program.state_dict else program.constants
        held[name] = _copy(held[name])


def draws_random_numbers(program: ExportedProgram) -> list[str]:
    """Name the operators of a program that draw random numbers."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    drawing = [t for t in targets if torch.Tag.nondeterministic_seeded in getattr(t, "tags", ())]
    return [str(target) for target in dict.fromkeys(drawing) if not _is_switched_off(target, program)]


def _is_switched_off(target: object, program: ExportedProgram) -> bool:
    """A dropout of a module in ``eval()`` is in the graph and does nothing; so is that of an attention."""
    switches = {"train", "dropout_p"}
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is not target:
            continue
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
        named = [a for a in target._schema.arguments if a.name in switches]
        if not named or any(given.get(a.name, a.default_value) for a in named):
            return False
    return True


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy
