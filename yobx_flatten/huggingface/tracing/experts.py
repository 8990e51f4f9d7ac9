"""Trace mixtures of experts without the loop over the experts that were hit.

Here every expert sees every token, and what a token was not routed to weighs nothing. Models that multiply their
experts in groups, by an operator, need no replacement.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .replacement import Function, replacement


def _gates(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, experts: int) -> torch.Tensor:
    """What every token gives to every expert, (experts, tokens, 1): zero where it was not routed to."""
    gates = top_k_weights.new_zeros(top_k_index.shape[0], experts)
    return gates.scatter_add(1, top_k_index, top_k_weights).t().unsqueeze(-1)


@replacement
def _dbrx_experts(original: Function) -> Function:
    if "top_k_index" not in inspect.signature(original).parameters:  # before 5.0
        return original

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens = hidden_states.reshape(1, -1, self.hidden_size)
        shape = (-1, self.ffn_hidden_size, self.hidden_size)
        w1, v1, w2 = (weight.view(shape) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        hidden = self.mlp.activation_fn(tokens.matmul(w1.mT)) * tokens.matmul(v1.mT)
        mixed: torch.Tensor = hidden.matmul(w2) * _gates(top_k_index, top_k_weights, self.num_experts)
        return mixed.sum(0).view(hidden_states.shape)

    return forward


@replacement
def _longcat_experts(original: Function) -> Function:
    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        gates = _gates(top_k_index, top_k_weights, self.total_experts)
        routed = self.num_routed_experts if self.gate_up_proj is not None else 0
        mixed = hidden_states * gates[routed:].sum(0)  # those past the routed ones hand their input on
        if routed:
            gate, up = hidden_states.matmul(self.gate_up_proj[:routed].mT).chunk(2, dim=-1)
            hidden = (self.act_fn(gate) * up).matmul(self.down_proj.mT)
            mixed = mixed + (hidden * gates[:routed]).sum(0)
        return mixed.to(hidden_states.dtype)

    return forward


# models, class, method, version to trace
EXPERTS = [
    (("dbrx",), "DbrxExperts", "forward", _dbrx_experts),
    (("longcat_flash",), "LongcatFlashExperts", "forward", _longcat_experts),
]
