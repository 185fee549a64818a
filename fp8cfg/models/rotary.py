"""Rotary position embedding, with the frequency scaling of Llama 3.1.

The tables are computed in each forward pass rather than kept. They are small (T x head_dim / 2), all layers share them,
and a table that is no buffer cannot be rounded by `model.to(torch.bfloat16)`, left as garbage by `to_empty`, or saved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8cfg.models.config import RopeScaling, TransformerConfig


def rotary_tables(config: TransformerConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each float32 [length, head_dim / 2]."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rotary_base ** (channels / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = scale_frequencies(frequencies, config.rope_scaling)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow the low frequencies down by `factor`, keep the high ones, and blend between (float32, same shape).

    "Low" and "high" count the turns that a channel makes within the original context. Source: `apply_scaling` in
    Meta's llama-models, `_compute_llama3_parameters` in transformers.
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` [B, T, heads, head_dim] by its positions, in float32; the result has the dtype of `x`.

    Channel i pairs with channel i + head_dim / 2 ("rotate half", as Hugging Face and Megatron store Llama's weights),
    not with its neighbour as in Meta's own checkpoints.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
