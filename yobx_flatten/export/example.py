"""Prepare the inputs of an export: arguments by name, dynamic axes with bounds, and test cases with other sizes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument

from ..core.effects import undisturbed
from ..core.private_names.of_torch import pytree
from ..declare.scopes import options_in_use
from ..errors import DynamicShapesError, InvalidArgumentError
from ..errors.failures import result_or
from ..huggingface.cache_names import after_cache, forward_of, name_in, named_for
from ..huggingface.layer_weights import offloaded_readers, streamed_readers
from ..registry.recipe.aliases import DynamicShapes, PyTree
from ..trace.program import arguments_of, traced_inputs
from ..trees import arguments
from ..trees.shapes import builtin_kind, check_entries, same_container, shapes_of_leaves, with_none_below, without_names
from ..trees.shapes import dynamic_shapes as write_dynamic_shapes
from ..trees.walk import key_name, leaf_names, leaves_of, node_of, plain_names
from .proof.eager_runs import Case, EagerRuns, clone
from .stated_sizes import Relation, names_of, relations_of

if TYPE_CHECKING:
    from ..huggingface.cases import DecodeSizes

Axis: TypeAlias = tuple[str, int]  # name of a leaf of the inputs, axis


# Set an upper bound on every dynamic axis, and check it against the model and its program.
#
#     bounds={"batch": 4, "length": 512, "new": 64}
#
#     input_ids               (batch <= 4, new <= 64)                   an axis that the trace fixes has no bound:
#     attention_mask          (batch <= 4, length <= 512)               frames of a spectrogram, heads, the width of
#     past_key_values.0.key   (batch <= 4, heads, length <= 512, 64)    a layer

_NEW = ("input_ids", "inputs_embeds", "position_ids", "decoder_input_ids")
"""Names of inputs that contain the new tokens of a call, not the cached tokens."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest batch size, sequence length and number of tokens per call of a program; ``None`` for no bound."""

    batch: int | None = None  # number of rows
    length: int | None = None  # number of tokens, in the cache and the mask
    new: int | None = None  # number of tokens of one call

    @classmethod
    def of(cls, given: Mapping[str, int] | None) -> Bounds | None:
        if given is None:
            return None
        known = [field.name for field in dataclasses.fields(cls)]
        wrong = [name for name, most in given.items() if name not in known or type(most) is not int or most < 1]
        if wrong or not given:
            raise InvalidArgumentError(
                'bounds: expected a dict of ints for "batch", "length" and "new" (tokens per call), such as '
                f'{{"batch": 4, "length": 512}}, found {dict(given)!r}.'
            )
        return cls(given.get("batch"), given.get("length"), given.get("new", given.get("length")))

    def __str__(self) -> str:
        return ", ".join(f"{name} {most}" for name, most in vars(self).items() if most is not None)

    def check_positions(self, module: object) -> None:
        config: Any = getattr(module, "config", None)  # only a Hugging Face model states its number of positions
        if self.length is None or not hasattr(config, "get_text_config"):
            return
        text: Any = config.get_text_config(decoder=True)
        for name in ("max_position_embeddings", "max_target_positions"):
            most = getattr(text, name, None)
            if isinstance(most, int) and self.length > most > 0:
                new = {"new": self.new} if self.new is not None and self.new < most else {}
                fitting = {**({} if self.batch is None else {"batch": self.batch}), "length": most, **new}
                raise DynamicShapesError(
                    f"bounds: length={self.length} is above the {most} positions of {type(module).__qualname__} "
                    f"(config.{name}). Pass at most this length:\n    bounds={fitting}"
                )

    def on(
        self, obj: PyTree, shapes: DynamicShapes, path: tuple[str, ...] = (), axes: Mapping[int, str] | None = None
    ) -> DynamicShapes:
        """Return ``shapes`` after setting the ``max`` of each ``Dim`` to the bound of its axis."""
        # path, axes: the place of `obj` in the inputs, and the meanings of its axes, if they are known
        node = None if shapes is None else node_of(obj)
        if node is not None:
            names = [key_name(key) for key in node.keys]
            recipe = node.recipe
            meanings = [None if recipe is None or recipe.axes is None else recipe.axes(name) for name in names]
            specs = [shapes[key] for key in obj] if isinstance(shapes, Mapping) else list(shapes)
            rows = zip(node.children, specs, names, meanings, strict=True)
            below = [self.on(child, spec, (*path, name), meaning) for child, spec, name, meaning in rows]
            is_own = builtin_kind(obj, node) is None  # torch compares `shapes` with what its flatten function returns
            return tuple(below) if is_own and isinstance(shapes, tuple) else same_container(obj, node, below)
        if not isinstance(obj, torch.Tensor) or not isinstance(shapes, (Mapping, list, tuple)):
            return shapes
        entries = dict(shapes) if isinstance(shapes, Mapping) else dict(enumerate(shapes))
        for axis, dim in entries.items():
            most, meaning = self._most(path, axes, axis)
            kind = getattr(getattr(dim, "type", None), "name", "")
            if most is None or kind not in ("AUTO", "DYNAMIC") or dim.max is not None:
                continue
            if obj.shape[axis] <= most:
                entries[axis] = getattr(Dim, kind)(min=dim.min, max=max(most, 3))  # torch makes 2 to 2 a constant
            elif axes is not None or (not obj.is_floating_point() and obj.dim() < 3):
                raise _above(f"{'.'.join(path)}.axis {axis}", obj.shape[axis], most, meaning)
        return entries

    def check_program(self, example: Example, program: ExportedProgram) -> None:
        """Raise an error if the example inputs exceed the bound of a dynamic axis of the program."""
        values = dict(zip(example.names, traced_inputs(program), strict=True))
        for name, leaf, axis, dim in example.axes():
            most, meaning = self._most((name.split(".")[0],), None, axis)
            if getattr(dim, "max", None) is not None or most is None or leaf.shape[axis] <= most:
                continue
            size: Any = values[name].shape[axis] if isinstance(values[name], torch.Tensor) else None
            if isinstance(size, torch.SymInt):
                known = program.range_constraints.get(size.node.expr)
                # torch.export may keep a symbol for a size with one possible value
                if known is None or known.lower != known.upper:
                    raise _above(f"{name}.axis {axis}", leaf.shape[axis], most, meaning)

    def holds(self, inputs: PyTree, shapes: DynamicShapes, steps: int = 1) -> bool:
        """Return whether all input sizes stay within the bounds if ``steps`` calls extend the same cache."""
        leaves = zip(leaf_names(inputs), leaves_of(inputs), strict=True)
        new = max((leaf.shape[1] for name, leaf in leaves if name in _NEW and leaf.dim() > 1), default=0)
        for name, leaf, axis, dim in dynamic_axes(inputs, shapes):
            most = getattr(dim, "max", None)
            if most is not None and axis < leaf.dim():
                counts = not leaf.is_floating_point() or after_cache(name) is not None
                grows = (steps - 1) * new if axis and counts and name not in _NEW else 0
                if leaf.shape[axis] + grows > most:
                    return False
        return True

    def _most(self, path: tuple[str, ...], axes: Mapping[int, str] | None, axis: int) -> tuple[int | None, str]:
        meaning = ("length" if axis else "batch") if axes is None else axes.get(axis, "")
        meaning = "new" if meaning == "length" and path[0] in _NEW else meaning
        return getattr(self, meaning, None), meaning


