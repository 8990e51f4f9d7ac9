"""The pieces of a cut model: phases, which run the model's own code, and calls of layers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from yobx_flatten import find_unregistered

from ..errors import BatchStructureError, CutError, MissingEmbeddingError
from ..loss.label_smoothing import SMOOTHED, with_smoothed_loss
from ..loss.lazy_logits import loss_only
from ..loss.weights import LOSS_ONLY, WEIGH, counting, rows_of_call, weighed
from .caches import CACHE, is_held, swapped
from .call_log import CallLog, State, Tree, box_content, fill_box, live
from .capture import asked_for, collecting
from .cut_plan import CutPlan
from .placeholder import Key, NeedsValue, holds_placeholder
from .session import PhaseSession
from .stub import running

__all__ = ["LayerCall", "MissingValueError", "Phase", "Whole", "begin"]


class Phase(nn.Module):
    """The model's own code up to the next layers; the last phase returns what the model returns.

    Args:
        program: what was found out about the model.
        number: of the phase.
        copy: the model with stubs in place of its layers.
    """

    def __init__(self, program: CutPlan, number: int, copy: nn.Module) -> None:
        super().__init__()
        self.copy = copy
        self.program = program
        self.number = number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the arguments of the model, in phase 0, or the state; return the state, or what the model returns."""
        state = begin(args, kwargs, self.copy) if self.number == 0 else args[0]
        if state["weigh"] is not None and self.number == self.program.phases - 1:
            run = functools.partial(self._run_with_loss, state)
            with counting() as items:
                result = loss_only(self.copy, run) if state["loss_only"] else run()
            return weighed(result, items, state["weigh"])
        return self._run(state)

    def _run_with_loss(self, state: State) -> Any:
        return with_smoothed_loss(self._run(state), state["smoothed"])

    def _run(self, state: State) -> Any:
        is_last = self.number == self.program.phases - 1
        done, result = self.advance(state)
        if done != is_last:
            raise BatchStructureError(
                f"This batch {'skips' if done else 'needs'} layers, or the code between them, in another way than the "
                "example that the model was cut with. Cut it with an example of this kind:\n"
                "    wrap_model_to_roundpipe(model, example=batch)"
            )
        return result if done else result[0]

    def advance(self, state: State) -> tuple[bool, Any]:
        """Run the model's forward until it needs what a layer has yet to compute.

        Returns:
            Whether it came to its end; and then the output of the model, else the new state and the tensor that it
            needs.
        """
        session = PhaseSession(self.program, state, self.number)
        args, kwargs = state["call"]
        held = kwargs.get(CACHE)
        if is_held(held):
            kwargs = {**kwargs, CACHE: session.hand_out(held)}
        try:
            with running(session), self._same_noise(state):
                output = self.copy(*args, **kwargs)
        except NeedsValue as needs:
            needed = needs.key
        else:
            waiting = holds_placeholder(pytree.tree_leaves(output))
            if waiting is None:
                return True, session.held_again(output)
            needed = waiting.key
        if needed.call not in session.calls:
            raise _missing(needed, session.call_log)
        call_log = session.call_log.record(session.calls, needed)
        if self.number == 0:
            call_log = dataclasses.replace(call_log, embedded=session.embedded)
        values = live(
            session.values,
            call_log,
            self.last_made(call_log),
            self.program.keep | _kept_outputs(call_log, self.program),
        )
        return False, ({**state, "values": values, "call_log": call_log}, needed)

    @contextlib.contextmanager
    def _same_noise(self, state: State) -> Iterator[None]:
        """Let the code between layers draw what it drew in the phases before: it runs again from the start."""
        if self.number and self.training and (self.program.phases > 2 or _drops_layers(self.copy)):
            _generator(state["call"]).manual_seed(state["seed"])
        yield

    @staticmethod
    def last_made(call_log: CallLog) -> int:
        """Return the place of the last call that was made, -1 before the first."""
        return max(call_log.results, default=-1)


class MissingValueError(BatchStructureError):
    """A phase reads an output of a layer that was not kept."""

    def __init__(self, key: Key) -> None:
        super().__init__(
            f"The model reads output {key.leaf} of its call {key.call} of a layer, which it did not do with the "
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        wants_loss = kwargs.get(WEIGH) == LOSS_ONLY
        rows = _rows_to_weigh(args, kwargs)
        smoothed = kwargs.pop(SMOOTHED, None)
        run = functools.partial(self._run, args, kwargs, smoothed)
        with counting() as items:
            result = loss_only(self.model, run) if wants_loss else run()
        return result if rows is None else weighed(result, items, rows)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], smoothed: Any) -> Any:
        with _caches_at_hand((), kwargs, _device_of((args, kwargs))) as (_, kwargs, views):
            return with_smoothed_loss(swapped(self.model(*args, **kwargs), views), smoothed)


