"""Causal self-attention: grouped queries, rotary positions, norms of queries and keys, sliding windows and soft caps.

Shape letters: B batch, T tokens, D hidden_size, G key-value heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

from fp8cfg.models.config import RopeScaling, TransformerConfig
from fp8cfg.models.norms import norm
from fp8cfg.models.recompute import recomputed


def rotary_tables(
    config: TransformerConfig, positions: Tensor, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of `positions`, integers [T] or [B, T], each float32 [..., rotary_size / 2]; `local` for
    layers with a sliding window where these have a base of their own, which no scaling stretches (Gemma 3).

    Each forward pass computes the tables. They are small, all layers share them, and a table that is no buffer cannot be rounded
    by `model.to(torch.bfloat16)`, left as garbage by `to_empty`, or saved.
    """
    channels = torch.arange(0, config.rotary_size, 2, dtype=torch.float32, device=positions.device)
    local = local and config.rotary_base_local is not None
    base = config.rotary_base_local if local and config.rotary_base_local else config.rotary_base
    frequencies = 1.0 / base ** (channels / config.rotary_size)
    if config.rope_scaling is not None and not local:
        frequencies = scale_frequencies(frequencies, config.rope_scaling)
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the low frequencies down by `factor`, keep the high ones, and blend between (float32, same shape); under linear
    scaling slow all of them.

    "Low" and "high" count the turns that a channel makes within the original context. Source: `apply_scaling` in
    Meta's llama-models, `_compute_llama3_parameters` in transformers.
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` [B, T, heads, head_dim] by its positions, in float32; the result has the dtype of `x`. Channels beyond those that
    the tables have angles for stay as they are.

    Channel i pairs with channel i + rotary_size / 2 ("rotate half", as Hugging Face and Megatron store Llama's weights),
    not with its neighbour as in Meta's own checkpoints.
    """
    turning = 2 * cos.shape[-1]
    first, second = x[..., :turning].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if turning == x.shape[-1] else torch.cat((turned, x[..., turning:]), dim=-1)


def hidden_from(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """The mask of what a token (row) must not see, bool [queries, keys]: later tokens, and those `window` or more before it. The
    queries are the last of the keys."""
    every, before = torch.ones(queries, keys, dtype=torch.bool, device=device), keys - queries
    later = every.triu(1 + before)
    return later if window is None else later | every.tril(before - window)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """That mask as what is added to scores: -inf where it is true, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -torch.inf
    )


_LOWER_RIGHT: dict[tuple[int, int], CausalBias] = {}


def expect_queries(queries: int, keys: int) -> None:
    """Prepare for so many queries that are the last of more keys: the bias with which flash attention takes them on a GPU, which
    torch 2.13 cannot make inside of compiled code. Without it, and on a CPU, an explicit mask does it.
    """
    _LOWER_RIGHT[queries, keys] = causal_lower_right(queries, keys)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for each of the query heads."""
    times = q.shape[1] // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


class CoreAttention(nn.Module):
    """softmax(q kᵀ x scale) v, causal: q [B, heads, T, head_dim], k and v [B, G, S, head_dim], out as q. S is T, or more: the
    queries are the last of the keys.

    `scale` None is 1 / √head_dim. A token sees itself and the `window` - 1 before it. `softcap` c bounds scores by
    c tanh(scores / c), which torch's fused attention does not know: they are computed explicitly then, in float32 (Gemma 2,
    arXiv 2408.00118).

    `mask`, [..., T, S] as `additive` gives it, is made here where a call brings none and needs one: a model of many layers makes it
    once for all of them. `selective` recomputes what flash attention does not: matrices of scores, keys and values by query head.
    """

    def __init__(
        self,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        selective: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.window, self.softcap, self.selective = scale, window, softcap, selective

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        queries, keys = q.shape[-2], k.shape[-2]
        window = self.window if self.window is not None and self.window < keys else None
        bias = _LOWER_RIGHT.get((queries, keys)) if q.is_cuda else None
        if (
            self.softcap is None
            and window is None
            and mask is None
            and (queries == keys or bias is not None)
        ):
            if q.is_cuda and q.dtype == torch.float32 and q.shape[1] > k.shape[1]:
                k, v = _by_head(
                    q, k, v
                )  # flash attention takes no float32, and what does no grouped queries
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                is_causal=bias is None,
                scale=self.scale,
                enable_gqa=q.shape[1] > k.shape[1],
            )
        given = (q, k, v) if mask is None else (q, k, v, mask)
        return (
            recomputed(self._explicit, None, *given) if self.selective else self._explicit(*given)
        )

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention with an explicit mask."""
        queries, keys = q.shape[-2], k.shape[-2]
        window = self.window if self.window is not None and self.window < keys else None
        mask = (
            additive(hidden_from(queries, keys, window, q.device), q.dtype)
            if mask is None
            else mask
        )
        k, v = _by_head(q, k, v)  # no kernel has both a mask and grouped queries
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (q @ k.mT).float().mul(scale / self.softcap).tanh().mul(self.softcap)
        return (scores + mask).softmax(-1).to(v.dtype) @ v

    def extra_repr(self) -> str:
        said = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return ", ".join(f"{name}={value:g}" for name, value in said.items() if value is not None)


class SelfAttention(nn.Module):
    """Causal grouped-query attention of one layer, by its number from 0.

    The rows of `linear_qkv` are laid out as in Megatron: group by group, each group's query heads, then its key head,
    then its value head. `selective` recomputes norms of queries and keys, and what CoreAttention does.
    """

    def __init__(self, config: TransformerConfig, layer: int = 0, selective: bool = False) -> None:
        super().__init__()
        self.selective = selective
        self.num_query_groups = config.num_query_groups
        self.heads_per_group = config.heads_per_group
        self.head_dim = config.head_dim
        scalar = config.query_pre_attn_scalar
        self.linear_qkv = nn.Linear(
            config.hidden_size, config.qkv_size, bias=config.add_qkv_bias or config.add_bias_linear
        )
        if config.qk_layernorm != "none":
            whole = config.qk_layernorm == "hidden"
            self.q_layernorm = norm(config, config.query_size if whole else config.head_dim)
            self.k_layernorm = norm(config, config.key_size if whole else config.head_dim)
        self.core_attention = CoreAttention(
            None if scalar is None else scalar**-0.5,
            config.window(layer),
            config.attn_logit_softcapping,
            selective,
        )
        self.linear_proj = nn.Linear(
            config.query_size, config.hidden_size, bias=config.add_bias_linear
        )
        self.normed = config.qk_layernorm

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        qkv = self.linear_qkv(x).unflatten(-1, (self.num_query_groups, -1, self.head_dim))
        q, k, v = qkv.split((self.heads_per_group, 1, 1), dim=-2)  # [B, T, G, heads, head_dim] each
        q_norm, k_norm = (
            (self.q_layernorm, self.k_layernorm) if self.normed != "none" else (None, None)
        )
        q, k, v = (
            self._turned(q, q_norm, cos, sin),
            self._turned(k, k_norm, cos, sin),
            v.flatten(2, 3),
        )
        attended: Tensor = self.core_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *mask
        )
        projected: Tensor = self.linear_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def _turned(
        self, heads: Tensor, norm: nn.Module | None, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        """Queries or keys [B, T, G, heads, head_dim] as attention takes them, [B, T, G x heads, head_dim]: normed and rotated."""

        def turned(x: Tensor) -> Tensor:
            x = x.flatten(2, 3)
            if norm is not None:
                x = norm(x) if self.normed == "head" else norm(x.flatten(2)).view(x.shape)
            return x if cos is None or sin is None else apply_rotary(x, cos, sin)

        return (
            recomputed(turned, norm, heads)
            if self.selective and norm is not None
            else turned(heads)
        )
