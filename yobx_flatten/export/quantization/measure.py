"""Measure how far a quantised file is from the model: on the replayed cases, and on a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ...errors.log import STEP
from ...huggingface.sliding_decoder import SlidingDecoder
from ...private_names.of_torch import pytree
from ...runners.runner import Runner
from ...trees.naming import output_names
from ..example.example import Example
from ..program.traced import Traced
from ..proof.exported_call import ByName
from ..proof.module_state import seeded
from ..proof.padding import Padding
from ..proof.quality import SCORES, Distance, Quality, text_losses
from ..proof.replay import Case, clone, eager_steps, following
from .options import Quantization
from .text_cases import text_cases

__all__ = ["Texts", "measure"]

Texts: TypeAlias = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor | None]
"""The arguments of a call that reads a text, the losses of the model, and its scores where these are few enough."""

_SCORES = 2**25
"""Numbers of scores that are kept for the divergence."""

logger = logging.getLogger("yobx_flatten")


def measure(
    runner: Runner,
    quantization: Quantization,
    example: Example,
    traced: Traced,
    cases: Sequence[Case],
    *,
    block_size: int | None = None,
    known: list[Texts] | None = None,
) -> Quality:
    """Return how far a file is from the module of an example. The block must be open."""
    # block_size: number of weights that share a scale; `None`, the default, for that of the quantization
    # known: what the model makes of the text, filled by a first call for others; `None`, the default, for one call
    block_size = quantization.block_size if block_size is None else block_size
    module, distance = example.module, Distance()
    side = ByName(runner, example.names)
    after = module.next_inputs if isinstance(module, SlidingDecoder) else following()
    for case in cases:
        logger.info("comparing %s", case.name, extra=STEP)
        outputs: Any = None
        padding = Padding()
        for index, (kwargs, eager, goes_on) in enumerate(eager_steps(module, case, after, traced.written)):
            padding.next_call(dict(kwargs))
            with seeded(index):
                outputs = side.run(clone(case.args), side.feed_back(kwargs, outputs) if goes_on else kwargs)
            names = output_names(eager, example.names)
            expected = dict(zip(names, pytree.tree_leaves(padding.blank_leaves(eager, names)), strict=True))
            tensors = {n: v for n, v in expected.items() if isinstance(v, torch.Tensor) and n in outputs}
            distance.add(tensors, {name: padding.blank(name, outputs[name]) for name in tensors})
    known = [] if known is None else known
    if not known and quantization.tokens is not None:
        for case in text_cases(module, example.kwargs, quantization.tokens):
            ((kwargs, eager, _),) = eager_steps(module, case, after, traced.written)
            scores = eager[SCORES] if isinstance(eager, dict) else getattr(eager, SCORES)
            kept = sum(one[2].numel() for one in known if one[2] is not None) + scores.numel() <= _SCORES
            known.append((dict(kwargs), text_losses(scores, kwargs["input_ids"]), scores.detach() if kept else None))
    for kwargs, losses, expected_scores in known:
        found = side.run((), clone(kwargs))[SCORES]
        if expected_scores is not None:
            distance.add_text_scores(expected_scores, found)
        distance.add_text(losses, text_losses(found, kwargs["input_ids"]))
    return distance.quality(quantization.weights, block_size, quantization.allowed)