def dynamic_axes(inputs: PyTree, shapes: DynamicShapes) -> Iterator[tuple[str, torch.Tensor, int, Any]]:
    """Yield the input name, tensor, axis number and ``Dim`` of each dynamic input axis."""
    for name, leaf, dims in zip(leaf_names(inputs), leaves_of(inputs), shapes_of_leaves(inputs, shapes), strict=True):
        for axis, dim in (dims or {}).items() if isinstance(leaf, torch.Tensor) else ():
            if dim is not None:
                yield name, leaf, axis, dim


def _above(place: str, size: int, most: int, meaning: str) -> DynamicShapesError:
    return DynamicShapesError(
        f"{place}: size {size} of the example is above the bound {most} of {meaning!r}. Pass a smaller example, or a "
        f'larger bound:\n    bounds={{"{meaning}": {size}}}'
    )


@dataclasses.dataclass(frozen=True)
class Example:
    """A module with the example arguments and dynamic shapes of its export."""

    module: torch.nn.Module
    args: tuple[Any, ...]  # positional arguments
    kwargs: Mapping[str, Any]  # keyword arguments
    shapes: Any  # the dynamic shapes of every input by parameter name; `None` if every size is fixed
    # names that the caller gave to axes, by input and axis
    axis_names: Mapping[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    cache_is: str = ""  # name of the keyword argument that is the cache; `""` without one
    no_data: str = ""  # why the example cannot be run; empty if it can
    why_not: str = ""  # why inputs of other sizes cannot be made; empty if they can
    remarks: tuple[str, ...] = ()  # notes for the report
    bounds: Bounds | None = None  # the largest sizes; `None` without bounds
    relations: tuple[Relation, ...] = ()  # what the caller stated of sizes, which the trace asserts
    loop: bool = True  # whether calls follow each other, and each gets the changed arguments of the previous call

    @property
    def inputs(self) -> dict[str, Any]:
        return _by_name(self.module, self.args, self.kwargs)

    @functools.cached_property
    def names(self) -> list[str]:
        return leaf_names(self.inputs)

    @property
    def leaves(self) -> dict[str, Any]:
        return dict(zip(self.names, leaves_of(self.inputs), strict=True))

    def axes(self) -> Iterator[tuple[str, torch.Tensor, int, Any]]:
        return dynamic_axes(self.inputs, self.shapes)

    @functools.cached_property
    def runs(self) -> EagerRuns:
        return EagerRuns(self.module)

    def case(self, steps: int) -> Case:
        return Case("the example", self.args, self.kwargs, steps)

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return _by_name(self.module, args, named_for(forward_of(self.module), kwargs))

    def holds(self, case: Case, steps: int) -> bool:
        if self.shapes is None or self.bounds is None:
            return True
        return self.bounds.holds(self.of_call(case.args, case.kwargs), self.shapes, steps)

    def other_cases(self, steps: int, *, only_largest: bool = False) -> tuple[list[Case], list[str]]:
        # only_largest: whether to make only the case with the most tokens
        if self.shapes is None or self.why_not:
            return [], []
        from ..huggingface.cases import default_sizes

        cache, kwargs = self.kwargs.get(self.cache_is), self.kwargs
        sizes, remark = default_sizes(self.module, cache)
        if only_largest:
            sizes = [max(sizes, key=lambda s: s.batch * (s.past + s.new))]
        if cache is not None and not pytree.tree_leaves(cache):  # a program for an empty cache takes no filled cache
            kwargs = {name: value for name, value in kwargs.items() if name != self.cache_is}
            sizes = [dataclasses.replace(s, past=0, new=s.past + s.new) for s in sizes]
        made = [{**self.kwargs, **resized(self.module, kwargs, s, seed)} for seed, s in enumerate(sizes)]
        names = [s.without_cache if cache is None else str(s) for s in sizes]
        cases = [Case(name, (), inputs, steps) for name, inputs in zip(names, made, strict=True)]
        return cases, [remark] if remark else []


def make_example(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: DynamicShapes,
    bounds: Bounds | None = None,
    *,
    loop: bool = True,
) -> Example:
    """Return the :class:`Example` of an export; must be called inside a ``register_flattening_functions`` block."""
    # shapes: dynamic shapes; `"auto"` writes them, `None` keeps every size fixed
    forward = forward_of(module)
    kwargs = named_for(forward, kwargs)  # the name of the cache depends on the version of transformers
    cache_is = name_in(kwargs) or ""
    inputs = _by_name(module, args, kwargs)
    shapes = arguments.with_attached(module, forward, shapes)
    shapes, assumptions = arguments.by_parameter(forward, shapes)
    if isinstance(shapes, Mapping):
        shapes = named_for(forward, shapes)
    brought = {*streamed_readers(module), *offloaded_readers(module)}
    no_data = arguments.has_no_data(module, pytree.tree_leaves(inputs), brought)
    arguments.check_no_modules(inputs)
    why_not, remarks = sizes_of(module, args, kwargs, cache_is)
    given = not (shapes is None or (isinstance(shapes, str) and shapes == "auto"))
    example = Example(module, args, kwargs, None, {}, cache_is, no_data, no_data or why_not, tuple(remarks), bounds)
    example = _with_shapes(dataclasses.replace(example, loop=loop), shapes, assumptions)
    cache, fixed = kwargs.get(cache_is), []  # dynamic axes that torch.export fixes since their size is 0 or 1
    # a caller who passes shapes for an empty cache wants a program for the prefill
    if example.shapes is not None and cache is not None and not pytree.tree_leaves(cache) and not given:
        fixed = [f"{cache_is} is empty"]
    elif example.shapes is not None:
        fixed = [f"{name} axis {axis}" for name, leaf, axis, _ in example.axes() if leaf.shape[axis] in (0, 1)]
    if fixed and not example.why_not:
        example = _replaced(example, shapes, assumptions, fixed)
    if fixed and example.why_not:
        remark = f"sizes of 0 and 1 in the example stay fixed ({', '.join(fixed)}): pass an example of size 2 or more."
        example = dataclasses.replace(example, remarks=(*example.remarks, remark))
    return example


def resized(module: torch.nn.Module, kwargs: Mapping[str, Any], sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Make inputs of a Hugging Face model with the given sizes, including a cache if ``kwargs`` contains a cache."""
    from ..huggingface.cases import decode_inputs

    like = {name: value for name, value in kwargs.items() if value is not None}
    with undisturbed(module=module):
        return {**kwargs, **decode_inputs(module, sizes, like, seed)}


def _by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def sizes_of(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cache_is: str
) -> tuple[str, list[str]]:
    """Return the reason why test inputs cannot be resized (``""`` if they can), and warnings for the report."""
    if not options_in_use()["patch_transformers"]:
        return "there are positional arguments" if args else "transformers is not imported", []
    from ..huggingface.cases import ambiguous_without, why_not_resizable

    missing = ambiguous_without(module, kwargs)
    why_not = "there are positional arguments" if args else why_not_resizable(module, kwargs, cache_is) or ""
    return why_not, [missing] if missing else []


def _replaced(example: Example, shapes: DynamicShapes, assumptions: tuple[Any, ...], fixed: list[str]) -> Example:
    """Return the example with larger sizes for the axes of size 0 or 1, if the model accepts the larger sizes."""
    from ..huggingface.cases import DecodeSizes

    module = example.module

    def called() -> dict[str, Any]:
        larger = resized(module, example.kwargs, DecodeSizes(), 0)
        with torch.no_grad(), undisturbed(module=module):
            module(**clone(larger))
        return larger

    larger = result_or(called, lambda error: error)  # some models accept one token at a time (ProphetNet)
    if isinstance(larger, Exception):
        refusal = f"{type(larger).__name__}: {(str(larger).splitlines() or [''])[0]}"
        return dataclasses.replace(example, why_not=f"the model refuses {DecodeSizes()} ({refusal})")
    remark = (
        f"the example was replaced by another with {DecodeSizes()}: torch.export fixes sizes of 0 and 1 "
        f"({', '.join(fixed)})."
    )
    example = dataclasses.replace(example, kwargs=larger, remarks=(*example.remarks, remark))
    return _with_shapes(example, shapes, assumptions)


def _with_shapes(example: Example, shapes: DynamicShapes, assumptions: tuple[Any, ...]) -> Example:
    """Return the example with its dynamic shapes, the names of its axes and the relations between its sizes."""
    if shapes is None:
        return example
    module, inputs = example.module, example.inputs
    for name in swallowed_names(module, example.kwargs):
        close = difflib.get_close_matches(name, list(_parameters(module)), n=1, cutoff=0.85)
        if close:
            raise InvalidArgumentError(
                f"{type(module).__qualname__}.forward has no parameter {name!r}, but its **kwargs would accept the "
                f"name silently. Did you mean {close[0]!r}?"
            )
    found: dict[str, Any] = {}
    if isinstance(shapes, str) and shapes == "auto":
        plain = write_dynamic_shapes(inputs)
    else:
        stated = arguments.without_specs(inputs, arguments.shapes_by_name(inputs, shapes), assumptions)
        shapes = {name: with_none_below(inputs.get(name), below) for name, below in stated.shapes.items()}
        check_entries(inputs, shapes)
        plain, leaves = without_names(shapes), leaf_names(inputs)
        rows = list(zip(leaves, leaves_of(inputs), shapes_of_leaves(inputs, shapes), strict=True))
        found = {"axis_names": names_of(rows, stated), "relations": relations_of(leaves, stated)}
    plain = plain if example.bounds is None else example.bounds.on(inputs, plain)
    return dataclasses.replace(example, shapes=plain, **found)


def swallowed_names(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that ``forward`` takes in its ``**kwargs``."""
    parameters = _parameters(module)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in kwargs if name not in parameters]


def check_all_read(
    module: torch.nn.Module, names: Sequence[str], program: ExportedProgram, inputs: Mapping[str, Any]
) -> None:
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    owners = [name for name, value in inputs.items() for _ in pytree.tree_leaves(value)]
    pairs = zip(owners, arguments_of(program), strict=True)
    in_graph = [(name, arg.name in used) for name, arg in pairs if not isinstance(arg, ConstantArgument)]
    unread = [name for name in names if (name, False) in in_graph and (name, True) not in in_graph]
    if unread:
        parameters = [p.name for p in _parameters(module).values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        hint = arguments.did_you_mean(unread[:1], parameters)
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward has no parameter {', '.join(map(repr, unread))}, and reads no such "
            f"name from its **kwargs. Its parameters are {', '.join(parameters)}.{hint}"
        )


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # the parameters of a scripted module are unknown
        return {}


def varying_axes(example: Example) -> set[Axis]:
    return {(name, axis) for name, leaf, axis, _ in example.axes() if leaf.shape[axis] > 1}


def rows_of(example: Example) -> set[tuple[str, int]]:
    """For each input tensor, return the first axis with the batch size (the size of axis 0 of the first tensor)."""
    tensors = {name: leaf for name, leaf in example.leaves.items() if isinstance(leaf, torch.Tensor) and leaf.ndim}
    rows = next((leaf.shape[0] for leaf in tensors.values()), None)
    return {(name, leaf.shape.index(rows)) for name, leaf in tensors.items() if rows in leaf.shape}


def narrowed(example: Example, kept: Collection[Axis]) -> DynamicShapes:
    inputs = example.inputs
    rows = zip(plain_names(inputs), example.names, shapes_of_leaves(inputs, example.shapes), strict=True)
    stated = [(path, name, dims) for path, name, dims in rows if dims]
    fewer = {path: {axis: dim for axis, dim in dims.items() if (name, axis) in kept} for path, name, dims in stated}
    return write_dynamic_shapes(inputs, fewer)
