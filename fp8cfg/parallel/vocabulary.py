"""Vocabulary parallelism: embedding and output layer split by rows over the tensor-parallel ranks, and the loss over split logits.

A rank looks up the tokens whose rows it has; the sum over the ranks is exact, for all others add zeros. Logits stay split: of a
token the ranks exchange the largest logit, the sum of the exponentials and the logit of its target, three float32 numbers
(Megatron's vocab_parallel_cross_entropy, torch's loss_parallel; models/cross_entropy.py).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.models.cross_entropy import VocabularyPart
from fp8cfg.numerics.amax_group import largest
from fp8cfg.parallel.tensor_collectives import summed


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
        return F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(
            elsewhere.unsqueeze(-1), 0.0
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, first={self.first}"


def vocabulary_part(first: int, group: str) -> VocabularyPart:
    """The part of the logits from the entry `first` on, of which the ranks of the process group of that name have the others."""
    return VocabularyPart(first, partial(largest, group=group), partial(summed, group=group))
