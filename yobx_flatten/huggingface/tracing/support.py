"""Replace functions of transformers, so that one trace of a model serves all numbers of tokens.

A trace records only the branches that the example takes, such as the branch for a full sliding window. A replacement
has no branch, and computes the same values as the function of transformers. Cache layers are replaced in
:mod:`.layers`, functions of models in :mod:`.models`, and masks, positions and attention in this file. A function of
transformers is replaced only in threads that run a trace.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from ...core.private_names.of_torch import OpOverload, dict_flatten_with_keys, pytree
from ...errors import is_installed
from ...registry.patches import LOCK, AttributePatch, TracePatch, tracing_here
from ...registry.recipe.aliases import Kwargs, Length, PyTree, Size, TransformersCache
from ...trace.trace_settings import TraceSupport, Translation
from ..cache_names import named_as, named_for
from ..caches.layouts import hold_length_leaf
from ..decoders import switch_of_kind
from ..outputs import ModelClasses, subclasses_of
from .layers import Function, Make, Replacement, always, layer_replacements, replacement, traceable
from .models import model_replacements
from .sparse import prepare_compressed


class TransformersTracing(TraceSupport):
    def __init__(self) -> None:
        super().__init__("transformers")
        self._patches: dict[tuple[Any, str], TracePatch] = {}
        self._keys_given: dict[type, AttributePatch] = {}
        self._open = 0

    def acquire(self) -> None:
        """Add pytree keys to model output classes that transformers registered without keys, until :meth:`release`."""
        from transformers.utils.generic import ModelOutput  # an import must not run under the lock

        with LOCK:
            self._open += 1
            # 4.56 to 5.0 register every ModelOutput without keys, and torch.export refuses such an input for a trace
            # or a program (T5 has such an encoder output). Specs and stored programs are unchanged.
            base = pytree.SUPPORTED_NODES.get(ModelOutput)
            if base is None or base.flatten_with_keys_fn is not None:
                return
            for cls in subclasses_of(ModelOutput):
                node = pytree.SUPPORTED_NODES.get(cls)
                if cls not in self._keys_given and node is not None and node.flatten_with_keys_fn is None:
                    keyed = node._replace(flatten_with_keys_fn=dict_flatten_with_keys)
                    patch = self._keys_given[cls] = AttributePatch(pytree.SUPPORTED_NODES, cls, keyed)
                    patch.acquire()

    def release(self) -> None:
        with LOCK:
            self._open -= 1
            if self._open == 0:
                for patch in self._keys_given.values():
                    patch.release()
                self._keys_given.clear()

    def named_for(self, forward: Callable[..., object], entries: Mapping[str, Any]) -> Mapping[str, Any]:
        return named_for(forward, entries)

    def named_as(self, names: Collection[str], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return named_as(names, kwargs)

    def prepare(self, tree: PyTree) -> PyTree:
        # A layer that has seen more tokens than its window keeps a slice. The strides of the slice would add a guard,
        # which refuses contiguous tensors. Layers that compress their keys get sizes that a trace does not fix.
        from transformers.cache_utils import Cache

        def prepare(node: object) -> PyTree:
            if not isinstance(node, Cache):
                return node
            copy = pytree.tree_map_only(Tensor, lambda leaf: leaf.contiguous(), node)
            parts = [vars(copy).get(name) for name in ("self_attention_cache", "cross_attention_cache")]
            for cache in (copy, *parts):
                hold_length_leaf(vars(cache).get("layers", []) if cache is not None else [])
            for layer in getattr(copy, "layers", ()):
                prepare_compressed(layer)
            return copy

        return pytree.tree_map(prepare, tree, is_leaf=lambda node: isinstance(node, Cache))

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        import transformers.cache_utils as cache_utils

        replacements: list[Replacement] = [*layer_replacements(), *mask_replacements()]  # these may import
        sdpa = sys.modules.get("transformers.integrations.sdpa_attention")
        if sdpa is not None and "use_gqa_in_sdpa" in vars(sdpa):
            # attention is one operator, with as many key heads as the cache has
            replacements.append((sdpa, "use_gqa_in_sdpa", always(lambda *args, **kwargs: True)))
        replacements += model_replacements()
        replacements += ((cls, "forward", _by_length) for cls in _CLASSES())
        # last: for the same function, this package's replacement takes precedence
        replacements += upstream_replacements()
        patches = []
        with LOCK:
            for target, name, make in replacements:
                patch = self._patches.get((target, name))
                if patch is None or not patch.is_current:
                    patch = self._patches[target, name] = TracePatch(target, name, make)
                patches.append(patch)
        with contextlib.ExitStack() as stack:
            self.acquire()  # again, for models imported inside the block, and for a trace that continues after it
            stack.callback(self.release)
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(tracing_here())
            # 4.56 to 5.0 pass the positions of the new tokens to the cache; later versions compute them on use
            if "cache_position" in inspect.signature(cache_utils.DynamicLayer.get_mask_sizes).parameters:
                stack.enter_context(TensorRanges())
            yield

    def translations(self) -> Iterator[Translation]:
        """Yield ONNX translations of grouped matrix products, for mixtures of experts in transformers 5.17 or later."""
        fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
        if fallback is not None and is_installed("transformers.exporters"):
            for operator in (fallback.default, torch.ops.aten._grouped_mm.default):
                yield Translation(operator, functools.partial(_translated, operator))


def _translated(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    # transformers' own translation, imported only if a program needs it
    with warnings.catch_warnings():
        # 5.17's exporters import every model that they patch, and some use torch.jit.script
        warnings.filterwarnings("ignore", r".torch\.jit\.script. is deprecated", DeprecationWarning)
        from ...core.private_names.of_transformers import onnx_translations
    return onnx_translations[operator](*args, **kwargs)


TRANSFORMERS_TRACING = TransformersTracing()


# Trace ``torch.arange`` that starts at a tensor: positions before transformers 5.1.
_SUMS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}


class TensorRanges(TorchFunctionMode):
    """Makes ``torch.arange(tensor, ...)`` traceable, without reading the value of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[Any, Any, Any]] = {}  # by id of a sum: the sum and its two operands

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and len(args) == 2 and isinstance(args[0], Tensor):
            found = self._sums.get(id(args[1]))
            if found is not None and found[1] is args[0]:
                return torch.arange(found[2], **kwargs) + args[0]
        result = func(*args, **kwargs)
        adds_number = func in _SUMS and len(args) == 2 and not isinstance(args[1], Tensor)
        if adds_number and isinstance(args[0], Tensor) and args[0].dim() == 0:
            self._sums[id(result)] = result, args[0], args[1]  # the reference keeps the id of the sum in use
        return result


