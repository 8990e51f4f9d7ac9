"""Split and join data whose rows are not along axis 0: packed images, lists per row, outputs and losses of a model."""

# pixel_values     (patches of all images, ...)      split by the images of each row, which image_grid_thw counts
# image_grid_thw   (images, 3)                       split by the images of each row
# router_logits    (rows * length, experts)          joined along axis 0, because rows come first
# image_outputs    a tensor or list per image        joined image by image

from __future__ import annotations

import inspect
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten import leaves
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.errors.failures import result_or
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ..batch.joining import join
from ..batch.loss import WeightedLoss
from ..batch.spec import RoundPipePackedData, TensorChunkSpec, sizes
from ..batch.splitting import infer_batch_size, split
from ..device.transfer import Static
from ..errors import ConfigError, JoinError, SplitError
from ..pipeline.live import with_own_forwards
from .adapters import model_inside
from .cutting.caches import HeldCache, join_held, swapped
from .cutting.check import evaluating
from .loss import own_loss as model_loss
from .loss.call_options import CALL_OPTIONS, gives_share, is_proven
from .loss.own_loss import check_weights

# Arguments with the images of all rows and the size of each image, and names of the image token in a configuration.
_PACKED = (
    ("pixel_values", "image_grid_thw", ("image_token_id", "image_token_index")),
    ("pixel_values_videos", "video_grid_thw", ("video_token_id", "video_token_index")),
)
_ROWS_SECOND = "outputs['mems']"  # memories of XLNet have the rows on axis 1: (length, rows, width)


def split_pictures(config: Any, kwargs: Kwargs) -> Callable[..., Any] | None:
    """Return a function that splits packed images or videos into microbatches; ``None`` without images and videos."""
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
        rest = {name: value for name, value in given.items() if not any(name in names for *names, _ in packed)}
        parts = split(args, rest, None, num_microbatch)
        made = [dict(part.kwargs) for part in parts]
        rows = [len(part["input_ids"]) for part in made]
        for values, grid, token in packed:
            patches = given[grid].prod(-1)
            places = (tokens == token).sum(-1).tolist() if token is not None else []
            if (each := _tokens_per_picture(given[grid], sum(places), merge)) is None:
                raise SplitError(
                    f"kwargs['{grid}']: {int(patches.sum())} patches do not fit the {sum(places)} image tokens in "
                    "input_ids. Pass the arguments that the model's processor returns."
                )
            counts, number = [], 0  # pictures of each row
            for left in places:
                start = number
                while left > 0 and number < len(each):
                    left, number = left - each[number], number + 1
                if left:
                    raise SplitError(
                        f"kwargs['{grid}']: a picture has image tokens in two rows, so the rows cannot be in different "
                        "microbatches. Pass the arguments that the model's processor returns."
                    )
                counts.append(number - start)
            row = picture = patch = 0
            for part, count in zip(made, rows, strict=True):
                pictures = sum(counts[row : row + count])
                length = int(patches[picture : picture + pictures].sum())
                if pictures:
                    part[grid] = given[grid][picture : picture + pictures]
                    part[values] = given[values][patch : patch + length]
                row, picture, patch = row + count, picture + pictures, patch + length
        ids = RoundPipePackedData([part["input_ids"] for part in made], rows=rows)  # patches may also add up
        return [part.args for part in parts], [{**part, "input_ids": ids} for part in made]

    split_input.is_of_batch = True  # type: ignore[attr-defined] # an attribute of a function
    return split_input


def _first_of(config: Any, names: Sequence[str]) -> int | None:
    return next((found for found in (getattr(config, name, None) for name in names) if found is not None), None)


