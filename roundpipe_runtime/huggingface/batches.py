"""Handle samples that are not rows along axis 0: packed images as input, flattened rows as output.

::

    pixel_values     (patches of all pictures, ...)    cut by the pictures of each row, as image_grid_thw counts them
    image_grid_thw   (pictures, 3)                     likewise
    router_logits    (rows * length, experts)          rows come first, so parts are joined along axis 0
    image_outputs    what is joined by pictures, in :mod:`.encoder_outputs`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from yobx_flatten import leaves
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ..batch.joining import join
from ..batch.spec import TensorChunkSpec, sizes
from ..batch.splitting import split
from ..errors import ConfigError, JoinError, SplitError

# images of all rows in one tensor, the size of each image, and the token that is the placeholder of a part of one
_PACKED = (
    ("pixel_values", "image_grid_thw", ("image_token_id", "image_token_index")),
    ("pixel_values_videos", "video_grid_thw", ("video_token_id", "video_token_index")),
)

# memories of XLNet: (length, rows, width), whatever the numbers are
_ROWS_SECOND = "outputs['mems']"


def check_packed_texts(kwargs: Mapping[str, Any]) -> None:
    """Check that packed texts stand in one row: their count across several rows cannot be split."""
    tokens = kwargs.get("input_ids")
    if kwargs.get("cu_seq_lens_q") is not None and isinstance(tokens, torch.Tensor) and len(tokens) > 1:
        raise ConfigError(
            f"cu_seq_lens_q counts texts across all {len(tokens)} rows, which cannot be split. Give the rows a mask "
            "instead, or concatenate them to one row:\n    DataCollatorWithFlattening()"
        )


def split_pictures(config: Any, kwargs: Kwargs) -> Callable[..., Any] | None:
    """Return a split function for a call with packed images or videos; ``None`` where there are none."""
    packed = [
        (values, grid, _first_of(config, names))
        for values, grid, names in _PACKED
        if isinstance(kwargs.get(grid), torch.Tensor) and isinstance(kwargs.get(values), torch.Tensor)
    ]
    if not packed or not isinstance(kwargs.get("input_ids"), torch.Tensor):
        return None

    merge = _first_of(getattr(config, "vision_config", config), ("spatial_merge_size",))

    def split_input(args: Any, given: Kwargs, num_microbatch: int) -> tuple[list[Any], list[Any]]:
        tokens = given["input_ids"]
        rows = sizes(tokens.shape[0], num_microbatch)
        held = {name for values, grid, _ in packed for name in (values, grid)}
        rest = {name: value for name, value in given.items() if name not in held}
        parts = split(args, rest, None, num_microbatch)
        made = [dict(part.kwargs) for part in parts]
        for values, grid, token in packed:
            counts = _pictures_per_row(tokens, given[grid], token, grid, merge)
            patches = given[grid].prod(-1)
            row = picture = patch = 0
            for part, count in zip(made, rows, strict=True):
                pictures = sum(counts[row : row + count])
                length = int(patches[picture : picture + pictures].sum())
                if pictures:
                    part[grid] = given[grid][picture : picture + pictures]
                    part[values] = given[values][patch : patch + length]
                row, picture, patch = row + count, picture + pictures, patch + length
        return [part.args for part in parts], made

    split_input.is_of_batch = True  # type: ignore[attr-defined] # an attribute of a function
    return split_input


def _first_of(config: Any, names: Sequence[str]) -> int | None:
    return next((found for found in (getattr(config, name, None) for name in names) if found is not None), None)


def _pictures_per_row(
    tokens: torch.Tensor, grid: torch.Tensor, token: int | None, name: str, merge: int | None
) -> list[int]:
    """The number of images of each row: their tokens fill the places in the row."""
    places = (tokens == token).sum(-1).tolist() if token is not None else []
    each = _tokens_per_picture(grid, sum(places), merge)
    if each is None:
        patches = int(grid.prod(-1).sum())
        raise SplitError(
            f"kwargs['{name}']: {patches} patches do not fit the {sum(places)} image tokens of the rows. Pass what the "
            "model's processor returns."
        )
    counts, number = [], 0
    for left in places:
        start = number
        while left > 0 and number < len(each):
            left, number = left - each[number], number + 1
        if left:
            raise SplitError(
                f"kwargs['{name}']: a picture has image tokens in two rows, so rows cannot be split. Pass what the "
                "model's processor returns."
            )
        counts.append(number - start)
    return counts


def _tokens_per_picture(grid: torch.Tensor, total: int, merge: int | None) -> list[int] | None:
    """The tokens of each image, such that there are as many as in the rows; ``None`` where none of the ways fits.

    Squares of patches become one token, and some models end each line of them with another one.
    """
    patches = grid.prod(-1)
    if merge:
        frames, high, wide = (grid // torch.tensor([1, merge, merge], device=grid.device)).unbind(-1)
        for columns in (wide, wide + 1):
            each = frames * high * columns
            if int(each.sum()) == total:
                return each.tolist()
    merged, rest = divmod(int(patches.sum()), total) if total else (0, 1)
    return None if rest or bool((patches % merged).any()) else (patches // merged).tolist()


def join_outputs(outputs: Sequence[PyTree], weights: Sequence[float], rows: Sequence[int]) -> PyTree:
    """Return the output of the whole batch; rows that were flattened with inner axes are also joined."""
    # weights: weight of each microbatch, for tensors without axes
    outputs, of_pictures = without_encoder_outputs(outputs)
    rules = {}
    for column in zip(*(leaves(output, name="outputs") for output in outputs), strict=False):
        axis = _axis([leaf.value for leaf in column], rows)
        if column[0].path.startswith(_ROWS_SECOND):
            axis = 1
        if axis is not None:
            rules[column[0].path] = TensorChunkSpec(axis)
    joined = join(outputs, weights, rows=rows, merge=rules or None)
    return with_encoder_outputs(joined, of_pictures)


def _axis(values: Sequence[Any], rows: Sequence[int]) -> int | None:
    """The axis to join along where it is not simply axis 0: another axis of rows, or a multiple of the rows."""
    if not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values):
        return None
    shapes = [tuple(value.shape) for value in values]
    if len({len(shape) for shape in shapes}) > 1 or all(s[0] == n for s, n in zip(shapes, rows, strict=True)):
        return None
    each, rest = divmod(shapes[0][0], rows[0])
    if not rest and all(s[0] == each * n for s, n in zip(shapes, rows, strict=True)):
        return 0 if len({shape[1:] for shape in shapes}) == 1 else None
    axes = [a for a in range(len(shapes[0])) if all(s[a] == n for s, n in zip(shapes, rows, strict=True))]
    return axes[0] if len(axes) == 1 and len({(*s[: axes[0]], *s[axes[0] + 1 :]) for s in shapes}) == 1 else None


# Join encoder outputs of pictures, videos and sounds, of which a row may have several or none.


_NAMES = tuple(f"{kind}_{what}" for kind in ("image", "video", "audio") for what in ("hidden_states", "outputs"))
# lists there have an item for each picture; others, for each layer
_BY_PICTURE = ("last_hidden_state", "pooler_output")


def without_encoder_outputs(outputs: Sequence[PyTree]) -> tuple[Sequence[PyTree], dict[str, Any]]:
    """Remove outputs of microbatches that are not joined by rows."""
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
        """Read it from the outputs of an encoder for each microbatch with pictures."""
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
    # of a single picture in each microbatch the shapes do not show it; then each is its own sequence, as is usual
    is_one_sequence = {shape[0] for shape in shapes} == {1} and max(counts, default=0) > 1
    axis = apart[0] if apart else int(is_one_sequence)
    if len(apart) > 1 or (is_one_sequence and len(shapes[0]) > 3):
        raise JoinError(
            f"{name!r} of pictures: tensors of shapes {shapes} cannot be concatenated. Say how to join outputs:\n"
            "    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
        )
    return torch.cat(list(tensors), dim=axis)
