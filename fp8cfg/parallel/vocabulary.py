"""Vocabulary parallelism: embedding and output layer split by rows over the tensor-parallel ranks, and the loss over split logits.

A rank looks up the tokens whose rows it has; the sum over the ranks is exact, for all others add zeros. Logits stay split: of a
token the ranks exchange the largest logit, the sum of the exponentials and the logit of its target, three float32 numbers
(Megatron's vocab_parallel_cross_entropy, torch's loss_parallel).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.numerics.amax_group import largest
from fp8cfg.parallel.tensor_collectives import summed

IGNORED = -100
"""A target that is left out of the mean, as in torch's cross_entropy."""


class VocabularyEmbedding(nn.Embedding):
    """Rows `first` to `first` + num_embeddings of an embedding; of other tokens the output is 0: the sum over the ranks is that of
    the whole embedding."""

    first = 0

    @classmethod
    def of(cls, weight: nn.Parameter, first: int) -> VocabularyEmbedding:
        """An embedding of these rows, which is not initialized anew."""
        rows, width = weight.shape
        with torch.device("meta"):
            made = cls(rows, width)
        made.weight, made.first = weight, first
        return made

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        return F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, first={self.first}"


class _CrossEntropy(torch.autograd.Function):
    """Losses [tokens] of float32 logits [tokens, V / ranks], the logits of rows `first` on; 0 where the target is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: str) -> Tensor:
        shifted = logits - largest(logits.amax(-1), group).unsqueeze(-1)
        local = targets - first
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        row = local.masked_fill(elsewhere, 0)
        of_target = shifted.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        sums = summed(torch.stack((exponentials.sum(-1), of_target)), group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), row, elsewhere, targets == IGNORED)
        return (sums[0].log() - sums[1]).masked_fill(targets == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, row, elsewhere, ignored = ctx.saved_tensors
        found = softmax.clone()
        found.scatter_add_(-1, row.unsqueeze(-1), (elsewhere.to(found.dtype) - 1.0).unsqueeze(-1))
        return found.mul_(g.masked_fill(ignored, 0.0).unsqueeze(-1)), None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, first: int, group: str) -> Tensor:
    """The mean cross entropy of `targets` [tokens], whole token ids, from this rank's float32 logits [tokens, V / ranks], which are
    those of the tokens from `first` on; the same on every rank, 0-d."""
    losses: Tensor = _CrossEntropy.apply(logits, targets, first, group)  # type: ignore[no-untyped-call]
    return losses.sum() / (targets != IGNORED).sum().clamp(min=1)
