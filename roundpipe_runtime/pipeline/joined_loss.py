"""Compute the loss of a whole batch once, from joined outputs, and run its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ..batch.loss import terms_of_batch
from ..device.outcome import noting
from ..device.transfer import shapes_of


def back_from(outputs: PyTree, label: Any, loss_fn: Callable[[Any, Any], Any], return_outputs: bool) -> PyTree:
    """Compute a loss of the outputs of a whole batch, and go back from it."""
    found = shapes_of([leaf for leaf in pytree.tree_leaves((outputs, label)) if isinstance(leaf, torch.Tensor)])
    with torch.enable_grad():
        # the microbatch is not known: a loss that does not run on a few rows may be meant for the whole batch
        with noting(f"In the loss, called once with the joined outputs and the labels of all rows: tensors {found}"):
            # outputs of microbatches carry weights of their losses, joined ones do not
            own = getattr(loss_fn, "__wrapped__", loss_fn) if hasattr(loss_fn, "has_proven_weights") else loss_fn
            loss = own(outputs, label)
        total, terms = terms_of_batch(loss)
    if terms:
        torch.autograd.backward([term.tensor for term in terms], [term.seed for term in terms])
    total = pytree.tree_map(torch.Tensor.cpu, total)
    return (total, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)) if return_outputs else total
