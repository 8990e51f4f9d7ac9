"""Flatten a batch once per call, for the checks, the search for the batch axis, and the split.

::

    args, kwargs     args[0]['x']  args[0]['mask']  kwargs['scale']   and the structure of (args, kwargs)
    label            label[0]  label[1]                               and the structure of the labels
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from yobx_flatten import Leaf, leaves
from yobx_flatten.private_names.of_torch import pytree

from ..device.block_masks import HeldMask, held, is_block_mask, leaf_test
from ..errors import ConfigError
from .packed import RoundPipePackedData


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A nested value and its leaves; a block mask is one leaf, in a :class:`HeldMask`."""

    name: str  # name of the value in key paths
    tree: Any
    leaves: list[Leaf]  # its leaves, in order

    @classmethod
    def of(cls, tree: Any, name: str) -> FlatTree:
        """Flatten a nested value."""
        found = leaves(_with_held_masks(tree), name=name)
        return cls(name, tree, [_hold(leaf) if is_block_mask(leaf.value) else leaf for leaf in found])


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBatch:
    """Inputs and labels of a batch."""

    args: FlatTree  # positional arguments
    kwargs: FlatTree  # keyword arguments
    label: FlatTree

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any) -> FlatBatch:
        """Flatten inputs and labels."""
        return cls(FlatTree.of(args, "args"), FlatTree.of(dict(kwargs), "kwargs"), FlatTree.of(label, "label"))

    def __iter__(self) -> Iterator[FlatTree]:
        return iter((self.args, self.kwargs, self.label))

    def specs(self) -> tuple[pytree.TreeSpec, pytree.TreeSpec]:
        """Return the structures of ``(args, kwargs)`` and of the labels."""
        call = _with_held_masks((self.args.tree, self.kwargs.tree))
        return pytree.tree_structure(call), pytree.tree_structure(_with_held_masks(self.label.tree))


@dataclasses.dataclass(frozen=True, slots=True)
class FlatMicrobatch:
    """The leaves of one microbatch."""

    inputs: list[Any]  # leaves of arguments and keyword arguments
    spec: pytree.TreeSpec  # structure of `(args, kwargs)`
    labels: list[Any]  # leaves of the labels
    label_spec: pytree.TreeSpec  # structure of the labels
    rows: int | None  # number of rows, as in `Microbatch`


def _with_held_masks(tree: Any) -> Any:
    """The tree with masks as leaves: torch would flatten those of a registered class, whose tensors cannot be cut."""
    return tree if leaf_test() is None else held(tree)


def _hold(leaf: Leaf) -> Leaf:
    return leaf._replace(value=HeldMask(leaf.value))


# Check the arguments of ``forward_backward`` before anything runs.


def check_call(input_args: Any, input_kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the arguments of ``forward_backward`` and return them as positional and keyword arguments of the model.

    >>> check_call([1, 2], None)
    ((1, 2), {})
    """
    # input_args: a tuple or list with one entry per argument
    if not isinstance(input_args, (tuple, list)) or isinstance(input_args, RoundPipePackedData):
        raise ConfigError(
            "input_args must be a tuple with the positional arguments of the model, found "
            f"{type(input_args).__qualname__}. A model of one argument:\n"
            "    forward_backward((x,), label=labels, loss_fn=loss_fn)"
        )
    if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
        raise ConfigError(
            f"input_kwargs must be a mapping from names to arguments, found {type(input_kwargs).__qualname__}:\n"
            "    forward_backward(input_kwargs={'mask': mask}, label=labels, loss_fn=loss_fn)"
        )
    return tuple(input_args), dict(input_kwargs or {})


def check_loss_fn(loss_fn: Any) -> None:
    """Check that a loss function can be called."""
    if not callable(loss_fn) or isinstance(loss_fn, type):
        way = f"{loss_fn.__name__}()" if isinstance(loss_fn, type) else "none if the outputs are the loss"
        raise ConfigError(
            f"loss_fn must be a function of the outputs and labels of a microbatch, found {loss_fn!r}. Pass {way}."
        )


def check_labels(label: FlatTree) -> None:
    """Check that no label requires a gradient: devices have copies, so no gradient reaches the labels."""
    for leaf in label.leaves:
        is_packed = isinstance(leaf.value, RoundPipePackedData)
        tensors = leaf.value if is_packed else [leaf.value]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            line = "forward_backward(..., label=label.detach())"
            if is_packed:
                line = "with torch.no_grad(): label = teacher(x)"
            raise ConfigError(
                f"{leaf.path} requires a gradient, but labels never get gradients. If it needs none, as the outputs "
                f"of a teacher:\n    {line}\nOtherwise pass it to the model as an argument, and let the last layer "
                "return it."
            )
