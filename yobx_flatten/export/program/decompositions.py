"""Decompose only the operators that have no translation, one by one.

``ExportedProgram.run_decompositions`` traces the whole program again, whatever is to be decomposed, which takes as long
as the first trace. In a program that writes to nothing each node stands for itself: a node that has to be decomposed is
traced alone, and all others are taken over.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputSpec
from torch.fx.experimental.proxy_tensor import make_fx

from ...private_names.of_torch import OpOverload, enable_python_dispatcher, pytree

_ATEN = torch.ops.aten
_ASSERTIONS = {
    _ATEN.sym_constrain_range_for_size.default,
    _ATEN._assert_async.default,
    _ATEN._assert_async.msg,
    _ATEN._assert_scalar.default,
    _ATEN._assert_tensor_metadata.default,
}
# a trace of a program writes these by its sizes, and torch.vmap, torch.func by what they do
_GONE_WHEN_TRACED = {_ATEN.sym_numel.default, _ATEN.sym_stride.int, _ATEN.sym_storage_offset.default}
_TRANSFORMS = "torch._functorch."
_CASTS = {_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout, _ATEN.to.other, _ATEN.type_as.default}


def decompose_untranslated(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram | None:
    """Return what ``program.run_decompositions(table)`` returns, without assertions and copies that change nothing."""
    # program: the program; it stays as it is, and its weights are shared
    # returns: `None` for a program that has to be traced again as a whole: one with branches, or that writes to its
    # inputs or to its state
    try:
        from ...private_names.of_torch import check_valid_to_preserve, is_composite
    except ImportError:  # of another torch
        return None

    def is_kept(target: Any) -> bool:
        if target in table:
            return False
        # torch decomposes what may return its own argument even if it is translated: those translations are untested
        return target is _ATEN.contiguous.default or not is_composite(target) or bool(check_valid_to_preserve(target))

    signature = program.graph_signature
    writes = (signature.buffers_to_mutate, signature.user_inputs_to_mutate)
    if any(writes) or getattr(signature, "parameters_to_mutate", None):
        return None
    if any(part is not program.graph_module for part in program.graph_module.modules()):
        return None
    if not all(_stands_alone(node) for node in program.graph.nodes):
        return None
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, Any] = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.target in _ASSERTIONS:
                continue
            done = _converted(node, graph, copied, table, is_kept)
            if done is None:
                return None
            if node.op == "placeholder":
                done.name = node.name  # the signature's name, which a copy does not keep if it is one of Python's own
            copied[node] = done
    graph.eliminate_dead_code()
    result = copy.copy(program)
    named = {node.name: done.name for node, done in copied.items() if isinstance(done, torch.fx.Node)}
    result._graph_signature = copy.copy(signature)
    result._graph_signature.output_specs = [_renamed(spec, named) for spec in signature.output_specs]
    result._graph_module = torch.fx.GraphModule(program.graph_module, graph)
    result._graph_module.meta.update(program.graph_module.meta)
    return result


def _stands_alone(node: torch.fx.Node) -> bool:
    """Whether a node is a function of its arguments whose result nothing writes to later."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if node.target in _GONE_WHEN_TRACED or getattr(node.target, "__module__", "").startswith(_TRANSFORMS):
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target in _ASSERTIONS or schema is None or not schema.is_mutable


def _renamed(spec: OutputSpec, named: Mapping[str, str]) -> OutputSpec:
    """An output that is now computed by another node."""
    name = getattr(spec.arg, "name", None)
    if name is None or isinstance(spec.arg, ConstantArgument) or name not in named:
        return spec
    return dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=named[name]))


def _converted(
    node: torch.fx.Node,
    graph: torch.fx.Graph,
    copied: dict[torch.fx.Node, Any],
    table: Mapping[Any, Callable[..., Any]],
    is_kept: Callable[[Any], bool],
) -> Any:
    """A node of the new graph that stands for this one; ``None`` where there is none."""
    target = node.target
    if target in _CASTS and _same_type(node):
        return copied[node.args[0]]  # type: ignore[index] # the tensor, a node
    if target is _ATEN.reshape.default:
        # a view that may copy; of the two, only the translation of a view takes sizes of 0
        copy_of = graph.node_copy(node, copied.__getitem__)
        copy_of.target = _ATEN.view.default
        return copy_of
    if target is operator.getitem and not isinstance(copied[node.args[0]], torch.fx.Node):  # type: ignore[index] # a node
        return copied[node.args[0]][node.args[1]]  # type: ignore[index] # of an operator that was decomposed
    if not isinstance(target, OpOverload) or is_kept(target):
        return graph.node_copy(node, copied.__getitem__)
    return _traced_alone(node, graph, copied, table)


def _same_type(node: torch.fx.Node) -> bool:
    given, found = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr] # the tensor, a node
    return bool(given.dtype == found.dtype and given.layout == found.layout)


def _traced_alone(
    node: torch.fx.Node, graph: torch.fx.Graph, copied: dict[torch.fx.Node, Any], table: Mapping[Any, Any]
) -> Any:
    """Trace what one operator is made of, and put it in its place."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    values = [leaves[place].meta.get("val") for place in places]
    if any(value is None for value in values) or "val" not in node.meta:
        return None
    modes = {value.fake_mode for value in pytree.tree_leaves((values, node.meta["val"])) if hasattr(value, "fake_mode")}
    if len(modes) != 1:
        return None

    def call(*given: Any) -> Any:
        filled = list(leaves)
        for place, value in zip(places, given, strict=True):
            filled[place] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator] # an operator

    with modes.pop(), enable_python_dispatcher():
        traced = make_fx(call, decomposition_table=dict(table), _allow_non_fake_inputs=True)(*values)
    inner: dict[torch.fx.Node, Any] = {}
    given = iter(places)
    for part in traced.graph.nodes:
        if part.op == "placeholder":
            inner[part] = copied[leaves[next(given)]]
        elif part.op == "output":
            return torch.fx.node.map_arg(part.args[0], inner.__getitem__)
        elif part.op != "call_function" or not _stands_alone(part):
            return None  # a constant, or an operator that writes
        elif part.target not in _ASSERTIONS:
            inner[part] = graph.node_copy(part, inner.__getitem__)
            inner[part].meta = {**node.meta, **part.meta}
    return None