# Trace rotary embeddings whose frequencies depend on the length (``"dynamic"``, ``"longrope"``).
def _plain(forward: Function | None) -> Function | None:
    """Return the function inside transformers' decorator ``dynamic_rope_update``; ``None`` without this decorator."""
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and code.co_qualname.startswith("dynamic_rope_update."):
            return getattr(forward, "__wrapped__", None)
        forward = getattr(forward, "__wrapped__", None)
    return None


_CLASSES = ModelClasses(lambda cls: _plain(vars(cls).get("forward")) is not None)


@replacement
def _by_length(original: Function) -> Function:
    # The original checks whether this call is longer than all calls before, and stores the result. The lengths of a
    # text only grow, so the frequencies depend on the length of this call only; up to the switch they are the initial
    # frequencies.
    plain = _plain(original)
    if plain is None:
        return original

    def forward(
        again: Function, self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None, **others: Any
    ) -> Any:
        kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
        if kind not in ("dynamic", "longrope"):
            return again()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix, of_layer = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
        config = self.config.to_dict()
        stated = config.get("rope_parameters") or config["rope_scaling"]
        switch = switch_of_kind(stated if layer_type is None else stated[layer_type], config)
        length = torch.max(position_ids) + 1
        # the long frequencies of `longrope` are equal for all greater lengths
        above = switch + 1 if kind == "longrope" else length
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](self.config, x.device, seq_len=above, **of_layer)
        first = getattr(self, f"{prefix}original_inv_freq").to(x.device)
        getattr(self, f"{prefix}inv_freq").copy_(torch.where(length > switch, scaled, first))
        return plain(self, x, position_ids, **of_layer)

    return forward


# Trace attention masks with one code path for every length.
def mask_replacements() -> Iterator[Replacement]:
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return
    yield masks, "prepare_padding_mask", _prepare_padding_mask
    yield masks, "_ignore_causal_mask_sdpa", always(lambda *args, **kwargs: False)
    name = "create_recurrent_attention_mask"  # each model has imported it
    for path, module in sys.modules.copy().items():
        if path.startswith("transformers.models.") and name in vars(module):
            yield module, name, _recurrent_mask
    if hasattr(masks, "_vmap_for_bhqkv"):  # 4.56 and 4.57; later versions broadcast by themselves
        yield masks, "_vmap_for_bhqkv", always(_broadcast_for_bhqkv)
        yield masks, "TransformGetItemToIndex", always(contextlib.nullcontext)


