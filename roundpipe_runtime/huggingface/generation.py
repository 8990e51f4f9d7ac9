"""Run the ``generate`` method of a Hugging Face model through its pipeline, if a trial gives the model's results."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.compare import relative_difference, tolerance
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.errors.failures import result_or
from yobx_flatten.huggingface.cache_names import cache_of, name_in
from yobx_flatten.registry.patches import AttributePatch
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ..batch.entries import is_cache
from ..errors import CutError
from ..pipeline.live import OtherForward, with_own_forwards
from .adapters import model_inside, random_tokens
from .cutting.caches import cache_argument, home
from .cutting.check import evaluating
from .cutting.cut import Cut, cut

_PROMPT, _PADDING = 5, 2


def forward_of(model: nn.Module, forward: Callable[..., Any]) -> AttributePatch:
    # `generate` calls the model itself, so only an attribute of the model can replace its forward
    inner = model_inside(model)
    other = OtherForward(forward, vars(inner).get("forward"))
    return AttributePatch(vars(inner), "forward", functools.wraps(inner.forward, updated=())(other))


def reason_for_host(cut: Cut, forward: Callable[..., Any]) -> str | None:
    """Return the reason why a model cannot generate through its pipeline; ``None`` if a trial gives equal logits."""
    if cut.report.is_whole:
        return "it could not be split into layers"
    if (cache := home(model_inside(cut.model))) is None:
        return "it has no cache of a known class"
    # a model may raise any error for a cache
    with torch.no_grad(), evaluating(cut.model):
        trial = partial(_difference, cut.model, forward, cache)
        return result_or(trial, lambda error: f"{type(error).__name__}: {error}")


def _difference(model: nn.Module, forward: Callable[..., Any], cache: Any) -> str | None:
    tokens = random_tokens(model, 2, _PROMPT + 1)
    mask = torch.ones_like(tokens)
    mask[0, :_PADDING] = 0
    name = cache_argument(model)
    assert name is not None  # the model accepts the cache
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


_LOG = logging.getLogger(__name__)
_ROWS = 2  # of a trial


class GenerationPath:
    """Runs an encoder or an encoder-decoder in ``generate`` through a pipeline, which is created by the first call.

    The model's own forward runs on the host if the pipeline fails, or if its outputs differ from the model's outputs.
    """

    def __init__(self, model: nn.Module, wrap: Callable[[Cut], Any]) -> None:
        self.model, self._wrap, self._tried = model, wrap, False
        self._pipeline: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with with_own_forwards(self.model):
            bound = inspect.signature(self.model.forward).bind_partial(*args)
            kwargs = {**bound.arguments, **kwargs}
            if not self._tried:
                self._tried = True
                # the code of a model may raise any error
                trial = partial(self._reason_for_host, kwargs)
                if (reason := result_or(trial, lambda error: f"{type(error).__name__}: {error}")) is not None:
                    _LOG.info("%s runs on the host in generate: %s", type(self.model).__name__, reason)
                    self.close()
            return self.model.forward(**kwargs) if self._pipeline is None else self._pipeline.forward(**kwargs)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None

    def _reason_for_host(self, kwargs: Kwargs) -> str | None:
        """Create the pipeline; return the reason why it is not used, ``None`` if its outputs equal the model's."""
        name, cache = name_in(kwargs), cache_of(kwargs)
        rest = {key: value for key, value in kwargs.items() if key not in (name, "use_cache", "cache_position")}
        tensors = [leaf for leaf in pytree.tree_leaves(rest) if isinstance(leaf, torch.Tensor)]
        rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)

        def first(leaf: Any) -> Any:
            is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
            return leaf[:_ROWS].clone() if is_cut else leaf  # a copy, because some models write into their arguments

        example = {key: pytree.tree_map(first, value) for key, value in rest.items()}
        made = cut(self.model, example, check=False)
        if made.report.is_whole:
            raise CutError(*made.report.refused[-1])
        self._pipeline = self._wrap(made)
        calls: list[dict[str, Any]] = [example]
        with torch.no_grad(), evaluating(self.model):
            held: list[dict[str, Any]] = [{"use_cache": True} if cache is None and kwargs.get("use_cache") else {}] * 2
            if name is not None and cache is not None and is_cache(cache) and not cache.get_seq_length():
                held = [{name: copy.deepcopy(cache), "use_cache": True} for _ in range(2)]
                calls.append({**example, "decoder_input_ids": example["decoder_input_ids"][:, -1:]})
            for call in calls:
                runs = zip((self._pipeline.forward, self.model.forward), held, strict=True)
                found, expected = (_first_tensor(run(**call, **more)) for run, more in runs)
                difference = relative_difference(expected, found)
                if not difference <= tolerance("gradients", *(p.dtype for p in self.model.parameters())):
                    return f"through the pipeline, its output differs by {difference:.1e}"
        return None


def _first_tensor(output: PyTree) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, dict) else None
    found: torch.Tensor = output[0] if logits is None else logits
    return found.double()
