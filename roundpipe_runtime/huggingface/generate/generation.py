"""Run ``generate`` of transformers with the forward of a pipeline, if a trial shows that both compute the same."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.compare import relative_difference, tolerance
from yobx_flatten.errors.failures import result_or

from ...pipeline.live import OtherForward
from ..adapters import model_inside
from ..configuration import text_config
from ..cutting.caches import cache_argument, home
from ..cutting.check import evaluating
from ..cutting.cut import Cut

_PROMPT, _PADDING = 5, 2


@contextlib.contextmanager
def forward_of(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a model in the block."""
    # `generate` calls the model that it is a method of, so an attribute of that object is the only way in
    inner = model_inside(model)
    held = inner.__dict__
    before = held.get("forward")
    held["forward"] = functools.wraps(inner.forward, updated=())(OtherForward(forward, before))
    try:
        yield
    finally:
        if before is None:
            del held["forward"]
        else:
            held["forward"] = before


def reason_for_host(cut: Cut, forward: Callable[..., Any]) -> str | None:
    """Return why a model has to generate on the host.

    A prompt of two rows, the first one padded, and one more token run through the pipeline and through the model, each
    with a cache.
    """
    inner = model_inside(cut.model)
    if cut.report.is_whole:
        return "it runs in one piece"
    cache = home(inner)
    if cache is None:
        return "its caches are of a kind of its own"
    # the code of a model may raise anything for a cache
    with torch.no_grad(), evaluating(cut.model):
        return result_or(
            lambda: _difference(cut.model, forward, cache), lambda error: f"{type(error).__name__}: {error}"
        )


def _difference(model: nn.Module, forward: Callable[..., Any], cache: Any) -> str | None:
    vocabulary = getattr(text_config(model), "vocab_size", None) or 100
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(5, vocabulary - 1), min(vocabulary, 100), (2, _PROMPT + 1), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :_PADDING] = 0
    name = cache_argument(model)
    assert name is not None  # it has a home
    caches = (cache, copy.deepcopy(cache))
    runs: tuple[Callable[..., Any], ...] = (forward, model)
    for start, stop in ((0, _PROMPT), (_PROMPT, _PROMPT + 1)):
        call = {"input_ids": tokens[:, start:stop], "attention_mask": mask[:, :stop], "use_cache": True}
        found, expected = (
            run(**call, **{name: held}).logits[:, -1].double() for run, held in zip(runs, caches, strict=True)
        )
        difference = relative_difference(expected, found)
        if not difference <= tolerance("gradients", *(p.dtype for p in model.parameters())):
            return f"with a cache, logits through the pipeline differ by {difference:.1e}"
    return None
