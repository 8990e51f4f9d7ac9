"""Run a model's forward with stubs for its layers: completed calls are replayed, new ones are recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from yobx_flatten import find_unregistered
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ...batch.entries import is_cache
from ..errors import BatchStructureError, CutError, MissingEmbeddingError, changed_results
from .caches import HeldCache, has_layers, swapped
from .call_log import BoxUse, CallLog, CallSpec, Embedded, EmptyCache, Tree, box_content, fill_box, is_box
from .capture import collect_recorded, collected_so_far, extend_collected
from .cut_plan import CutPlan
from .cut_state import CutState
from .layers import tensors_of
from .made_caches import MadeCache
from .placeholder import Key, NeedsValue, Placeholder

# classes whose objects hold no tensors that a flattening would have to find
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, HeldCache)


class PhaseSession:
    """Answers the stubs in one phase of one microbatch.

    The forward of the model runs from its start in every phase, as Python cannot continue it in the middle::

        phase 1 of 2    embed        placeholder with the form of what phase 0 computed
                        layers.0     replayed: the output that the state holds
                        layers.1     recorded: arguments by key; placeholders are returned
                        norm(x)      x is a placeholder: the phase ends
    """

    # phase: number of the phase. Calls from place `program.ends[phase]` on belong to later phases.

    def __init__(self, program: CutPlan, state: CutState, phase: int) -> None:
        self.program = program
        self.call_log: CallLog = state.call_log
        self.values: dict[Key, torch.Tensor] = dict(state.values)
        self.boxes: Mapping[int, Any] = state.boxes
        self.calls: dict[int, CallSpec] = {}
        self._phase = phase
        self._made = sorted(self.call_log.results)
        self._asked = 0
        self._place = self._made[-1] + 1 if self._made else 0
        # Tensors and boxes are recognized by identity: a tensor passed to twelve layers is one value, copied once.
        self._keys = {id(value): key for key, value in self.values.items()}
        self._sides = 0
        self._newest = Key(-1, 0)  # an output of the last call that was recorded
        self._box_numbers: dict[int, int] = {}
        self._box_seen: dict[int, list[int]] = {}
        self._held: dict[int, HeldCache] = {}
        self._embeds: dict[str, int] = {}
        self.embedded: dict[str, list[Embedded]] = {}
        self._alive: list[Any] = []  # an id is reused once its object is gone, so objects known by id stay referenced

    def hand_out(self, held: HeldCache) -> Any:
        """Return the cache that the model's own code gets in place of a held one."""
        view = held.before()
        self._alive.append(view)
        self._held[id(view)] = held
        return view

    def held_again(self, output: PyTree) -> PyTree:
        """Return the output of the model, with held caches in place of those that were handed out."""
        return swapped(output, self._held)

    def call(self, layer: str, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree:
        """Replay or record a call of a layer."""
        # returns: the output of the layer, if the call was completed; placeholders for it otherwise
        self._asked += 1
        if self._asked <= len(self._made):
            return self._replay(self._made[self._asked - 1], layer, args, kwargs)
        return self._record(self._next_place(layer), args, kwargs)

    def embed(self, name: str, run: Callable[[], Any], device: torch.device) -> PyTree:
        """Compute the output of an embedding in phase 0; in later phases, return a stand-in for it."""
        # returns: the output of the embedding; in later phases a placeholder, or the output if the state holds it
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
        # While the plan is being found, values in the state are ignored: outputs for a single token are always kept,
        # and a phase that read one would fail for longer inputs.
        found = self.values.get(made[number].key) if self.program.used else None
        if found is None:
            form = torch.empty((), dtype=made[number].dtype, device=device).expand(made[number].shape)
            found = Placeholder(made[number].key, form)
            self._alive.append(found)
        return found

    # -- calls that were completed -----------------------------------------------------------------------------------

    def _replay(self, place: int, layer: str, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree:
        if self.program.calls[place].layer != layer:
            raise BatchStructureError(
                f"The model called {layer} where it called {self.program.calls[place].layer} in the phase before: its "
                "forward is not deterministic."
            )
        given = pytree.tree_leaves((args, kwargs), is_leaf=_box_below(kwargs))
        self._check_given(place, given)
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
        leaves = [self._value(leaf) if isinstance(leaf, Key) else leaf for leaf in result.leaves]
        return pytree.tree_unflatten(leaves, result.spec)

    def _check_given(self, place: int, given: Sequence[Any]) -> None:
        """Check that the layer was given what the model hands to it now that the layers before it have run.

        The call was recorded with what those layers return for the example: where they return a tensor for this batch
        and none for the example, it was not among the arguments.
        """
        if self.call_log.is_of_others:
            return
        recorded = self.call_log.calls[place].arguments.leaves
        if len(given) == len(recorded):
            differs = any(_is_or_is_none(one, other) for one, other in zip(given, recorded, strict=True))
        else:
            differs = not self._held  # caches that were handed out stand for others
        if differs:
            raise BatchStructureError(changed_results(self.program.calls[place].layer))

    def _value(self, key: Key) -> torch.Tensor:
        found = self.values.get(key)
        if found is None:
            found = Placeholder(key, None)
            self._alive.append(found)
        return found

    # -- calls to be made --------------------------------------------------------------------------------------------

    def _next_place(self, layer: str) -> int:
        """The place of a call in the plan. Calls before it that the batch skipped are never recorded (LayerDrop)."""
        places = range(self._place, self.program.ends[self._phase])
        for place in places:
            if self.program.calls[place].layer == layer:
                self._place = place + 1
                return place
        if self.calls and any(call.layer == layer for call in self.program.calls[self.program.ends[self._phase] :]):
            # With the example, the model computed between the two layers, as some do in evaluation only.
            raise NeedsValue(self._newest)
        expected = [self.program.calls[place].layer for place in places]
        raise BatchStructureError(
            f"This batch calls {layer} where the example that the model was cut with called "
            f"{', '.join(expected[:3]) or 'no layer'}. Cut the model with an example of this kind:\n"
            "    wrap_model_to_roundpipe(model, example=batch)"
        )

    def _record(self, place: int, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree:
        args, kwargs = swapped(args, self._held), swapped(kwargs, self._held)
        self._alive.append((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_box_below(kwargs))
        arguments = Tree(spec, tuple(self._named(leaf, place) for leaf in leaves))
        self.calls[place] = CallSpec(arguments, collected_so_far())
        form = self.program.calls[place].form
        inputs = tensors_of((args, kwargs))
        made = []
        for number, leaf in enumerate(form.leaves):
            if isinstance(leaf, tuple):
                made.append(leaf[0])
            else:
                made.append(Placeholder(Key(place, number), inputs[leaf] if 0 <= leaf < len(inputs) else None))
        self._alive += made
        self._newest = next((one.key for one in made if isinstance(one, Placeholder)), self._newest)
        collect_recorded(next((one for one in made if isinstance(one, Placeholder)), None))
        return pytree.tree_unflatten(made, form.spec)

    def _named(self, leaf: Any, place: int) -> Any:
        if isinstance(leaf, Placeholder):
            if leaf.key.call < 0:  # an embedding of phase 0, which the state no longer holds
                raise NeedsValue(leaf.key)
            return leaf.key
        if isinstance(leaf, torch.Tensor):
            return self._side(leaf)
        if is_box(leaf):
            return self._box(leaf, place)
        if is_cache(leaf) and find_unregistered(leaf):
            if not has_layers(leaf):
                raise CutError(
                    "structure",
                    f"{self.program.calls[place].layer} gets a {type(leaf).__name__} that the model made and filled. "
                    "Keys and values cannot pass from layer to layer in it, as gradients would have to flow back "
                    "through it.",
                )
            reads = self.program.cache_reads
            only = None if reads is None else reads.get(place, frozenset())
            return MadeCache.of(leaf, lambda value: self._named(value, place), only)
        if not isinstance(leaf, _PLAIN) and (found := find_unregistered(leaf)):
            raise CutError(
                "structure",
                f"{self.program.calls[place].layer} gets an argument that cannot pass between pieces: {found[0]}",
            )
        return EmptyCache(copy.deepcopy(leaf)) if is_cache(leaf) else leaf

    def _side(self, tensor: torch.Tensor) -> Key:
        key = self._keys.get(id(tensor))
        if key is None:
            key = Key(-1 - self._phase, self._sides)
            self._sides += 1
            self._keys[id(tensor)] = key
            self.values[key] = tensor
        return key

    def _box(self, box: Any, place: int) -> BoxUse:
        number = self._box_numbers.setdefault(id(box), len(self._box_numbers) + 1000 * self._phase)
        # unchanged since a layer had it: then its content is in the state, or will be when that layer has run
        held = _ids(box)
        if self._box_seen.get(number) == held:
            return BoxUse(number, type(box), None)
        self._box_seen[number] = held
        content = box_content(box)
        self._alive.append(content)
        leaves, spec = pytree.tree_flatten(content)
        return BoxUse(number, type(box), Tree(spec, tuple(self._named(leaf, place) for leaf in leaves)))


def _ids(box: Any) -> list[int]:
    return [id(leaf) for leaf in pytree.tree_leaves(box_content(box))]


def _box_below(kwargs: Kwargs) -> Callable[[Any], bool]:
    """Return a test for boxes that is false for the keyword arguments themselves, which are also a dictionary."""
    # torch's flattening makes a reference cycle with this function, so it must not reference tensors
    outside = id(kwargs)
    return lambda value: id(value) != outside and is_box(value)


def _is_or_is_none(given: Any, recorded: Any) -> bool:
    """Whether one of both is a tensor, and the other is ``None``."""
    return (given is None and isinstance(recorded, Key)) or (recorded is None and isinstance(given, torch.Tensor))
