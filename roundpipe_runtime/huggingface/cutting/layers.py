"""Find the layers of a model by their place in it and by the calls of its forward, not by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from .call_log import is_box


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A list of modules that could be layers."""

    path: str  # name of the list in the model
    layers: dict[str, nn.Module]  # layers by their name in the model
    size: int  # number of elements in their parameters


def candidates(model: nn.Module) -> list[Candidate]:
    """Return the outermost lists of modules in a model, largest first.

    A list counts if it has at least two elements, all with parameters.

    >>> [found.path for found in candidates(nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2)] * 2)}))]
    ['h']
    """
    found = list(_lists(model, ""))
    return sorted(found, key=lambda candidate: -candidate.size)


def _lists(module: nn.Module, path: str) -> Iterator[Candidate]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _is_of_layers(child):
            layers = {f"{inner}.{key}": layer for key, layer in child._modules.items()}
            size = sum(p.numel() for p in {id(p): p for p in child.parameters()}.values())
            yield Candidate(inner, layers, size)
        else:
            yield from _lists(child, inner)


def _is_of_layers(module: nn.Module) -> bool:
    # the same module can occur several times, and children() would list it once
    children = [child for child in module._modules.values() if child is not None]
    if len(children) < 2 or not all(any(True for _ in child.parameters()) for child in children):
        return False
    # a Sequential of matrices and activations is one small network, not a list of layers
    alike = len({type(child) for child in children}) == 1 and all(list(child.children()) for child in children)
    return isinstance(module, nn.ModuleList) or alike


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """The form of the output of a layer."""

    spec: pytree.TreeSpec  # structure
    # for a tensor, the position of an input tensor with the same shape and dtype, or `-1`; `(value,)` for all else
    leaves: tuple[int | tuple[Any], ...]


@dataclasses.dataclass(frozen=True)
class Observed:
    """One call of a layer in a forward of the model."""

    layer: str  # name of the layer
    form: OutputSpec


def observe(layers: dict[str, nn.Module], forward: Callable[[], Any]) -> tuple[list[Observed], Any]:
    """Run a forward and observe which layers it calls."""
    seen: list[Observed] = []
    names: dict[int, str] = {}
    for name, layer in layers.items():
        names.setdefault(id(layer), name)
    handles = []
    for layer in {id(layer): layer for layer in layers.values()}.values():

        def hook(module: nn.Module, args: Any, kwargs: Any, out: PyTree) -> None:
            seen.append(Observed(names[id(module)], _form_of(tensors_of((args, kwargs)), out)))

        handles.append(layer.register_forward_hook(hook, with_kwargs=True))
    try:
        result = forward()
    finally:
        for handle in handles:
            handle.remove()
    return seen, result


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments ``(args, kwargs)``, in order, without those in boxes."""
    # kwargs is a dictionary but no box; by its id, as a reference from the function would live until a collection
    outside = id(arguments[1])
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda value: is_box(value) and id(value) != outside)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _form_of(inputs: list[torch.Tensor], out: PyTree) -> OutputSpec:
    leaves, spec = pytree.tree_flatten(out)
    found: list[int | tuple[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            alike = (i for i, t in enumerate(inputs) if (t.shape, t.dtype) == (leaf.shape, leaf.dtype))
            found.append(next(alike, -1))
        else:
            found.append((leaf,))
    return OutputSpec(spec, tuple(found))
