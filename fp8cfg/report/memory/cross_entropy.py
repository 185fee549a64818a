"""Cross entropy memory: bytes of logits and of what the loss makes of them (models/cross_entropy.py), on one rank.

Few logits are cast to float32 whole: the widest moment is the backward pass, with log-probabilities, their gradient and that of the
logits, 12 bytes a logit; the forward pass has as many or fewer. Of more, and of a part of the vocabulary, the logits stay, the
gradient is made beside them, and a chunk at a time is in float32, with twelve bytes a logit again, or four of a part.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8cfg.report.memory.linears import LinearBytes

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits in float32 at a time (models/cross_entropy.py, CHUNK and GPU_CHUNK)."""


class LogitBytes(NamedTuple):
    """Bytes of a microbatch: kept from the forward to the backward pass, at the widest moment of the forward pass, and of both."""

    kept: int
    forward: int
    widest: int


def logit_bytes(b: LinearBytes) -> LogitBytes:
    """Those of a rank that has the output layer."""
    count, c = b.tokens * b.v, b.c
    chunk = min(count, CHUNK[b.device])
    capped = c * count if b.recipe.model.final_logit_softcapping is not None else 0
    cast = 4 if c == 4 else 8  # logits in float32 are no copy
    forward = c * count + cast * chunk + capped
    if b.tp == 1 and count == chunk:
        return LogitBytes(int(4 * count + capped), int(forward), int(12 * count + capped))
    widest = max(forward, 2 * c * count + (12 if b.tp == 1 else 4) * chunk + capped)
    return LogitBytes(int(c * count + capped), int(forward), int(widest))
