"""The few replacements that let one trace of a transformers model serve all lengths.

A trace follows one branch. transformers branches on the number of tokens seen (is the window full?), on mask lengths
and on whether a mask can be left out; each would fix the example's case in the program. The versions here compute the
same values without a branch:

* a sliding layer knows how many keys it kept from their shape, so ``kept + query`` keys are attended to, starting at
  position ``seen - kept``; of those it keeps the last ``window - 1``, or all if there are fewer;
* masks are always made, padded by ``max(missing, 0)``, and by broadcasting;
* an empty layer starts from a slice of its first keys, not from a new tensor: a tensor made in a trace is a constant of
  the program that ``run_decompositions`` and the ONNX exporter do not find again
  (https://github.com/pytorch/pytorch/issues/179555).

The replacements are in force during a trace only, and the originals are asked again for what they do not cover.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..patches import AttributePatch
from .loaded import subclasses_of

__all__ = ["TRANSFORMERS_TRACING", "TransformersTracing", "onnx_translations"]


class TransformersTracing:
    """What transformers' models need while they are traced."""

    modules = "transformers"

    def __init__(self) -> None:
        self._patches: dict[tuple[str, str], AttributePatch] = {}
        self._keys_given: dict[type, AttributePatch] = {}
        self._open = 0
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Open a block or a trace: outputs that transformers registered without keys have them from now on."""
        with self._lock:
            self._open += 1
            self._give_keys()

    def release(self) -> None:
        """Close a block or a trace; the last one puts the registrations back."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                for patch in self._keys_given.values():
                    patch.release()
                self._keys_given.clear()

    def _give_keys(self) -> None:
        # 4.56 to 5.0 register every ModelOutput without keys, and torch.export refuses to trace or to call a program
        # that is given one (T5 returns such an encoder output). Specs and stored programs stay as they are.
        from transformers.utils.generic import ModelOutput

        base = pytree.SUPPORTED_NODES.get(ModelOutput)
        if base is None or base.flatten_with_keys_fn is not None:
            return
        for cls in subclasses_of(ModelOutput):
            node = pytree.SUPPORTED_NODES.get(cls)
            if cls not in self._keys_given and node is not None and node.flatten_with_keys_fn is None:
                keyed = node._replace(flatten_with_keys_fn=pytree._dict_flatten_with_keys)
                patch = self._keys_given[cls] = AttributePatch(pytree.SUPPORTED_NODES, cls, keyed)
                patch.acquire()

    def prepare(self, tree: Any) -> Any:
        """Return the inputs with the tensors of their caches contiguous.

        Past its window a layer keeps a slice; the slice's strides would end in a guard of the program that refuses the
        contiguous tensors which everybody else passes.
        """
        from transformers.cache_utils import Cache

        def contiguous(leaf: Any) -> Any:
            return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf

        def prepare(node: Any) -> Any:
            return pytree.tree_map(contiguous, node) if isinstance(node, Cache) else node

        return pytree.tree_map(prepare, tree, is_leaf=lambda node: isinstance(node, Cache))

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """Put the traceable versions in place, and the originals back."""
        with self._lock:
            patches = [
                self._patches.setdefault((owner, name), AttributePatch(target, name, make(vars(target)[name])))
                for owner, target, name, make in _replacements()
            ]
        with contextlib.ExitStack() as stack:
            self.acquire()  # again: for models imported inside the block, and for a trace that outlives its block
            stack.callback(self.release)
            for patch in patches:
                patch.acquire()
                stack.callback(patch.release)
            yield


def onnx_translations(program: torch.export.ExportedProgram) -> dict[Any, Any]:
    """Translations of operators of transformers that torch's ONNX exporter does not know.

    Mixtures of experts multiply in groups, by an operator that transformers defines; its own exporters (5.17 and later)
    bring the translation. They are large, so they are imported only for a program that needs them.

    Args:
        program: the program to be converted.

    Returns:
        What ``torch.onnx.export(custom_translation_table=...)`` takes; empty for versions without.
    """
    fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
    if fallback is None or importlib.util.find_spec("transformers.exporters") is None:
        return {}
    wanted = {fallback.default, torch.ops.aten._grouped_mm.default} & {node.target for node in program.graph.nodes}
    if not wanted:
        return {}
    try:
        with warnings.catch_warnings():
            # 5.17's exporters import every model that they patch, and some use torch.jit.script
            warnings.filterwarnings("ignore", r".torch\.jit\.script. is deprecated", DeprecationWarning)
            from transformers.exporters.exporter_onnx import _ONNX_TRANSLATION_TABLE
    except ImportError:  # 5.0 to 5.16
        return {}
    return {op: _ONNX_TRANSLATION_TABLE[op] for op in wanted if op in _ONNX_TRANSLATION_TABLE}


