"""Find the buffers that a program writes, and where it draws random numbers."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


def written_parameters(module: torch.nn.Module, written: Collection[str]) -> list[torch.nn.Parameter]:
    """Return the parameters of a module among the names of what its program writes to."""
    return [parameter for name, parameter in module.named_parameters(remove_duplicate=False) if name in written]


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
