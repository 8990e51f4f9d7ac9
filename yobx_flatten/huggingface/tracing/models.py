"""Define traceable versions of functions of transformers models, for the models that are imported."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from ...registry.recipe.aliases import Size, TransformersCache
from .layers import Function, Replacement, last_places, replacement, traceable
from .sparse import SPARSE

# ruff: noqa: N803, N806 (A, B, C and D are what the paper and the functions of transformers call them)

# Trace models that process tokens in chunks as one scan over tokens, for any number of new tokens.
#
# Their own code pads the tokens to whole chunks, and a trace fixes the number of chunks.


# (state, inputs of one token) -> (next state, output of the token)
_Step: TypeAlias = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor]]


@traceable
def _mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(F.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1]).float()
    hidden_states = hidden_states.float()
    repeats = hidden_states.shape[2] // B.shape[2]
    B, C = (part.float().repeat_interleave(repeats, dim=2) for part in (B, C))
    decay, added = torch.exp(A.float() * dt), hidden_states * dt[..., None]

    def step(state: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        decay, added, B, C = given
        state = state * decay[..., None, None] + added[..., None] * B[:, :, None]
        return state, (state * C[:, :, None]).sum(-1)

    start = torch.zeros_like(added[:, 0, :, :, None] * B[:, 0, :, None])
    start = start if initial_states is None else initial_states.to(start.dtype)
    state, outputs = _chunk_scan(step, start, (decay, added, B, C))
    outputs = outputs if D is None else outputs + hidden_states * D[..., None]
    return (outputs, state) if return_final_states else outputs


@traceable
def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    dtype, repeats = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query, key = (part.repeat_interleave(repeats, dim=2) for part in (query * key.shape[-1] ** -0.5, key))
    # one decay per head (gated delta rule), or one per head and entry of the key (Kimi)
    decay = torch.exp(g if g.dim() == 4 else g[..., None])

    def step(state: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = given
        state = state * decay[..., None]
        change = (value - (state * key[..., None]).sum(-2)) * beta[..., None]
        state = state + key[..., None] * change[..., None, :]
        return state, (state * query[..., None]).sum(-2)

    start = torch.zeros_like(key[:, 0, :, :, None] * value[:, 0, :, None])
    start = start if initial_state is None else initial_state.to(start.dtype)
    state, outputs = _chunk_scan(step, start, (query, key, value, decay, beta))
    return outputs.to(dtype), state if output_final_state else None


def _chunk_scan(step: _Step, start: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Run a recurrence over tokens (axis 1 of inputs and outputs); return the last state and all outputs."""
    from ...core.private_names.of_torch import scan

    state, outputs = scan(step, start, tuple(part.transpose(0, 1) for part in given))
    return state, outputs.transpose(0, 1)


# Trace mixtures of experts without the loop over the experts that received tokens.


