"""Find the call of a model that a file implements, and make test inputs in the sizes that the file accepts."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import FlattenError
from ..export.proof.eager_runs import Case, clone
from ..huggingface.cache_names import cache_of
from ..huggingface.cases import DecodeSizes, decode_inputs, default_sizes
from ..model_folder.pieces.tasks import TASKS, pieces_for, task_of
from ..model_folder.pieces.text import Piece, Split, decoder_pieces, encoder_decoder_pieces
from ..private_names.of_torch import pytree
from ..recipe.aliases import TransformersModel
from ..runners.ports import Runner
from ..trees.walk import leaf_names, plain_names
from .file_side import BRANCH, DERIVED, WINDOW, Call
from .names import ALIASES, matched, place_of

_LEFT_OUT = ("attention_mask", "position_ids", "token_type_ids", "encoder_attention_mask", "decoder_attention_mask")
"""Inputs that an exported file may lack: the module is then called without them."""

_COUNTED = {"position_ids": "those that the mask counts", "attention_mask": "one of ones"}
"""By name of an input that the module needs and the file lacks: a description of the input that the module gets."""


def calls_of(model: torch.nn.Module, runner: Runner, stated: Mapping[str, str]) -> Iterator[Call]:
    """Yield the ways of calling a model that a file may implement, likely ones first, inside an open with block."""
    for what, module, cases in _possible(model, runner):
        for left, counted in _left_out(runner, module, cases[0]):
            call = fitting(what, module, [_given(case, left, counted) for case in cases], runner, stated, counted)
            if call is not None:
                notes = [f"the file takes no {', '.join(left)}: the model is called without it."] if left else []
                notes += [f"the file takes no {name}: the model gets {_COUNTED[name]}." for name in counted]
                yield dataclasses.replace(call, remarks=(*call.remarks, *notes))


def _given(case: Case, left: Sequence[str], counted: Sequence[str]) -> Case:
    """Return a case with the inputs of a file, and a mask of ones if the model requires a mask."""
    given = {name: leaf for name, leaf in case.kwargs.items() if name not in left}
    given |= {name: torch.ones_like(given[name]) for name in counted if name.endswith("mask")}
    return dataclasses.replace(case, kwargs=given)


def fitting(
    what: str,
    module: torch.nn.Module,
    cases: Sequence[Case],
    runner: Runner,
    stated: Mapping[str, str],
    counted: Sequence[str] = (),
) -> Call | None:
    """Return a :class:`Call` of the module if the file's inputs match the inputs of the cases, else ``None``."""
    # counted: inputs that the file computes from other inputs
    inputs = _arguments(module, cases[0])
    names, plain = leaf_names(inputs), plain_names(inputs)
    given = pytree.tree_leaves(inputs)
    found = matched(list(runner.ports), names, plain, stated, by_order=False)
    lacking = [name for name in runner.ports if name not in found and name not in DERIVED and not name.endswith(WINDOW)]
    if BRANCH in runner.ports:  # only the other branch reads these inputs
        lacking = [name for name in lacking if not place_of(name) and name != "encoder_hidden_states"]
    unread = [n for n, leaf in zip(names, given, strict=True) if isinstance(leaf, torch.Tensor)]
    if "encoder_hidden_states" in found.values():  # the file computes the encoder's keys and values
        unread = [name for name in unread if ".encoder." not in name]
    if lacking or set(unread) - set(found.values()) - set(counted):
        return None
    sizes = _fixed(runner, found, names, cases, module)
    fitted = [_in_sizes(case, module, names, sizes) for case in cases] if sizes else list(cases)
    if any(place_of(name) for name in sizes):  # the returned cache has a different size, so there is no second call
        fitted = [dataclasses.replace(case, steps=1) for case in fitted]
    remarks = [f"the file fixes axis {axis} of {n} at {size}" for n, of in sizes.items() for axis, size in of.items()]
    return Call(what, module, fitted, found, names, remarks)


def _arguments(module: torch.nn.Module, case: Case) -> dict[str, Any]:
    """Return all arguments by name, in the order of the leaves."""
    named = inspect.signature(module.forward).bind_partial(*case.args).arguments if case.args else {}
    return {**named, **case.kwargs}


# -- the calls that exporters write ------------------------------------------------------------------------------------


def _possible(model: TransformersModel, runner: Runner) -> Iterator[tuple[str, torch.nn.Module, list[Case]]]:
    task = task_of(model)
    caches = any(place_of(name) for name in runner.ports)
    if TASKS[task] is decoder_pieces:
        if caches:
            for whole in (False, True):
                for piece in _tried(decoder_pieces, model, Split(whole_cache=whole)):
                    yield "with a cache", piece.module, [*_cases_of(piece, 3), *_empty_cache(piece)]
        if not caches or BRANCH in runner.ports:
            yield "without a cache", model, _whole_texts(model)
        return
    if TASKS[task] is encoder_decoder_pieces:
        pieces = _tried(encoder_decoder_pieces, model)
        for piece in pieces:
            yield piece.stem, piece.module, _cases_of(piece, 3)
        if pieces:
            encoder, first, following = (_cases_of(piece, 1) for piece in pieces)
            both = _with(encoder, first, "input_ids", "decoder_input_ids")
            yield "encoder and decoder in one call", model, both
            both = _with(following, first, "encoder_hidden_states", "encoder_hidden_states")
            yield f"{pieces[2].stem}, given the features too", pieces[2].module, both
        return
    for piece in _tried(pieces_for, model, task):
        cases = _cases_of(piece, 1)
        yield piece.stem, piece.module, cases
        takes = inspect.signature(piece.module.forward).parameters
        if "token_type_ids" in takes and "input_ids" in piece.kwargs and "token_type_ids" not in piece.kwargs:
            zeros = [dataclasses.replace(c, kwargs={"types": torch.zeros_like(c.kwargs["input_ids"])}) for c in cases]
            yield piece.stem, piece.module, _with(cases, zeros, "types", "token_type_ids")


