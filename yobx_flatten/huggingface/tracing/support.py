"""Replacements that let one trace of a transformers model serve all lengths.

A trace follows one branch. transformers branches on the number of tokens seen (is the window full?), on mask lengths
and on whether a mask can be left out; each would fix the example's case in the program. The versions put in place here
compute the same values without a branch: of the layers (:mod:`.layers`), of the masks
(:mod:`.masks`), and of some models (:mod:`.models`). One computes the same values with less memory
(:mod:`.attention`).

The replacements are active during a trace only, for the thread that traces, and the originals are asked again for
what they do not cover.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from ...errors.dependencies import is_installed
from ...private_names.of_torch import OpOverload, dict_flatten_with_keys, pytree
from ...recipe.aliases import PyTree
from ...registry.locking import LOCK
from ...registry.patches import AttributePatch, TracePatch, tracing_here
from ...trace.onnx_operators import Translation
from ..cache_names import named_as, named_for
from ..caches.layouts import hold_length_leaf
from ..loaded import subclasses_of
from .attention import attention_replacements
from .layers import layer_replacements
from .masks import mask_replacements
from .model_patches import upstream_replacements
from .models import model_replacements
from .ranges import TensorRanges
from .replacement import Make, Replacement
from .rotary import rotary_replacements
from .sparse import prepare_compressed


class TransformersTracing:
    """What transformers' models need while they are traced."""

    modules = "transformers"

    def __init__(self) -> None:
        self._patches: dict[tuple[Any, str], TracePatch] = {}
        self._keys_given: dict[type, AttributePatch] = {}
        self._open = 0

    def acquire(self) -> None:
        """Open a block or a trace: outputs that transformers registered without keys have them from now on."""
        from transformers.utils.generic import ModelOutput  # here, since no import runs under the lock

        with LOCK:
            self._open += 1
            self._give_keys(ModelOutput)

    def release(self) -> None:
        """Close a block or a trace; the last one puts the registrations back."""
        with LOCK:
            self._open -= 1
            if self._open == 0:
                for patch in self._keys_given.values():
                    patch.release()
                self._keys_given.clear()

    def _give_keys(self, model_output: type) -> None:
        # 4.56 to 5.0 register every ModelOutput without keys, and torch.export refuses to trace or to call a program
        # that is given one (T5 returns such an encoder output). Specs and stored programs stay as they are.
        base = pytree.SUPPORTED_NODES.get(model_output)
        if base is None or base.flatten_with_keys_fn is not None:
            return
        for cls in subclasses_of(model_output):
            node = pytree.SUPPORTED_NODES.get(cls)
            if cls not in self._keys_given and node is not None and node.flatten_with_keys_fn is None:
                keyed = node._replace(flatten_with_keys_fn=dict_flatten_with_keys)
                patch = self._keys_given[cls] = AttributePatch(pytree.SUPPORTED_NODES, cls, keyed)
                patch.acquire()

    def named_for(self, forward: Callable[..., object], entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments with the cache under the name that a forward has for it."""
        return named_for(forward, entries)

    def named_as(self, names: Collection[str], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments with the cache under the name that a program has for it."""
        return named_as(names, kwargs)

    def prepare(self, tree: PyTree) -> PyTree:
        """Return the inputs with the tensors of their caches contiguous.

        Past its window a layer keeps a slice; the slice's strides would end in a guard of the program that refuses the
        contiguous tensors that all other callers pass. Layers that compress their keys get sizes that a trace does not
        fix.
        """
        from transformers.cache_utils import Cache

        def contiguous(leaf: object) -> object:
            return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf

        def prepare(node: object) -> PyTree:
            if not isinstance(node, Cache):
                return node
            copy = pytree.tree_map(contiguous, node)
            parts = [vars(copy).get(name) for name in ("self_attention_cache", "cross_attention_cache")]
            for cache in (copy, *parts):
                hold_length_leaf(vars(cache).get("layers", []) if cache is not None else [])
            for layer in getattr(copy, "layers", ()):
                prepare_compressed(layer)
            return copy

        return pytree.tree_map(prepare, tree, is_leaf=lambda node: isinstance(node, Cache))

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """Put the traceable versions in place, and the originals back."""
        replacements = list(_replacements())  # which may import
        with LOCK:
            patches = [self._patch(target, name, make) for target, name, make in replacements]
        with contextlib.ExitStack() as stack:
            self.acquire()  # again: for models imported inside the block, and for a trace that outlives its block
            stack.callback(self.release)
            for patch in patches:
                patch.acquire()
                stack.callback(patch.release)
            stack.enter_context(tracing_here())
            if _ranges_begin_at_the_past():
                stack.enter_context(TensorRanges())
            yield

    def _patch(self, target: object, name: str, make: Make) -> TracePatch:
        patch = self._patches.get((target, name))
        if patch is None or not patch.is_current:
            patch = self._patches[target, name] = TracePatch(target, name, make)
        return patch

    def translations(self) -> Iterator[Translation]:
        """Return the translations of the grouped products by which mixtures of experts multiply.

        transformers' own exporters (5.17 and later) bring them; there are none for versions without.
        """
        fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
        if fallback is not None and is_installed("transformers.exporters"):
            for operator in (fallback.default, torch.ops.aten._grouped_mm.default):
                yield Translation(operator, _grouped_products(operator))


def _grouped_products(operator: OpOverload) -> Callable[..., Any]:
    """Build the product with transformers' own translation, which is imported for a program that needs it only."""

    def translate(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # 5.17's exporters import every model that they patch, and some use torch.jit.script
            warnings.filterwarnings("ignore", r".torch\.jit\.script. is deprecated", DeprecationWarning)
            from ...private_names.of_transformers import onnx_translations
        return onnx_translations[operator](*args, **kwargs)

    return translate


def _ranges_begin_at_the_past() -> bool:
    # 4.56 to 5.0 hand the positions of the new tokens to the cache; later versions make them where they are used
    from transformers.cache_utils import DynamicLayer

    return "cache_position" in inspect.signature(DynamicLayer.get_mask_sizes).parameters


def _replacements() -> Iterator[Replacement]:
    """Target, attribute and replacement, for what the installed and imported transformers has."""
    yield from layer_replacements()
    yield from mask_replacements()
    yield from attention_replacements()
    yield from model_replacements()
    yield from rotary_replacements()
    yield from upstream_replacements()  # last: where ours replace the same function, ours is used


TRANSFORMERS_TRACING = TransformersTracing()
