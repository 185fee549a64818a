"""FP8 parameters: weights stored in float8 only, quantized from a float32 master and read back as GEMM operands.

One float8 matrix serves fprop and dgrad where both read the same scales: one scale a tensor, or square tiles. Scales along
rows cannot be read along columns; then a second matrix is kept for dgrad, as Transformer Engine's MXFP8 tensors do, which
takes as many bytes as bfloat16 would. Scales are stored in their own size: E8M0 in a byte, nvfp4's E4M3 as float8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.block_scaling import e8m0_bytes, first_level, tiled, untiled
from fp8cfg.numerics.exact_float32 import reciprocal
from fp8cfg.numerics.formats import cast, widen
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import WEIGHT, Scaling
from fp8cfg.scalings import SCALINGS, Tile


class Stored(NamedTuple):
    """A float8 weight [out, in] with its inverse scales, a second pair of data and inverse scales for dgrad where dgrad needs
    other scales, and nvfp4's scale of the whole tensor.
    """

    data: Tensor
    scale_inv: Tensor
    dgrad: Tensor | None = None
    dgrad_scale_inv: Tensor | None = None
    global_scale_inv: Tensor | None = None


WEIGHT_BUFFERS = (
    "fp8_weight_scale_inv",
    "fp8_weight_dgrad",
    "fp8_weight_dgrad_scale_inv",
    "fp8_weight_global_scale_inv",
)
"""A layer's buffers beside its float8 weight, in the order of the fields of `Stored`."""


def store(
    master: Tensor,
    scaling: Scaling,
    scale: Tensor | None = None,
    record: Tensor | None = None,
    parts: AmaxGroup | None = None,
) -> Stored:
    """Quantizes `master` [out, in]; `scale` is the scalar scale where one scale serves the whole tensor. Where there are more the
    amax is folded into the running maximum `record`, [], if there is one, and scales of what others have `parts` of are those of
    the whole."""
    fmt = scaling.forward
    if scale is not None:
        return Stored(cast(master.float() * scale, fmt), reciprocal(scale))
    whole = (
        first_level(master, group=parts and parts.over(WEIGHT))
        if scaling.layout.two_levels
        else None
    )

    def along(axis: int) -> tuple[Tensor, Tensor]:
        tile = scaling.tile(WEIGHT, axis)
        assert tile is not None, "one scale for the tensor is given"
        group = parts and parts.over(WEIGHT, tile)
        q = quantize_tiles(master, tile, fmt, scaling, fmt.dtype, whole, record=record, group=group)
        assert q.scale_inv is not None
        return q.data, pack(q.scale_inv, scaling)

    data, scale_inv = along(1)
    dgrad, dgrad_scale_inv = along(0) if scaling.directional(WEIGHT) else (None, None)
    return Stored(
        data, scale_inv, dgrad, dgrad_scale_inv, None if whole is None else reciprocal(whole)
    )


def operand(stored: Stored, axis: int, scaling: Scaling, carrier: torch.dtype | None) -> Operand:
    """The weight [out, in] as the operand of a product that contracts its dimension `axis`. `carrier` None keeps float8."""
    fmt, tile = scaling.forward, scaling.tile(WEIGHT, axis)
    data, scale_inv = stored.data, stored.scale_inv
    if axis == 0 and stored.dgrad is not None and stored.dgrad_scale_inv is not None:
        data, scale_inv = stored.dgrad, stored.dgrad_scale_inv
    if tile is None:
        return Operand(widen(data, carrier) if carrier else data, scale_inv, fmt)
    decode = scale_inv if carrier is None and scale_inv.dtype == torch.uint8 else unpack(scale_inv)
    if carrier is None or not scaling.layout.block:
        return Operand(
            widen(data, carrier) if carrier else data,
            decode,
            fmt,
            tile,
            whole_inv=stored.global_scale_inv,
        )
    v = tiled(widen(data, carrier), tile) * decode.to(carrier)[:, None, :, None]
    return Operand(untiled(v, data.shape), stored.global_scale_inv, fmt, tile)


def dequantize(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in] in `dtype`, rounded once; float32 values are scaled in place."""
    decode, shape = unpack(stored.scale_inv), stored.data.shape
    if stored.global_scale_inv is not None:
        decode = decode * stored.global_scale_inv
    data = (
        widen(stored.data, torch.float32)
        if stored.data.dtype.itemsize == 1
        else stored.data.float()
    )
    if decode.dim() < 2:
        return data.mul_(decode).to(dtype)
    tiles = tiled(data.contiguous(), _tile(shape, decode.shape)).mul_(decode[:, None, :, None])
    return untiled(tiles, shape).to(dtype).contiguous()


def pack(decode: Tensor, scaling: Scaling) -> Tensor:
    """Float32 scales in the dtype in which the scaling stores them: E8M0 bytes, E4M3, or float32."""
    return _PACKED[scaling.layout.scale](decode)


_PACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda decode: decode,
    "e4m3": lambda decode: decode.to(torch.float8_e4m3fn),
    "e8m0": e8m0_bytes,
}
_SIZES = sorted({1, *(scaling.block for scaling in SCALINGS.values() if scaling.block)})


def unpack(scale_inv: Tensor) -> Tensor:
    """The inverse of `pack`."""
    if scale_inv.dtype == torch.uint8 and not torch.compiler.is_compiling():
        return scale_inv.view(torch.float8_e8m0fnu).float()
    if scale_inv.dtype == torch.uint8:  # operations that a compiler makes part of another kernel
        powers = torch.where(scale_inv == 0, 2.0**-127, (scale_inv.int() << 23).view(torch.float32))
        return torch.where(scale_inv == 255, torch.nan, powers)
    return scale_inv.float()


def _tile(shape: torch.Size, scales: torch.Size) -> Tile:
    """The tile size for which a matrix of `shape` has as many tiles as `scales` has elements. No two sizes in use give the same
    number, unless that is one.
    """

    def size(n: int, count: int) -> int:
        return next((k for k in _SIZES if -(-n // k) == count), 0)

    return size(shape[0], scales[0]), size(shape[1], scales[1])