class LayerCall(nn.Module):
    """One call of a layer.

    Args:
        program: what was found out about the model.
        place: of the call in the program.
        layer: the layer.
    """

    def __init__(self, program: CutPlan, place: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.program = program
        self.place = place

    def forward(self, state: State) -> State:
        """Call the layer as the phase before recorded it; a microbatch that leaves it out passes by."""
        call_log: CallLog = state["call_log"]
        spec = call_log.calls.get(self.place)
        if spec is None:
            return state
        values, boxes = state["values"], dict(state["boxes"])
        used = {}
        for use in spec.boxes():
            used[use.number] = box = use.kind()
            fill_box(box, boxes.get(use.number, ()) if use.content is None else use.content.build(values, {}))
        args, kwargs = spec.arguments.build(values, used)
        at_hand = _caches_at_hand(args, kwargs, _device_of(values))
        with collecting(spec.collect) as captured, at_hand as (args, kwargs, _):
            out = self.layer(*args, **kwargs)
        boxes.update((number, box_content(box)) for number, box in used.items())
        result, found = _taken_apart(out, self.place, 0, self.program)
        held = None
        if captured:
            held, more = _taken_apart(captured, self.place, len(result.leaves), self.program)
            found |= more
        call_log = call_log.made(self.place, result, held)
        kept = self.program.keep | _kept_outputs(call_log, self.program)
        values = live({**values, **found}, call_log, self.place, kept)
        return {**state, "values": values, "boxes": boxes, "call_log": call_log}


@contextlib.contextmanager
def _caches_at_hand(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], dict[int, Any]]]:
    """Yield arguments in which held caches are open, and by the id of each open one what it was."""
    with contextlib.ExitStack() as stack:
        held = {id(value): value for value in (*args, *kwargs.values()) if is_held(value)}
        opened = {key: stack.enter_context(value.opened(device)) for key, value in held.items()}
        views = {id(view): held[key] for key, view in opened.items()}
        yield swapped(args, opened), swapped(dict(kwargs), opened), views


def _device_of(values: Any) -> torch.device:
    found = (leaf.device for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return next(found, torch.device("cpu"))


def begin(args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> State:
    """Return the state of a microbatch before anything was done."""
    kwargs = dict(kwargs)
    wants_loss = kwargs.get(WEIGH) == LOSS_ONLY
    weigh = _rows_to_weigh(args, kwargs)
    smoothed = kwargs.pop(SMOOTHED, None)
    return {
        "loss_only": wants_loss,
        "smoothed": smoothed,
        "weigh": weigh,
        "call": (args, kwargs),
        "values": {},
        "boxes": {},
        "seed": _generator((args, kwargs)).initial_seed(),
        # where the last layer may be left out, the code behind it reads the output of any other one
        "call_log": CallLog(keep="all" if model.training and _drops_layers(model) else asked_for(model, kwargs)),
    }


def _generator(call: Any) -> Any:
    """Whatever has the ``manual_seed`` of the device that a call runs on."""
    device = _device_of(call)
    is_host = device.type in ("cpu", "meta")
    return torch.default_generator if is_host else torch.get_device_module(device)


def _drops_layers(model: nn.Module) -> bool:
    """Whether the model draws in training which layers it calls."""
    config = getattr(model, "config", None)
    return any(getattr(config, f"{part}layerdrop", 0) for part in ("", "encoder_", "decoder_"))


def _rows_to_weigh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    return None if kwargs.pop(WEIGH, None) is None else rows_of_call(args, kwargs)


def _kept_outputs(call_log: CallLog, program: CutPlan) -> frozenset[Key]:
    """What the model hands out, of layers and of its embeddings; and single tokens, which it may look for in others."""
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


def _taken_apart(out: Any, place: int, first: int, program: CutPlan) -> tuple[Tree, dict[Key, torch.Tensor]]:
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
            raise CutError("structure", f"{name} returns something that cannot travel: {unknown[0]}")
        named.append(leaf)
    return Tree(spec, tuple(named)), found
