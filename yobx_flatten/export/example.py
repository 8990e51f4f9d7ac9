"""Build the example of an export: arguments by name, dynamic axes, and test cases with other sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.export import ExportedProgram

from ..core.effects import undisturbed
from ..declare.scopes import options_in_use
from ..errors import InvalidArgumentError
from ..errors.failures import result_or
from ..huggingface.cache_names import forward_of, name_in, named_for
from ..huggingface.layer_weights import offloaded_readers, streamed_readers
from ..private_names.of_torch import pytree
from ..recipe.aliases import DynamicShapes, PyTree
from ..runners.signature import Signature
from ..trees.arguments import check_no_modules, has_no_data, shapes_by_name
from ..trees.dynamic_specs import by_parameter, with_attached, without_specs
from ..trees.shapes import check_entries, shapes_of_leaves, with_none_below, without_names
from ..trees.shapes import dynamic_shapes as write_dynamic_shapes
from ..trees.walk import leaf_names, leaves_of, plain_names
from .bounds import Bounds
from .proof.eager_runs import Case, EagerRuns, clone
from .stated_sizes import Relation, names_of, relations_of, replaced_forward

if TYPE_CHECKING:
    from ..huggingface.cases import DecodeSizes

Axis: TypeAlias = tuple[str, int]  # name of a leaf of the inputs, axis


@dataclasses.dataclass(frozen=True)
class Example:
    """A module with the arguments that the module is exported with."""

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
        """All inputs by parameter name."""
        return _by_name(self.module, self.args, self.kwargs)

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all leaves of the inputs, in order."""
        return leaf_names(self.inputs)

    @property
    def leaves(self) -> dict[str, Any]:
        """All leaves of the inputs by name."""
        return dict(zip(self.names, leaves_of(self.inputs), strict=True))

    def axes(self) -> Iterator[tuple[str, torch.Tensor, int, Any]]:
        """Yield name, tensor, axis and dynamic shape of each axis of the inputs that is not stated to be fixed."""
        entries = shapes_of_leaves(self.inputs, self.shapes)
        for name, leaf, dims in zip(self.names, leaves_of(self.inputs), entries, strict=True):
            for axis, dim in (dims or {}).items() if isinstance(leaf, torch.Tensor) else ():
                if dim is not None:
                    yield name, leaf, axis, dim

    @functools.cached_property
    def runs(self) -> EagerRuns:
        """The outputs of the eager module for the test cases, each computed when first needed."""
        return EagerRuns(self.module)

    def case(self, steps: int) -> Case:
        """Return the example's own arguments as a test case of ``steps`` calls."""
        return Case("the example", self.args, self.kwargs, steps)

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter name."""
        return _by_name(self.module, args, named_for(forward_of(self.module), kwargs))

    def holds(self, case: Case, steps: int) -> bool:
        """Return whether ``steps`` calls of a test case stay within the bounds."""
        if self.shapes is None or self.bounds is None:
            return True
        return self.bounds.holds(self.of_call(case.args, case.kwargs), self.shapes, steps)

    def named(self, sizes: DecodeSizes) -> str:
        """Return the sizes of a call as text, without a number of cached tokens if the example has no cache."""
        return sizes.without_cache if self.kwargs.get(self.cache_is) is None else str(sizes)

    def other_cases(self, steps: int, *, only_largest: bool = False) -> tuple[list[Case], list[str]]:
        """Make test cases with other sizes than those of the example."""
        # only_largest: whether to make only the case with the most tokens
        if self.shapes is None or self.why_not:
            return [], []
        from ..huggingface.cases import default_sizes

        sizes, remark = default_sizes(self.module, self.kwargs.get(self.cache_is))
        if only_largest:
            sizes = [max(sizes, key=lambda s: s.batch * (s.past + s.new))]
        cache, kwargs = self.kwargs.get(self.cache_is), self.kwargs
        if cache is not None and not pytree.tree_leaves(cache):  # a program for an empty cache takes no filled cache
            kwargs = {name: value for name, value in kwargs.items() if name != self.cache_is}
            sizes = [dataclasses.replace(s, past=0, new=s.past + s.new) for s in sizes]
        made = [{**self.kwargs, **resized(self.module, kwargs, s, seed)} for seed, s in enumerate(sizes)]
        cases = [Case(self.named(s), (), inputs, steps) for s, inputs in zip(sizes, made, strict=True)]
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
    """Return the checked arguments of an export as an ``Example``. Needs ``register_flattening_functions``."""
    # shapes: dynamic shapes; `"auto"` writes them, `None` keeps every size fixed
    forward = forward_of(module)
    kwargs = named_for(forward, kwargs)  # the name of the cache depends on the version of transformers
    cache_is = name_in(kwargs) or ""
    inputs = _by_name(module, args, kwargs)
    shapes = with_attached(module, forward, shapes)
    shapes, assumptions = by_parameter(forward, shapes)
    if isinstance(shapes, Mapping):
        shapes = named_for(forward, shapes)
    brought = {*streamed_readers(module), *offloaded_readers(module)}
    no_data = has_no_data(module, pytree.tree_leaves(inputs), brought)
    check_no_modules(inputs)
    why_not, remarks = sizes_of(module, args, kwargs, cache_is)
    given = not (shapes is None or (isinstance(shapes, str) and shapes == "auto"))
    found = _complete(module, inputs, kwargs, shapes, assumptions, bounds)
    why_not, notes = no_data or why_not, tuple(remarks)
    stated = (bounds, found.relations, loop)
    example = Example(module, args, kwargs, found.shapes, found.names, cache_is, no_data, why_not, notes, *stated)
    fixed = _fixed_axes(example, given)
    if fixed and not example.why_not:
        example = _replaced(example, shapes, assumptions, fixed, bounds)
    if fixed and example.why_not:
        remark = f"sizes of 0 and 1 in the example stay fixed ({', '.join(fixed)}): pass an example of size 2 or more."
        example = dataclasses.replace(example, remarks=(*example.remarks, remark))
    return example


def resized(module: torch.nn.Module, kwargs: Mapping[str, Any], sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    """Make the inputs of an example in other sizes for a Hugging Face model, with a cache if the example has one."""
    from ..huggingface.cases import decode_inputs

    like = {name: value for name, value in kwargs.items() if value is not None}
    with undisturbed(module=module):
        return {**kwargs, **decode_inputs(module, sizes, like, seed)}


def _by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def sizes_of(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cache_is: str
) -> tuple[str, list[str]]:
    """Return why inputs of other sizes cannot be made (``""`` if they can), and notes on the model's settings."""
    if not options_in_use()["patch_transformers"]:
        return "there are positional arguments" if args else "transformers is not imported", []
    from ..huggingface.cases import ambiguous_without, why_not_resizable

    missing = ambiguous_without(module, kwargs)
    why_not = "there are positional arguments" if args else why_not_resizable(module, kwargs, cache_is) or ""
    return why_not, [missing] if missing else []


