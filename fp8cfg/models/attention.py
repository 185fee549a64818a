"""Causal self-attention with grouped queries.

Options of a model family: rotary positions, norms of queries and keys, sliding windows, a soft cap
of scores.

Shape letters: B batch, T tokens (of the queries), S tokens of the keys, D hidden_size, H query
heads, G key-value heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

from fp8cfg.models.config import RopeScaling, TransformerConfig
from fp8cfg.models.norms import build_norm
from fp8cfg.models.recompute import recompute_in_backward


class SelfAttention(nn.Module):
    """Causal grouped-query attention of one layer, x [B, T, D] to [B, T, D].

    The rows of `linear_qkv` have Megatron's order: group by group, and in each group first its
    query heads, then its key head, then its value head.
    """

    def __init__(self, config: TransformerConfig, layer: int = 0, selective: bool = False) -> None:
        """Builds the attention of one layer.

        Args:
            config: The model's shapes.
            layer: Number of the layer, from 0. Some families alternate full and windowed attention.
            selective: Whether the backward pass recomputes the norms of queries and keys, and
                attention with a mask. See `CoreAttention`.
        """
        super().__init__()
        self.selective = selective
        self.num_query_groups = config.num_query_groups
        self.heads_per_group = config.heads_per_group
        self.head_dim = config.head_dim
        self.qk_layernorm = config.qk_layernorm
        self.linear_qkv = nn.Linear(
            config.hidden_size, config.qkv_size, bias=config.add_qkv_bias or config.add_bias_linear
        )
        if config.qk_layernorm == "hidden":  # one norm over all heads, as in OLMo 2
            self.q_layernorm = build_norm(config, config.query_size)
            self.k_layernorm = build_norm(config, config.key_size)
        elif config.qk_layernorm == "head":  # each head separately, as in Qwen 3
            self.q_layernorm = build_norm(config, config.head_dim)
            self.k_layernorm = build_norm(config, config.head_dim)
        scale = None
        if config.query_pre_attn_scalar is not None:
            scale = config.query_pre_attn_scalar**-0.5
        self.core_attention = CoreAttention(
            scale, config.window(layer), config.attn_logit_softcapping, selective
        )
        self.linear_proj = nn.Linear(
            config.query_size, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, *mask: Tensor) -> Tensor:
        """Computes attention.

        Args:
            x: The normalized residual stream, [B, T, D].
            cos: Cosines from `rotary_tables`, or None without rotary positions.
            sin: Sines from `rotary_tables`, or None without rotary positions.
            *mask: The mask of `CoreAttention`, or nothing.
        """
        qkv = self.linear_qkv(x).unflatten(-1, (self.num_query_groups, -1, self.head_dim))
        # [B, T, G, heads of a group, head_dim] each
        q, k, v = qkv.split((self.heads_per_group, 1, 1), dim=-2)
        q_norm, k_norm = None, None
        if self.qk_layernorm != "none":
            q_norm, k_norm = self.q_layernorm, self.k_layernorm
        q = self._norm_and_rotate(q, q_norm, cos, sin)
        k = self._norm_and_rotate(k, k_norm, cos, sin)
        v = v.flatten(2, 3)
        # torch's attention wants the heads before the tokens.
        output: Tensor = self.core_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *mask
        )
        projected: Tensor = self.linear_proj(output.transpose(1, 2).flatten(2))
        return projected

    def _norm_and_rotate(
        self, heads: Tensor, norm: nn.Module | None, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        """Prepares queries or keys for attention: flattens their groups, normalizes and rotates.

        Args:
            heads: [B, T, G, heads of a group, head_dim].
            norm: The norm, or None.
            cos: See `forward`.
            sin: See `forward`.

        Returns:
            [B, T, heads, head_dim].
        """

        def norm_and_rotate(x: Tensor) -> Tensor:
            x = x.flatten(2, 3)
            if norm is not None and self.qk_layernorm == "head":
                x = norm(x)
            elif norm is not None:
                x = norm(x.flatten(2)).view(x.shape)
            if cos is None or sin is None:
                return x
            return apply_rotary(x, cos, sin)

        if self.selective and norm is not None:
            return recompute_in_backward(norm_and_rotate, norm, heads)
        return norm_and_rotate(heads)


class CoreAttention(nn.Module):
    """Causal attention without its linear layers: softmax(q kᵀ x scale) v.

    Most calls run torch's fused attention with its causal flag. A window, a soft cap or a mask
    needs an explicit mask. A soft cap also needs explicit scores, because torch's fused attention
    has none (Gemma 2, arXiv 2408.00118).
    """

    def __init__(
        self,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        selective: bool = False,
    ) -> None:
        """Sets the options of a layer.

        Args:
            scale: Factor of the scores. None is 1 / √head_dim.
            window: Tokens that a token sees, including itself. None for all before it.
            softcap: Bounds scores to softcap x tanh(scores / softcap), in float32. None for no
                bound.
            selective: Whether the backward pass recomputes attention with an explicit mask. Flash
                attention needs no recomputation: it keeps no matrix of scores.
        """
        super().__init__()
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.selective = selective

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes attention. If S is larger than T, the queries are the last T of S tokens.

        Args:
            q: Queries, [B, H, T, head_dim].
            k: Keys, [B, G, S, head_dim].
            v: Values, [B, G, S, head_dim].
            mask: Mask to add to the scores, [..., T, S], from `additive_mask`. A model makes it
                once for all layers. None makes one here if attention needs one.

        Returns:
            [B, H, T, head_dim].
        """
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        bias = None
        if q.is_cuda:
            bias = _LOWER_RIGHT.get((num_queries, num_keys))
        has_mask = mask is not None or self.softcap is not None
        has_mask = has_mask or self._effective_window(num_keys) is not None
        # torch's causal flag aligns queries with the first keys, so it fits equal lengths only.
        if not has_mask and (num_queries == num_keys or bias is not None):
            return self._causal_attention(q, k, v, bias)
        inputs: tuple[Tensor, ...] = (q, k, v)
        if mask is not None:
            inputs = (q, k, v, mask)
        if self.selective:
            return recompute_in_backward(self._masked_attention, None, *inputs)
        return self._masked_attention(*inputs)

    def _causal_attention(self, q: Tensor, k: Tensor, v: Tensor, bias: CausalBias | None) -> Tensor:
        # On a GPU flash attention has no float32, and the kernels with float32 no grouped queries.
        if q.is_cuda and q.dtype == torch.float32 and q.shape[1] > k.shape[1]:
            k, v = _repeat_kv(q, k, v)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            is_causal=bias is None,
            scale=self.scale,
            enable_gqa=q.shape[1] > k.shape[1],
        )

    def _masked_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        if mask is None:
            window = self._effective_window(num_keys)
            is_hidden = causal_mask(num_queries, num_keys, window, q.device)
            mask = additive_mask(is_hidden, q.dtype)
        # No kernel has both a mask and grouped queries.
        k, v = _repeat_kv(q, k, v)
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scale = self.scale
        if scale is None:
            scale = q.shape[-1] ** -0.5
        scores = (q @ k.mT).float().mul(scale / self.softcap).tanh().mul(self.softcap)
        return (scores + mask).softmax(-1).to(v.dtype) @ v

    def _effective_window(self, num_keys: int) -> int | None:
        """Returns the window, or None if it covers all keys."""
        if self.window is None or self.window >= num_keys:
            return None
        return self.window

    def extra_repr(self) -> str:
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return ", ".join(
            f"{name}={value:g}" for name, value in options.items() if value is not None
        )


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values [B, G, S, head_dim] for each query head: [B, H, S, head_dim]."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Returns the mask of hidden tokens, bool [num_queries, num_keys].

    A token (row) does not see later tokens. With a window it does not see tokens that are `window`
    or more before it either. The queries are the last of the keys.
    """
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    offset = num_keys - num_queries
    is_hidden = everything.triu(1 + offset)
    if window is not None:
        is_hidden = is_hidden | everything.tril(offset - window)
    return is_hidden


def additive_mask(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask to numbers to add to scores: -inf for hidden tokens, otherwise 0."""
    zeros = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return zeros.masked_fill_(is_hidden, -torch.inf)


