"""Join the outputs of the microbatches into the output of the whole batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from yobx_flatten import compare_specs, leaves
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.trees import Leaf

from ..errors import JoinError
from .spec import Rule, Rules, is_below, read_rules, rule_for


def join(
    outputs: Sequence[Any],
    weights: Sequence[float | None],
    *,
    rows: Sequence[int | None] | None = None,
    merge: Any = None,
) -> Any:
    """Join the outputs of all microbatches of a batch into the output of the whole batch.

    Tensors are concatenated along axis 0. Tensors in an object of a registered class, such as a cache, are concatenated
    along the batch axis that is registered for the class. Floating-point scalar tensors are averaged with
    ``weights``. Other values must be equal in all microbatches, and one of them is returned. Tensors whose size along
    axis 0 is not the number of rows of the microbatch must also be equal.

    Args:
        outputs: list with the output of each microbatch, any nested object.
        weights: one weight per microbatch, for averages of scalars. Pass numbers of rows, or the weights that the loss
            function returned. If a weight is ``None``, scalars cannot be averaged.
        rows: number of rows of each microbatch. Tensors with these sizes on axis 0 are joined. Default: ``weights``.
        merge: how to join the outputs. ``None`` and ``True`` stand for the default rules above. A function gets the
            list of outputs, and returns the joined output. Other rules are passed as a tree, or as a mapping from key
            paths such as ``"outputs['logits']"`` to rules. A rule is a :class:`TensorChunkSpec` or :class:`Replicate`.
            The rule of a container applies to all values in the container.

    Returns:
        The joined output. A single output is returned unchanged if ``merge`` is ``None`` or ``True``.

    Raises:
        JoinError: outputs cannot be joined; the message names the key path of the value.

    >>> first = {"y": torch.tensor([1, 2]), "n": torch.tensor(1.0)}
    >>> join([first, {"y": torch.tensor([3]), "n": torch.tensor(4.0)}], [2, 1])
    {'y': tensor([1, 2, 3]), 'n': tensor(2.)}
    """
    if not outputs:
        raise JoinError("There are no outputs to join.")
    if merge is not None and not isinstance(merge, (bool, type)) and callable(merge):
        return merge(list(outputs))
    if len(outputs) != len(weights):
        raise JoinError(f"Each microbatch needs one weight, found {len(outputs)} outputs and {len(weights)} weights.")
    rules: Rules = {}
    if merge is not None and merge is not True:
        names_paths = isinstance(merge, Mapping) and all(isinstance(k, str) and is_below(k, "outputs") for k in merge)
        rules = read_rules(merge, "" if names_paths else "outputs", JoinError)
    if len(outputs) == 1 and not rules:
        return outputs[0]
    spec = common_spec(outputs)
    columns = list(zip(*(leaves(output, name="outputs") for output in outputs), strict=True))
    paths = [column[0].path for column in columns]
    for written in rules:
        if not any(is_below(path, written) for path in paths):
            raise JoinError(f"merge_output: {written!r} is not among the outputs. The key paths are:\n    {paths}")
    counts = weights if rows is None else rows
    joined = [_join_leaf(column, weights, counts, rule_for(column[0].path, rules)) for column in columns]
    return pytree.tree_unflatten(joined, spec)


def common_spec(outputs: Sequence[Any]) -> pytree.TreeSpec:
    specs = [pytree.tree_structure(output) for output in outputs]
    for index, spec in enumerate(specs):
        if spec != specs[0]:
            found = compare_specs(specs[0], spec, name="outputs", names=("microbatch 0", f"microbatch {index}"))
            text = "\n".join(map(str, found)) or f"{specs[0]}\n{spec}"
            raise JoinError(f"The outputs of microbatches 0 and {index} have different structures:\n{text}")
    return specs[0]


def _join_leaf(
    column: Sequence[Leaf], weights: Sequence[float | None], rows: Sequence[float | None], rule: Rule | None
) -> Any:
    path, values = column[0].path, [leaf.value for leaf in column]
    if rule is not None and rule.reduce is not None:
        return functools.reduce(rule.reduce, values, rule.init)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) != len(values) or (rule is not None and rule.dim is None):
        return _the_same(path, values)
    # microbatches share a tensor that was not split
    if rule is None and all(value is values[0] for value in values):
        return values[0]
    if rule is not None and rule.dim is not None:
        return _cat(path, tensors, rule.dim)
    if column[0].axes is not None:
        for axis, meaning in column[0].axes.items():
            if meaning == "batch":
                return _cat(path, tensors, axis)
        return _the_same(path, tensors)
    if tensors[0].dim() == 0:
        return _mean(path, tensors, weights)
    if None in rows and all(_equal(t, tensors[0]) for t in tensors):
        raise JoinError(
            f"{path} is the same in all microbatches, so RoundPipe cannot see whether to concatenate it (one value per "
            "row) or to keep it once (one value for the whole batch). Choose one:\n"
            f"    RoundPipeRunConfig(merge_output={{{path!r}: TensorChunkSpec(0)}})\n"
            f"    RoundPipeRunConfig(merge_output={{{path!r}: Replicate}})"
        )
    if all(t.dim() > 0 and count in (None, t.shape[0]) for t, count in zip(tensors, rows, strict=True)):
        return _cat(path, tensors, 0)
    if all(_equal(t, tensors[0]) for t in tensors):
        return tensors[0]
    shapes = [tuple(t.shape) for t in tensors]
    axis = next((axis for axis, size in enumerate(shapes[0]) if size == rows[0]), 0)
    raise JoinError(
        f"{path} cannot be joined: the microbatches have {list(rows)} rows, but axis 0 of the tensors has other sizes: "
        f"{shapes}. The tensors differ, so all are needed. Name the axis to join along, or pass a function:\n"
        f"    RoundPipeRunConfig(merge_output={{{path!r}: TensorChunkSpec({axis})}})\n"
        "    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
    )


def _cat(path: str, tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    try:
        return torch.cat(list(tensors), dim=axis)
    except (RuntimeError, IndexError, TypeError) as error:
        raise JoinError(
            f"{path}: shapes {[tuple(t.shape) for t in tensors]} cannot be concatenated along axis {axis}: {error}"
        ) from error


def _mean(path: str, tensors: Sequence[torch.Tensor], given: Sequence[float | None]) -> torch.Tensor:
    if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        value: torch.Tensor = _the_same(path, tensors)
        return value
    weights = [weight for weight in given if weight is not None]
    if len(weights) != len(tensors):
        if all(_equal(tensor, tensors[0]) and not tensor.requires_grad for tensor in tensors):
            return tensors[0]
        raise JoinError(
            f"{path} cannot be joined: scalars are averaged, weighted by rows, but a microbatch's rows are unknown. "
            "Pass a function that joins the outputs:\n    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
        )
    total = math.fsum(weights)  # a tensor with weight 0 is ignored below, because it may be NaN
    if total == 0:
        return torch.zeros_like(tensors[0])
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    wide = tensors[0].dtype if tensors[0].device.type == "mps" else wide  # MPS has no float64
    terms = [t.to(wide) * (weight / total) for t, weight in zip(tensors, weights, strict=True) if weight]
    return torch.stack(terms).sum().to(tensors[0].dtype)


def _the_same(path: str, values: Sequence[Any]) -> Any:
    first = values[0]
    for index, value in enumerate(values):
        if not _equal(value, first):
            raise JoinError(
                f"{path} differs: {_short(first)} in microbatch 0, {_short(value)} in microbatch {index}. Only values "
                "that are concatenated, averaged or reduced may differ. Pass a function that joins the outputs:\n"
                "    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
            )
    return first


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    try:
        same = one == other
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    except (ValueError, TypeError, RuntimeError):
        return False


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.numel() > 4 else str(value.tolist())
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
