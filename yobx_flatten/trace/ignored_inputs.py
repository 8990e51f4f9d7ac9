"""Refuse a value for an input that was ``None`` at export: the program would ignore it.

``torch.export`` writes a guard for a number among the inputs and none for ``None``: a program that was exported without
a mask takes a mask, and computes as if there were none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from ..errors import SpecMismatchError, describe_class
from ..private_names.of_torch import pytree
from .program_inputs import arguments_of

__all__ = ["refusal_of_ignored_inputs"]

_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]], None]


def refusal_of_ignored_inputs(program: ExportedProgram) -> _Hook | None:
    """Make a hook that looks over the inputs of a call before the program's module takes it."""
    # returns: the hook, for `register_forward_pre_hook(with_kwargs=True)`; it raises
    # `yobx_flatten.errors.SpecMismatchError`. `None` where no input was `None`.
    given = arguments_of(program)
    places = [i for i, arg in enumerate(given) if isinstance(arg, ConstantArgument) and arg.value is None]
    spec = program.call_spec.in_spec
    if not places or spec is None or spec.num_leaves != len(given):
        return None
    return functools.partial(_check_call, spec, places)


def _check_call(
    spec: pytree.TreeSpec, places: list[int], module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if torch.compiler.is_compiling():  # of a trace, the call that is made with the result is looked over
        return
    names = spec.children()[1].context
    if set(names) != set(kwargs):  # torch reports it
        return
    call = (args, {name: kwargs[name] for name in names})
    leaves = pytree.tree_leaves(call)
    if len(leaves) != spec.num_leaves or all(leaves[place] is None for place in places):
        return
    paths = [path for path, _ in pytree.tree_flatten_with_path(call)[0]]
    place = next(place for place in places if leaves[place] is not None)
    (part, *rest), leaf = paths[place], leaves[place]
    path = ("args", "kwargs")[part.idx] + pytree.keystr(tuple(rest))  # type: ignore[attr-defined] # of a tuple
    found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else describe_class(leaf)
    raise SpecMismatchError(
        f"{path} was None when this program was exported: it has no such input, and would ignore {found}. Pass None, "
        "or export another program with an example that has a tensor there."
    )
