"""Triton functions of a tile that is quantized: the scale of an amax, saturation, the transposed store, counts of what overflows.

Parts of all kernels of quantization (triton_kernels.py, triton_block_kernel.py, triton_row_kernel.py).

Saturation and maxima are written with `where`: tl.minimum and tl.maximum that pass NaN on corrupt a transposed float8 store beside
them (triton-lang/triton#11111, Triton 3.6 at least).

Atomics, of the kernels too, are relaxed: later launches read what they write. Triton's default is a fence of the whole GPU in each
program, before it stores its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(amax, target, highest, POWER_2: tl.constexpr):
    scale = tl.div_rn(target, amax)
    scale = tl.where(scale == float("inf"), highest, scale)
    scale = tl.where(amax > 0, tl.where(amax < float("inf"), scale, 1.0), 1.0)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _note_infinite(seen, amax):
    """Infinity into `seen`, the bits of a float32 number, where that is the `amax`; other programs write nothing."""
    tl.atomic_max(seen, amax.to(tl.int32, bitcast=True), mask=amax == float("inf"), sem="relaxed")


@triton.jit
def _count(counts, beyond, infinite):
    """The elements of a tile that are finite and `beyond` what fits, and those that are `infinite`, added to `counts`. It is called
    where there are some."""
    n = tl.sum(tl.sum(infinite.to(tl.float32), 1), 0)
    tl.atomic_add(counts, tl.sum(tl.sum(beyond.to(tl.float32), 1), 0) - n, sem="relaxed")
    tl.atomic_add(counts + 1, n, sem="relaxed")


@triton.jit
def _count_infinite(counts, v, amax):
    """The infinite elements of the tile `v`, where the `amax` says that there may be some, added to `counts`."""
    if amax == float("inf"):
        tl.atomic_add(
            counts + 1,
            tl.sum(tl.sum((tl.abs(v) == float("inf")).to(tl.float32), 1), 0),
            sem="relaxed",
        )


@triton.jit  # type: ignore[untyped-decorator]
def _saturated(v, LARGEST: tl.constexpr):
    v = tl.where(v > LARGEST, LARGEST, v)
    return tl.where(v < -LARGEST, -LARGEST, v)


@triton.jit  # type: ignore[untyped-decorator]
def _store_across(to, q, at, inside, at_t, inside_t, TRANSPOSE: tl.constexpr):
    if TRANSPOSE:
        tl.store(to + at_t, tl.trans(q), mask=inside_t)
    else:
        tl.store(to + at, q, mask=inside)
