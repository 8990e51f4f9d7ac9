"""The pieces of a cut model: phases, which run the model's own code, and calls of layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from yobx_flatten import find_unregistered
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ...engine.recompute.states import restart_generators
from ..errors import BatchStructureError, CutError, MissingEmbeddingError, changed_results
from ..loss.call_options import run_with_options, split_options
from ..loss.lazy_logits import weight_of_head
from ..loss.weights import rows_of_call
from .caches import is_held, open_caches, swapped
from .call_log import CallLog, Tree, box_content, fill_box, live
from .capture import collecting
from .cut_plan import CutPlan
from .cut_state import CutState, begin, device_of, drops_layers
from .made_caches import Entry, entries_read, without_caches
from .placeholder import Key, NeedsValue, holds_placeholder
from .session import PhaseSession
from .stub import running


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The result of a forward that came to its end."""

    output: PyTree  # output of the model


@dataclasses.dataclass(frozen=True, slots=True)
class Paused:
    """The result of a forward that needs the output of a layer that has not run."""

    state: CutState  # state for the layers, whose calls are recorded in it
    needed: Key  # output without which the forward cannot continue


class Phase(nn.Module):
    """The model's own code up to the next layers; the last phase returns what the model returns."""

    # copy: copy of the model with stubs in place of its layers

    def __init__(self, program: CutPlan, number: int, copy: nn.Module) -> None:
        super().__init__()
        self.copy = copy
        self.program = program
        self.number = number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own code up to the next layers."""
        # args: positional arguments of the model, in phase 0; else the state
        # returns: the state; from the last phase the output of the model, as the options ask for it
        state: CutState = begin(args, kwargs, self.copy) if self.number == 0 else args[0]
        run = functools.partial(self._run, state)
        if not self._is_last:
            return run()
        return run_with_options(self.copy, run, state.options, rows_of_call(*state.call))

    def __repr__(self) -> str:  # modules of the copy may lack parameters that another phase has
        return f"Phase {self.number} of {type(self.copy).__name__}"

    @property
    def _rp_runs_again(self) -> CutPlan:
        """What lets all phases write the buffers that the model's own code writes: each runs it from its start."""
        return self.program

    @property
    def _rp_head_weight(self) -> torch.Tensor | None:
        """The weight that makes the logits."""
        return weight_of_head(self.copy)

    @property
    def _rp_to_compile(self) -> None:
        """Nothing: the model's own code is stopped by an exception where it needs a layer."""
        return

    @property
    def _is_last(self) -> bool:
        return self.number == self.program.phases - 1

    def _run(self, state: CutState) -> Any:
        result = self.advance(state)
        is_finished = isinstance(result, Finished)
        if is_finished != self._is_last:
            raise BatchStructureError(
                f"This batch {'skips' if is_finished else 'needs'} layers, or the code between them, in another way "
                "than the example that the model was cut with. Cut it with an example of this kind:\n"
                "    wrap_model_to_roundpipe(model, example=batch)"
            )
        return result.output if isinstance(result, Finished) else result.state

    def advance(self, state: CutState) -> Finished | Paused:
        """Run the model's forward until it needs what a layer has yet to compute."""
        session = PhaseSession(self.program, state, self.number)
        args, kwargs = state.call
        kwargs = {name: session.hand_out(value) if is_held(value) else value for name, value in kwargs.items()}
        # The code runs again from the start of the forward, so it must draw the numbers that it drew in earlier phases.
        # Two phases need this only where the numbers decide which layers run.
        restart_generators()
        if self.number and self.training and (self.program.phases > 2 or drops_layers(self.copy)):
            state.restart_noise()
        try:
            with running(session):
                output = self.copy(*args, **kwargs)
        except NeedsValue as needs:
            needed = needs.key
        else:
            waiting = holds_placeholder(pytree.tree_leaves(output))
            if waiting is None:
                output = session.held_again(output)
                return Finished(output if state.call[1].get("use_cache") else without_caches(output))
            needed = waiting.key
        # a call of an earlier phase: it is completed, so running layers would not bring this output back
        if needed.call not in session.calls:
            raise _missing(needed, session.call_log)
        call_log = session.call_log.record(session.calls, needed)
        if self.number == 0:
            call_log = dataclasses.replace(call_log, embedded=session.embedded)
        kept = self.program.keep | _kept_outputs(call_log, self.program)
        values = live(session.values, call_log, self.last_made(call_log), kept)
        return Paused(dataclasses.replace(state, values=values, call_log=call_log), needed)

    @staticmethod
    def last_made(call_log: CallLog) -> int:
        """Return the place of the last call that was made, -1 before the first."""
        return max(call_log.results, default=-1)