def _tokens_per_picture(grid: torch.Tensor, total: int, merge: int | None) -> list[int] | None:
    """Return the number of tokens of each image, computed from the number of its patches."""
    # a square of patches becomes one token, and some models add a token after each line of squares
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
    """Join the outputs of microbatches, including tensors of shape ``(rows * length, ...)``."""
    of_pictures: dict[str, Any] = {}  # outputs of image, video and audio encoders, joined
    if len(outputs) > 1 and all(isinstance(output, dict) for output in outputs):
        for name in _NAMES:
            column = [output.get(name) for output in outputs]
            present = _present(column)
            # dictionaries, lists, and tensors that only some microbatches have are joined separately
            is_partial = len(present) < len(column) and all(isinstance(value, torch.Tensor) for value in present)
            if present and (is_partial or all(isinstance(value, (dict, list, tuple)) for value in present)):
                of_pictures[name] = _joined(name, column)
    if of_pictures:
        outputs = [_with_entries(o, {k: v for k, v in o.items() if k not in of_pictures}) for o in outputs]
    rules = {}
    for column in zip(*(leaves(output, name="outputs") for output in outputs), strict=False):
        axis = _axis([leaf.value for leaf in column], rows)
        if column[0].path.startswith(_ROWS_SECOND):
            axis = 1
        if axis is not None:
            rules[column[0].path] = TensorChunkSpec(axis)
    joined = join(outputs, weights, rows=rows, merge=rules or None)
    return _with_entries(joined, {**joined, **of_pictures}) if of_pictures else joined


def _axis(values: Sequence[Any], rows: Sequence[int]) -> int | None:
    """Find the axis along which tensors of microbatches must be joined, if the default axis is wrong."""
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


# Encoder outputs of images, videos and sounds, of which a row may have several or none.
_NAMES = tuple(f"{kind}_{what}" for kind in ("image", "video", "audio") for what in ("hidden_states", "outputs"))
# Lists with these names have an item for each image. Other lists have an item for each layer.
_BY_PICTURE = ("last_hidden_state", "pooler_output")


def _with_entries(output: Mapping[str, Any], entries: Mapping[str, Any]) -> Any:
    made: Any = type(output)
    return made(**entries)


def _present(column: Iterable[Any]) -> list[Any]:
    return [value for value in column if value is not None]


def _are_equal(columns: Sequence[Sequence[torch.Tensor]]) -> bool:
    return all(len(column) == len(columns[0]) and all(map(torch.equal, column, columns[0])) for column in columns[1:])


def _joined(name: str, column: Sequence[Any], *, counts: Sequence[int] = (), are_alike: bool = True) -> Any:
    # counts: number of images in each microbatch; empty if not known
    # are_alike: whether all microbatches have the same images
    if not (present := _present(column)):
        return None
    if all(isinstance(value, dict) for value in present):
        columns = ([value.get(key) for value in present] for key in ("pooler_output", "last_hidden_state"))
        pooled = next((found for found in columns if len(_present(found)) == len(present)), [])
        tensors = [[leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, torch.Tensor)] for one in pooled]
        inside: Any = {
            "counts": [len(value) for value in pooled if isinstance(value, (list, tuple))],
            "are_alike": _are_equal(tensors),
        }
        keys = dict.fromkeys(key for value in present for key in value)
        return _with_entries(present[0], {key: _joined(key, [v.get(key) for v in present], **inside) for key in keys})
    if all(isinstance(value, (list, tuple)) for value in present):
        if name in (*_BY_PICTURE, *_NAMES):
            return type(present[0])(item for value in present for item in value)
        inside = {"counts": counts, "are_alike": are_alike}
        return type(present[0])(_joined(f"an item of {name}", items, **inside) for items in zip(*present, strict=True))
    if all(isinstance(value, torch.Tensor) and value.dim() for value in present):
        # a tensor that is equal for different pictures belongs to the model, not to the pictures
        if not are_alike and _are_equal([[value] for value in present]):
            return present[0]
        shapes = [tuple(tensor.shape) for tensor in present]
        apart = [axis for axis, found in enumerate(zip(*shapes, strict=False)) if len(set(found)) > 1]
        # with one picture per microbatch, shapes do not show the axis; axis 0 counts pictures in most models
        is_one_sequence = {shape[0] for shape in shapes} == {1} and max(counts, default=0) > 1
        if len(apart) > 1 or (is_one_sequence and len(shapes[0]) > 3):
            raise JoinError(
                f"The microbatches' tensors for pictures, {name!r}, cannot be concatenated: their shapes are {shapes}. "
                "Pass a function that joins the outputs:\n    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
            )
        return torch.cat(present, dim=apart[0] if apart else int(is_one_sequence))
    return join(present, [None] * len(present))


