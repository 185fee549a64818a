"""Triton kernel that counts the values of a tensor that did not fit into FP8, where plain operations quantized it.

Programs read the amax first, and return where it fits: the host waits for nothing, and no tensor is read that fits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp8cfg.numerics.triton_kernels import BLOCK, launched, part_count


@triton.jit  # type: ignore[untyped-decorator]
def _count_overflow(t, amax, scale, counts, count, REACH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    most, factor = tl.load(amax), tl.load(scale) if SCALED else 0.0
    if most < float("inf"):  # noqa: SIM102, Triton has no `and` of numbers that are loaded
        if most * factor <= REACH:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    clipped, infinite = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    while start < count:
        at = start + tl.arange(0, BLOCK)
        a = tl.abs(tl.load(t + at, mask=at < count, other=0.0).to(tl.float32))
        finite = a < float("inf")
        clipped += (finite & (a * factor > REACH)).to(tl.float32)
        infinite += (a == float("inf")).to(tl.float32)
        start += tl.num_programs(0) * BLOCK
    if SCALED:
        tl.atomic_add(counts, tl.sum(clipped, 0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(infinite, 0), sem="relaxed")


@launched
def count(t: Tensor, amax: Tensor, scale: Tensor | None, counts: Tensor, reach: float) -> Any:
    """Add to `counts`, float32, how many values of contiguous `t`, any shape but an empty one, are finite and beyond `reach`, times
    the `scale`, float32 [], and how many are infinite. No value of `t` is larger than `amax`, float32 []. Without a `scale` no
    finite value is counted. Returns the compiled kernel."""
    factor = amax if scale is None else scale
    return _count_overflow[(part_count(t),)](t, amax, factor, counts, t.numel(), reach, scale is not None, BLOCK, num_warps=8)
