# ruff: noqa: N803, N806 (A, B, C and D are what the paper and the functions of transformers call them)
"""Trace models that read several tokens in chunks as one scan from token to token, for any number of tokens.

Their own code pads the tokens to whole chunks. A trace fixes how many chunks there are, so that a program which was
traced with few tokens takes no more than one chunk, and each single token costs as much as a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from .replacement import Function, replacement

# the state and what is given of one token -> the state after it, and its output
_Step: TypeAlias = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]


@replacement
def _mamba2_chunk_scan(original: Function) -> Function:
    def mamba2_chunk_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = torch.clamp(F.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1]).float()
        hidden_states = hidden_states.float()
        repeats = hidden_states.shape[2] // B.shape[2]
        B, C = (part.float().repeat_interleave(repeats, dim=2) for part in (B, C))
        decay, added = torch.exp(A.float() * dt), hidden_states * dt[..., None]

        def step(state: torch.Tensor, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            decay, added, B, C = given
            state = state * decay[..., None, None] + added[..., None] * B[:, :, None]
            return state, (state * C[:, :, None]).sum(-1)

        start = torch.zeros_like(added[:, 0, :, :, None] * B[:, 0, :, None])
        start = start if initial_states is None else initial_states.to(start.dtype)
        state, outputs = _scan(step, start, (decay, added, B, C))
        outputs = outputs if D is None else outputs + hidden_states * D[..., None]
        return (outputs, state) if return_final_states else outputs

    return mamba2_chunk_scan


@replacement
def _delta_rule(original: Function) -> Function:
    def chunk_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype, repeats = query.dtype, value.shape[2] // key.shape[2]
        query, key, value, g, beta = (part.float() for part in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        query, key = (part.repeat_interleave(repeats, dim=2) for part in (query * key.shape[-1] ** -0.5, key))
        # one decay per head (gated delta rule), or one per head and entry of the key (Kimi)
        decay = torch.exp(g if g.dim() == 4 else g[..., None])

        def step(state: torch.Tensor, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            query, key, value, decay, beta = given
            state = state * decay[..., None]
            change = (value - (state * key[..., None]).sum(-2)) * beta[..., None]
            state = state + key[..., None] * change[..., None, :]
            return state, (state * query[..., None]).sum(-2)

        start = torch.zeros_like(key[:, 0, :, :, None] * value[:, 0, :, None])
        start = start if initial_state is None else initial_state.to(start.dtype)
        state, outputs = _scan(step, start, (query, key, value, decay, beta))
        return outputs.to(dtype), state if output_final_state else None

    return chunk_delta_rule


def _scan(step: _Step, start: torch.Tensor, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The last state, and the outputs of all tokens; tokens are axis 1 of what is given and of the outputs."""
    from ...private_names.of_torch import scan

    state, outputs = scan(step, start, tuple(part.transpose(0, 1) for part in given))
    return state, outputs.transpose(0, 1)


# models, class (or none), function, version to trace
CHUNK_SCANS = [
    (
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
        None,
        "mamba2_chunk_scan",
        _mamba2_chunk_scan,
    ),
    (
        ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"),
        None,
        "torch_chunk_gated_delta_rule",
        _delta_rule,
    ),
    (("bailing_hybrid", "glm5_next", "kimi_linear"), None, "chunk_kimi_delta_attention", _delta_rule),
]
