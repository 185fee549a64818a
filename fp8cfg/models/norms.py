"""RMSNorm and LayerNorm, computed in float32. The output has the dtype of the input.

A zero-centered weight is stored as its difference from 1, as in Gemma's RMSNorm and Megatron's
LayerNorm1p. Weight decay then pulls the factor towards 1, and bfloat16 has more digits near it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.models.config import TransformerConfig


class RMSNorm(nn.Module):
    """x / rms(x) * gamma. gamma is the weight, or 1 + weight if it is zero-centered."""

    kind = "RMSNorm"

    def __init__(self, size: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        initial = torch.zeros(size) if zero_centered else torch.ones(size)
        self.weight = nn.Parameter(initial)

    @property
    def gamma(self) -> Tensor:
        """The factor of the normalized input, float32 [size]."""
        weight = self.weight.float()
        if self.zero_centered:
            return 1.0 + weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension of `x`, any float dtype [..., size]."""
        return F.rms_norm(upcast(x), self.weight.shape, self.gamma, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        text = f"{self.weight.numel()}, eps={self.eps}"
        if self.zero_centered:
            text += ", zero_centered"
        return text


class LayerNorm(RMSNorm):
    """(x - mean(x)) / std(x) * gamma + bias. For gamma see RMSNorm."""

    kind = "LayerNorm"

    def __init__(self, size: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__(size, eps, zero_centered)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.float()
        y = F.layer_norm(upcast(x), self.weight.shape, self.gamma, bias, self.eps)
        return y.to(x.dtype)


def upcast(x: Tensor) -> Tensor:
    """Returns `x` in float32, always as a new node of autograd's graph."""
    # On a CPU RMSNorm is several operations, and each one adds a gradient to its input. With a node
    # of its own the norm's gradients are summed first, and then added to those of the residual
    # stream. The order is then the same for each dtype and under recomputation (recompute.py).
    if x.dtype == torch.float32:
        return x.view_as(x)
    return x.float()


def build_norm(config: TransformerConfig, size: int | None = None) -> RMSNorm:
    """Builds the norm of a model family.

    Args:
        config: The model's shapes.
        size: Channels. Default hidden_size.
    """
    norm_class = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[config.normalization]
    return norm_class(
        size or config.hidden_size, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
    )
