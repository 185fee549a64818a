"""Cross entropy in chunks of tokens, so that float32 logits of a whole batch never exist.

Logits of 8192 tokens and 128256 entries take 2 GiB in bfloat16. In float32, logits,
log-probabilities and gradients of all tokens at once take 11.7 GiB. Here the forward pass saves the
logits in their own dtype and two float32 numbers per token:

    largest   the largest logit
    log_sum   log(sum(exp(logits - largest)))

The backward pass computes log-probabilities and float32 gradients for one chunk at a time and
stores the gradient in the dtype of the logits. Loss and gradient have the bits of torch's formula.
Over a split vocabulary they differ by a few units in the last place.

The function starts at the logits, not at the hidden states. The GEMM of the output layer can then
run in any way: in FP8, with adapters, by Transformer Engine, over a part of the vocabulary. Its
records and its weight gradient stay the same. `F.linear_cross_entropy(options=...)` of torch 2.13
and Liger's kernel take the weight instead. They also save the 16-bit logits, but accumulate the
weight gradient in bfloat16 over the chunks, and compute gradients in the forward pass, which the
backward pass scales and rounds again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Targets with this value are left out of the mean, as in torch's cross_entropy."""
CHUNK, GPU_CHUNK = 1 << 20, 1 << 24
"""Logits in float32 at a time: as many as fit in a CPU's cache, or keep a GPU busy."""


class VocabularyPart(NamedTuple):
    """This rank's part of a vocabulary that is split over tensor-parallel ranks."""

    first: int
    """Token id of the first logit of this rank."""
    reduce_max: Callable[[Tensor], Tensor]
    """Returns the elementwise maximum of a tensor over the ranks."""
    reduce_sum: Callable[[Tensor], Tensor]
    """Returns the sum of a tensor over the ranks."""


def cross_entropy(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Computes the mean cross entropy.

    Args:
        logits: [tokens, V], any float dtype: of the whole vocabulary, or of this rank's part.
        targets: Token ids, int64 [tokens]. Targets of -100 are ignored.
        part: This rank's part of the vocabulary. None if the logits cover the whole vocabulary.

    Returns:
        float32 [], the same on all ranks. 0 if all targets are ignored.
    """
    count = (targets != IGNORED).sum().clamp(min=1)
    # A compiler fuses torch's formula and creates no float32 logits.
    uses_torch = torch.compiler.is_compiling() or logits.numel() <= chunk_size(logits)
    if part is None and uses_torch:
        return F.cross_entropy(logits.float(), targets, reduction="sum") / count
    total: Tensor = _CrossEntropy.apply(logits, targets, part)
    return total / count


def chunk_size(logits: Tensor) -> int:
    """Returns the number of logits in float32 at a time."""
    if logits.device.type == "cpu":
        return CHUNK
    return GPU_CHUNK


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yields the rows of each chunk."""
    rows = max(1, chunk_size(logits) // logits.shape[1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


class _CrossEntropy(torch.autograd.Function):
    """Sum of the losses, float32 [], of logits [tokens, V] and targets [tokens]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: VocabularyPart | None) -> Tensor:
        num_tokens, num_entries = logits.shape
        is_ignored = targets == IGNORED
        local_targets = targets
        is_missing = is_ignored
        if part is not None:
            local_targets = targets - part.first
            is_missing = is_ignored | (local_targets < 0) | (local_targets >= num_entries)
        # Over the whole vocabulary `gather` raises an error for an invalid target, as torch does.
        is_missing = is_missing.unsqueeze(1)
        columns = local_targets.unsqueeze(1).masked_fill(is_missing, 0)

        largest = torch.empty(num_tokens, 1, dtype=torch.float32, device=logits.device)
        log_sum = torch.empty(num_tokens, 1, dtype=torch.float32, device=logits.device)
        for tokens in _chunks(logits):
            largest[tokens], index = logits[tokens].max(1, keepdim=True)
            # The log-probability of the largest logit is -log_sum.
            log_sum[tokens] = logits[tokens].float().log_softmax(1).gather(1, index)
        log_sum.neg_()

        target_logits = logits.gather(1, columns).float()
        if part is None:
            target_logits = target_logits - largest
        else:
            local_largest = largest
            largest = part.reduce_max(local_largest)
            local_sum = (log_sum + (local_largest - largest)).exp()
            # Only the rank with the target's logit adds it.
            target_logits = (target_logits - largest).masked_fill(is_missing, 0.0)
            sums = part.reduce_sum(torch.cat((local_sum, target_logits), 1))
            total, target_logits = sums.chunk(2, 1)
            log_sum = total.log()
        ctx.save_for_backward(
            logits, columns, is_missing, is_ignored.unsqueeze(1), largest, log_sum
        )
        ctx.is_split = part is not None
        log_probabilities = target_logits - log_sum
        return F.nll_loss(log_probabilities, torch.where(is_ignored, IGNORED, 0), reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, columns, is_missing, is_ignored, largest, log_sum = ctx.saved_tensors
        grad_loss = torch.where(is_ignored, 0.0, grad_output)
        grad_target = torch.where(is_missing, 0.0, -grad_output)
        grad_logits = torch.empty_like(logits)
        for tokens in _chunks(logits):
            grad_logits[tokens] = _logits_gradient(
                logits[tokens],
                largest[tokens],
                log_sum[tokens],
                columns[tokens],
                grad_loss[tokens],
                grad_target[tokens],
                ctx.is_split,
            )
        return grad_logits, None, None


def _logits_gradient(
    logits: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    columns: Tensor,
    grad_loss: Tensor,
    grad_target: Tensor,
    is_split: bool,
) -> Tensor:
    """Computes the gradient of a chunk of logits: grad_loss * softmax(logits) + grad_target.

    Args:
        logits: [n, V].
        largest: Over the whole vocabulary, float32 [n, 1].
        log_sum: Over the whole vocabulary, float32 [n, 1].
        columns: Column of each target, int64 [n, 1].
        grad_loss: Gradient of each token's loss, 0 if it is ignored, float32 [n, 1].
        grad_target: Added in the target's column, -grad_loss, or 0 if another rank has the target.
        is_split: Whether the logits are a part of the vocabulary.

    Returns:
        float32 [n, V].
    """
    log_probabilities = (logits.float() - largest).sub_(log_sum)
    if is_split:
        gradient = log_probabilities.exp_().mul_(grad_loss)
        return gradient.scatter_add_(1, columns, grad_target)
    # torch's own kernel, for the bits of torch's cross_entropy.
    grad_log_probabilities = torch.zeros_like(log_probabilities).scatter_(1, columns, grad_target)
    return torch.ops.aten._log_softmax_backward_data(  # type: ignore[no-any-return]
        grad_log_probabilities, log_probabilities, 1, torch.float32
    )
