"""RMSNorm and LayerNorm, computed in float32 whatever the dtypes of input and weight; the output has the input's.

A zero-centered weight is the difference from 1 (Gemma's RMSNorm, Megatron's LayerNorm1p): weight decay, where a norm has it, then
pulls towards 1, and bfloat16 has more digits near it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.models.config import TransformerConfig


def upcast(x: Tensor) -> Tensor:
    """`x` in float32, another tensor than `x` for autograd where it is that already. On a CPU RMSNorm is several operations that
    read it: the sum of their gradients is made before it is added to the residual stream's, whatever the dtype of `x`, and also
    where the norm is recomputed (recompute.py)."""
    return x.view_as(x) if x.dtype == torch.float32 else x.float()


class RMSNorm(nn.Module):
    """x / rms(x) * weight, or x / rms(x) * (1 + weight) where that is `zero_centered`."""

    kind = "RMSNorm"

    def __init__(self, size: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))

    @property
    def gamma(self) -> Tensor:
        """What the normalized input is multiplied by, float32."""
        return 1.0 + self.weight.float() if self.zero_centered else self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(upcast(x), self.weight.shape, self.gamma, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}" + (
            ", zero_centered" if self.zero_centered else ""
        )


class LayerNorm(RMSNorm):
    """(x - mean(x)) / std(x) * weight + bias, or * (1 + weight) where that is `zero_centered`."""

    kind = "LayerNorm"

    def __init__(self, size: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__(size, eps, zero_centered)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            upcast(x), self.weight.shape, self.gamma, self.bias.float(), self.eps
        ).to(x.dtype)


def norm(config: TransformerConfig, size: int | None = None) -> RMSNorm:
    """The norm that `config` names, over `size` channels, by default those of the residual stream."""
    kind = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[config.normalization]
    return kind(
        size or config.hidden_size, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
    )