def _tried(make: Any, *args: Any) -> list[Piece]:
    """Return the parts of a model that are exported separately; none if this package cannot export the model."""
    try:
        found = make(*args)
    except (FlattenError, TypeError, AttributeError, LookupError, ValueError, RuntimeError, ArithmeticError):
        return []
    return list(found[1] if isinstance(found, tuple) else found)


def _cases_of(piece: Piece, steps: int) -> list[Case]:
    return [Case("the example", (), piece.kwargs, steps), *piece.cases]


def _empty_cache(piece: Piece) -> list[Case]:
    """Return the first call of a generation with an empty cache; none for caches of other state."""
    layers = getattr(cache_of(piece.kwargs), "layers", None)
    if layers is None or any(type(layer).__name__ != "DynamicLayer" or layer.keys.dim() != 4 for layer in layers):
        return []
    new = piece.kwargs["input_ids"].shape[1]
    given = clone(dict(piece.kwargs))
    for layer in cache_of(given).layers:
        layer.keys, layer.values = layer.keys[:, :, :0].contiguous(), layer.values[:, :, :0].contiguous()
    mask = given.get("attention_mask")
    if mask is not None:
        given["attention_mask"] = mask[:, -new:].contiguous()
    if given.get("position_ids") is not None:
        given["position_ids"] = torch.arange(new).expand(len(given["input_ids"]), -1).contiguous()
    return [Case(f"empty cache, new {new}", (), given, 3)]


def _whole_texts(model: TransformersModel) -> list[Case]:
    """Return test cases without a cache, in the sizes of the test cases with a cache."""
    takes = inspect.signature(model.forward).parameters
    like = dict.fromkeys(name for name in ("input_ids", "attention_mask", "position_ids") if name in takes)
    found: list[Case] = []
    for seed, sizes in enumerate((DecodeSizes(), *default_sizes(model)[0])):
        name = "the example" if not found else sizes.without_cache
        found.append(Case(name, (), decode_inputs(model, sizes, like, seed)))
    return found


def _with(cases: Sequence[Case], others: Sequence[Case], reads: str, name: str) -> list[Case]:
    """Return cases with one more argument, whose values are an argument of other cases of the same sizes."""
    pairs = zip(cases, others, strict=True)
    return [dataclasses.replace(one, kwargs={**one.kwargs, name: other.kwargs[reads]}) for one, other in pairs]


# -- what a file leaves out, and the sizes that it fixes ---------------------------------------------------------------


def _left_out(
    runner: Runner, module: torch.nn.Module, example: Case
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return arguments of the module that the file does not accept, and counters that it may compute from the mask."""
    takes = inspect.signature(module.forward).parameters
    read = {name for name in example.kwargs if {name, *ALIASES.get(name, ())} & set(runner.ports)}
    unread = [name for name in _LEFT_OUT if name in example.kwargs and name not in read]
    left = [name for name in unread if takes[name].default is not inspect.Parameter.empty]
    rest = [name for name in unread if name not in left]
    if set(rest) <= set(_COUNTED):
        yield tuple(left), tuple(rest)
    if "position_ids" in left:
        yield tuple(name for name in left if name != "position_ids"), (*rest, "position_ids")


def _fixed(
    runner: Runner, found: Mapping[str, str], names: Sequence[str], cases: Sequence[Case], module: torch.nn.Module
) -> dict[str, dict[int, int]]:
    """Return, by leaf, the sizes of the axes that the file fixes and that differ between cases."""
    taken: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for case in cases:
        for name, leaf in zip(names, pytree.tree_leaves(_arguments(module, case)), strict=False):
            for axis, size in enumerate(leaf.shape if isinstance(leaf, torch.Tensor) else ()):
                taken[name, axis].add(size)
    ports = [(found.get(port.name, ""), port.shape) for port in runner.ports.values()]
    sizes = {
        name: {at: n for at, n in enumerate(of) if n is not None and len(taken[name, at]) > 1} for name, of in ports
    }
    return {one: fixed for one, fixed in sizes.items() if fixed}


def _in_sizes(case: Case, module: torch.nn.Module, names: Sequence[str], sizes: Mapping[str, dict[int, int]]) -> Case:
    """Return a case whose tensors are cut or repeated to the sizes that a file fixes."""
    given = _arguments(module, case)
    leaves, spec = pytree.tree_flatten(clone(given))
    made = []
    for name, leaf in zip(names, leaves, strict=True):
        for axis, size in sizes.get(name, {}).items():
            if leaf.shape[axis] != size and leaf.shape[axis]:
                leaf = leaf.index_select(axis, torch.arange(size) % leaf.shape[axis]).contiguous()
        made.append(leaf)
    return dataclasses.replace(case, args=(), kwargs=pytree.tree_unflatten(made, spec))
