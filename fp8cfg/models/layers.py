"""Transformer layer: RMSNorm, attention and MLP, under Megatron's module names.

Every product is that of an `nn.Linear` or of `CoreAttention`, so that a module with FP8 products can take its place. Shape
letters: B batch, T tokens, D hidden_size, G key-value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.rotary import apply_rotary


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 whatever the dtypes of input and weight; the output has the input's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class CoreAttention(nn.Module):
    """softmax(q kᵀ / √head_dim) v, causal: q [B, heads, T, head_dim], k and v [B, G, T, head_dim], out as q."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


class SelfAttention(nn.Module):
    """Causal grouped-query attention.

    The rows of `linear_qkv` are laid out as in Megatron: group by group, each group's query heads, then its key head,
    then its value head.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_query_groups = config.num_query_groups
        self.heads_per_group = config.heads_per_group
        self.head_dim = config.head_dim
        self.linear_qkv = nn.Linear(config.hidden_size, config.qkv_size, bias=False)
        self.core_attention = CoreAttention()
        self.linear_proj = nn.Linear(config.query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.linear_qkv(x).unflatten(-1, (self.num_query_groups, -1, self.head_dim))
        q, k, v = qkv.split((self.heads_per_group, 1, 1), dim=-2)  # [B, T, G, heads, head_dim] each
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        attended: Tensor = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        projected: Tensor = self.linear_proj(attended.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """SwiGLU: `linear_fc1` holds the gate's rows and then the up projection's; `linear_fc2` projects down."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        down: Tensor = self.linear_fc2(F.silu(gate) * up)
        return down


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream: [B, T, D] -> [B, T, D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.pre_mlp_layernorm(x))
        return x