def _prepare_padding_mask(original: Function) -> Function:
    def prepare_padding_mask(
        attention_mask: Tensor | None, kv_length: Size, kv_offset: Length, *args: object, **kwargs: Any
    ) -> Tensor | None:
        if attention_mask is None:
            return None
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        if isinstance(missing, Tensor) or not statically_known_true(missing <= 0):
            # a longer padding than necessary, so that the graph does not compute its size
            padded = torch.nn.functional.pad(attention_mask, (0, missing if type(missing) is int else kv_length))
        else:
            padded = attention_mask
        if kwargs.get("_slice", "_slice" in inspect.signature(original).parameters):  # before 5.0
            return padded[:, torch.arange(kv_length, device=padded.device) + kv_offset]
        return padded

    return prepare_padding_mask


@traceable
def _recurrent_mask(
    config: object,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: TransformersCache | None = None,
    **kwargs: object,
) -> Tensor | None:
    # the slice mask[:, -new:] would check whether it begins at 0, as for an empty cache, which adds a guard
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    columns, length = attention_mask.shape[1], inputs_embeds.shape[1]
    torch._check(columns >= length, lambda: f"attention_mask has {columns} columns for {length} tokens")
    return attention_mask.index_select(1, torch.arange(length, device=attention_mask.device) + (columns - length))


def _broadcast_for_bhqkv(mask_function: Callable[..., Tensor], bh_indices: bool = True) -> Function:
    # 4.56 and 4.57 use vmap over four indices; later versions broadcast. In vmap an index into the padding mask becomes
    # an operator (`flat_apply`) that torch 2.13 cannot store: "Unsupported getattr attribute
    # function_const_func_spec0".
    def broadcast(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if not bh_indices:  # batch and head are None
            return mask_function(batch, head, query[:, None], key[None, :]).expand(query.shape[0], key.shape[0])
        mask = mask_function(
            batch[:, None, None, None], head[None, :, None, None], query[None, None, :, None], key[None, None, None]
        )
        return mask.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

    return broadcast


# Apply the reversible patches of transformers' own exporters to the imported models.
_MODULE = "transformers.exporters.exporter_dynamo"


def upstream_replacements() -> Iterator[Replacement]:
    if _modules_named() & sys.modules.keys():
        for owner, name, make in _patches():
            target: Any = owner
            if isinstance(owner, str):  # the path of a module or class, which may not be imported
                parent, _, own = owner.rpartition(".")
                target = sys.modules.get(owner) or getattr(sys.modules.get(parent), own, None)
            module = str(getattr(target, "__module__", None) or getattr(target, "__name__", ""))
            if module.startswith("transformers.models.") and name in vars(target):
                yield target, name, _CORRECTED.get((target.__name__, name), make)


@functools.cache
def _modules_named() -> frozenset[str]:
    """Return the names of the model modules that transformers' exporters patch, read from the exporters' source."""
    package, _, file = _MODULE.rpartition(".")
    spec = importlib.util.find_spec(package)  # the package only: finding its module would import the package
    folders = [] if spec is None else list(spec.submodule_search_locations or ())  # 4.56 to 5.16 lack the package
    sources = [path for path in (pathlib.Path(folder, f"{file}.py") for folder in folders) if path.exists()]
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    return frozenset(re.findall(r'"(transformers\.models\.\w+\.\w+)\.', source))


@functools.cache
def _patches() -> list[tuple[ModuleType | type | str, str, Make]]:
    try:
        with warnings.catch_warnings():
            # 5.17 imports every model that it patches, and some use torch.jit.script
            warnings.filterwarnings("ignore", r".torch\.jit\.script. is deprecated", DeprecationWarning)
            importlib.import_module(_MODULE)
            from ...core.private_names.of_transformers import export_patches
    except ImportError:  # a private name
        return []
    return list(export_patches.get("dynamo", ()))


def _masked_attention(
    self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: object
) -> Tensor:
    # The patch of transformers' exporters (5.23) omits the norms of queries and keys that come from one projection, and
    # silently computes different values. It also requires images and windows of equal size, which a mask does not.
    count = hidden_states.shape[0]
    query, key, value = self.qkv(hidden_states).reshape(count, 3, self.num_heads, -1).unbind(1)
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_vision
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = rotate(query, key, *position_embeddings)
    picture = (torch.arange(count, device=cu_seqlens.device)[:, None] >= cu_seqlens[1:]).sum(-1)
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    seen = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=picture[:, None] == picture, scale=self.scaling
    )
    found: Tensor = self.proj(seen.squeeze(0).transpose(0, 1).reshape(count, -1))
    return found


# class and attribute -> replacement, if the patch of transformers' exporters computes different values
_CORRECTED: dict[tuple[str, str], Make] = {
    ("Dots3NoteVisionAttention", "forward"): always(_masked_attention),
    ("GlmOcrVisionAttention", "forward"): always(_masked_attention),
    ("Qwen2_5_VLVisionAttention", "forward"): always(_masked_attention),
}
