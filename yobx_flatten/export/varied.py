"""Make test cases with other sizes and values for any module, by calling the module to find accepted inputs."""

# dynamic sizes ──> larger sizes that meet the assertions of the program ──┐
#                                                                          v
# values ──> other signs         ──> does the module accept them? ──> a case, else milder values, else a remark
#        ──> zeros, False, lowest integers, rows with an empty mask
#        ──> large and small values, highest integers

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from ..core.compare import largest_difference, share_of_nan
from ..core.effects import undisturbed
from ..core.private_names.of_torch import pytree
from ..diagnose.comparison import compare_outputs
from ..errors import InvalidArgumentError, ReplayError
from ..errors.failures import first_line, result_or
from ..registry.recipe.aliases import PyTree
from ..runners.signature import Signature, holds, names_in, place_of_sizes
from ..trace.program import traced_inputs
from ..trees.walk import output_names
from .example import Example
from .flat_program import signature_of
from .proof.eager_runs import REFUSALS, Case, clone, eager_steps, written_parameters
from .traced import Traced

_Leaves = Mapping[str, torch.Tensor]

INFINITIES = "infinities"
"""Name of the case with infinite inputs: if a file differs there, the report has a note, but the export succeeds."""

_SECONDS = (0.3, 1.0)
"""Seconds per call: modules below the first limit are checked on all varied inputs, below the second on two."""


def varied_cases(
    example: Example, traced: Traced, *, only_largest: bool = False, magnitudes: bool = True
) -> tuple[list[Case], list[str]]:
    """Make test cases with other sizes and values than the example."""
    # returns: the cases, and notes on inputs that the module refused
    # only_largest: whether to make only the first case
    # magnitudes: whether values may be larger than the example's, which increases rounding errors
    if example.no_data or traced.drawing:
        return [], []
    try:
        signature = signature_of(traced)
    except InvalidArgumentError:  # an input that varies is a number
        return [], ["other sizes and values were not tested, since an input that varies is a number."]
    found = tensors_of(example, signature)
    if not found or len(found) != len(signature.inputs):
        return [], []
    return _Maker(example, traced, signature, found).made(only_largest, magnitudes)


def tensors_of(example: Example, signature: Signature) -> dict[str, torch.Tensor]:
    wanted = {name for name, _, _ in signature.inputs}
    return {name: leaf for name, leaf in example.leaves.items() if name in wanted and isinstance(leaf, torch.Tensor)}


