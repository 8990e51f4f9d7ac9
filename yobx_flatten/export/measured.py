"""Measure how far a file with quantised weights is from the model: the cases of its replay, and a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..errors.log import STEP
from ..huggingface.sliding_decoder import SlidingDecoder
from ..private_names.of_torch import pytree
from ..runners.runner import Runner
from ..trees.naming import output_names
from .example import Example
from .padding import Padding
from .quality import SCORES, Distance, Quality, text_losses
from .quantization import Quantization
from .replay import Case, clone, eager_steps, following
from .sides import ByName
from .text_cases import text_cases
from .traced import Traced
from .undisturbed import seeded

__all__ = ["measure"]

logger = logging.getLogger("yobx_flatten")


def measure(
    runner: Runner,
    quantization: Quantization,
    example: Example,
    traced: Traced,
    cases: Sequence[Case],
    *,
    block_size: int | None = None,
) -> Quality:
    """Return how far a file is from the module of an example. The block must be open.

    Args:
        runner: the file, open.
        quantization: how its weights are stored, and the text.
        example: the module in full precision.
        traced: the program of that module.
        cases: what is compared, in addition to the text.
        block_size: number of weights that share a scale; ``None``, the default, for that of the quantization.
    """
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
    tokens = quantization.tokens
    for case in [] if tokens is None else text_cases(module, example.kwargs, tokens):
        ((kwargs, eager, _),) = eager_steps(module, case, after, traced.written)
        read = kwargs["input_ids"]
        scores = eager[SCORES] if isinstance(eager, dict) else getattr(eager, SCORES)
        found = side.run((), kwargs)[SCORES]
        distance.add_text(text_losses(scores, read), text_losses(found, read))
    return distance.quality(quantization.weights, block_size, quantization.allowed)
