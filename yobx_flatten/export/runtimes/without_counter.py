"""Remove the counter input of a model whose layers all slide, since no tool feeds it."""

from __future__ import annotations

import dataclasses

import torch

from ...diagnose.compare import largest_difference
from ...huggingface.cache_names import CACHE, cache_of
from ...huggingface.sliding_decoder import SlidingDecoder, counts_by_itself, why_not_sliding
from ..example.example import Example, make_example
from ..program.traced import Traced
from ..proof.module_state import seeded, undisturbed
from ..proof.replay import clone
from ..proof.report import ExportReport
from ..proof.untouched_copy import untouched_copy

__all__ = ["without_counter"]


def without_counter(example: Example, traced: Traced, report: ExportReport) -> Example | None:
    """Return the example of a model whose layers all slide, without the counter that no tool feeds."""
    module, kwargs = example.module, example.kwargs
    if not counts_by_itself(cache_of(kwargs)):
        return None
    why_not = "there are positional arguments" if example.args else why_not_sliding(module, kwargs)
    if why_not is None:
        decoder = SlidingDecoder(module, kwargs)
        inputs = decoder.inputs(kwargs)
        with torch.no_grad(), undisturbed(module, traced.written), seeded(0):
            expected = module(**untouched_copy(dict(kwargs), module))
            found = decoder(**clone(inputs))
        if largest_difference(expected["logits"], found["logits"]) <= report.tolerance:
            fed = make_example(decoder, (), inputs, decoder.shapes(example.shapes), example.bounds)
            return dataclasses.replace(fed, axis_names=example.axis_names, relations=example.relations)
        why_not = "the model computes something else from the length of the mask"
    report.remark(f"{CACHE}.length, how many tokens were seen, is an input that other tools do not feed: {why_not}.")
    return None
