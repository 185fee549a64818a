"""Block scaling: a scale for each tile of a matrix, which maps the tile's own amax to the largest value of the format.

One outlier sets the scale of all elements that share it, and pushes the smallest of them off the grid. So the fewer
share one, the less is lost; what is paid is that a product can no longer be scaled afterwards, and hardware multiplies
the scales in while it accumulates:

    row     one float32 scale a row along the contracted dimension: still outside of the sum   (torchao "rowwise")
    block   1x128 for activations and gradients, 128x128 for weights; float32                  (DeepSeek-V3, arXiv:2412.19437)
    mxfp8   1x32; a scale is a power of two in eight bits, E8M0                                 (OCP Microscaling 1.0)
    nvfp4   1x16, weights 16x16; a scale is an E4M3 number, under one float32 for the tensor   (arXiv:2509.25149)

Tiles lie along the contracted dimension, and backward contracts another one than forward does: a tensor is quantized
twice, along rows for one product and along columns for the other. Square tiles read the same from both sides.

The rules are Transformer Engine's to the bit (common/recipe/recipe_common.cuh, common/util/ptx.cuh float_to_e8m0,
pytorch/custom_recipes/reference_nvfp4.py); MXFP8's are also the RCEIL mode of torchao, whose blocks with a NaN are all NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics import exact_float32
from fp8cfg.numerics.amax_group import largest, largest_or_nan
from fp8cfg.numerics.formats import E2M1, E4M3, Format, cast
from fp8cfg.numerics.scaling import FLT_MAX, Scaling, floor_to_power_of_2, scale_from_amax
from fp8cfg.scalings import Tile


class Scales(NamedTuple):
    """The scales of the tiles of a matrix, float32: `encode` multiplies the elements before rounding, `decode` dequantizes the
    rounded ones.
    """

    encode: Tensor
    decode: Tensor


def tiled(t: Tensor, tile: Tile) -> Tensor:
    """The matrix `t` [R, C] as [R / r, r, C / c, c] for tiles of r x c, completed with zeros; a view where none are missing.
    A size of 0 is the whole dimension."""
    (rows, columns), (r, c) = t.shape, sizes(t.shape, tile)
    if rows % r or columns % c:
        t = F.pad(t, (0, -columns % c, 0, -rows % r))
        if torch.compiler.is_compiling():  # written out; see `untiled`
            t = t.as_strided(t.shape, (t.shape[1], 1))
    return t.view(t.shape[0] // r, r, t.shape[1] // c, c)


def sizes(shape: tuple[int, ...], tile: Tile) -> Tile:
    """Rows and columns of a tile of a matrix of `shape`."""
    return tile[0] or max(1, shape[0]), tile[1] or max(1, shape[1])


def untiled(v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tiled`."""
    a, r, b, c = v.shape
    # What is read by stride has to be in memory. Fused with what is around it, Inductor's C++ of incomplete tiles leaves elements
    # unwritten. Seen with torch 2.13; it ends with the torch that passes the test of few columns without it.
    if torch.compiler.is_compiling() and shape != (a * r, b * c):
        return v.contiguous().as_strided(shape, (b * c, 1))
    return v.reshape(a * r, b * c)[: shape[0], : shape[1]]


def spread(scales: Tensor, shape: tuple[int, ...], tile: Tile) -> Tensor:
    """Scales [R / r, C / c] of the tiles of a matrix of `shape` [R, C], one for each of its elements."""
    r, c = sizes(shape, tile)
    return scales.repeat_interleave(r, 0)[: shape[0]].repeat_interleave(c, 1)[:, : shape[1]]


def tile_amax(v: Tensor, keep_nan: bool) -> Tensor:
    """Largest magnitude in each tile of `v` [A, r, B, c], float32 [A, 1, B, 1]. NaN is kept, or else skipped as in fmaxf."""
    a = v.float().abs()
    if keep_nan:
        return a.amax((1, 3), keepdim=True)
    if torch.compiler.is_compiling():
        return torch.where(a >= 0, a, 0).amax((1, 3), keepdim=True)
    amax = a.amax((1, 3), keepdim=True)
    if amax.device.type == "cpu" and not amax.isnan().any():
        return amax
    return a.nan_to_num(nan=0.0, posinf=torch.inf).amax((1, 3), keepdim=True)


