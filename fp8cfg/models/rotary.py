"""Rotary position embedding, with the frequency scaling of Llama 3.1 and linear scaling.

The tables are computed in each forward pass rather than kept. They are small (T x head_dim / 2), all layers share them,
and a table that is no buffer cannot be rounded by `model.to(torch.bfloat16)`, left as garbage by `to_empty`, or saved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8cfg.models.config import RopeScaling, TransformerConfig


def rotary_tables(
    config: TransformerConfig, positions: Tensor, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of `positions`, integers [T] or [B, T], each float32 [..., rotary_size / 2]; `local` for
    layers with a sliding window where these have a base of their own, which no scaling stretches (Gemma 3).
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