SplitFunction = Callable[[Any, Kwargs, int], tuple[list[Any], list[Any]]]


# Arguments that are lists, such as the labels of object detection:
#
#     pixel_values   (4, 3, 64, 64)
#     labels         [{"class_labels": (2,), "boxes": (2, 4)}, {(1,), (1, 4)}, ...]   4 entries, one per row
#     mask_labels    [(2, 64, 64), (1, 64, 64), ...]                                  4 entries, one per row
#     features       [(4, 32), (4, 64)]                                               each entry is a batch


def split_lists(
    model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs, inner: SplitFunction | None
) -> SplitFunction | None:
    """Return a function that splits arguments that are lists with one entry per row, such as detection labels."""
    # inner: split function for the other arguments; `None` for the default split
    kinds = (Mapping, torch.Tensor)
    lists = {
        name: value
        for name, value in kwargs.items()
        if type(value) is list and value and any(all(isinstance(v, kind) for v in value) for kind in kinds)
    }
    if not lists:
        return inner
    others = {name: value for name, value in kwargs.items() if name not in lists}
    rows = result_or(lambda: infer_batch_size(args, others), lambda error: None)  # the split raises the error later
    names = {name for name, value in lists.items() if len(value) == rows and _has_rows(model, name, value)}
    if rows is None or not names:
        return inner

    def split_input(given_args: Any, given: Kwargs, num_microbatch: int) -> tuple[list[Any], list[Any]]:
        rest = {name: value for name, value in given.items() if name not in names}
        if inner is None:
            parts = [(part.args, part.kwargs) for part in split(given_args, rest, None, num_microbatch)]
        else:
            parts = list(zip(*inner(given_args, rest, num_microbatch), strict=True))
        stops = list(itertools.accumulate(sizes(rows, num_microbatch)))
        made = [dict(part) for _, part in parts]
        for part, start, stop in zip(made, [0, *stops], stops, strict=False):
            part |= {name: given[name][start:stop] for name in names}
        return [part for part, _ in parts], made

    split_input.is_of_batch = True  # type: ignore[attr-defined] # an attribute of a function
    return split_input


def _has_rows(model: nn.Module, name: str, values: Sequence[Any]) -> bool:
    """Return whether entry i of a list argument belongs to row i of the batch, not to all rows."""
    # if each tensor in the list also has as many rows as the batch, only labels that the forward declares as a list do
    held = itertools.chain(*(value.values() if isinstance(value, Mapping) else [value] for value in values))
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    if any(t.dim() == 0 or t.shape[0] != len(values) for t in tensors):
        return True
    if "label" not in name:
        return False
    forward = type(model_inside(model)).forward
    try:
        stated = typing.get_type_hints(forward).get(name) if name in inspect.signature(forward).parameters else None
    except (NameError, TypeError):  # the annotation has names that only type checkers import
        stated = None
    if any(typing.get_origin(kind) is list for kind in (stated, *typing.get_args(stated))):
        return True
    raise SplitError(
        f"kwargs[{name!r}] is a list of {len(values)} entries, each with {len(values)} rows, and the batch has "
        f"{len(values)} rows. It is not clear whether each entry is for one row of the batch, or for all rows. "
        "Split the list with a function:\n"
        "    RoundPipeRunConfig(split_input=lambda args, kwargs, count: (args_of_parts, kwargs_of_parts))"
    )


# Allowed relative difference between the results of a text alone and packed; in 32 bits, and in 16 bits.
_ROUNDING, _ROUNDING_16 = 1e-4, 2e-2