class MissingValueError(BatchStructureError):
    """A phase reads an output of a layer that was not kept."""

    def __init__(self, key: Key) -> None:
        super().__init__(
            f"The model reads output {key.leaf} of its call {key.call} of a layer, which it did not read with the "
            "example that it was cut with. Cut it with an example of this kind:\n"
            "    wrap_model_to_roundpipe(model, example=batch)"
        )
        self.key = key

    def __reduce__(self) -> tuple[type[MissingValueError], tuple[Key]]:
        return type(self), (self.key,)


def _missing(key: Key, call_log: CallLog) -> BatchStructureError:
    names = (name for name, made in call_log.embedded.items() if key in (one.key for one in made))
    name = next(names, None)
    return MissingValueError(key) if name is None else MissingEmbeddingError(name)


class Whole(nn.Module):
    """A model that was not cut, as the only piece of a pipeline."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def _rp_head_weight(self) -> torch.Tensor | None:
        """The weight that makes the logits."""
        return weight_of_head(self.model)

    @property
    def _rp_to_compile(self) -> None:
        """Nothing: the loss and caches are handed out next to the output."""
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        kwargs, options = split_options(kwargs)
        return run_with_options(
            self.model, functools.partial(self._run, args, kwargs), options, rows_of_call(args, kwargs)
        )

    def _run(self, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        with open_caches((), kwargs, device_of((args, kwargs))) as (_, kwargs, views):
            output = swapped(self.model(*args, **kwargs), views)
        return output if kwargs.get("use_cache") else without_caches(output)


class LayerCall(nn.Module):
    """A call of a layer."""

    def __init__(self, program: CutPlan, place: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.program = program
        self.place = place

    @property
    def _rp_to_compile(self) -> nn.Module:
        """The layer, without the code around it that takes its arguments out of the state."""
        return self.layer

    def forward(self, state: CutState) -> CutState:
        """Call the layer as the phase before recorded it."""
        # returns: the state after the call; the same state, if this microbatch skips the layer
        return self.observe(state)[0]

    def observe(self, state: CutState) -> tuple[CutState, frozenset[Entry]]:
        """Call the layer, and observe which entries it reads of caches that the model made."""
        spec = state.call_log.calls.get(self.place)
        if spec is None:
            return state, frozenset()
        values, boxes = state.values, dict(state.boxes)
        # boxes are made anew, so that the layer writes neither to the state nor to the box of another call
        used = {}
        for use in spec.boxes():
            used[use.number] = box = use.kind()
            fill_box(box, boxes.get(use.number, ()) if use.content is None else use.content.build(values, {}))
        args, kwargs = spec.arguments.build(values, used)
        caches = open_caches(args, kwargs, device_of(values))
        with collecting(spec.collect) as captured, caches as (args, kwargs, _):
            try:
                out = self.layer(*args, **kwargs)
            except Exception as error:  # of a layer that was not given what those before it return for this batch
                if self.program.returned_others(state.call_log.results):
                    raise BatchStructureError(changed_results(self.program.calls[self.place].layer)) from error
                raise
        boxes.update((number, box_content(box)) for number, box in used.items())
        # outputs and what hooks captured are numbered through, so that a key names one tensor
        result, found = _flattened(out, self.place, 0, self.program)
        held = None
        if captured:
            held, more = _flattened(captured, self.place, len(result.leaves), self.program)
            found |= more
        call_log = state.call_log.made(self.place, result, held)
        kept = self.program.keep | _kept_outputs(call_log, self.program)
        values = live({**values, **found}, call_log, self.place, kept)
        return dataclasses.replace(state, values=values, boxes=boxes, call_log=call_log), entries_read((args, kwargs))


def _kept_outputs(call_log: CallLog, program: CutPlan) -> frozenset[Key]:
    """Outputs of layers and embeddings that the model returns, and embeddings of a single token.

    The embedding of one token is small, and some models compare it with the inputs in a later phase, to find where
    images go. So it is always kept.
    """
    embedded = frozenset(
        one.key
        for made in call_log.embedded.values()
        for one in made
        if call_log.keep == "all" or one.shape.numel() == one.shape[-1]
    )
    if call_log.keep == "none":
        return embedded
    return embedded | frozenset(
        leaf
        for place, tree in call_log.results.items()
        for leaf in tree.leaves
        if isinstance(leaf, Key) and (call_log.keep == "all" or program.is_extra(place, leaf.leaf))
    )


def _flattened(out: PyTree, place: int, first: int, program: CutPlan) -> tuple[Tree, dict[Key, torch.Tensor]]:
    leaves, spec = pytree.tree_flatten(out)
    found: dict[Key, torch.Tensor] = {}
    named: list[Any] = []
    for number, leaf in enumerate(leaves, first):
        if isinstance(leaf, torch.Tensor):
            found[Key(place, number)] = leaf
            named.append(Key(place, number))
            continue
        if leaf is not None and not isinstance(leaf, (int, float, str)) and (unknown := find_unregistered(leaf)):
            name = program.calls[place].layer
            raise CutError("structure", f"{name} returns something that cannot pass between pieces: {unknown[0]}")
        named.append(leaf)
    return Tree(spec, tuple(named)), found