def _gates(top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> Tensor:
    """Return each expert's weight for each token, of shape (experts, tokens, 1). Unused experts have the weight 0."""
    gates = top_k_weights.new_zeros(top_k_index.shape[0], experts)
    return gates.scatter_add(1, top_k_index, top_k_weights).t().unsqueeze(-1)


@replacement
def _dbrx_experts(original: Function) -> Function:
    if "top_k_index" not in inspect.signature(original).parameters:  # before 5.0
        return original

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = hidden_states.reshape(1, -1, self.hidden_size)
        shape = (-1, self.ffn_hidden_size, self.hidden_size)
        w1, v1, w2 = (weight.view(shape) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        hidden = self.mlp.activation_fn(tokens.matmul(w1.mT)) * tokens.matmul(v1.mT)
        mixed: Tensor = hidden.matmul(w2) * _gates(top_k_index, top_k_weights, self.num_experts)
        return mixed.sum(0).view(hidden_states.shape)

    return forward


@traceable
def _longcat_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    gates = _gates(top_k_index, top_k_weights, self.total_experts)
    routed = self.num_routed_experts if self.gate_up_proj is not None else 0
    mixed = hidden_states * gates[routed:].sum(0)  # experts after the routed ones return their input
    if routed:
        gate, up = hidden_states.matmul(self.gate_up_proj[:routed].mT).chunk(2, dim=-1)
        hidden = (self.act_fn(gate) * up).matmul(self.down_proj.mT)
        mixed = mixed + (hidden * gates[:routed]).sum(0)
    return mixed.to(hidden_states.dtype)


# Trace models that call their layers in a loop, where only the last call writes the cache.
@traceable
def _past_of_the_window(
    again: Callable[..., tuple[Tensor, Tensor]],
    self: Any,
    cache: TransformersCache | None = None,
    shared_kv_states: dict[int, tuple[Tensor, ...]] | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    # The original joins the past and the new keys, and drops the keys before the window with a slice. The slice checks
    # whether it drops a key, which adds a guard to the program. Only recording layers still have these keys, so only
    # their past is cut.
    shared = shared_kv_states or {}
    past = shared.get(self.layer_idx)
    layer = None if cache is None else cache.layers[self.layer_idx]
    sliding: Any = sys.modules["transformers.cache_utils"].DynamicSlidingWindowLayer
    if past is None or self.sliding_window is None or not isinstance(layer, sliding):
        return again()
    if getattr(layer, "record_past", False):
        last = last_places(past[0], self.sliding_window - 1)
        past = tuple(states.index_select(2, last) for states in past)
    uncut = copy.copy(self)  # other threads may call the module
    uncut.sliding_window = None
    return again(self=uncut, shared_kv_states={**shared, self.layer_idx: past})


# Trace positions that a model computes with Python integers.


@traceable
def _next_position(
    again: Function,
    self: Any,
    inputs_shape: torch.Size,
    device: torch.device,
    attention_mask: Tensor | None = None,
    cache: TransformersCache | None = None,
    position_ids: Tensor | None = None,
) -> Any:
    # the original uses `int(...)` of the sum, for an older exporter, and so fixes the length of the example
    seen = 0 if cache is None else cache.get_seq_length()
    if position_ids is not None or (type(seen) is int and seen == 0):
        return again()
    position = torch.ones((1, 1), dtype=torch.long, device=device) * (self.padding_idx + inputs_shape[1] + seen)
    return self._forward(position), position


@traceable
def _positions_of_the_call(
    again: Function,
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cache: TransformersCache | None = None,
    inputs_embeds: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> Any:
    # the original slices the mask's positions after the past; the trace assumes that the size of the slice is not 1, so
    # that the program refuses calls with one token
    tokens = inputs_embeds if input_ids is None else input_ids
    if attention_mask is None or tokens is None or position_ids is not None:
        return again()
    length = tokens.shape[1]
    seen = 0 if cache is None else cache.get_seq_length()
    if isinstance(seen, (int, torch.SymInt)):
        # the original raises an error for another shape; without this check the positions would be wrong
        torch._check(
            attention_mask.shape[1] == seen + length, lambda: "attention_mask does not fit the cache and the tokens"
        )
    places = torch.arange(length, device=attention_mask.device) + (attention_mask.shape[1] - length)
    positions = (attention_mask.cumsum(dim=1) * attention_mask - 1).long().index_select(1, places)
    return again(position_ids=positions)


@traceable
def _relative_embeddings(self: Any, relative_embeddings: Tensor, length: Size) -> Any:
    # the original pads its table for longer inputs and slices it for shorter inputs: a branch on the length
    last = relative_embeddings.shape[1] - 1
    places = torch.arange(1 - length, length, device=relative_embeddings.device) + self.window_size
    known = (places >= 0) & (places <= last)
    return torch.where(known[:, None], relative_embeddings[:, places.clamp(0, last)], 0.0)


# Trace recurrent models (with a state per token) as one graph, for any number of new tokens.


def _caches_have(*methods: str) -> bool:  # transformers 5.23 added these methods
    return all(hasattr(sys.modules["transformers.cache_utils"].Cache, name) for name in methods)


# Models of the first Mamba have two branches: one new token continues from the state, several tokens start from zero
# ("initial hidden state is not supported by the kernel path"). Both branches are one scan here, from the state or from
# zero. torch assumes that a dynamic size is 2 or more and drops comparisons with 1, so the number of tokens is read
# from a tensor.


class _Waiting(threading.local):
    states: Iterator[Any] = iter(())  # the initial states of the scans of the current layer, in order


_WAITING = _Waiting()


@replacement
def _mamba_mixer(original: Function) -> Function:
    # older versions have the scan inside this function, or caches without this method
    if "mamba_selective_scan" not in inspect.unwrap(original).__globals__ or not _caches_have("get_recurrent_state"):
        return original

    def forward(
        again: Function, self: Any, hidden_states: Tensor, cache: TransformersCache | None = None, **others: Any
    ) -> Any:
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        # zamba scans head by head: (batch, heads, width of a head, states)
        _WAITING.states = iter(() if state is None else state.unbind(1) if state.dim() == 4 else (state,))
        try:
            return again()
        finally:
            _WAITING.states = iter(())

    return forward


@traceable
def _mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    from ...core.private_names.of_torch import scan

    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = F.softplus(dt) if delta_softplus else dt
    dt, inputs, B, C = (part.permute(2, 0, 1) for part in (dt, hidden_states, B, C))  # tokens first
    # one step of the scan for each token: state = decay * state + added
    decay = torch.exp(A * dt[..., None])
    added = (dt * inputs.float())[..., None] * B[:, :, None].float()
    start, cached = torch.zeros_like(added[0]), next(_WAITING.states, None)
    if cached is not None:  # one new token continues from the cached state, several tokens start from zero
        # the index of the last token as a tensor, since a trace would not keep a comparison of the size with 1
        last = torch.arange(added.shape[0], device=added.device).amax(0)
        start = torch.where(last == 0, cached.to(added.dtype), start)

    def step(state: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state = given[0] * state + given[1]
        # a scan may not return the carried tensor itself
        return state, state.clone()

    states: Tensor = scan(step, start, (decay, added))[1]
    outputs = states.to(inputs.dtype).matmul(C[..., None]).squeeze(-1).permute(1, 2, 0)
    outputs = outputs if D is None else outputs + hidden_states * D[None, :, None]
    outputs = outputs if z is None else outputs * F.silu(z)
    # the state after the last token, which the layer's cache keeps
    return (outputs, states[-1]) if return_last_state else outputs


@replacement
def _minimax_lightning_attention(original: Function) -> Function:
    # The original loops over the new tokens, or over blocks of them. The decay between two tokens depends on their
    # distance only, so one matrix product computes all of them.
    apply_mask = inspect.unwrap(original).__globals__.get("apply_mask_to_padding_states")
    if apply_mask is None:  # before 5.0 padding is treated differently
        return original

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: object,
        attention_mask: Tensor | None,
        cache: TransformersCache | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        batch, count, _ = hidden_states.shape
        states = self.act_fn(self.qkv_proj(hidden_states))
        states = apply_mask(states, attention_mask)
        states = states.reshape(batch, count, self.num_attention_heads, 3 * self.head_dim).transpose(1, 2)
        query, key, value = torch.split(states, self.head_dim, dim=3)
        past = None if cache is None else cache.get_linear_cache(self.layer_idx)

        token = torch.arange(count, device=query.device)
        distance = token[:, None] - token[None, :]
        # 0 for tokens that come later
        fade = torch.exp(-self.slope_rate * distance).masked_fill(distance < 0, 0.0)
        output = (query.matmul(key.mT) * fade).matmul(value)
        # each key decayed by its distance to the last token: the state of the next call
        state = (key * torch.exp(-self.slope_rate * (count - 1 - token[:, None]))).mT.matmul(value)
        if past is not None:
            # the past is one token before the first new token
            output = output + (query * torch.exp(-self.slope_rate * (token[:, None] + 1))).matmul(past)
            state = state + torch.exp(-self.slope_rate * count) * past

        output = self.norm(output.transpose(1, 2).reshape(batch, count, self.num_attention_heads * self.head_dim))
        output = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, state)
        return output, state

    return forward


@replacement
def _zaya_projection(original: Function) -> Function:
    # The original drops the last new token. Of two tokens one token remains, and a trace fixes a size of 1.
    repeat = inspect.unwrap(original).__globals__.get("repeat_kv")
    if repeat is None or not _caches_have("get_conv_state", "get_recurrent_state"):
        return original

    def forward(
        again: Function,
        self: Any,
        hidden_states: Tensor,
        cache: TransformersCache | None,
        conv_mask: Tensor | None = None,
    ) -> Any:
        past = None if cache is None else cache.get_conv_state(self.layer_idx)
        delayed = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if cache is None or past is None or delayed is None:
            return again()
        if conv_mask is not None:
            hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        # the kernel's width before the first new token, so that the convolution needs no padding
        mixed = torch.cat([past, torch.cat([query, key], dim=-1).transpose(1, 2)], dim=-1)
        cache.update_conv_state(_last(mixed, self.conv_kernel_size, -1), self.layer_idx)
        mixed = self.conv_qk_grouped(self.conv_qk_depthwise(mixed)).transpose(1, 2)

        query = query.view(*shape)
        query = (query + repeat(key.view(*shape).transpose(1, 2), self.num_key_value_groups).transpose(1, 2)) * 0.5
        key = query.view(*shape[:-2], -1, self.num_key_value_groups, self.head_dim).mean(dim=-2)
        width = query.shape[-2] * query.shape[-1]
        query = mixed[..., :width].view(*shape) + query
        key = mixed[..., width:].view(*shape) + key

        delayed = torch.cat([delayed.unsqueeze(1), self.v_proj_delayed(hidden_states)], dim=1)
        cache.update_recurrent_state(_last(delayed, 1, 1).squeeze(1), self.layer_idx)
        # all but the last: each token gets the value of the token before
        earlier = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        value = torch.cat([self.v_proj_current(hidden_states), delayed.index_select(1, earlier)], dim=-1)
        return query, key, value.view(*shape)

    return forward


def _last(tensor: Tensor, count: int, axis: int) -> Tensor:
    # without a slice, which would check that the axis has enough entries
    return tensor.index_select(axis, torch.arange(count, device=tensor.device) + (tensor.shape[axis] - count))


_MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
_DELTA = ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")
# models, class (or none), function, version to trace
CHUNK_SCANS = [
    (_MAMBA2, None, "mamba2_chunk_scan", _mamba2_chunk_scan),
    (_DELTA, None, "torch_chunk_gated_delta_rule", _delta_rule),
    (("bailing_hybrid", "glm5_next", "kimi_linear"), None, "chunk_kimi_delta_attention", _delta_rule),
]
OTHERS = [
    (("dbrx",), "DbrxExperts", "forward", _dbrx_experts),
    (("longcat_flash",), "LongcatFlashExperts", "forward", _longcat_experts),
    (("dory",), "DoryAttention", "forward", _past_of_the_window),
    (("prophetnet",), "ProphetNetPositionalEmbeddings", "forward", _next_position),
    (("opt",), "OPTDecoder", "forward", _positions_of_the_call),
    (("vits",), "VitsAttention", "_get_relative_embeddings", _relative_embeddings),
    (("falcon_mamba", "jamba", "mamba", "zamba"), None, "mamba_selective_scan", _mamba_selective_scan),
    (("falcon_mamba",), "FalconMambaMixer", "forward", _mamba_mixer),
    (("jamba",), "JambaMambaMixer", "forward", _mamba_mixer),
    (("mamba",), "MambaMixer", "forward", _mamba_mixer),
    (("zamba",), "ZambaMambaMixer", "forward", _mamba_mixer),
    (("minimax",), "MiniMaxLightningAttention", "forward", _minimax_lightning_attention),
    (("zaya",), "ZayaCCAProjection", "forward", _zaya_projection),
]


def model_replacements() -> Iterator[Replacement]:
    for models, owner, name, make in (*CHUNK_SCANS, *OTHERS, *SPARSE):
        for model in models:
            target: Any = sys.modules.get(f"transformers.models.{model}.modeling_{model}")
            target = getattr(target, owner, None) if owner is not None else target
            if target is not None and name in vars(target):
                yield target, name, make
