"""Remove the counter input of a model whose layers all slide, since no tool feeds it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...core.compare import largest_difference
from ...core.effects import undisturbed
from ...huggingface.cache_names import CACHE, cache_of
from ...huggingface.sliding_decoder import SlidingDecoder, counts_by_itself, why_not_sliding
from ..example.example import Example, make_example
from ..program.traced import Traced
from ..proof.case import Case, clone
from ..proof.module_state import written_parameters
from ..proof.report import ExportReport
from ..source import Source, traced_example


def without_counter(source: Source, report: ExportReport) -> Source:
    """Return a source without the counter that no tool feeds, for a model whose layers all slide."""
    left = source.traced.left  # the decoder that is fed otherwise leaves nothing in its arguments
    example = None if source.is_given or left is not None else _without_counter(source.example, source.traced, report)
    if example is None:
        return source
    decoder: Any = example.module
    traced = dataclasses.replace(traced_example(example, report), kept=decoder.kept)
    cases = [Case(case.name, (), decoder.inputs(case.kwargs), case.steps) for case in source.cases]
    return dataclasses.replace(source, example=example, traced=traced, cases=cases)


def _without_counter(example: Example, traced: Traced, report: ExportReport) -> Example | None:
    """The example of the model without the counter; ``None`` where it has none, or it cannot go."""
    module, kwargs = example.module, example.kwargs
    if not counts_by_itself(cache_of(kwargs)):
        return None
    why_not = "there are positional arguments" if example.args else why_not_sliding(module, kwargs)
    if why_not is None:
        decoder = SlidingDecoder(module, kwargs)
        inputs = decoder.inputs(kwargs)
        written = written_parameters(module, traced.written)
        with torch.no_grad(), undisturbed(seed=0, module=module, kwargs=kwargs, parameters=written):
            found = decoder(**clone(inputs))
            expected = module(**kwargs)
        if largest_difference(expected["logits"], found["logits"]) <= report.tolerance:
            fed = make_example(decoder, (), inputs, decoder.shapes(example.shapes), example.bounds)
            return dataclasses.replace(fed, axis_names=example.axis_names, relations=example.relations)
        why_not = "the model computes something else from the length of the mask"
    report.remark(f"{CACHE}.length, how many tokens were seen, is an input that other tools do not feed: {why_not}.")
    return None
