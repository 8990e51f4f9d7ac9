"""Join encoder outputs of pictures, videos and sounds, of which a row may have several or none.

::

    image_hidden_states    [(tokens, width), ...]            a list has an item for each picture: lists are concatenated
    image_outputs          what the encoder returned, as models do since transformers 5.24:
      pooler_output        [(tokens, width), ...]            likewise
      last_hidden_state    (pictures, patches, width)        joined along axis 0
                           (1, patches of all, width)        one sequence of all pictures: joined along axis 1
      hidden_states        (None, (pictures, ...), ...)      an item for each layer: joined item by item
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ..batch.joining import join
from ..errors import JoinError

_NAMES = tuple(f"{kind}_{what}" for kind in ("image", "video", "audio") for what in ("hidden_states", "outputs"))
# lists there have an item for each picture; others, for each layer
_BY_PICTURE = ("last_hidden_state", "pooler_output")


def without_encoder_outputs(outputs: Sequence[PyTree]) -> tuple[Sequence[PyTree], dict[str, Any]]:
    """Take out of the outputs of microbatches what is not joined by rows."""
    if len(outputs) == 1 or not all(isinstance(output, dict) for output in outputs):
        return outputs, {}
    columns = {name: [output.get(name) for output in outputs] for name in _NAMES}
    found = {name: _joined(name, column) for name, column in columns.items() if _is_taken(column)}
    if not found:
        return outputs, {}
    return [_with_entries(output, {k: v for k, v in output.items() if k not in found}) for output in outputs], found


def with_encoder_outputs(joined: PyTree, found: Mapping[str, Any]) -> PyTree:
    """Return the joined output with the entries that were taken out, in the order of its class."""
    return _with_entries(joined, {**joined, **found}) if found else joined


def _with_entries(output: Mapping[str, Any], entries: Mapping[str, Any]) -> Any:
    made: Any = type(output)
    return made(**entries)


def _is_taken(column: Sequence[Any]) -> bool:
    """Whether there are outputs of an encoder, a list for pictures, or a tensor in some microbatches only."""
    present = _present(column)
    if not present:
        return False
    is_partial = len(present) < len(column) and all(isinstance(value, torch.Tensor) for value in present)
    return is_partial or all(isinstance(value, (dict, list, tuple)) for value in present)


def _present(column: Iterable[Any]) -> list[Any]:
    return [value for value in column if value is not None]


@dataclasses.dataclass(frozen=True)
class _Pictures:
    """The number of pictures in each microbatch, and whether all have the same ones."""

    counts: Sequence[int] = ()  # number of pictures of each; empty where it is not known
    are_alike: bool = True  # whether each has the same pictures

    @classmethod
    def of(cls, outputs: Sequence[Mapping[str, Any]]) -> _Pictures:
        """Read it off what an encoder returned of each microbatch, which has pictures."""
        columns = ([output.get(name) for output in outputs] for name in ("pooler_output", "last_hidden_state"))
        pooled = next((column for column in columns if len(_present(column)) == len(outputs)), [])
        counts = [len(value) for value in pooled if isinstance(value, (list, tuple))]
        return cls(counts, _are_equal([_tensors(value) for value in pooled]))


def _tensors(value: PyTree) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _are_equal(columns: Sequence[Sequence[torch.Tensor]]) -> bool:
    return all(len(column) == len(columns[0]) and all(map(torch.equal, column, columns[0])) for column in columns[1:])


def _joined(name: str, column: Sequence[Any], pictures: _Pictures = _Pictures()) -> Any:
    """Join one entry; a microbatch without pictures has ``None`` there."""
    present = _present(column)
    if not present:
        return None
    if all(isinstance(value, dict) for value in present):
        keys, inside = dict.fromkeys(key for value in present for key in value), _Pictures.of(present)
        return _with_entries(present[0], {key: _joined(key, [v.get(key) for v in present], inside) for key in keys})
    if all(isinstance(value, (list, tuple)) for value in present):
        if name in (*_BY_PICTURE, *_NAMES):
            return type(present[0])(item for value in present for item in value)
        return type(present[0])(_joined(f"an item of {name}", items, pictures) for items in zip(*present, strict=True))
    if all(isinstance(value, torch.Tensor) and value.dim() for value in present):
        # what is the same while the pictures are not is a table of the model
        is_table = not pictures.are_alike and _are_equal([[value] for value in present])
        return present[0] if is_table else _concatenated(name, present, pictures.counts)
    return join(present, [None] * len(present))


def _concatenated(name: str, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    apart = [axis for axis, found in enumerate(zip(*shapes, strict=False)) if len(set(found)) > 1]
    # of a single picture in each microbatch the shapes do not show it; then each is a sequence of its own, as is usual
    is_one_sequence = {shape[0] for shape in shapes} == {1} and max(counts, default=0) > 1
    axis = apart[0] if apart else int(is_one_sequence)
    if len(apart) > 1 or (is_one_sequence and len(shapes[0]) > 3):
        raise JoinError(
            f"{name!r} of pictures: tensors of shapes {shapes} cannot be concatenated. Say how to join outputs:\n"
            "    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
        )
    return torch.cat(list(tensors), dim=axis)
