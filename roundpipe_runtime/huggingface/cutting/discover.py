"""Find the plan of a cut: run the model's forward on an example, and observe where it needs the output of a layer.

The first forward is that of the model itself; it shows the order of the calls and the form of their outputs. In the
second forward, layers are stubs that return placeholders. Where the model computes with a placeholder, a phase ends:
the calls recorded so far run, and the next phase starts, in which they are replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.failures import raised_as
from yobx_flatten.recipe.aliases import Kwargs

from ..errors import CutError, MissingEmbeddingError
from .cut_plan import CutPlan
from .cut_state import begin
from .layers import observe
from .made_caches import Entry, check_apart
from .pieces import Finished, LayerCall, MissingValueError, Phase
from .stub import copy_with_stubs

# With more phases than this, a model is better left in one piece: each phase runs the code of all earlier ones again.
_MOST_PHASES = 300


def discover(model: nn.Module, layers: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Kwargs) -> CutPlan:
    """Find the plan of a cut for these layers of a model."""
    with torch.no_grad():
        calls, _ = observe(dict(layers), lambda: model(*args, **kwargs))
        if not calls:
            raise CutError("layers", f"The forward of {type(model).__name__} calls none of {', '.join(layers)}.")
        program = CutPlan(calls, (), embeddings=frozenset(_embeddings(model, layers)))
        copies: list[nn.Module] = []
        tracks: list[_Tracks] = []
        while True:
            try:
                return _run(program, model, layers, args, kwargs, copies, tracks)
            # a trial shows what a plan lacks: an embedding that later phases compute, or an output that they read
            except MissingEmbeddingError as missing:
                program = dataclasses.replace(program, embeddings=program.embeddings - {missing.name}, ends=())
                copies, tracks = [], []
            except MissingValueError as missing:
                if missing.key in program.keep:
                    raise CutError("structure", f"{missing}") from missing
                program = dataclasses.replace(program, keep=program.keep | {missing.key}, ends=())


def _run(
    program: CutPlan,
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    copies: list[nn.Module],
    tracks: list[_Tracks],
) -> CutPlan:
    ends: list[int] = []
    keep = set(program.keep)
    reads: dict[int, frozenset[Entry]] = {}
    state = begin(args, kwargs, model)
    while True:
        number = len(ends)
        if number == len(copies):
            # a copy for each phase, as in the pipeline: a module that caches what it computes of a parameter reads it
            # in its first call only, and each phase makes that call on another device
            copies.append(copy_with_stubs(model, layers, program.embeddings))
            tracks.append(_Tracks(copies[-1]))
        trial = dataclasses.replace(program, ends=[*ends, len(program.calls)], keep=frozenset(keep))
        result = Phase(trial, number, copies[number]).advance(state)
        if isinstance(result, Finished):
            ends.append(len(program.calls))
            used = [track.used() for track in tracks[: len(ends)]]
            check_apart([call.layer for call in program.calls], reads)
            used_names = _completed(used, model, layers)
            return dataclasses.replace(program, ends=ends, keep=frozenset(keep), used=used_names, cache_reads=reads)
        state = result.state
        keep.add(result.needed)  # the next phase reads it
        start, end = (ends[-1] if ends else 0), max(state.call_log.calls) + 1
        for place in range(start, end):
            trial = dataclasses.replace(trial, keep=frozenset(keep))
            layer = program.calls[place].layer
            has_caches = bool(state.call_log.calls[place].caches())
            with raised_as(partial(_fails_alone, layer), CutError) if has_caches else contextlib.nullcontext():
                state, reads[place] = LayerCall(trial, place, layers[layer]).observe(state)
        ends.append(end)
        if len(ends) > _MOST_PHASES:
            raise CutError(
                "structure",
                f"The model runs code of its own between its layers {len(ends)} times or more, and each time would be "
                "a piece.",
            )


def _fails_alone(layer: str, error: Exception) -> CutError:
    return CutError(
        "structure",
        f"{layer} gets a cache that the model made, and fails without what other layers write into it: "
        f"{type(error).__name__}: {error}",
    )


def _embeddings(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names of the embeddings outside of layers."""
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside:
            yield name


class _Tracks:
    """Records which parameters of a copy are read."""

    def __init__(self, copied: nn.Module) -> None:
        self._read: set[str] = set()
        for path, module in copied.named_modules():
            prefix = f"{path}." if path else ""
            module.__dict__["_parameters"] = _Tracked(module._parameters, prefix, self._read)

    def used(self) -> set[str]:
        """Return the names of the parameters that were read."""
        return set(self._read)


class _Tracked(dict[str, Any]):
    def __init__(self, held: dict[str, Any], prefix: str, read: set[str]) -> None:
        super().__init__(held)
        self._prefix, self._read = prefix, read

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is not None:
            self._read.add(self._prefix + name)
        return found


def _completed(used: list[set[str]], model: nn.Module, layers: Mapping[str, nn.Module]) -> list[frozenset[str]]:
    """The parameters of each phase. All get those that the example did not reach: other batches may read them."""
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in inside}
    unread = names.difference(*used)
    return [frozenset(found | unread) for found in used]