def tile_scales(
    v: Tensor,
    fmt: Format,
    scaling: Scaling,
    whole: Tensor | None,
    dtype: torch.dtype = torch.float32,
    seen: list[Tensor] | None = None,
    group: str | None = None,
) -> Scales:
    """The scales of the tiles of `v` [A, r, B, c] under `scaling`, [A, 1, B, 1]. `whole` is the first level of nvfp4, `dtype`
    what `v` was before it was float32: block scales go no higher than its largest number. The largest amax of all tiles, [], is
    added to `seen`. Of tiles, rows or columns, whose other parts ranks of `group` have, amaxes are the largest over these.
    """
    keep_nan = scaling.layout.scale != "float32"
    amax = tile_amax(v, keep_nan)
    if seen is not None and amax.numel():
        seen.append(
            (torch.where(amax >= 0, amax, 0) if keep_nan else amax).amax()
        )  # but for tiles that have NaN
    if group is not None:
        amax = (largest_or_nan if keep_nan else largest)(amax, group)
    return Scales(*(_written_out(s) for s in scales_of_amaxes(amax, fmt, scaling, whole, dtype)))


def _written_out(scales: Tensor) -> Tensor:
    """`scales` itself. A compiler would work a scale out again for each element that it scales, bit by bit; what is read by
    stride has to be in memory."""
    if not torch.compiler.is_compiling():
        return scales
    a, _, b, _ = (
        scales.shape
    )  # strides written out: those of `scales` upset the compiler under autocast
    return scales.contiguous().as_strided((a, 1, b, 1), (b, b, 1, 1))


def scales_of_amaxes(
    amax: Tensor,
    fmt: Format,
    scaling: Scaling,
    whole: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Scales:
    """The scales of tiles of those amaxes, float32 of any shape: the one choice between scalings of many scales, by the dtype of
    these."""
    kind = scaling.layout.scale
    if kind == "e8m0":
        return _e8m0(amax, fmt)
    if kind == "e4m3":
        assert whole is not None, "E4M3 scales stand under one of the whole tensor"
        return _two_levels(amax, whole)
    largest = min(torch.finfo(dtype).max, FLT_MAX) if scaling.layout.block else FLT_MAX
    scale = scale_from_amax(amax, fmt, largest=largest)
    if scaling.power_2_scales:
        scale = floor_to_power_of_2(scale)
    return Scales(scale, exact_float32.reciprocal(scale))


def _e8m0(amax: Tensor, fmt: Format) -> Scales:
    """Powers of two, rounded up so that nothing saturates. The bits of amax / max are 8 of exponent above 23 of mantissa;
    any mantissa raises the exponent by one. The byte 0 stands for 2^-127 and is not multiplied by, 254 is the largest
    exponent, 255 is NaN."""
    # torch.tensor would be a copy that the host waits for
    v = amax * torch.full((), 1.0 / fmt.max, dtype=torch.float32, device=amax.device)
    bits = v.view(torch.int32)
    byte, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (byte < 254) & ~((byte == 0) & (mantissa <= 0x400000))
    byte = torch.where(torch.isinf(v), 254, byte + up)
    encode = torch.where(byte == 254, 2.0**-127, ((254 - byte) << 23).view(torch.float32))
    encode, decode = (
        torch.where(byte == 0, 1.0, encode),
        torch.where(byte == 0, 2.0**-127, (byte << 23).view(torch.float32)),
    )
    broken = torch.isnan(v)
    return Scales(torch.where(broken, torch.nan, encode), torch.where(broken, torch.nan, decode))


def e8m0_bytes(decode: Tensor) -> Tensor:
    """Float32 powers of two from 2^-127 on as E8M0, bytes: the exponent's bits. NaN has all of them."""
    return (decode.view(torch.int32) >> 23).to(torch.uint8)


def first_level(t: Tensor, group: str | None = None) -> Tensor:
    """nvfp4's scale of a whole tensor, a float32 scalar: it brings the largest E4M3 scale of a tile to 448. Where ranks of `group`
    have other parts of the tensor, the scale is that of the largest over these."""
    amax = amax_or_nan(t)
    return first_level_of(amax if group is None else largest_or_nan(amax, group))


def amax_or_nan(t: Tensor) -> Tensor:
    """Largest magnitude in `t`, any shape, NaN where it has a NaN, float32 []; 0 of no elements."""
    return exact_float32.largest(t.detach()).float()


def first_level_of(amax: Tensor) -> Tensor:
    """That of a tensor of the amax [], float32."""
    scale = torch.div(torch.full_like(amax, E4M3.max * E2M1.max), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _two_levels(amax: Tensor, whole: Tensor) -> Scales:
    """E4M3 scales that decode with `whole`'s reciprocal, which stays outside of the product."""
    sixth = exact_float32.reciprocal(torch.full((), 6.0, dtype=torch.float32, device=amax.device))
    decode = cast((amax * (whole * sixth)).clamp(max=FLT_MAX), E4M3).float()
    encode = exact_float32.reciprocal(decode * exact_float32.reciprocal(whole)).clamp(max=FLT_MAX)
    return Scales(encode, decode)
