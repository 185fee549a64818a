"""Transformer layer: attention and MLP between norms, under Megatron's module names.

Every product is that of an `nn.Linear` or of `CoreAttention`, so that a module with FP8 products can take its place. Shape
letters: B batch, T tokens, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8cfg.models.attention import CoreAttention, SelfAttention
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.norms import norm
from fp8cfg.models.selective_recompute import discarded, keep_products, recomputed


class MLP(nn.Module):
    """`linear_fc2` of the activation of `linear_fc1`, which under swiglu and geglu holds the gate's rows and then the up
    projection's. GELU is the tanh approximation, as in Gemma, GPT-2 and Transformer Engine's kernels. `selective` recomputes the
    activation."""

    def __init__(self, config: TransformerConfig, selective: bool = False) -> None:
        super().__init__()
        self.activation, self.selective = config.activation, selective
        self.linear_fc1 = nn.Linear(
            config.hidden_size, config.fc1_size, bias=config.add_bias_linear
        )
        self.linear_fc2 = nn.Linear(
            config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(self, x: Tensor) -> Tensor:
        up = self.linear_fc1(x)
        activated = recomputed(self._activated, None, up) if self.selective else self._activated(up)
        with discarded(activated):
            down: Tensor = self.linear_fc2(activated)
        return down

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "squared_relu":
            return F.relu(x).square()
        if self.activation == "gelu":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        return (
            F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        ) * up


class TransformerLayer(nn.Module):
    """Attention and MLP, each between norms and added to the residual stream: [B, T, D] -> [B, T, D]. `layer` is its number from 0.

    A norm stands before each (pre), after each (post, OLMo 2) or both (Gemma 2). `mask` is that of CoreAttention, or nothing;
    `packed` says that it may keep documents apart, and that positions may differ between samples; `selective` recomputes norms,
    activation function and explicit matrices of attention (selective_recompute.py). `enter`, where tensor parallelism sets it,
    makes the input of attention and MLP of what stands before them."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int = 0,
        packed: bool = False,
        selective: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.placement, self.packed, self.selective = (
            config,
            config.layernorm_placement,
            packed,
            selective,
        )
        self.enter: Callable[[Tensor], Tensor] | None = None
        before, after = self.placement != "post", self.placement != "pre"
        if before:
            self.input_layernorm = norm(config)
        self.self_attention = SelfAttention(config, layer, selective)
        if after:
            self.post_self_attn_layernorm = norm(config)
        if before:
            self.pre_mlp_layernorm = norm(config)
        self.mlp = MLP(config, selective)
        if after:
            self.post_mlp_layernorm = norm(config)

    @property
    def takes_mask(self) -> bool:
        """Whether a call may bring a mask: attention that stands in the place of CoreAttention takes none."""
        return type(self.self_attention.core_attention) is CoreAttention

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        if self.selective and torch.compiler.is_compiling() and torch.is_grad_enabled():
            y: Tensor = checkpoint(
                self._residual_stream,
                x,
                cos,
                sin,
                *mask,
                use_reentrant=False,
                context_fn=keep_products,
            )
            return y
        return self._residual_stream(x, cos, sin, *mask)

    def _residual_stream(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor
    ) -> Tensor:
        before, after = self.placement != "post", self.placement != "pre"
        y = self._computed(
            self.self_attention, self.input_layernorm if before else None, x, cos, sin, *mask
        )
        x = x + (self._normed(self.post_self_attn_layernorm, y) if after else y)
        y = self._computed(self.mlp, self.pre_mlp_layernorm if before else None, x)
        x = x + (self._normed(self.post_mlp_layernorm, y) if after else y)
        return x

    def _computed(
        self, module: nn.Module, norm: nn.Module | None, x: Tensor, *more: Tensor | None
    ) -> Tensor:
        """`module` of the residual stream, which goes through `norm` before."""
        y = x if norm is None else self._normed(norm, x)
        read = y if self.enter is None else self.enter(y)
        if not self.selective:
            return module(read, *more)  # type: ignore[no-any-return]
        with discarded(y, self.enter, read):
            return module(read, *more)  # type: ignore[no-any-return]

    def _normed(self, norm: nn.Module, y: Tensor) -> Tensor:
        return recomputed(norm, norm, y) if self.selective else norm(y)
