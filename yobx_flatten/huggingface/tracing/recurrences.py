# ruff: noqa: N803, N806 (A, B, C and D are what the paper and the functions of transformers call them)
"""Trace models that go from token to token with a state as one graph, for any number of new tokens.

Their own code loops over the tokens in Python, which makes a graph for one number of them, or branches on whether there
is one new token.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from ...recipe.aliases import TransformersCache
from .replacement import Function, replacement

# -- mamba -----------------------------------------------------------------------------------------------------------

# Models of the first mamba have two ways: one new token goes on from the state, several start again from zero ("initial
# hidden state is not supported by the kernel path"). Both are one scan, from the state or from zero. torch assumes that
# a size that varies is 2 or more and drops what compares it with 1, so the number of tokens is asked of a tensor.


def _caches_answer(*questions: str) -> bool:
    """Whether caches have these methods, with which versions here ask for a state: not before 5.23."""
    return all(hasattr(sys.modules["transformers.cache_utils"].Cache, name) for name in questions)


class _Waiting(threading.local):
    """The states that the scans of the layer at work may go on from, in order."""

    states: Iterator[Any] = iter(())


_WAITING = _Waiting()


@replacement
def _mamba_mixer(original: Function) -> Function:
    # versions whose scan is a part of this very function, and those whose caches do not answer
    if "mamba_selective_scan" not in inspect.unwrap(original).__globals__ or not _caches_answer("get_recurrent_state"):
        return original

    def forward(
        again: Function, self: Any, hidden_states: torch.Tensor, cache: TransformersCache | None = None, **others: Any
    ) -> Any:
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        with _waiting(state):
            return again()

    return forward


@contextlib.contextmanager
def _waiting(state: torch.Tensor | None) -> Iterator[None]:
    # zamba scans head by head: (batch, heads, width of a head, states)
    _WAITING.states = iter(() if state is None else state.unbind(1) if state.dim() == 4 else (state,))
    try:
        yield
    finally:
        _WAITING.states = iter(())


@replacement
def _mamba_selective_scan(original: Function) -> Function:
    def mamba_selective_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = F.softplus(dt) if delta_softplus else dt
        dt, inputs, B, C = (part.permute(2, 0, 1) for part in (dt, hidden_states, B, C))  # tokens first
        # one step of the scan for each token: state = decay * state + added
        decay = torch.exp(A * dt[..., None])
        added = (dt * inputs.float())[..., None] * B[:, :, None].float()
        states = _scan(_start(next(_WAITING.states, None), added), decay, added)
        outputs = states.to(inputs.dtype).matmul(C[..., None]).squeeze(-1).permute(1, 2, 0)
        outputs = outputs if D is None else outputs + hidden_states * D[None, :, None]
        outputs = outputs if z is None else outputs * F.silu(z)
        # the state after the last token, which the layer's cache keeps
        return (outputs, states[-1]) if return_last_state else outputs

    return mamba_selective_scan


def _start(state: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
    """Where a scan starts: from the state when there is one token, from zero when there are several."""
    zero = torch.zeros_like(added[0])
    if state is None:
        return zero
    # the number of the last token, as a tensor: 0 where there is one, and no size that a trace would compare
    last = torch.arange(added.shape[0], device=added.device).amax(0)
    return torch.where(last == 0, state.to(added.dtype), zero)


def _scan(state: torch.Tensor, decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """All states of ``state = decay * state + added``, along the first axis."""
    from ...private_names.of_torch import scan

    def step(state: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        state = given[0] * state + given[1]
        # what is carried on and what is returned may not be one tensor in a scan
        return state, state.clone()

    states: torch.Tensor = scan(step, state, (decay, added))[1]
    return states


# -- minimax ---------------------------------------------------------------------------------------------------------


@replacement
def _minimax_lightning_attention(original: Function) -> Function:
    # The original loops over the new tokens, or over blocks of them. What a token sees of another one fades with their
    # distance alone, so all of it is one product.
    apply_mask = inspect.unwrap(original).__globals__.get("apply_mask_to_padding_states")
    if apply_mask is None:  # before 5.0 padding is treated differently
        return original

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: object,
        attention_mask: torch.Tensor | None,
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
        # each key faded by its distance to the last token: what the next call goes on from
        state = (key * torch.exp(-self.slope_rate * (count - 1 - token[:, None]))).mT.matmul(value)
        if past is not None:
            # the past is one token further away than the first of these
            output = output + (query * torch.exp(-self.slope_rate * (token[:, None] + 1))).matmul(past)
            state = state + torch.exp(-self.slope_rate * count) * past

        output = self.norm(output.transpose(1, 2).reshape(batch, count, self.num_attention_heads * self.head_dim))
        output = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, state)
        return output, state

    return forward


# -- zaya ------------------------------------------------------------------------------------------------------------


@replacement
def _zaya_projection(original: Function) -> Function:
    # The original cuts the last new token off. With two of them one is left, and a trace takes a size of one for fixed.
    repeat = inspect.unwrap(original).__globals__.get("repeat_kv")
    if repeat is None or not _caches_answer("get_conv_state", "get_recurrent_state"):
        return original

    def forward(
        again: Function,
        self: Any,
        hidden_states: torch.Tensor,
        cache: TransformersCache | None,
        conv_mask: torch.Tensor | None = None,
    ) -> Any:
        past = None if cache is None else cache.get_conv_state(self.layer_idx)
        delayed = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if cache is None or past is None or delayed is None:
            return again()
        if conv_mask is not None:
            hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        # as many as the kernel takes before the first new token, so that the convolution pads nothing
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
        # all but the last: each token gets what the one before it left
        earlier = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        value = torch.cat([self.v_proj_current(hidden_states), delayed.index_select(1, earlier)], dim=-1)
        return query, key, value.view(*shape)

    return forward


def _last(tensor: torch.Tensor, count: int, axis: int) -> torch.Tensor:
    """The last entries of a long enough axis, without a slice."""
    return tensor.index_select(axis, torch.arange(count, device=tensor.device) + (tensor.shape[axis] - count))


# models, class (or none), function, version to trace
RECURRENCES = [
    (("falcon_mamba", "jamba", "mamba", "zamba"), None, "mamba_selective_scan", _mamba_selective_scan),
    (("falcon_mamba",), "FalconMambaMixer", "forward", _mamba_mixer),
    (("jamba",), "JambaMambaMixer", "forward", _mamba_mixer),
    (("mamba",), "MambaMixer", "forward", _mamba_mixer),
    (("zamba",), "ZambaMambaMixer", "forward", _mamba_mixer),
    (("minimax",), "MiniMaxLightningAttention", "forward", _minimax_lightning_attention),
    (("zaya",), "ZayaCCAProjection", "forward", _zaya_projection),
]
