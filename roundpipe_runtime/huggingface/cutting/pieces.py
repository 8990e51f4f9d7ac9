"""The modules of a split model: each runs one layer call, or code of the model before, between or after layers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten import find_unregistered
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ...batch.entries import is_cache
from ...engine.recomputed import restart_generators
from ...errors import WRAP_WITH_BATCH, BatchStructureError, CutError, MissingEmbeddingError, changed_results
from ..loss.call_options import run_with_options, split_options
from ..loss.lazy_logits import weight_of_head
from ..loss.own_loss import rows_of_call
from .caches import Entry, HeldCache, MadeCache, entries_read, has_layers, open_caches, swapped, without_caches
from .call_log import BoxUse, CallLog, CallSpec, Embedded, EmptyCache, Tree, box_content, fill_box, is_box, tensors_of
from .capture import collect_recorded, collected_so_far, collecting, extend_collected
from .cut_plan import CutPlan, CutState, begin, device_of, drops_layers
from .stub import Key, NeedsValue, Placeholder, first_placeholder, running


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The result of :meth:`Phase.advance` if the forward of the model has completed."""

    output: PyTree


class Phase(nn.Module):
    """A module that runs code of the model before, between or after its layers."""

    def __init__(self, program: CutPlan, number: int, copy: nn.Module) -> None:
        super().__init__()
        self.copy = copy  # of the model, with stubs instead of its layers
        self.program, self.number = program, number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # args: arguments of the model in phase 0; else the state
        # returns: the state; in the last phase, the output of the model in the requested form
        state: CutState = begin(args, kwargs, self.copy) if self.number == 0 else args[0]
        is_last = self.number == len(self.program.ends) - 1

        def run() -> Any:
            result = self.advance(state)
            if isinstance(result, Finished) is not is_last:
                raise BatchStructureError(
                    f"The model runs {'more' if is_last else 'fewer'} steps (layers, and code between layers) for this "
                    f"batch than for the example that it was split with. {WRAP_WITH_BATCH}"
                )
            return result.output if isinstance(result, Finished) else result

        return run_with_options(self.copy, run, state.options, rows_of_call(*state.call)) if is_last else run()

    def __repr__(self) -> str:  # modules of the copy may lack parameters
        return f"Phase {self.number} of {type(self.copy).__name__}"

    @property
    def _rp_runs_again(self) -> CutPlan:
        """The plan of the split. Phases with the same plan repeat code of the model, and may write the same buffers."""
        return self.program

    @property
    def _rp_head_weight(self) -> torch.Tensor | None:
        return weight_of_head(self.copy)

    _rp_to_compile = None  # code outside of layers is not compiled: an exception ends it where a layer must run first

    def advance(self, state: CutState) -> Finished | CutState:
        # returns: a state with the recorded calls of layers if the forward needs an output of a layer that has not run
        session = PhaseSession(self.program, state, self.number)
        args, kwargs = state.call[0], dict(state.call[1])
        for key, value in kwargs.items():
            if isinstance(value, HeldCache):
                kwargs[key] = view = value.before()
                session.held[id(view)] = value
        # The forward runs again from its start, so it must draw the same numbers as in earlier phases. With two phases
        # this matters only if the draws decide which layers run.
        restart_generators()
        if self.number and self.training and (len(self.program.ends) > 2 or drops_layers(self.copy)):
            state.restart_noise()
        try:
            with running(session):
                output = self.copy(*args, **kwargs)
        except NeedsValue as needs:
            needed = needs.key
        else:
            if (waiting := first_placeholder(pytree.tree_leaves(output))) is None:
                output = swapped(output, session.held)
                return Finished(output if state.call[1].get("use_cache") else without_caches(output))
            needed = waiting.key
        # an output of a completed call was not kept, and running layers would not produce it
        if needed.call not in session.calls:
            embedded = session.call_log.embedded.items()
            name = next((name for name, made in embedded if needed in (one.key for one in made)), None)
            raise MissingValueError(needed) if name is None else MissingEmbeddingError(name)
        call_log = session.call_log.record(session.calls, needed)
        if self.number == 0:
            call_log = dataclasses.replace(call_log, embedded=session.embedded)
        values = live(session.values, call_log, max(call_log.results, default=-1), self.program)
        return dataclasses.replace(state, values=values, call_log=call_log)


class MissingValueError(BatchStructureError):
    """The model reads a layer output that is not stored, because the model did not read this output for the example."""

    def __init__(self, key: Key) -> None:
        super().__init__(
            f"The model reads output {key.leaf} of layer call number {key.call}, but did not read it with the "
            f"example that it was split with. {WRAP_WITH_BATCH}"
        )
        self.key = key

    def __reduce__(self) -> tuple[type[MissingValueError], tuple[Key]]:
        return type(self), (self.key,)


