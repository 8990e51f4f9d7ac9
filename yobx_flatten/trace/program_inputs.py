"""List the inputs that the caller of a traced program passes, with their values in the trace."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ArgumentSpec, ConstantArgument, InputKind, SymIntArgument

from ..errors import SpecMismatchError, describe_class
from ..private_names.of_torch import pytree
from ..recipe.aliases import PyTree


def arguments_of(program: ExportedProgram) -> list[ArgumentSpec]:
    """Return the program's graph argument for each leaf of the user's inputs, without parameters and buffers."""
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def traced_inputs(program: ExportedProgram) -> list[Any]:
    """Return the traced tensor or size of each leaf of the user's inputs; ``None`` for a leaf fixed as a constant."""
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return [None if isinstance(arg, ConstantArgument) else values[arg.name] for arg in arguments_of(program)]


# Numbers, texts, enums and ``None`` among the inputs: a program fixes the values of its example.


_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]
_Members = dict[int, enum.Enum]


def text_of(value: object) -> str:
    """Return the text by which reports show a constant among the inputs.

    >>> import inspect
    >>> text_of(0.5), text_of("mean"), text_of(inspect._ParameterKind.KEYWORD_ONLY)
    ('0.5', "'mean'", '_ParameterKind.KEYWORD_ONLY')
    """
    return f"{type(value).__qualname__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def _is_enum(leaf: object) -> bool:
    return isinstance(leaf, enum.Enum) and not isinstance(leaf, (int, str))  # torch accepts IntEnum and StrEnum


def enums_as_texts(args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree, _Members]:
    """Replace enum members in the arguments of an export by texts; also return the members by number of the leaf."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    members = {place: leaf for place, leaf in enumerate(leaves) if _is_enum(leaf)}
    if members:
        args, kwargs = pytree.tree_unflatten(
            [text_of(leaf) if place in members else leaf for place, leaf in enumerate(leaves)], spec
        )
    return args, kwargs, members


def with_members(args: PyTree, kwargs: PyTree, members: _Members) -> tuple[PyTree, PyTree]:
    """Return a call's arguments with the enum members that :func:`enums_as_texts` replaced by texts."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten([members.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
    return args, kwargs


@contextlib.contextmanager
def members_in_forward(module: torch.nn.Module, names: list[str], members: _Members) -> Iterator[None]:
    """Make a module's ``forward`` receive enum members in the with block, while its trace receives texts."""
    # names: the keyword arguments in the order of the export, which determines the numbers of the leaves
    if not members:
        yield
        return

    def put_back(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return with_members(args, {name: kwargs[name] for name in names}, members)

    with module.register_forward_pre_hook(put_back, prepend=True, with_kwargs=True):
        yield


def checking_constants(program: ExportedProgram) -> _Hook | None:
    """Make a hook that refuses a call if an input differs from the constant that the exported program has for it."""
    # returns: the hook for `register_forward_pre_hook(with_kwargs=True)`; `None` if the program has no constant input
    given = arguments_of(program)
    constants = {place: arg.value for place, arg in enumerate(given) if isinstance(arg, ConstantArgument)}
    spec = program.call_spec.in_spec
    if not constants or spec is None or spec.num_leaves != len(given):
        return None
    return functools.partial(_check_call, spec, constants)


def _check_call(
    spec: pytree.TreeSpec,
    constants: Mapping[int, Any],
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if torch.compiler.is_compiling():  # inside a trace, the call of the resulting program is checked instead
        return None
    names = spec.children()[1].context
    if set(names) != set(kwargs):  # torch reports it
        return None
    call = (args, {name: kwargs[name] for name in names})
    leaves, found = pytree.tree_flatten(call)
    if len(leaves) != spec.num_leaves:
        return None
    members = [place for place, value in constants.items() if type(value) is str and _is_enum(leaves[place])]
    for place in members:
        leaves[place] = text_of(leaves[place])
    for place, value in constants.items():
        if not _is_same(value, leaves[place]):
            path, _ = pytree.tree_flatten_with_path(call)[0][place]
            raise SpecMismatchError(_message(path, value, leaves[place]))
    return pytree.tree_unflatten(leaves, found) if members else None


def _is_same(value: object, leaf: object) -> bool:
    if value is None or leaf is None or isinstance(leaf, torch.Tensor):
        return value is leaf
    return bool(value == leaf) or (value != value and leaf != leaf)


def _message(path: tuple[Any, ...], value: object, leaf: object) -> str:
    part, *rest = path
    where = ("args", "kwargs")[part.idx] + pytree.keystr(tuple(rest))
    found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else describe_class(leaf)
    if value is None:
        return (
            f"{where} was None when this program was exported, so the program has no such input and would ignore "
            f"{found}. Pass None, or export again with a tensor there in the example."
        )
    return (
        f"{where} was {value!r} when this program was exported, and is fixed in the program. The call passes "
        f"{found if isinstance(leaf, torch.Tensor) else repr(leaf)}. Pass {value!r}, or export again with the other "
        "value, or with a tensor, in the example."
    )


class StoredInteger(int):
    """A token counter for an older exported program, which takes an integer where caches now flatten to a tensor."""


def with_integers(program: ExportedProgram) -> _Hook | None:
    """Make a hook that converts tensors in a call to integers where an older exported program takes integers."""
    # returns: the hook for `register_forward_pre_hook(with_kwargs=True)`; `None` if the program takes no integer
    given = arguments_of(program)
    places = {index for index, arg in enumerate(given) if isinstance(arg, SymIntArgument)}
    spec = program.call_spec.in_spec
    if not places or spec is None or spec.num_leaves != len(given):
        return None
    names = spec.children()[1].context

    def convert(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if set(names) != set(kwargs):  # torch reports it
            return None
        leaves, found = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
        late = {place for place in places if place < len(leaves) and isinstance(leaves[place], torch.Tensor)}
        if len(leaves) != len(given) or not late:
            return None
        converted = [StoredInteger(leaf) if place in late else leaf for place, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(converted, found)

    return convert


class Flat(torch.nn.Module):
    """A module with one argument, a list of tensors, which are the arguments of a graph module."""

    def __init__(self, called: torch.fx.GraphModule) -> None:
        super().__init__()
        self.called = called

    def forward(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the graph."""
        return self.called(*tensors)


def sizes_of(program: ExportedProgram, inputs: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the shapes that the named inputs have in the trace of an exported program."""
    # program: a result of `flat_program`
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    return {name: values[arg.name].shape for name, arg in zip(inputs, arguments_of(program), strict=True)}


def joined(past: torch.fx.Node, present: Any) -> torch.fx.Node | None:
    """Return the graph node that appends new tokens to a cache input if the program returns that node, or ``None``."""
    value = past.meta.get("val")
    if value is None or value.ndim != 4:
        return None
    cats = [user for user in past.users if user.target is not torch.ops.aten.sym_size.int]
    if len(cats) != 1 or cats[0] is not present or present.target is not torch.ops.aten.cat.default:
        return None
    parts: Any = present.args[0]
    axis = present.args[1] if len(present.args) > 1 else 0
    is_after = len(parts) == 2 and parts[0] is past and parts[1] is not past and axis in (2, -2)
    return present if is_after and not present.kwargs else None
