"""Quantization of a matrix to an operand: scale, round, and carry.

Always from float32: rounding to bfloat16 before FP8 changes 3 in 100 values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8cfg.numerics.block_scaling import Scales, sizes, tile_scales, tiled, untiled
from fp8cfg.numerics.exact_float32 import reciprocal
from fp8cfg.numerics.formats import E2M1, Format, cast, round_in_steps, round_to_grid, widen
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.scaling import Scaling, record_amax
from fp8cfg.numerics.stochastic_rounding import Random
from fp8cfg.scalings import Tile

Part = Callable[[Tensor, Scales | None, int], tuple[Tensor, Tensor]]
CHUNK = (
    1 << 17
    # elements quantized at a time in eager mode: float32 temporaries stay in the cache, and none pages
    # in anew
)


def quantize(t: Tensor, scale: Tensor, fmt: Format, carrier: torch.dtype) -> Operand:
    """Multiplies the matrix `t`, read as float32, by the scalar `scale` and rounds it to FP8, once. `carrier` is the dtype of
    the data: `fmt.dtype` for a real product, bfloat16 or float32 for an emulated one."""
    scale_inv = reciprocal(scale)
    if not _in_chunks(t) or carrier == fmt.dtype:
        return Operand(_rounded(t.float() * scale, fmt, carrier).to(carrier), scale_inv, fmt)
    data = torch.empty(t.shape, dtype=carrier)
    rows = max(1, CHUNK // max(1, t.shape[1]))
    for source, target in zip(torch.split(t, rows), torch.split(data, rows), strict=True):
        target.copy_(_rounded(source.float() * scale, fmt, carrier))
    return Operand(data, scale_inv, fmt)


def quantize_tiles(
    t: Tensor,
    tile: Tile,
    fmt: Format,
    scaling: Scaling,
    carrier: torch.dtype,
    whole: Tensor | None = None,
    random: Random | None = None,
    record: Tensor | None = None,
    group: str | None = None,
) -> Operand:
    """Quantizes the matrix `t` [R, C] with a scale for each tile. `whole` is nvfp4's scale of the whole tensor. Scales of a
    carried operand that vary along the contracted dimension are multiplied into its data. With `random` the format rounds
    stochastically, by numbers that depend on the place of an element in `t` alone, not on strides or chunks. The largest amax of
    all tiles is folded into the running maximum `record`, [], if there is one. Ranks of `group` have the other parts of each tile,
    a row or a column, if it is given."""
    fold = carrier != fmt.dtype and scaling.layout.block > 0
    seen: list[Tensor] | None = None if record is None else []

    def part(t: Tensor, scales: Scales | None = None, row: int = 0) -> tuple[Tensor, Tensor]:
        v = tiled(t, tile).float()
        encode, decode = scales or tile_scales(v, fmt, scaling, whole, t.dtype, seen)
        uniform = (
            random.uniform(row * v.shape[2] * v.shape[3], v.numel()).view(v.shape)
            if random
            else None
        )
        q = _rounded(v * encode, fmt, carrier, uniform)
        q = (q * decode.to(q.dtype) if fold else q).to(carrier)
        return untiled(q, t.shape), decode[:, 0, :, 0]

    chunks = _in_chunks(t)
    first = group is not None or (chunks and tile[0] == 0)  # what no chunk knows
    scales = (
        tile_scales(tiled(t, tile).float(), fmt, scaling, whole, seen=seen, group=group)
        if first
        else None
    )
    data, decode = _by_chunks(t, tile, carrier, part, scales) if chunks else part(t, scales)
    if record is not None and seen:
        record_amax(record, seen[0] if len(seen) == 1 else torch.stack(seen).amax())
    if not fold:
        return Operand(
            data, decode, fmt, tile, whole_inv=None if whole is None else reciprocal(whole)
        )
    return Operand(data, None if whole is None else reciprocal(whole), fmt, tile)


def _by_chunks(
    t: Tensor, tile: Tile, carrier: torch.dtype, part: Part, scales: Scales | None
) -> tuple[Tensor, Tensor]:
    """`part` of some rows at a time; with the `scales` that are known: of whole rows, or of whole columns, where a tile has all
    rows."""
    data, columns = torch.empty(t.shape, dtype=carrier), tile[0] == 0
    r = 1 if columns else sizes(t.shape, tile)[0]
    rows = max(1, CHUNK // max(1, r * t.shape[1])) * r
    found = []
    for i, (source, target) in enumerate(
        zip(torch.split(t, rows), torch.split(data, rows), strict=True)
    ):
        own = (
            scales
            if columns or scales is None
            else Scales(*(s[i * rows : (i + 1) * rows] for s in scales))
        )
        values, decode = part(source, own, i * rows)
        target.copy_(values)
        found.append(decode)
    return data, found[0] if columns else torch.cat(found)


def _in_chunks(t: Tensor) -> bool:
    return t.device.type == "cpu" and t.numel() > 0 and not torch.compiler.is_compiling()


def rounded(v: Tensor, fmt: Format) -> Tensor:
    """Float32 `v`, scaled, in `fmt.dtype`."""
    return _rounded(v, fmt, fmt.dtype)


def _rounded(v: Tensor, fmt: Format, carrier: torch.dtype, uniform: Tensor | None = None) -> Tensor:
    """Float32 `v` on the grid of `fmt`: as `fmt.dtype` if that is the carrier, else as the carrier or float32."""
    if fmt == E2M1:
        return round_in_steps(v, fmt, uniform).to(
            fmt.dtype if carrier == fmt.dtype else torch.float32
        )
    if carrier == fmt.dtype:
        return cast(v, fmt)
    # A GPU has the cast in hardware, and its compiler contracts what round_to_grid relies on.
    if v.device.type == "cpu" and torch.compiler.is_compiling():
        return round_to_grid(v, fmt)
    return widen(cast(v, fmt), carrier)