def is_packed(kwargs: Mapping[str, Any]) -> bool:
    """Report whether a row has several texts: ``position_ids`` restart in the row, and no token is masked."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or positions.dim() < 2 or positions.shape[-1] < 3:
        return False
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return False
    begins = (positions[..., 1:-1] == 0) & (positions[..., :-2] != 0) & (positions[..., 2:] == 1)
    return bool(begins.any())


def keeps_texts_apart(model: nn.Module) -> bool | None:
    """Return whether a text has equal outputs alone and in a row with another text; ``None`` if the model fails."""
    one, other = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[8, 9, 3, 5]])
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]

    def is_apart() -> bool:
        try:
            alone = model(input_ids=other, position_ids=positions[:, 5:])[0]
            packed = model(input_ids=torch.cat([one, other], 1), position_ids=positions, use_cache=False)[0][:, 5:]
        except TypeError:  # a model without positions cannot detect where a text begins
            return False
        rounding = _ROUNDING_16 if alone.dtype.itemsize < 4 else _ROUNDING
        return bool((alone - packed).float().norm() <= rounding * alone.float().norm())

    with with_own_forwards(model), evaluating(model), torch.no_grad():
        return result_or(is_apart, lambda error: None)  # a model may raise any error for unsupported arguments


def loss_fn_with_weight(
    loss_fn: Callable[[Any, Any], Any], batch: Callable[[], int] | None, kwargs: Kwargs
) -> Callable[[Any, Any], Any]:
    """Wrap ``loss_fn`` so that it returns the loss of a microbatch together with the weight of this loss."""
    # batch: function that returns the rows of the batch; `None` for models that compute no loss
    # two variables, not a dict: the loss is checked again if an object in the closure is another one
    is_share, was_checked = gives_share(kwargs), is_proven(kwargs)

    def weighted_loss(outputs: PyTree, labels: Any) -> Any:
        output, count, rows = outputs
        result = loss_fn(output, labels)
        if batch is None or not isinstance(result, torch.Tensor):
            return result
        if rows < batch():
            check_weights([count, count], is_share=is_share, is_proven=was_checked)
        elif not 0 < count < math.inf:  # the whole batch
            return WeightedLoss(result, 1.0)
        if count < 0:  # the loss is a share of the batch's loss, and shares are added
            return WeightedLoss(result, rows / batch())
        return WeightedLoss(result * count, count)

    # The model's own loss was checked before. A loss function of the caller is checked here.
    weighted_loss.has_proven_weights = batch is not None  # type: ignore[attr-defined] # an attribute of a function
    weighted_loss.__wrapped__ = loss_fn  # type: ignore[attr-defined] # an attribute of a function
    return weighted_loss


# Functions that merge the outputs of the microbatches. Each microbatch returns `(output, items, rows)`.


def merge_with_cache(cache: Any, merge: Callable[[list[PyTree]], PyTree], outputs: list[PyTree]) -> PyTree:
    """Merge the outputs of microbatches by ``merge``, and join their KV caches into the caller's cache."""
    found, parts = [], []
    mark = Static()  # a leaf without tensors, which marks the place of the cache
    for output, *rest in outputs:
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
        held = next((value for value in values if isinstance(value, HeldCache)), None)
        found += [] if held is None else [held]
        parts.append((swapped(output, {id(held): mark}), *rest))
    joined = merge(parts)
    if len(found) == len(parts):
        join_held(cache, found, [count for _, _, count in outputs])
    return swapped(joined, {id(mark): cache})


def merge_as_asked(merge: Any, outputs: list[PyTree]) -> PyTree:
    rows = [count for _, _, count in outputs]
    return join([output for output, _, _ in outputs], [float(count) for count in rows], rows=rows, merge=merge)


def merge_with_loss(model: nn.Module, kwargs: Kwargs, outputs: list[PyTree]) -> PyTree:
    is_smoothed = kwargs[CALL_OPTIONS].smoothed_loss is not None
    parts, items, rows = ([*column] for column in zip(*outputs, strict=True))
    losses = [loss for loss in map(model_loss.loss_of, parts) if loss is not None]
    first = parts[0]
    # the first value of a tuple is a loss only if there are labels
    named = first.get("loss") if isinstance(first, dict) else getattr(first, "loss", None)
    has_loss = len(losses) == len(parts) and (is_smoothed or model_loss.has_labels(model, kwargs) or named is not None)
    if has_loss:
        check_weights(items, is_share=gives_share(kwargs), is_proven=is_proven(kwargs))
    joined = join_outputs(parts, [float(count) for count in rows], rows)
    aux, routers = None, getattr(joined, "router_logits", None)
    has_aux = model_loss.has_router_logits(model, kwargs) and getattr(first, "aux_loss", None) is not None
    if has_aux and routers is not None:
        aux = model_loss.auxiliary_loss_of(model, tuple(routers), kwargs.get("attention_mask"))
    if aux is not None:
        joined["aux_loss"] = aux[0]
    if not has_loss:
        return joined
    adds_auxiliary = aux is not None and not is_smoothed and model_loss.has_auxiliary_loss(model, kwargs)
    if adds_auxiliary:
        losses = [model_loss.without_auxiliary_loss(model, part) for part in parts]
    loss = model_loss.loss_of_batch(losses, items)
    return model_loss.with_loss(joined, loss + aux[1] if adds_auxiliary and aux is not None else loss)