class Whole(nn.Module):
    """The only module of a pipeline for a model that was not split."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def _rp_head_weight(self) -> torch.Tensor | None:
        return weight_of_head(self.model)

    _rp_to_compile = None  # a model that was not split is not compiled: this wrapper also handles losses and caches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs, options = split_options(kwargs)

        def run() -> Any:
            with open_caches((), kwargs, device_of((args, kwargs))) as (_, opened, views):
                output = swapped(self.model(*args, **opened), views)
            return output if kwargs.get("use_cache") else without_caches(output)

        return run_with_options(self.model, run, options, rows_of_call(args, kwargs))


class LayerCall(nn.Module):
    def __init__(self, program: CutPlan, place: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.program, self.place = layer, program, place

    @property
    def _rp_to_compile(self) -> nn.Module:
        """The module for ``torch.compile``: the layer, without the code of `LayerCall` that prepares arguments."""
        return self.layer

    def forward(self, state: CutState) -> CutState:
        return self.observe(state)[0]  # the same state if this microbatch skips the layer

    def observe(self, state: CutState) -> tuple[CutState, frozenset[Entry]]:
        """Call the layer; return the values for the next layer, and the entries that were read from KV caches."""
        if (spec := state.call_log.calls.get(self.place)) is None:
            return state, frozenset()
        values, boxes = state.values, dict(state.boxes)
        # boxes are built anew, so that the layer writes neither to the state nor to the box of another call
        used = {}
        for use in spec.boxes():
            used[use.number] = box = use.kind()
            fill_box(box, boxes.get(use.number, ()) if use.content is None else use.content.build(values, {}))
        args, kwargs = spec.arguments.build(values, used)
        caches = open_caches(args, kwargs, device_of(values))
        with collecting(spec.collect) as captured, caches as (args, kwargs, _):
            try:
                out = self.layer(*args, **kwargs)
            except Exception as error:  # earlier layers may have returned other outputs than for the example
                if self.program.returned_others(state.call_log.results):
                    raise BatchStructureError(changed_results(self.program.calls[self.place].layer)) from error
                raise
        boxes.update((number, box_content(box)) for number, box in used.items())
        # outputs and captured tensors share one numbering, so that a key names one tensor
        result, found = _flattened(out, self.place, 0, self.program)
        held = state.call_log.captured
        if captured:
            tree, more = _flattened(captured, self.place, len(result.leaves), self.program)
            held, found = {**held, self.place: tree}, found | more
        results = {**state.call_log.results, self.place: result}
        call_log = dataclasses.replace(state.call_log, results=results, captured=held)
        values = live({**values, **found}, call_log, self.place, self.program)
        return dataclasses.replace(state, values=values, boxes=boxes, call_log=call_log), entries_read((args, kwargs))


def live(
    values: Mapping[Key, torch.Tensor], call_log: CallLog, place: int, program: CutPlan
) -> dict[Key, torch.Tensor]:
    """Return the tensors that later modules of the pipeline need after the layer call at position ``place``."""
    # dropped values are not copied to the next device, and not kept for the backward
    kept = program.keep.union(call_log.needed, *(tree.keys() for tree in call_log.captured.values()))
    # some models compare the embedding of an image token with the inputs in a later phase
    kept |= {
        one.key
        for made in call_log.embedded.values()
        for one in made
        if call_log.keep == "all" or one.shape.numel() == one.shape[-1]
    }
    if call_log.keep != "none":  # the model returns outputs of layers, or may read them
        kept |= {
            leaf
            for place, tree in call_log.results.items()
            for leaf in tree.leaves
            if isinstance(leaf, Key) and (call_log.keep == "all" or program.is_extra(place, leaf.leaf))
        }
    return {key: value for key, value in values.items() if call_log.last_use.get(key, -1) > place or key in kept}


def _flattened(out: PyTree, place: int, first: int, program: CutPlan) -> tuple[Tree, dict[Key, torch.Tensor]]:
    leaves, spec = pytree.tree_flatten(out)
    found: dict[Key, torch.Tensor] = {}
    named: list[Any] = []
    for number, leaf in enumerate(leaves, first):
        if isinstance(leaf, torch.Tensor):
            found[Key(place, number)] = leaf
            named.append(Key(place, number))
            continue
        if leaf is not None and not isinstance(leaf, (int, float, str)) and (unregistered := find_unregistered(leaf)):
            layer, unknown = program.calls[place].layer, unregistered[0]
            raise CutError("structure", f"{layer} returns a value that cannot be passed between layers: {unknown}")
        named.append(leaf)
    return Tree(spec, tuple(named)), found


# Classes whose objects contain no tensors.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, HeldCache)


class PhaseSession:
    """Replaces layers while other code of the model runs: returns results of completed calls, and records new calls.

    The model's forward restarts in every phase, because Python cannot resume a function in the middle.
    """

    # phase 1 of 2    embed        placeholder with the shape of phase 0's output
    #                 layers.0     replayed: the output that the state holds
    #                 layers.1     recorded: arguments by key; placeholders are returned
    #                 norm(x)      x is a placeholder: the phase ends
    #
    # phase: number of the phase. Calls at position `program.ends[phase]` and later belong to later phases.

    def __init__(self, program: CutPlan, state: CutState, phase: int) -> None:
        self.program = program
        self.call_log: CallLog = state.call_log
        self.values: dict[Key, torch.Tensor] = dict(state.values)
        self.boxes: Mapping[int, Any] = state.boxes
        self.calls: dict[int, CallSpec] = {}
        self._phase = phase
        self._made = sorted(self.call_log.results)
        self._asked = self._sides = 0
        self._place = self._made[-1] + 1 if self._made else 0
        # by identity, so that a tensor that is passed to several layers is copied once
        self._keys = {id(value): key for key, value in self.values.items()}
        self._newest = Key(-1, 0)  # an output of the last recorded call
        self._box_numbers: dict[int, int] = {}
        self._box_seen: dict[int, list[int]] = {}
        self.held: dict[int, HeldCache] = {}  # by the id of the cache that the model gets
        self._embeds: dict[str, int] = {}
        self.embedded: dict[str, list[Embedded]] = {}
        self._alive: list[Any] = []  # objects that are known by id, because the id of a deleted object can be reused

    def call(self, layer: str, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree:
        """Return the output of a layer that has already run; otherwise record the call and return placeholders."""
        self._asked += 1
        if self._asked <= len(self._made):
            return self._replay(self._made[self._asked - 1], layer, args, kwargs)
        return self._record(layer, args, kwargs)

    def embed(self, name: str, run: Callable[[], Any], device: torch.device) -> PyTree:
        """Compute an embedding in the first module; in later modules, return its stored output, or a placeholder."""
        if self._phase == 0:
            out = run()
            if type(out) is torch.Tensor:
                self.embedded.setdefault(name, []).append(Embedded(self._side(out), out.shape, out.dtype))
            return out
        number = self._embeds.get(name, 0)
        self._embeds[name] = number + 1
        made = self.call_log.embedded.get(name, ())
        if number >= len(made):
            raise MissingEmbeddingError(name)
        # Outputs for a single token are always in the state. While the plan is found they are ignored, because a phase
        # that reads such an output would fail for longer inputs.
        found = self.values.get(made[number].key) if self.program.used else None
        if found is None:
            form = torch.empty((), dtype=made[number].dtype, device=device).expand(made[number].shape)
            found = Placeholder(made[number].key, form)
            self._alive.append(found)
        return found

    def _replay(self, place: int, layer: str, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree:
        if (earlier := self.program.calls[place].layer) != layer:
            raise BatchStructureError(
                f"The model called {layer} where an earlier run called {earlier}, but each run must call the same "
                "layers. Do not split the model:\n    wrap_model_to_roundpipe(model, use_sequential_preset=False)"
            )
        given = pytree.tree_leaves((args, kwargs), is_leaf=_box_below(kwargs))
        recorded = self.call_log.calls[place].arguments.leaves
        if len(given) == len(recorded):
            # The call was recorded before earlier layers ran. If an earlier layer returned a tensor for this batch, but
            # `None` for the example, the recorded arguments lack the tensor.
            differs = any(
                (one is None and isinstance(other, Key)) or (other is None and isinstance(one, torch.Tensor))
                for one, other in zip(given, recorded, strict=True)
            )
        else:
            differs = not self.held  # with caches, the numbers of leaves differ
        if differs and not self.call_log.is_of_others:
            raise BatchStructureError(changed_results(earlier))
        boxes = (leaf for leaf in given if is_box(leaf))
        for use, box in zip(self.call_log.calls[place].boxes(), boxes, strict=False):
            self._box_numbers[id(box)] = use.number
            self._alive.append(box)
            if use.number in self.boxes:  # the layer wrote to a copy: the model's own code reads it in its own box
                fill_box(box, self.boxes[use.number])
                self._box_seen[use.number] = _ids(box)
        if place in self.call_log.captured:
            extend_collected(self.call_log.captured[place].build(self.values, {}))
        result = self.call_log.results[place]
        leaves = []
        for leaf in result.leaves:
            found = self.values.get(leaf) if isinstance(leaf, Key) else leaf
            if isinstance(leaf, Key) and found is None:
                found = Placeholder(leaf, None)
                self._alive.append(found)
            leaves.append(found)
        return pytree.tree_unflatten(leaves, result.spec)

    def _record(self, layer: str, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree:
        # the next call of this layer in the plan, after those of layers that LayerDrop dropped
        end = self.program.ends[self._phase]
        expected = [call.layer for call in self.program.calls[self._place : end]]
        if layer not in expected:
            if self.calls and any(call.layer == layer for call in self.program.calls[end:]):
                # for the example, the model has computed between the two layers, as some models do in evaluation only
                raise NeedsValue(self._newest)
            raise BatchStructureError(
                f"This batch calls {layer} where the example that the model was split with called "
                f"{', '.join(expected[:3]) or 'no layer'}. {WRAP_WITH_BATCH}"
            )
        place = self._place + expected.index(layer)
        self._place = place + 1
        args, kwargs = swapped(args, self.held), swapped(kwargs, self.held)
        self._alive.append((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_box_below(kwargs))
        arguments = Tree(spec, tuple(self._named(leaf, place) for leaf in leaves))
        self.calls[place] = CallSpec(arguments, collected_so_far())
        form = self.program.calls[place]
        inputs = tensors_of((args, kwargs))
        made = []
        for number, leaf in enumerate(form.leaves):
            if isinstance(leaf, tuple):
                made.append(leaf[0])
            else:
                made.append(Placeholder(Key(place, number), inputs[leaf] if 0 <= leaf < len(inputs) else None))
        self._alive += made
        first = next((one for one in made if isinstance(one, Placeholder)), None)
        self._newest = self._newest if first is None else first.key
        collect_recorded(first)
        return pytree.tree_unflatten(made, form.spec)

    def _named(self, leaf: Any, place: int) -> Any:
        layer = self.program.calls[place].layer
        if isinstance(leaf, Placeholder):
            if leaf.key.call < 0:  # an embedding of phase 0, which is not in the state
                raise NeedsValue(leaf.key)
            return leaf.key
        if isinstance(leaf, torch.Tensor):
            return self._side(leaf)
        if is_box(leaf):
            number = self._box_numbers.setdefault(id(leaf), len(self._box_numbers) + 1000 * self._phase)
            # if no code but layers has changed the box, its content is in the state when this layer runs
            if self._box_seen.get(number) == (held := _ids(leaf)):
                return BoxUse(number, type(leaf), None)
            self._box_seen[number] = held
            content = box_content(leaf)
            self._alive.append(content)
            leaves, spec = pytree.tree_flatten(content)
            return BoxUse(number, type(leaf), Tree(spec, tuple(self._named(one, place) for one in leaves)))
        if is_cache(leaf) and find_unregistered(leaf):
            if not has_layers(leaf):
                raise CutError(
                    "structure",
                    f"{layer} gets a cache of class {type(leaf).__name__}, which cannot be passed between layers.",
                )
            reads = self.program.cache_reads
            only = None if reads is None else reads.get(place, frozenset())
            return MadeCache.of(leaf, lambda value: self._named(value, place), only)
        if not isinstance(leaf, _PLAIN) and (unregistered := find_unregistered(leaf)):
            unknown = unregistered[0]
            raise CutError("structure", f"{layer} gets an argument that cannot be passed between layers: {unknown}")
        return EmptyCache(copy.deepcopy(leaf)) if is_cache(leaf) else leaf

    def _side(self, tensor: torch.Tensor) -> Key:
        if id(tensor) not in self._keys:
            key = self._keys[id(tensor)] = Key(-1 - self._phase, self._sides)
            self._sides += 1
            self.values[key] = tensor
        return self._keys[id(tensor)]


def _ids(box: Any) -> list[int]:
    return [id(leaf) for leaf in pytree.tree_leaves(box_content(box))]


def _box_below(kwargs: Kwargs) -> Callable[[Any], bool]:
    """Return a function that reports whether a value is a mutable container other than ``kwargs``."""
    # torch's flattening forms a reference cycle with this function, so the function must not refer to tensors
    outside = id(kwargs)
    return lambda value: id(value) != outside and is_box(value)
