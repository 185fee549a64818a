"""Transformer layer: attention and MLP between norms, under Megatron's module names.

Every product is that of an `nn.Linear` or of `CoreAttention`, so that a module with FP8 products can take its place. Shape
letters: B batch, T tokens, D hidden_size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.models.attention import CoreAttention, SelfAttention
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.norms import norm


class MLP(nn.Module):
    """`linear_fc2` of the activation of `linear_fc1`, which under swiglu and geglu holds the gate's rows and then the up
    projection's. GELU is the tanh approximation, as in Gemma, GPT-2 and Transformer Engine's kernels."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.linear_fc1 = nn.Linear(config.hidden_size, config.fc1_size, bias=config.add_bias_linear)
        self.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.linear_fc2(self._activated(self.linear_fc1(x)))
        return down

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "squared_relu":
            return F.relu(x).square()
        if self.activation == "gelu":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up


class TransformerLayer(nn.Module):
    """Attention and MLP, each between norms and added to the residual stream: [B, T, D] -> [B, T, D]. `layer` is its number from 0.

    A norm stands before each (pre), after each (post, OLMo 2) or both (Gemma 2). `mask` is that of CoreAttention, or nothing;
    `packed` says that it may keep documents apart, and that positions may differ between samples."""

    def __init__(self, config: TransformerConfig, layer: int = 0, packed: bool = False) -> None:
        super().__init__()
        self.config, self.placement, self.packed = config, config.layernorm_placement, packed
        before, after = self.placement != "post", self.placement != "pre"
        if before:
            self.input_layernorm = norm(config)
        self.self_attention = SelfAttention(config, layer)
        if after:
            self.post_self_attn_layernorm = norm(config)
        if before:
            self.pre_mlp_layernorm = norm(config)
        self.mlp = MLP(config)
        if after:
            self.post_mlp_layernorm = norm(config)

    @property
    def takes_mask(self) -> bool:
        """Whether a call may bring a mask: attention that stands in the place of CoreAttention takes none."""
        return type(self.self_attention.core_attention) is CoreAttention

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        y: Tensor = self.self_attention(x if self.placement == "post" else self.input_layernorm(x), cos, sin, *mask)
        x = x + (y if self.placement == "pre" else self.post_self_attn_layernorm(y))
        y = self.mlp(x if self.placement == "post" else self.pre_mlp_layernorm(x))
        x = x + (y if self.placement == "pre" else self.post_mlp_layernorm(y))
        return x