class WholeBatchLoss:
    """Computes the loss of a batch, including the auxiliary loss of experts, from the outputs of several processes."""

    def __init__(
        self, model: nn.Module, kwargs: Kwargs, loss_fn: Callable[..., Any], label: Any, merge: Any, *, as_tuple: bool
    ) -> None:
        if merge not in (None, True):
            raise ConfigError(
                "The auxiliary loss of the model is computed from the outputs of all rows, which must be joined in the "
                "default way. Leave merge_output= out."
            )
        self._model, self._label, self._loss_fn, self._as_tuple = model, label, loss_fn, as_tuple
        mask = kwargs.get("attention_mask")
        self._mask: torch.Tensor | None = mask if isinstance(mask, torch.Tensor) else None
        self._is_share, self._is_proven = gives_share(kwargs), is_proven(kwargs)
        self._next_row = 0

    def state(self, group: Sequence[PyTree]) -> dict[str, Any] | None:
        """Return losses and router logits of one group of the batch's rows, which are sent to the other processes."""
        if not group:
            return None
        rows = sum(count for _, _, count in group)
        first, self._next_row = self._next_row, self._next_row + rows
        return {
            **self._computed(group),
            "items": [items for _, items, _ in group],
            "mask": None if self._mask is None else self._mask[first : first + rows].reshape(1, -1),
        }

    def _computed(self, group: Sequence[PyTree]) -> dict[str, Any]:
        parts = [output for output, _, _ in group]
        with_losses = [part for part in parts if model_loss.loss_of(part) is not None]
        losses = [model_loss.without_auxiliary_loss(self._model, part) for part in with_losses]
        has_routers = all(getattr(part, "aux_loss", None) is not None for part in parts)
        # one tensor per layer; `None` without an auxiliary loss
        routers = _one_after_another([part.router_logits for part in parts]) if has_routers else None
        return {"losses": losses, "routers": routers}

    def compute(
        self, groups: Sequence[Sequence[PyTree]], own: Sequence[int], stated: Sequence[dict[str, Any] | None]
    ) -> tuple[Any, PyTree]:
        here = [group for group in groups if group]
        if not here:
            return None, None
        all_of: list[Any] = [None if one is None else dict(one) for one in stated]
        for number, group in zip(own, groups, strict=True):
            if group:  # the stated losses have no graph
                all_of[number] |= self._computed(group)
        found = [one for one in all_of if one is not None]
        aux = None
        if all(one["routers"] is not None for one in found):
            masks = [one["mask"] for one in found]
            mask = None if any(one is None for one in masks) else torch.cat(masks, 1)
            aux = model_loss.auxiliary_loss_of(self._model, _one_after_another([one["routers"] for one in found]), mask)
        outputs, _, counts = zip(*(output for group in here for output in group), strict=True)
        joined = join_outputs(outputs, [float(rows) for rows in counts], counts)
        if aux is not None:
            joined["aux_loss"] = aux[0]
        losses = [loss for one in found for loss in one["losses"]]
        if losses:
            items = [count for one in found for count in one["items"]]
            model_loss.check_weights(items, is_share=self._is_share, is_proven=self._is_proven)
            loss = model_loss.loss_of_batch(losses, items)
            joined = model_loss.with_loss(joined, loss if aux is None else loss + aux[1])
        output = joined.to_tuple() if self._as_tuple else joined
        return self._loss_fn(output, self._label), output


def _one_after_another(routers: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(list(layers)) for layers in zip(*routers, strict=True))
