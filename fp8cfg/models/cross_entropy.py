"""Cross entropy in chunks over tokens: float32 logits of a whole batch never exist.

Logits of 8192 tokens over 128256 entries are 2 GiB in bfloat16; cast to float32, log-probabilities and gradient of all tokens at
once take 11.7 GiB. Here the forward pass keeps the logits as they are and two float32 numbers a token: the largest logit, and the
logarithm of the sum of exponentials beneath it. The backward pass makes log-probabilities of a chunk at a time of them, and the
gradient in the dtype of the logits. Both are those of torch's own formula, to the bit; of a part of the vocabulary to a few units
in the last place.

It begins at the logits of one product, not at the hidden states: whoever multiplies the output layer (FP8, adapters, Transformer
Engine, a part of the vocabulary) is the same as before, and so are its records and the gradient of its weight. torch 2.13's
`F.linear_cross_entropy(options=...)` and Liger's kernel take the weight itself: they spare the 16-bit logits too, add the weight's
gradient up in bfloat16 once a chunk, and make gradients in the forward pass, to be multiplied and rounded again in the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""A target that is left out of the mean, as in torch's cross_entropy."""
CHUNK, GPU_CHUNK = 1 << 20, 1 << 24
"""Logits that are in float32 at a time: as many as a CPU's cache holds, or as keep a GPU busy. Of fewer the loss is torch's."""


class VocabularyPart(NamedTuple):
    """The part of the vocabulary that a rank has logits of: from the entry `first` on. `largest` and `summed` reduce a tensor over
    it and the ranks that have the other parts."""

    first: int
    largest: Callable[[Tensor], Tensor]
    summed: Callable[[Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """The mean cross entropy, float32 and 0-d, of `targets` [tokens], int64, those that are -100 left out; 0 where all are.
    `logits` [tokens, V] are of any float dtype, and of the whole vocabulary or of this rank's `part`: the mean is the same on
    every rank.

    A compiler fuses torch's own formula and makes no float32 logits of it either.
    """
    count = (targets != IGNORED).sum().clamp(min=1)
    if part is None and (torch.compiler.is_compiling() or logits.numel() <= chunk(logits)):
        return F.cross_entropy(logits.float(), targets, reduction="sum") / count
    total: Tensor = _CrossEntropy.apply(logits, targets, part)
    return total / count


def chunk(logits: Tensor) -> int:
    """Logits that are in float32 at a time."""
    return CHUNK if logits.device.type == "cpu" else GPU_CHUNK


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, chunk(logits) // logits.shape[1])
    return (slice(i, i + rows) for i in range(0, len(logits), rows))


class _CrossEntropy(torch.autograd.Function):
    """Logits [tokens, V] and targets [tokens] to the sum of losses, float32 and 0-d."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: VocabularyPart | None) -> Tensor:
        ignored, local = targets == IGNORED, targets - (part.first if part else 0)
        # Of the whole vocabulary a target outside of it is for `gather` to refuse, as torch's own formula does.
        elsewhere = (
            ignored | ((local < 0) | (local >= logits.shape[1])) if part else ignored
        ).unsqueeze(1)
        row = local.unsqueeze(1).masked_fill(elsewhere, 0)
        largest, log_sum = (
            torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device) for _ in range(2)
        )
        for tokens in _chunks(logits):
            largest[tokens], at = logits[tokens].max(1, keepdim=True)
            log_sum[tokens] = logits[tokens].float().log_softmax(1).gather(1, at)
        log_sum.neg_()
        of_target = logits.gather(1, row).float()
        if part is None:
            of_target = of_target - largest
        else:
            own, largest = largest, part.largest(largest)
            shares = (
                (log_sum + (own - largest)).exp(),
                (of_target - largest).masked_fill(elsewhere, 0.0),
            )
            sums, of_target = part.summed(torch.cat(shares, 1)).chunk(2, 1)
            log_sum = sums.log()
        ctx.save_for_backward(logits, row, elsewhere, ignored.unsqueeze(1), largest, log_sum)
        ctx.whole = part is None
        return F.nll_loss(of_target - log_sum, torch.where(ignored, IGNORED, 0), reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        logits, row, elsewhere, ignored, largest, log_sum = ctx.saved_tensors
        each, of_target = torch.where(ignored, 0.0, g), torch.where(elsewhere, 0.0, -g)
        made = torch.empty_like(logits)
        for tokens in _chunks(logits):
            own = (t[tokens] for t in (logits, largest, log_sum, row, each, of_target))
            made[tokens] = _gradient(ctx.whole, *own)
        return made, None, None


def _gradient(
    whole: bool,
    logits: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    row: Tensor,
    each: Tensor,
    of_target: Tensor,
) -> Tensor:
    """The gradient, float32, of `logits` [n, V], whose losses have gradients `each` [n, 1], with `of_target` [n, 1] added in column
    `row`. Of the `whole` vocabulary torch's own kernel makes it, with the same bits as of all tokens at once.
    """
    log_probabilities = (logits.float() - largest).sub_(log_sum)
    if whole:
        losses = torch.zeros_like(log_probabilities).scatter_(1, row, of_target)
        return torch.ops.aten._log_softmax_backward_data(  # type: ignore[no-any-return]
            losses, log_probabilities, 1, torch.float32
        )
    return log_probabilities.exp_().mul_(each).scatter_add_(1, row, of_target)