def _replaced(
    example: Example, shapes: DynamicShapes, assumptions: tuple[Any, ...], fixed: list[str], bounds: Bounds | None
) -> Example:
    """Replace the inputs by inputs without sizes 0 and 1; if the model refuses them, ``why_not`` has the reason."""
    from ..huggingface.cases import DecodeSizes

    module = example.module

    def called() -> dict[str, Any]:
        larger = resized(module, example.kwargs, DecodeSizes(), 0)
        with torch.no_grad(), undisturbed(module=module):
            module(**clone(larger))
        return larger

    def refused(error: Exception) -> str:
        lines = str(error).splitlines() or [""]
        return f"the model refuses {DecodeSizes()} ({type(error).__name__}: {lines[0]})"

    larger: dict[str, Any] | str = result_or(called, refused)  # some models accept one token at a time (ProphetNet)
    if isinstance(larger, str):
        return dataclasses.replace(example, why_not=larger)
    found = _complete(module, _by_name(module, example.args, larger), larger, shapes, assumptions, bounds)
    remark = (
        f"the example was replaced by another with {DecodeSizes()}: torch.export fixes sizes of 0 and 1 "
        f"({', '.join(fixed)})."
    )
    remarks = (*example.remarks, remark)
    return dataclasses.replace(
        example, kwargs=larger, shapes=found.shapes, axis_names=found.names, relations=found.relations, remarks=remarks
    )


# -- dynamic shapes ----------------------------------------------------------------------------------------------------


class _Completed(NamedTuple):
    shapes: Any  # in the form torch wants them: by parameter name
    names: dict[tuple[str, int], str]
    relations: tuple[Relation, ...] = ()


def _complete(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    shapes: DynamicShapes,
    assumptions: tuple[Any, ...],
    bounds: Bounds | None,
) -> _Completed:
    """Return the dynamic shapes of all inputs, the names of axes, and the relations between sizes."""
    if shapes is None:
        return _Completed(None, {})
    check_spelling(module, swallowed_names(module, kwargs))
    if isinstance(shapes, str) and shapes == "auto":
        found = _Completed(write_dynamic_shapes(inputs), {})
    else:
        stated = without_specs(inputs, shapes_by_name(inputs, shapes), assumptions)
        shapes = {name: with_none_below(inputs.get(name), below) for name, below in stated.shapes.items()}
        check_entries(inputs, shapes)
        entries, plain = shapes_of_leaves(inputs, shapes), without_names(shapes)
        leaves = leaf_names(inputs)
        rows = list(zip(leaves, leaves_of(inputs), entries, strict=True))
        found = _Completed(plain, names_of(rows, stated), relations_of(leaves, stated))
    return found if bounds is None else found._replace(shapes=bounds.on(inputs, found.shapes))


