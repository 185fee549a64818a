"""Dynamic range expansion (COAT): a block's values are stored as powers, with an exponent k for which they fill the range of E4M3.

    k = floor(16 log2(448² / 2) / log2(largest / smallest)) / 16        code = E4M3(448 (|x| / largest)^k), and the sign of x

Source: arXiv 2410.19313, section 4.1, and coat/optimizer/kernels/fp8_adamw_expand_cuda_kernel.cu of NVlabs/COAT. There values
are divided by sqrt(smallest x largest) first, and a block keeps that beside k and scale; it cancels out. There k is infinite
where all values of a block are equal; here it ends at 16, and below at 3/16, under which not every code would have a value that
is a normal number.

Compilers disagree about the last bit of a power, so none is taken of a tensor. For each k a table, computed in double precision,
says what the codes stand for, and where one code ends and the next begins. All tables are searched as one, by integers: a row of
them for each block would take as much memory as the float32 values of all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.formats import E4M3
from fp8cfg.numerics.host_copy import sent

STEPS = 16
"""k is a multiple of 1 / STEPS."""
LEAST, MOST = 3, 16 * STEPS
"""Bounds of k, in steps."""


def _below(x: Tensor) -> Tensor:
    """Float64 `x` as float32, rounded down: y > x and y > _below(x) are the same for every float32 y."""
    nearest = x.float()
    return torch.where(
        nearest.double() > x, nearest.nextafter(torch.full_like(nearest, -math.inf)), nearest
    )


def _keys(values: Tensor, k: Tensor) -> Tensor:
    """Float32 `values` from 0 to 1, [.., n], of rows whose k, in steps, is `k`, int64 [..], as int64 that ascend with k and, for
    one k, with values, as the bits of a float32 do, of which 1 has 30. NaN is beyond all of its row.
    """
    return k[:, None] * 2**30 + values.view(torch.int32)


class _Tables(NamedTuple):
    """By k, in steps: the values of the 127 codes, over the largest, [.. x 127] and their keys, the keys of where they meet
    [.. x 126]. And, ascending, the widest range of a block for each k, from MOST down to LEAST."""

    values: Tensor
    codes: Tensor
    meets: Tensor
    ranges: Tensor


def _tables() -> _Tables:
    codes = torch.arange(127, dtype=torch.uint8, device="cpu").view(E4M3.dtype).double() / E4M3.max
    steps = torch.arange(MOST + 1, device="cpu")
    roots = STEPS / steps[:, None].double().clamp(min=LEAST)
    meets = ((codes[1:] + codes[:-1]) / 2) ** roots
    values = (codes**roots).float()
    return _Tables(
        values.flatten(),
        _keys(values, steps).flatten(),
        _keys(_below(meets), steps).flatten(),
        _below((E4M3.max**2 / 2) ** roots[LEAST:, 0].flip(0)),
    )


_TABLES = _tables()
_ON_GPU: dict[int | None, _Tables] = {}
"""The tables on each GPU, sent once: compiled code would send them anew for each tensor, and wait each time."""


def send_tables(device: torch.device) -> None:
    """Send the tables to `device`, if it is a GPU that has none yet: before code that uses them there is compiled."""
    if device.type == "cuda" and device.index not in _ON_GPU:
        _ON_GPU[device.index] = _Tables(*(sent(table, device) for table in _TABLES))


def _on(device: torch.device) -> _Tables:
    if device.type == "cuda":
        if not torch.compiler.is_compiling():
            send_tables(device)
        return _ON_GPU[device.index]
    return _Tables(*(table.to(device) for table in _TABLES))


def scales(rows: Tensor) -> Tensor:
    """For each row of float32 `rows` [blocks, block] its largest magnitude and k, float32 [blocks, 2]. The first is NaN where
    something in the row is not finite."""
    x = rows.abs()
    largest, smallest = x.amax(-1), torch.where(x == 0, math.inf, x).amin(-1)
    narrower = torch.searchsorted(_on(x.device).ranges, largest / smallest)
    k = (MOST - narrower).clamp(min=LEAST).float() / STEPS
    return torch.stack(
        [torch.where(largest < math.inf, largest.clamp(min=2.0**-126), math.nan), k], -1
    )


def encode(rows: Tensor, scales: Tensor, u: Tensor | None = None) -> Tensor:
    """The codes, E4M3 [blocks, block], of float32 `rows`: nearest among the powers, as COAT has it, or with the random numbers `u`
    stochastic among the values themselves. What is not 0 does not become 0."""
    x, k, tables = rows.abs() / scales[:, :1], _steps(scales), _on(rows.device)
    if u is None:
        code = (torch.bucketize(_keys(x, k), tables.meets) - 126 * k[:, None]).clamp(max=126)
    else:
        first = 127 * k[:, None]
        code = (torch.bucketize(_keys(x, k), tables.codes, right=True) - 1 - first).clamp(0, 125)
        lower, upper = tables.values[first + code], tables.values[first + code + 1]
        code = code + (u < (x - lower) / (upper - lower))
    code = torch.where(rows != 0, code.clamp(min=1), code)
    return torch.where(rows < 0, code + 128, code).to(torch.uint8).view(E4M3.dtype)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of `codes`, the bytes [blocks, block] that `encode` returned."""
    code = codes.long()
    values = _on(codes.device).values[_steps(scales)[:, None] * 127 + (code & 127)]
    return torch.where(code > 127, -values, values) * scales[:, :1]


def _steps(scales: Tensor) -> Tensor:
    return (scales[:, 1] * STEPS).long()
