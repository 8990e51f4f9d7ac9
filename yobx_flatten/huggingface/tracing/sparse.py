"""Trace models that attend to selected or compressed keys, with one graph for any number of keys.

DeepSeek V4 compresses each full window of keys, Qwen 4 selects blocks of keys per query, Longformer and LED attend to a
window. The sparse attention of transformers branches on the number of windows or blocks, or makes this number constant.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from ...registry.recipe.aliases import CacheLayer, Size, TransformersCache
from .layers import Function, Make, traceable


def prepare_compressed(layer: CacheLayer) -> None:
    """Enlarge the tensors of a DeepSeek V4 cache layer, since a trace would fix sizes of 0 and 1."""
    # Between two calls a buffer contains fewer keys than a window, often 0 or 1. The traced values are never used.
    # layer: a layer of a copy of the example's cache; layers of other classes are not changed
    held = vars(layer)
    rate = held.get("compress_rate")
    if "entry_count" not in held or not isinstance(rate, int):
        return
    for states, size in (("buffer_kv", 2 * rate + 2), ("buffer_gate", 2 * rate + 2), ("compressed_kv", 3)):
        buffers = held[states]
        for name, tensor in buffers.items():
            if isinstance(tensor, Tensor) and tensor.dim() == 3 and tensor.shape[1] < size:
                buffers[name] = tensor.new_zeros(tensor.shape[0], size, tensor.shape[2])
    layer.entry_count = {name: max(count, 3) for name, count in held["entry_count"].items()}


@traceable
def _shared_update(
    again: Callable[..., tuple[Tensor, Tensor]], self: Any, key_states: Tensor, value_states: Tensor, **others: Any
) -> tuple[Tensor, Tensor]:
    if getattr(self, "record_past", False):
        return again()
    sliding: Any = sys.modules["transformers.cache_utils"].DynamicSlidingWindowLayer
    keys, _ = sliding.update(self, key_states, value_states)
    self.values = self.keys  # keys and values are one tensor
    return keys, keys


def _compressed(module: Any, layer: CacheLayer, name: str, hidden_states: Tensor) -> Tensor:
    """Return the compressed keys of all full windows of tokens so far, of shape (batch, windows, width)."""
    kv = torch.cat([layer.buffer_kv[name], module.kv_proj(hidden_states)], dim=1)
    gate = torch.cat([layer.buffer_gate[name], module.gate_proj(hidden_states)], dim=1)
    batch, count, ratio, size = *kv.shape[:2], module.compress_rate, module.head_dim
    windows = count // ratio
    # the indices are not made from a size: the remainder may be 0 or 1, which a trace would fix
    rest = torch.nonzero(torch.arange(count, device=kv.device) >= windows * ratio).flatten()
    layer.buffer_kv[name], layer.buffer_gate[name] = kv.index_select(1, rest), gate.index_select(1, rest)

    # two extra windows, which are dropped later: a trace checks whether a size is 0 or 1
    token = torch.arange((windows + 2) * ratio, device=kv.device).clamp(max=count - 1)
    kv = kv.index_select(1, token).reshape(batch, windows + 2, ratio, kv.shape[-1])
    gate = gate.index_select(1, token).reshape(batch, windows + 2, ratio, gate.shape[-1]) + module.position_bias
    if hasattr(layer, "overlap_kv"):  # a window shares half of its series with the window before
        kv, layer.overlap_kv[name] = _overlapping(layer.overlap_kv[name], kv, size, windows)
        gate, layer.overlap_gate[name] = _overlapping(layer.overlap_gate[name], gate, size, windows)
    weights = gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)
    compressed = module.kv_norm((kv * weights).sum(dim=2))
    positions = torch.arange(windows + 2, device=kv.device) * ratio + layer.entry_count[name] * ratio
    cos, sin = module.rotary_emb(
        compressed, position_ids=positions.unsqueeze(0).expand(batch, -1), layer_type=module.rope_layer_type
    )
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    closed = rotate(compressed.unsqueeze(1), cos, sin).squeeze(1)
    past = layer.compressed_kv[name]
    kept = torch.arange(past.shape[1] + windows, device=kv.device)
    everything = layer.compressed_kv[name] = torch.cat([past, closed], dim=1).index_select(1, kept)
    layer.entry_count[name] = layer.entry_count[name] + windows
    return everything


def _overlapping(before: Tensor, windows: Tensor, size: int, closed: Size) -> tuple[Tensor, Tensor]:
    """Replace the first ``size`` channels of each window by the first ``size`` channels of the previous window."""
    # also returns the first channels of the last full window, for the next call
    series = torch.cat([before.unsqueeze(1).to(windows.dtype), windows[..., :size]], dim=1)
    each = torch.arange(windows.shape[1], device=windows.device)
    last = torch.arange(1, device=windows.device) + closed
    joined = torch.cat([series.index_select(1, each), windows[..., size:]], dim=2)
    return joined, series.index_select(1, last).squeeze(1)


def _going_on(part: str, go_on: Callable[..., Any]) -> Make:
    """Make a ``forward`` that calls ``go_on`` if the cache has compressed keys, else the original ``forward``."""

    @traceable
    def forward(
        again: Function,
        self: Any,
        hidden_states: Tensor,
        q_residual: Tensor,
        position_ids: Tensor,
        cache: TransformersCache | None,
        layer_idx: int,
    ) -> Any:
        layer = None if cache is None else cache.layers[layer_idx]
        if layer is None or layer.compressed_kv[part] is None:
            return again()
        if getattr(layer, "overlap_kv", {part: layer})[part] is None:
            return again()
        compressed = _compressed(self, layer, part, hidden_states)
        return go_on(self, compressed, hidden_states, q_residual, position_ids, cache, layer_idx)

    return forward


def _every_closed_window(
    module: Any, compressed: Tensor, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *cache: object
) -> tuple[Tensor, Tensor]:
    compressed = torch.nn.functional.pad(compressed.unsqueeze(1), (0, 0, 0, 1))  # an extra window that no token sees
    count, queries = compressed.shape[2], position_ids.shape[1]
    # a single query sees all full windows
    single = torch.arange(queries, device=compressed.device).amax(0) == 0
    entry = torch.arange(count, device=compressed.device)
    unseen = (entry >= ((position_ids + 1) // module.compress_rate).unsqueeze(-1)) & ~single | (entry == count - 1)
    bias = compressed.new_zeros((hidden_states.shape[0], 1, queries, count))
    return compressed, bias.masked_fill(unseen.unsqueeze(1), float("-inf"))


def _chosen_windows(
    module: Any, compressed: Tensor, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *cache: object
) -> tuple[Tensor, Tensor]:
    chosen = module.indexer(hidden_states, q_residual, position_ids, *cache)
    count = compressed.shape[1]
    chosen = torch.where(chosen >= 0, chosen, count)  # invisible indices point to the extra window at the end
    bias = compressed.new_full((hidden_states.shape[0], 1, hidden_states.shape[1], count + 1), float("-inf"))
    bias = bias.scatter(-1, chosen.unsqueeze(1), 0.0)
    unseen = torch.arange(count + 1, device=bias.device) == count  # the extra window, which no token sees
    compressed = torch.nn.functional.pad(compressed.unsqueeze(1), (0, 0, 0, 1))
    return compressed, bias.masked_fill(unseen, float("-inf"))


def _choice(
    module: Any, compressed: Tensor, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *cache: object
) -> Tensor:
    cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query = module.q_b_proj(q_residual).view(*hidden_states.shape[:2], -1, module.head_dim).transpose(1, 2)
    scores = module.scorer(rotate(query, cos, sin).transpose(1, 2), compressed, hidden_states)
    count = compressed.shape[1]
    closed = ((position_ids + 1) // module.compress_rate).unsqueeze(-1)
    unseen = torch.arange(count, device=scores.device) >= closed
    chosen = scores.masked_fill(unseen, float("-inf")).topk(torch.sym_min(module.index_topk, count), dim=-1).indices
    return torch.where(chosen >= closed, -1, chosen)


@traceable
def _qsa_indexer(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: TransformersCache | None,
) -> Any:
    # The original loops over queries and selects their visible keys. Here the visible keys of a row are numbered once:
    # a query sees the first ones, since the mask is causal and only excludes padding.
    cos, sin = position_embeddings
    batch, queries, _ = hidden_states.shape
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    sizes = [heads * self.index_head_dim for heads in (self.index_n_heads, self.index_kv_heads)]
    query, keys = torch.split(self.index_qk_proj(hidden_states), sizes, dim=-1)
    query = self.q_layernorm(query.reshape(batch, queries, -1, self.index_head_dim))
    now = torch.arange(queries, device=query.device) + (cos.shape[1] - queries)
    query = rotate(query, cos=cos.index_select(1, now), sin=sin.index_select(1, now), unsqueeze_dim=2)
    if cache is not None:
        keys = cache.update_indexer(keys, self.layer_idx)

    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    visible = visible[:, 0]  # (batch, queries, keys)
    ever = visible.any(dim=1)
    number = ever.cumsum(-1) - 1  # number of a visible key in its row
    ratio, last = self.compress_ratio, visible.shape[-1] - 1
    # visible keys first, each with a distinct number: OpenVINO's sort is not stable
    places = torch.arange(last + 1, device=ever.device)
    order = torch.argsort((~ever).to(torch.int64) * (last + 1) + places, dim=-1)
    count = visible.shape[-1] // ratio + 2  # two extra, never complete: a trace checks whether a size is 0 or 1
    members = order.index_select(1, torch.arange(count * ratio, device=order.device).clamp(max=last))
    width = keys.shape[-1]
    pooled = keys.gather(1, members.unsqueeze(-1).expand(-1, -1, width)).reshape(batch, count, ratio, width)
    pooled = self.k_layernorm(pooled.float().mean(dim=2).to(keys.dtype))
    starts = members.reshape(batch, count, ratio)[..., :1].expand(-1, -1, cos.shape[-1])
    rows = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    blocks = rotate(pooled.unsqueeze(2), cos=rows[0].gather(1, starts), sin=rows[1].gather(1, starts), unsqueeze_dim=2)
    scores = torch.einsum("bqhd,bkd->bqkh", query.float(), blocks.squeeze(2).float())
    scores = torch.relu(scores).sum(dim=-1) / math.sqrt(self.index_head_dim)

    complete = (visible.sum(-1) // ratio).unsqueeze(-1)  # (batch, queries, 1)
    scores = scores.masked_fill(torch.arange(count, device=scores.device) >= complete, float("-inf"))
    best = scores.topk(torch.sym_min(self.block_topk, count), dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)

    block = (number // ratio).unsqueeze(1).expand(-1, queries, -1)  # of each key; the last one may be incomplete
    chosen = F.pad(chosen, (0, 1)).gather(-1, block.clamp(0, count))
    return (visible & (chosen | (block >= complete))).unsqueeze(1)


class _Marked(threading.local):
    now = False  # whether the traced call marks tokens that attend to all others and that all others see


_MARKED = _Marked()


@traceable
def _whole_windows(again: Function, self: Any, global_attention_mask: Tensor | None = None, **others: Any) -> Any:
    # the original pads and unpads if the tokens do not fill the last window: a branch on the length
    ids, rows = others.get("input_ids"), {**others, "global_attention_mask": global_attention_mask}
    tokens = others["inputs_embeds"] if ids is None else ids
    if rows.get("attention_mask") is None:
        rows["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    length, window = tokens.shape[1], self.config.attention_window
    window = window if isinstance(window, int) else max(window)
    place = torch.arange((length + window - 1) // window * window, device=tokens.device)
    inside, changes = place < length, {}
    others_by_token = ("attention_mask", "global_attention_mask", "position_ids", "token_type_ids")
    for name in ("input_ids", "inputs_embeds", *others_by_token):
        if (row := rows.get(name)) is not None:
            torch._check(row.shape[1] == length, lambda name=name: f"{name} and the tokens differ in length")
            row = row.index_select(1, place.clamp(max=length - 1))
            filler = self.config.pad_token_id if name == "input_ids" else 0
            changes[name] = row if name == "inputs_embeds" else torch.where(inside, row, filler)
    before, _MARKED.now = _MARKED.now, global_attention_mask is not None
    try:
        outputs = again(**changes)
    finally:
        _MARKED.now = before
    cut = outputs[0].index_select(1, torch.arange(length, device=tokens.device))
    if isinstance(outputs, tuple):
        return (cut, *outputs[1:])
    outputs["last_hidden_state"] = cut
    return outputs


@traceable
def _attention_in_blocks(
    again: Function,
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    is_index_masked: Tensor,
    is_index_global_attn: Tensor,
    output_attentions: bool = False,
    **others: Any,
) -> Any:
    # A block of half a window attends to itself and to both neighbors, in memory that is linear in the length. If the
    # call marks tokens, as a classifier marks the first token, every token is also compared with every other token.
    if output_attentions:
        return again()
    batch, length, width = hidden_states.shape
    half, least = self.one_sided_attn_window_size, torch.finfo(hidden_states.dtype).min

    def heads(layer: Function) -> Any:
        return layer(hidden_states).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)

    def around(rows: Tensor, filler: float) -> Tensor:  # rows of three blocks, for each block
        rows = F.pad(rows, (0, 0, half, half), value=filler)
        parts = [rows.narrow(2, start, length).unflatten(2, (-1, half)) for start in (0, half, 2 * half)]
        return torch.cat(parts, dim=3)

    query, key, value = heads(self.query) / math.sqrt(self.head_dim), heads(self.key), heads(self.value)
    hidden = attention_mask.ne(0).to(query.dtype).mul(least)[:, None, :, None]
    place = torch.arange(3 * half, device=query.device) - torch.arange(half, device=query.device)[:, None]
    scores = query.unflatten(2, (-1, half)).matmul(around(key, 0.0).mT) + around(hidden, -math.inf).mT
    scores = scores.masked_fill((place < 0) | (place > 2 * half), -math.inf).flatten(2, 3)
    if _MARKED.now:
        to_marked = query.matmul(key.mT).masked_fill(~is_index_global_attn[:, None, None], -math.inf)
        scores = torch.cat([scores, to_marked], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).masked_fill(is_index_masked[:, None, :, None], 0.0)
    shares = shares.to(query.dtype)
    output = shares[..., : 3 * half].unflatten(2, (-1, half)).matmul(around(value, 0.0)).flatten(2, 3)
    if _MARKED.now:
        of_marked = (heads(self.query_global) / math.sqrt(self.head_dim)).matmul(heads(self.key_global).mT)
        of_marked = of_marked.masked_fill(is_index_masked[:, None, None], least).softmax(-1, dtype=torch.float32)
        of_marked = of_marked.to(query.dtype).matmul(heads(self.value_global))
        output = output + shares[..., 3 * half :].matmul(value)
        output = torch.where(is_index_global_attn[:, None, :, None], of_marked, output)
    return (output.transpose(1, 2).reshape(batch, length, width),)


# models, class, method, version to trace
SPARSE = [
    (("deepseek_v4",), "DeepseekV4HCACache", "update", _shared_update),
    (("deepseek_v4",), "DeepseekV4HCACompressor", "forward", _going_on("compressor", _every_closed_window)),
    (("deepseek_v4",), "DeepseekV4CSACompressor", "forward", _going_on("compressor", _chosen_windows)),
    (("deepseek_v4",), "DeepseekV4Indexer", "forward", _going_on("indexer", _choice)),
    (("qwen4_exp",), "Qwen4ExpTextQSAIndexer", "forward", _qsa_indexer),
    (("led",), "LEDEncoder", "forward", _whole_windows),
    (("longformer",), "LongformerModel", "forward", _whole_windows),
    (("led",), "LEDEncoderSelfAttention", "forward", _attention_in_blocks),
    (("longformer",), "LongformerSelfAttention", "forward", _attention_in_blocks),
]