def _fixed_axes(example: Example, given: bool) -> list[str]:
    """Return the dynamic axes that torch.export fixes because their size in the example is 0 or 1."""
    if example.shapes is None:
        return []
    cache = example.kwargs.get(example.cache_is)
    # a caller who passes shapes for an empty cache wants a program for the prefill
    if cache is not None and not leaf_names(cache) and not given:
        return [f"{example.cache_is} is empty"]
    return [f"{name} axis {axis}" for name, leaf, axis, _ in example.axes() if leaf.shape[axis] in (0, 1)]


# Give `forward` a parameter for each argument that it takes in its `**kwargs`, during a trace.
#
# `torch.export` takes dynamic shapes by the parameters of `forward`, and accepts none for arguments in `**kwargs`
# (https://github.com/pytorch/pytorch/issues/150371). Hugging Face models take half of their arguments there.


def swallowed_names(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    """List the arguments that ``forward`` receives through ``**kwargs``."""
    parameters = _parameters(module)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in kwargs if name not in parameters]


@contextlib.contextmanager
def named_in_forward(module: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """In a ``with`` block, replace the ``**kwargs`` of ``forward`` by keyword parameters with these names."""
    if not names:
        yield
        return
    original = module.forward
    kept = [p for p in _parameters(module).values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    forward.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined] # what inspect reads first
    with replaced_forward(module, forward):
        yield


def check_spelling(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Refuse names that are probably misspelled parameters, and that ``**kwargs`` would accept silently."""
    known = list(_parameters(module))
    for name in names:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if close:
            raise InvalidArgumentError(
                f"{type(module).__qualname__}.forward has no parameter {name!r}, but its **kwargs would accept the "
                f"name silently. Did you mean {close[0]!r}?"
            )


def check_all_read(
    module: torch.nn.Module, names: Sequence[str], program: ExportedProgram, inputs: Mapping[str, Sequence[str]]
) -> None:
    """Refuse tensors that were passed through ``**kwargs`` and that ``forward`` did not read."""
    # inputs: for each argument, the graph inputs of its tensors
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    unread = [name for name in names if inputs.get(name) and not used.intersection(inputs[name])]
    if unread:
        parameters = [p.name for p in _parameters(module).values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        close = difflib.get_close_matches(unread[0], parameters, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward has no parameter {', '.join(map(repr, unread))}, and reads no such "
            f"name from its **kwargs. Its parameters are {', '.join(parameters)}.{hint}"
        )


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # the parameters of a scripted module are unknown
        return {}


def tensors_of(example: Example, signature: Signature) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors of an example that are inputs of its program."""
    wanted = {name for name, _, _ in signature.inputs}
    return {name: leaf for name, leaf in example.leaves.items() if name in wanted and isinstance(leaf, torch.Tensor)}


def resized_leaves(example: Example, signature: Signature, sizes: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
    """Return the inputs of an example in other sizes by name, data repeated or truncated; ``None`` if impossible."""
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
    """Return an example's arguments with copies of the tensors in ``made``. Needs ``register_flattening_functions``."""
    own = example.leaves
    by_id = {id(own[name]): tensor for name, tensor in made.items()}

    def replaced(leaf: PyTree) -> PyTree:
        found = by_id.get(id(leaf), leaf)
        return found.clone() if isinstance(found, torch.Tensor) else found

    args, kwargs = pytree.tree_map(replaced, (example.args, dict(example.kwargs)))
    return args, kwargs


def varying_axes(example: Example) -> set[Axis]:
    """Return the axes of an example's tensors that have a dynamic size larger than 1."""
    return {(name, axis) for name, leaf, axis, _ in example.axes() if leaf.shape[axis] > 1}


def rows_of(example: Example) -> set[tuple[str, int]]:
    """Return the batch axis of each tensor: its first axis with the size of axis 0 of the first tensor."""
    tensors = {name: leaf for name, leaf in example.leaves.items() if isinstance(leaf, torch.Tensor) and leaf.ndim}
    rows = next((leaf.shape[0] for leaf in tensors.values()), None)
    return {(name, leaf.shape.index(rows)) for name, leaf in tensors.items() if rows in leaf.shape}


def narrowed(example: Example, kept: Collection[Axis]) -> DynamicShapes:
    """Return the dynamic shapes of an example in which only the given axes vary."""
    inputs = example.inputs
    rows = zip(plain_names(inputs), example.names, shapes_of_leaves(inputs, example.shapes), strict=True)
    return write_dynamic_shapes(
        inputs,
        {path: {axis: dim for axis, dim in dims.items() if (name, axis) in kept} for path, name, dims in rows if dims},
    )
