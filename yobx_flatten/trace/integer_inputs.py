"""Call older programs that take an integer where a tensor is flattened now.

The number of tokens that a cache of sliding layers has seen was an integer among the inputs. Such a program is called
with a copy of the cache that holds a :class:`StoredInteger`, which is flattened to an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import SymIntArgument

from ..private_names.of_torch import pytree
from .program_inputs import arguments_of

_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


class StoredInteger(int):
    """A number that is an integer among the leaves, not a tensor."""


def with_integers(program: ExportedProgram) -> _Hook | None:
    """Make a hook that gives a program integers where it takes them."""
    # returns: the hook, for `register_forward_pre_hook(with_kwargs=True)`; `None` where the program takes none
    given = arguments_of(program)
    places = {index for index, arg in enumerate(given) if isinstance(arg, SymIntArgument)}
    spec = program.call_spec.in_spec
    if not places or spec is None or spec.num_leaves != len(given):
        return None
    names = spec.children()[1].context

    def convert(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if set(names) != set(kwargs):  # torch names them
            return None
        leaves, found = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
        late = {place for place in places if place < len(leaves) and isinstance(leaves[place], torch.Tensor)}
        if len(leaves) != len(given) or not late:
            return None
        converted = [StoredInteger(leaf) if place in late else leaf for place, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(converted, found)

    return convert