def _replacements() -> Iterator[tuple[str, Any, str, Callable[[Any], Any]]]:
    """Owner, target, attribute and replacement, for what the installed and imported transformers has."""
    cache_utils = sys.modules["transformers.cache_utils"]
    sliding, full = cache_utils.DynamicSlidingWindowLayer, cache_utils.DynamicLayer
    yield "sliding", sliding, "update", _sliding_update
    yield "sliding", sliding, "get_mask_sizes", _sliding_mask_sizes
    yield "full", full, "lazy_initialization", _lazy_initialization
    if "lazy_initialization" in vars(sliding):
        yield "sliding", sliding, "lazy_initialization", _lazy_initialization
    if "_sliding_window_tensor" in sliding.__init__.__code__.co_names:
        yield "sliding", sliding, "__init__", _sliding_init
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None:
        yield "masks", masks, "prepare_padding_mask", _prepare_padding_mask
        yield "masks", masks, "_ignore_causal_mask_sdpa", _never_ignore_the_mask
        if hasattr(masks, "_vmap_for_bhqkv"):  # 4.56 and 4.57; later versions broadcast by themselves
            yield "masks", masks, "_vmap_for_bhqkv", _broadcast_for_bhqkv
            yield "masks", masks, "TransformGetItemToIndex", _nothing_to_transform


def _sliding_update(original: Any) -> Any:
    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if getattr(self, "record_past", False):
            return original(self, key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if self.keys is None:
            _start_empty(self, key_states, value_states)
        self.cumulative_length = self.cumulative_length + key_states.shape[-2]
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        count = keys.shape[-2]
        last = torch.arange(torch.sym_min(count, self.sliding_window - 1), device=keys.device)
        last = last + torch.sym_max(count - self.sliding_window + 1, 0)
        # Not keys[:, :, start:]: a slice asks whether start is 0, and whether its strides are those of a contiguous
        # tensor. Either answer is fixed in the program, which then refuses lengths on the other side of the window.
        self.keys, self.values = keys.index_select(2, last), values.index_select(2, last)
        return keys, values

    return update


def _sliding_mask_sizes(original: Any) -> Any:
    # 4.56 to 5.0 pass the positions of the new tokens, later versions their number
    takes_positions = "cache_position" in inspect.signature(original).parameters

    def get_mask_sizes(self: Any, query: Any) -> tuple[Any, Any]:
        if getattr(self, "record_past", False):
            return original(self, query)  # type: ignore[no-any-return]
        kept = 0 if self.keys is None or self.keys.dim() < 2 else self.keys.shape[-2]
        return kept + (query.shape[0] if takes_positions else query), self.cumulative_length - kept

    return get_mask_sizes


def _lazy_initialization(original: Any) -> Any:
    def lazy_initialization(self: Any, key_states: Any, value_states: Any = None) -> None:
        _start_empty(self, key_states, key_states if value_states is None else value_states)

    return lazy_initialization


def _start_empty(layer: Any, key_states: Any, value_states: Any) -> None:
    layer.dtype, layer.device = key_states.dtype, key_states.device
    layer.keys, layer.values = key_states[..., :0, :], value_states[..., :0, :]
    layer.is_initialized = True


def _sliding_init(original: Any) -> Any:
    def __init__(self: Any, sliding_window: int, *args: Any, **kwargs: Any) -> None:
        # the layer's tensor copy of its window is only read by DDP's gather, outside of any trace
        with _without_new_tensors():
            original(self, sliding_window, *args, **kwargs)
        self.__dict__.pop("_sliding_window_tensor", None)

    return __init__


@contextlib.contextmanager
def _without_new_tensors() -> Iterator[None]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        yield


def _prepare_padding_mask(original: Any) -> Any:
    def prepare_padding_mask(attention_mask: Any, kv_length: Any, kv_offset: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is None:
            return None
        missing = torch.sym_max(kv_length + kv_offset - attention_mask.shape[-1], 0)
        padded = attention_mask if type(missing) is int and missing == 0 else _pad(attention_mask, missing)
        if kwargs.get("_slice", "_slice" in inspect.signature(original).parameters):  # before 5.0
            return padded[:, torch.arange(kv_length, device=padded.device) + kv_offset]
        return padded

    return prepare_padding_mask


def _pad(mask: Any, missing: Any) -> Any:
    return torch.nn.functional.pad(mask, (0, missing))


def _never_ignore_the_mask(original: Any) -> Any:
    def _ignore_causal_mask_sdpa(*args: Any, **kwargs: Any) -> bool:
        return False

    return _ignore_causal_mask_sdpa


def _broadcast_for_bhqkv(original: Any) -> Any:
    # What 4.56 and 4.57 vmap over four indices, later versions broadcast. Under vmap an index into the padding mask
    # becomes an operator (`flat_apply`) that torch 2.13 cannot store: "Unsupported getattr attribute
    # function_const_func_spec0".
    def _vmap_for_bhqkv(mask_function: Any, bh_indices: bool = True) -> Any:
        def broadcast(batch: Any, head: Any, query: Any, key: Any) -> Any:
            if not bh_indices:  # batch and head are None
                return mask_function(batch, head, query[:, None], key[None, :]).expand(query.shape[0], key.shape[0])
            mask = mask_function(
                batch[:, None, None, None], head[None, :, None, None], query[None, None, :, None], key[None, None, None]
            )
            return mask.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

        return broadcast

    return _vmap_for_bhqkv


def _nothing_to_transform(original: Any) -> Any:
    return contextlib.nullcontext


TRANSFORMERS_TRACING = TransformersTracing()
