"""Compute the loss of one microbatch, and its backward to the outputs of the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...batch.averages import count_items
from ...batch.loss import BackwardTerm
from ...device.protocol import Device
from ..layer_graph import Values, enter, other_leaves
from ..parameters.on_device import check_not_kept
from ..recompute.draws import CallDraws
from ..recompute.states import VisitGenerator, run_seeded
from ..run import Run
from .nested_checkpoint import run_backward, watch_forward


class MicrobatchLoss:
    """The loss of one microbatch: :meth:`compute` it, then go :meth:`back`."""

    # device: device of the outputs of the last layer

    def __init__(self, run: Run, device: Device, microbatch: int, outputs: Values, generator: VisitGenerator) -> None:
        self._run, self._device, self._microbatch, self._generator = run, device, microbatch, generator
        self._entries, entered = enter(outputs, as_leaves=False)
        self._outputs = outputs.structure.rebuild(entered)
        self._terms: Sequence[BackwardTerm] = ()
        # What the means in the loss were taken over, as far as it is known.
        self._items: Sequence[float] = ()

    def compute(self, labels: Any) -> None:
        """Call the loss function with labels on the device."""
        run, spec = self._run, self._run.spec
        invoke = partial(self._invoke, labels)
        call = partial(watch_forward, invoke, spec.loss_fn, self._device.torch_device)
        if spec.preserve_rng_state:
            seed = partial(spec.seed, len(spec.contents), self._microbatch)
            place = partial(CallDraws, run.draws, len(spec.contents), self._microbatch)
            call = partial(run_seeded, call, spec.loss_fn, seed, self._generator, call, None, place)
        with run.loss_lock:
            result = call()
        self._terms = run.contract.add(self._microbatch, result, self._items)

    def _invoke(self, labels: Any) -> Any:
        """Call the loss function; a second time if the first one shows that it draws, so only the last one counts."""
        loss_fn = self._run.spec.loss_fn
        if self._run.contract.reduction not in ("mean", "items"):  # counting waits for an accelerator
            return loss_fn(self._outputs, labels)
        with count_items() as items:
            result = loss_fn(self._outputs, labels)
        self._items = items.trained
        return result

    def back(self) -> list[torch.Tensor | None]:
        """Go back; return the gradients of the last layer's outputs, ``None`` where none flows."""
        if self._terms:
            with self._run.loss_lock:
                run_backward(self._back, self._run.spec.loss_fn, self._device.torch_device)
        return [None if entry is None else entry.grad for entry in self._entries]

    def _back(self) -> None:
        losses, seeds = [term.tensor for term in self._terms], [term.seed for term in self._terms]
        outside = other_leaves(losses, self._entries)
        if not outside:
            torch.autograd.backward(losses, seeds)
            return
        for leaf in outside:
            check_not_kept(leaf)
        wanted = [entry for entry in self._entries if entry is not None]
        found = torch.autograd.grad(losses, [*wanted, *outside], seeds, allow_unused=True)
        for entry, gradient in zip(wanted, found, strict=False):
            entry.grad = gradient
        # what the loss itself trains is collected like the gradients of a layer after the last
        pairs = zip(cast(list[nn.Parameter], outside), found[len(wanted) :], strict=True)
        collected = self._run.collected
        own = collected.loss_gradients[self._microbatch] = {}
        for leaf, gradient in pairs:
            if gradient is not None:
                own[leaf] = gradient
        if not self._run.spec.has_copies:
            collected.add_loss_gradients(len(self._run.spec.contents))