_LOWER_RIGHT: dict[tuple[int, int], CausalBias] = {}


def prepare_lower_right_bias(num_queries: int, num_keys: int) -> None:
    """Prepares attention of `num_queries` queries that are the last of `num_keys` keys.

    Context parallelism has such calls. With this bias flash attention runs them on a GPU. Without
    it, and on a CPU, an explicit mask does.
    """
    # Before the first call, because torch 2.13 can't create a CausalBias in compiled code.
    _LOWER_RIGHT[num_queries, num_keys] = causal_lower_right(num_queries, num_keys)


def rotary_tables(
    config: TransformerConfig, positions: Tensor, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotary angles.

    Each forward pass computes the tables. They are small, and all layers share them. They are not
    buffers, because `model.to(torch.bfloat16)` would round a buffer, `to_empty` would leave garbage
    in it, and checkpoints would have it.

    Args:
        config: The model's shapes.
        positions: Positions of the tokens, integers [T] or [B, T].
        local: Whether the tables are for layers with a sliding window. In Gemma 3 these have a
            separate base without scaling.

    Returns:
        Cosines and sines, each float32 [..., rotary_size / 2].
    """
    channels = torch.arange(0, config.rotary_size, 2, dtype=torch.float32, device=positions.device)
    base = config.rotary_base
    scaling = config.rope_scaling
    if local and config.rotary_base_local is not None:
        base = config.rotary_base_local
        scaling = None
    frequencies = 1.0 / base ** (channels / config.rotary_size)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretches rotary frequencies for a longer context.

    Linear scaling divides all frequencies by `factor`. Llama 3's scaling divides low frequencies,
    keeps high ones and blends between them. "Low" and "high" refer to the number of turns that a
    channel makes within the original context. Source: `apply_scaling` in Meta's llama-models,
    `_compute_llama3_parameters` in transformers.

    Args:
        frequencies: float32 [rotary_size / 2].
        scaling: The stretch.

    Returns:
        float32 [rotary_size / 2].
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads by their positions, in float32.

    Channel i pairs with channel i + rotary_size / 2 ("rotate half", as Hugging Face and Megatron
    store Llama's weights). Meta's own checkpoints pair it with channel i + 1.

    Args:
        x: Queries or keys, [B, T, heads, head_dim].
        cos: Cosines from `rotary_tables`.
        sin: Sines from `rotary_tables`.

    Returns:
        Same shape and dtype as `x`. Channels from `rotary_size` on stay as they are.
    """
    rotary_size = 2 * cos.shape[-1]
    first, second = x[..., :rotary_size].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    halves = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(halves, dim=-1).to(x.dtype)
    if rotary_size == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_size:]), dim=-1)