def resized_leaves(example: Example, signature: Signature, sizes: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
    """Return the example inputs, repeated or truncated to the given sizes; ``None`` if the sizes are impossible."""
    wanted = {name: found for name, _, found in signature.inputs}
    made: dict[str, torch.Tensor] = {}
    for name, leaf in tensors_of(example, signature).items():
        other = leaf
        for axis, size in enumerate(wanted[name]):
            if isinstance(size, Mapping):
                if any(part and part not in sizes for part in size):
                    return None
                length = sum(factor * (sizes[part] if part else 1) for part, factor in size.items())
                if length < 1 or leaf.shape[axis] < 1:
                    return None
                if length != leaf.shape[axis]:
                    places = torch.arange(length, device=leaf.device) % leaf.shape[axis]
                    other = other.index_select(axis, places)
        made[name] = other
    return made


def arguments_with(example: Example, made: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example arguments with some tensors replaced: ``made`` has the new tensor for each leaf name."""
    # called inside `register_flattening_functions`
    own = example.leaves
    by_id = {id(own[name]): tensor for name, tensor in made.items()}

    def replaced(leaf: PyTree) -> PyTree:
        found = by_id.get(id(leaf), leaf)
        return found.clone() if isinstance(found, torch.Tensor) else found

    args, kwargs = pytree.tree_map(replaced, (example.args, dict(example.kwargs)))
    return args, kwargs


def rounding_changes(example: Example, case: Case, traced: Traced, tolerance: float) -> dict[str, float]:
    """Return how much each output of the module changes if the last digits of the inputs change."""
    # at least the tolerance times the largest value of the output
    found: dict[str, float] = {}
    # zeros stay zeros, since a module may treat zero specially; if the module chooses among equal values (`topk`,
    # `sort`), zeros become different tiny numbers with the sign of the zero
    choices = ("aten.topk", "aten.sort", "aten.argsort", "aten.kthvalue", "aten.median", "aten.mode")
    chooses = any(str(node.target).startswith(choices) for node in traced.program.graph.nodes)
    steps = example.runs.steps(case, traced.written, traced.left, twice=True)
    for number in range(3):
        moved = functools.partial(_moved, number=number, chooses=chooses)
        args, kwargs = pytree.tree_map(moved, (case.args, dict(case.kwargs)))
        other_case = dataclasses.replace(case, args=args, kwargs=kwargs)
        others = eager_steps(example.module, other_case, traced.written, traced.left, twice=True)
        for step, other in zip(steps, others, strict=True):
            names = output_names(step.outputs, example.names)
            try:
                apart = compare_outputs(step.outputs, other.outputs, names)
            except ReplayError:  # an output has another size, which rounding does not excuse
                continue
            for name, leaf in zip(names, pytree.tree_leaves(step.outputs), strict=True):
                rounding, largest = apart.get(name, 0.0), 0.0
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    finite = leaf[leaf.isfinite()]
                    largest = float(finite.abs().max()) if finite.numel() else 0.0
                elif rounding and isinstance(leaf, torch.Tensor) and not leaf.is_complex():
                    # if integers may differ, the range of the output is allowed
                    rounding = max(rounding, float(leaf.max() - leaf.min()) if leaf.dtype != torch.bool else 1.0)
                found[name] = max(found.get(name, 0.0), rounding, tolerance * largest)
    return found


def _moved(leaf: PyTree, *, number: int, chooses: bool) -> PyTree:
    """Change the last digits of an input; replace zeros by tiny numbers if the module sorts or selects by value."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    digit = 4 * torch.finfo(leaf.dtype).eps
    factors = ((1 + digit, 1 - digit, 1.0), (1.0, 1 + digit), (1 - digit, 1 + digit))[number]
    other = leaf * _cycled(factors, leaf, 0)
    places = _places(leaf) if number else leaf.numel() - _places(leaf)
    least = (places + 1).to(leaf.dtype) * torch.finfo(leaf.dtype).tiny
    return torch.where(leaf == 0, torch.copysign(least, leaf), other) if chooses else other


class _Maker:
    def __init__(self, example: Example, traced: Traced, signature: Signature, leaves: _Leaves) -> None:
        self._example, self._traced, self._signature, self._leaves = example, traced, signature, leaves
        kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
        self._structured = any(isinstance(part, kind) for part in example.module.modules())
        # embedding_bag reads rows that do not exist without an error
        self._reads_anything = any("embedding_bag" in str(node.target) for node in traced.program.graph.nodes)
        self._refusal = ""
        start = time.perf_counter()
        self._nan = self._share_of_nan(example.case(1))
        self._seconds = time.perf_counter() - start

    def made(self, only_largest: bool, magnitudes: bool) -> tuple[list[Case], list[str]]:
        if self._nan is None:
            return [], []
        first, base, remarks = self._resized()
        kinds: list[tuple[str, Callable[..., torch.Tensor]]] = []
        if not only_largest and not self._structured:
            # for Hugging Face models no kinds are tried, since their inputs depend on each other
            kinds = [("zeros, False and lowest values", _edge)]
            kinds += [("large, small and highest values", _end)] * magnitudes
            kinds += [(INFINITIES, _infinite)]
            kinds = kinds[: 3 if self._seconds < _SECONDS[0] else 1 if self._seconds < _SECONDS[1] else 0]
        cases = [] if first is None else [first]
        for name, value in kinds:
            case, left = self._accepted(name, base, value)
            cases += [] if case is None else [case]
            if left and name != INFINITIES:
                remarks.append(
                    f"{name} of {', '.join(left)} were not replayed: {type(self._example.module).__qualname__} "
                    f"does not accept them{self._refusal}."
                )
        return cases, remarks

    def _resized(self) -> tuple[Case | None, _Leaves, list[str]]:
        """Return a test case with new input sizes, the example inputs resized to them, and notes for the report."""
        is_resizable = self._example.shapes is not None and bool(place_of_sizes(self._signature))
        for sizes in itertools.islice(self._larger(), 5) if is_resizable else ():
            base = resized_leaves(self._example, self._signature, sizes)
            if base is None:
                continue
            ordered = {name for name, leaf in self._leaves.items() if not leaf.is_complex() and _is_ordered(leaf)}
            base = {name: leaf.sort(-1)[0] if name in ordered else leaf for name, leaf in base.items()}
            shapes = [f"{name} {tuple(leaf.shape)}" for name, leaf in base.items()]
            name = f"other sizes: {', '.join(shapes[:2])}{', ...' * (len(shapes) > 2)}"
            case, _ = self._accepted(name, base, _signed)
            plain = self._case(name, base)
            if case is not None or self._accepts(plain):
                return case or plain, base, []
        reason = self._refusal or ": no other sizes that the program accepts were found"
        case, _ = self._accepted("other values", self._leaves, _signed)
        remark = f"other sizes were not replayed{reason}. Pass cases=[Case(name, args, kwargs), ...]."
        return case, self._leaves, [remark] if is_resizable else []

    def _larger(self) -> Iterator[dict[str, int]]:
        """Yield input sizes to try: first all sizes larger than in the example, then each size alone."""
        places = place_of_sizes(self._signature)
        own = {name: self._leaves[leaf].shape[axis] for name, (leaf, axis) in places.items()}
        # double the axes of small inputs, so that there is room for all kinds of values
        is_small = {name: self._leaves[leaf].numel() < 64 for name, (leaf, _) in places.items()}
        grows = {name: 2 * size + 1 if is_small[name] else size + 1 for name, size in own.items()}
        alike = {name: size + size for name, size in own.items()}
        alone = [{**own, name: larger[name]} for larger in (grows, alike) for name in own]
        least, most = self._signature.smallest, self._signature.largest
        known = [one for one in self._signature.relations if isinstance(one, tuple) and names_in(one) <= own.keys()]
        for sizes in (grows, alike, *alone):
            is_within = all(least.get(name, 0) <= size <= most.get(name, size) for name, size in sizes.items())
            if is_within and sizes != own and all(holds(one, sizes) for one in known):
                yield sizes

    def _accepted(self, name: str, base: _Leaves, value: Callable[..., torch.Tensor]) -> tuple[Case | None, list[str]]:
        """Return a test case with new values where the module accepts them, and the names of the unchanged inputs."""
        self._refusal = ""
        made = {leaf: self._value(value, leaf, tensor, 0) for leaf, tensor in base.items()}
        changed = [leaf for leaf in made if made[leaf] is not base[leaf]]
        if not changed:
            return None, []
        case = self._case(name, made)
        if self._accepts(case):
            return case, []
        # the module refuses some input: try each input alone, with milder and milder values
        if self._seconds > _SECONDS[1] / len(changed):
            return None, changed
        kept = dict(base)
        for leaf in changed:
            for tried in (self._value(value, leaf, base[leaf], mildness) for mildness in range(3)):
                if tried is not base[leaf] and self._accepts(self._case(name, {**kept, leaf: tried})):
                    kept[leaf] = tried
                    break
        left = [leaf for leaf in changed if kept[leaf] is base[leaf]]
        case = self._case(name, kept)
        return (case, left) if len(left) < len(changed) and self._accepts(case) else (None, changed)

    def _value(self, value: Callable[..., torch.Tensor], leaf: str, base: torch.Tensor, mildness: int) -> torch.Tensor:
        if not base.numel() or base.is_complex() or (self._reads_anything and not base.is_floating_point()):
            return base
        rows = self._signature.rows.get(leaf)
        number = list(self._leaves).index(leaf)
        made = value(base, number, mildness, rows=rows, structured=self._structured)
        # ordered inputs, such as offsets and positions, stay ordered: of others, PyTorch returns meaningless results
        return made if made is base or not _is_ordered(self._leaves[leaf]) else made.sort(-1)[0]

    def _case(self, name: str, leaves: _Leaves) -> Case:
        return Case(name, *arguments_with(self._example, leaves))

    def _accepts(self, case: Case) -> bool:
        """Return whether the module runs without an error and returns no more NaN than with the example."""
        share = self._share_of_nan(case)
        if share is None or self._nan is None:
            return False
        if share > self._nan:
            self._refusal = " (NaN)"
        return share <= self._nan

    def _share_of_nan(self, case: Case) -> float | None:
        try:
            steps = self._example.runs.steps(case, self._traced.written, self._traced.left, twice=True)
        except InvalidArgumentError as error:
            self._refusal = f": {first_line(error.__cause__ or error)}"[:200]
            return None
        shares = [share_of_nan(leaf) or 0.0 for step in steps for leaf in pytree.tree_leaves(step.outputs)]
        return max(shares, default=0.0)


# -- kinds of values: functions of a tensor, the number of the input, and the required mildness -----------------------


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.numel(), device=like.device).reshape(like.shape)


def _cycled(values: Sequence[float], like: torch.Tensor, number: int) -> torch.Tensor:
    """Fill a tensor like ``like`` with ``values`` in a cycle; a higher ``number`` repeats each value more often."""
    places = _places(like) // len(values) ** number if like.numel() > len(values) ** number else _places(like)
    return torch.tensor(values, dtype=like.dtype, device=like.device)[places % len(values)]


def _distinct(base: torch.Tensor) -> torch.Tensor:
    """Make repeated values distinct, because the order of equal values after a sort is undefined."""
    golden = 0.6180339887
    return base * (0.75 + 0.5 * (_places(base) * golden).frac()).to(base.dtype)


def _is_ordered(example: torch.Tensor) -> bool:
    """Return whether a tensor never decreases, and increases somewhere, along the last axis."""
    if not example.ndim or example.shape[-1] < 2 or _is_switch(example):
        return False
    numbers = example if example.is_floating_point() else example.to(torch.int64)
    steps = numbers[..., 1:] - numbers[..., :-1]
    return bool((steps >= 0).all()) and bool((steps > 0).any())


def _is_switch(base: torch.Tensor) -> bool:
    """Return whether an input is a mask: booleans, or integers that are all 0 or 1."""
    if base.dtype == torch.bool:
        return True
    return not base.is_floating_point() and base.ndim > 1 and bool(((base == 0) | (base == 1)).all())


def _as_mask(base: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    table = torch.stack(list(rows)).to(base.dtype)
    count = base.numel() // base.shape[-1] if base.ndim else 1
    return table[torch.arange(count, device=base.device) % len(rows)].reshape(base.shape)


def _mask_rows(base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three mask rows: true at all positions, true in the first half, and true at no position."""
    length = base.shape[-1] if base.ndim else 1
    places = torch.arange(length, device=base.device)
    return places >= 0, places < (length + 1) // 2, places < 0


def _signed(base: torch.Tensor, number: int, mildness: int, *, rows: int | None, structured: bool) -> torch.Tensor:
    if _is_switch(base):
        whole, part, _ = _mask_rows(base)
        return _as_mask(base, (part, whole) if mildness == 0 else (whole, part))
    if not base.is_floating_point():
        return base.flip(-1) if base.ndim and not structured else base
    factors = ((1.0, -1.0, -0.5, 0.75), (1.0, 0.5, 0.75, 0.9))[min(mildness, 1)]
    return _distinct(base) * _cycled(factors, base, number)


def _edge(base: torch.Tensor, number: int, mildness: int, *, rows: int | None, structured: bool) -> torch.Tensor:
    if _is_switch(base):
        whole, part, none = _mask_rows(base)
        return _as_mask(base, ((whole, none, part), (none, part), (whole, part))[mildness])
    if not base.is_floating_point():
        least = 0 if rows is not None or mildness or base.dtype == torch.uint8 else -1
        return torch.where(_places(base) % 3 == 1, torch.full_like(base, least), base)
    if _is_open_mask(base) and mildness < 2:
        whole, part, none = (torch.zeros(row.shape).masked_fill(~row, -torch.inf) for row in _mask_rows(base))
        return _as_mask(base, ((whole, none, part), (part, whole))[mildness])
    kinds = _cycled((0.0, -0.0, 1.0, -1.0), base, number)
    size = _distinct(torch.where(base == 0, torch.ones_like(base), base))
    if mildness == 0:
        return torch.where(kinds == 0, kinds, kinds * size)  # `kinds * size` would change the sign of -0.0
    return torch.where(kinds == 0, kinds.abs(), size)


def _is_open_mask(base: torch.Tensor) -> bool:
    """Return whether an input is an additive mask: zeros, and values close to minus infinity."""
    hidden = base <= torch.finfo(base.dtype).min / 4
    return base.ndim > 1 and bool(((base == 0) | hidden).all())


def _end(base: torch.Tensor, number: int, mildness: int, *, rows: int | None, structured: bool) -> torch.Tensor:
    if _is_switch(base):
        return base
    if not base.is_floating_point():
        most = int(base.max())
        highest = rows - 1 if rows is not None else (2 * most + 1, most + 1, most)[mildness]
        if highest > torch.iinfo(base.dtype).max:
            return base
        return torch.where(_places(base) % 2 == 0, torch.full_like(base, highest), base)
    if _is_open_mask(base):
        return base
    factors = ((1e3, 1e-3, -1.0, -1e2), (1e2, 1e-2, 1.0, 10.0), (2.0, 0.1, 1.0, 1.5))[mildness]
    return _distinct(base) * _cycled(factors, base, number)


def _infinite(base: torch.Tensor, number: int, mildness: int, *, rows: int | None, structured: bool) -> torch.Tensor:
    if not base.is_floating_point() or _is_open_mask(base):
        return base
    factors = ((1.0, 1.0, torch.inf, 1.0, -torch.inf), (1.0, 1.0, torch.inf), (1.0, 1.0, -torch.inf))[mildness]
    kinds = _cycled(factors, base, number)
    return torch.where(kinds.isinf(), kinds, base)


def dependence_on_padding(module: torch.nn.Module, case: Case, written: Collection[str], tolerance: float) -> str:
    """Return a warning if outputs of one row of a batch depend on the padding of other rows, else ``""``."""
    whole, padded = _masked(module, case, padded=False), _masked(module, case, padded=True)
    if whole is None or padded is None:
        return ""
    cases = whole, padded
    # the module may refuse a mask of ones
    found = result_or(lambda: [eager_steps(module, one, written)[0].outputs for one in cases], lambda error: None)
    if found is None:
        return ""
    rows = len(next(_masks(module, whole)))
    far = {
        name: largest_difference(one[1:], other[1:])
        for name, one, other in zip(output_names(found[0], ()), *map(pytree.tree_leaves, found), strict=True)
        if isinstance(one, torch.Tensor) and one.shape == other.shape and one.shape[:1] == (rows,)
    }
    name = max(far, key=far.__getitem__, default="")
    difference = far.get(name, 0.0)
    if difference <= tolerance:
        return ""
    has_kernels = callable(getattr(module, "set_attn_implementation", None))
    way = ' Another kernel may not: model.set_attn_implementation("eager")' if has_kernels else ""
    return (
        f"The model itself changes a row's output by {difference:.1e} (output {name!r}) when another row is padded, so "
        f"no file agrees with the model at every mask.{way}"
    )


def _masked(module: torch.nn.Module, case: Case, *, padded: bool) -> Case | None:
    """Return a test case without padding, or with padding only in row 0 of the batch; ``None`` for batch size 1."""
    made = Case(case.name, *clone((case.args, dict(case.kwargs))))
    masks = list(_masks(module, made))
    for mask in masks:
        padding = (mask == 0)[int((mask == 0).sum(1).argmax())]
        mask.fill_(1)
        if padded:
            mask[0, padding if bool(padding.any()) else 0] = 0
    return made if masks else None


def _masks(module: torch.nn.Module, case: Case) -> Iterator[torch.Tensor]:
    """Yield the inputs of a test case that mask tokens, if the batch size is at least 2."""
    named: dict[str, Any] = {**inspect.signature(module.forward).bind_partial(*case.args).arguments, **case.kwargs}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or len(value) < 2 or value.is_floating_point():
            continue
        if value.dtype == torch.bool or ("mask" in name and int(value.max()) == 1):
            yield value


def notes_on_fixed_axes(example: Example, traced: Traced) -> list[str]:
    if example.shapes is None:
        return []
    values = dict(zip(example.names, traced_inputs(traced.program), strict=True))
    fixed: dict[int, dict[str, list[int]]] = {}  # by size, since axes of the same size have to change together
    every: dict[int, dict[str, list[int]]] = {}  # the axes that may vary, by size
    for name, leaf, axis, dim in example.axes():
        size, value = leaf.shape[axis], values[name]
        every.setdefault(size, {}).setdefault(name, []).append(axis)
        is_fixed = isinstance(value, torch.Tensor) and not isinstance(value.shape[axis], torch.SymInt)
        if is_fixed and dim == Dim.AUTO and size > 1:  # `make_example` notes sizes of 0 and 1
            fixed.setdefault(size, {}).setdefault(name, []).append(axis)
    places: list[str] = []
    for size, axes in fixed.items():
        # a mask may vary in the program although the model needs as many entries as there are tokens
        tried = [axes] if every[size] == axes else [axes, every[size]]
        if any(_takes_more(example, traced, together) for together in tried):
            each = [(name, axis) for name, those in axes.items() for axis in those]
            places += [f"{name}.shape[{axis}] is fixed at {size} by the trace" for name, axis in each]
    note = f"{', '.join(places)}: the model accepts other sizes; the program and its files refuse them."
    return [note] if places else []


def _takes_more(example: Example, traced: Traced, axes: Mapping[str, list[int]]) -> bool:
    """Return whether the model accepts inputs that are larger by one along the given axes."""
    larger = {name: example.leaves[name] for name in axes}
    for name, axis in ((name, axis) for name, those in axes.items() for axis in those):
        larger[name] = torch.cat([larger[name], larger[name].narrow(axis, -1, 1)], dim=axis)
    args, kwargs = arguments_with(example, larger)
    try:
        written = written_parameters(example.module, traced.written)
        with torch.no_grad(), undisturbed(seed=0, module=example.module, parameters=written):
            example.module(*args, **kwargs)
    except REFUSALS:
        return False
    return True
