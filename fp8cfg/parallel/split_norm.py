"""Split norms: norms of queries and keys over all heads (OLMo 2), of which a tensor-parallel rank has its own. The mean and the
mean square are sums over the ranks, a number a token each."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8cfg.models.norms import LayerNorm, RMSNorm
from fp8cfg.parallel.tensor_collectives import total


class SplitRMSNorm(RMSNorm):
    """RMSNorm over the last dimension, of which, as of the weight, each of `ranks` of the process group `group` has an equal
    part."""

    group: str
    ranks: int

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * self._inverse_root(wide) * self.gamma).to(x.dtype)

    def _mean(self, wide: Tensor) -> Tensor:
        return total(wide.sum(-1, keepdim=True), self.group) / (wide.shape[-1] * self.ranks)

    def _inverse_root(self, wide: Tensor) -> Tensor:
        return torch.rsqrt(self._mean(wide.square()) + self.eps)


class SplitLayerNorm(SplitRMSNorm, LayerNorm):
    """LayerNorm in the same way."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centered = wide - self._mean(wide)
        return (centered * self._inverse_root(centered) * self.gamma + self.bias.float()).to(
            x.dtype
        )


def split(norm: RMSNorm, ranks: int, group: str) -> None:
    """Let `norm`, whose parameters are this rank's part already, compute as the whole one, in place."""
    norm.__class__ = SplitLayerNorm if isinstance(norm, LayerNorm) else SplitRMSNorm
    norm.group, norm.ranks = group, ranks  # type: ignore[assignment]
