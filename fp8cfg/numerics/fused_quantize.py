"""Fused quantization on a GPU: a tensor with one scale is read once under delayed scaling, and comes row-major and transposed.

In plain torch operations a quantized tensor takes some twenty launches, and each transposed copy another. The operator is one to a
compiler too; what it computes is that of `scale_now` and `quantize`, of which it is a part where the hardware multiplies FP8.
torchao's kernels have no delayed scales and no transposed copy in the same read, and Transformer Engine's come with its modules
(backend=te): neither is called from here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, library

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.block_scaling import Tile, sizes
from fp8cfg.numerics.formats import BY_DTYPE
from fp8cfg.numerics.fp8_weights import Stored, store
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.scaling import FLT_MAX, WEIGHT, Scaling, amax_of, scale_now

WIDTH = 128
"""Elements of a tile of block scaling along a contracted dimension."""
MX = 32
"""The same under MX."""
LEAST = (8, 9)
"""The least CUDA compute capability whose hardware converts to FP8."""
TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed: torch's CUDA builds bring it."""


def fuses(t: Tensor, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_fused` can quantize `t`: with a single scale, into float8 and no wider `carrier`."""
    if not TRITON or not t.is_cuda or carrier is not None or t.dim() != 2 or t.numel() == 0:
        return False
    return scaling.layout.tile(1, scaling.granularity, square=False) is None


def quantize_fused(
    t: Tensor, role: int, scaling: Scaling, scales: Tensor | None, history: Tensor | None, record: bool, both: bool,
    parts: AmaxGroup | None = None,
) -> Operand:
    """`t` [R, C], of any float dtype, as an operand that contracts its last dimension, and with `both` its first one too, as
    `Operand.other`. The scale is that of `scale_now`, and where `record` says so the amax goes into `history`."""
    fmt, t = scaling.format_of(role), t.contiguous()
    target = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max
    amax, in_time = None, scales is None or scaling.first_step == "in_time"
    if parts is not None and role in parts.roles and in_time:
        amax = parts.amax(amax_where_unset(t, scales, role), role)
    data, transposed, scale_inv = quantize_tensor(
        t, scales, history if record else None, amax, role, target, fmt.dtype, scaling.power_2_scales and scales is None, both)
    return Operand(data, scale_inv, fmt, None, Operand(transposed, scale_inv, fmt) if both else None)


def fuses_tiles(t: Tensor, tile: Tile, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_tiles_fused` can quantize `t`, into float8 and no wider `carrier`: with a float32 scale for a row, 128
    elements or their square, or an E8M0 one for 32."""
    made = {"float32": 0 in tile or max(tile) == WIDTH, "e8m0": max(tile) == MX}.get(scaling.layout.scale, False)
    return TRITON and t.is_cuda and carrier is None and made and t.dim() == 2 and t.numel() > 0


def quantize_tiles_fused(t: Tensor, role: int, scaling: Scaling, axis: int, both: bool, history: Tensor | None) -> Operand:
    """`quantize_tiles` of `t` [R, C] for a product that contracts its dimension `axis`, with the other one in the same read where
    `both` are contracted, as `Operand.other`. An infinite amax goes into `history`, if it is given."""
    fmt, tile = scaling.format_of(role), scaling.tile(role, 1)
    assert tile is not None, "there are scales of tiles"
    rows, columns = both or axis == 1, both or axis == 0
    made = quantize_blocks(
        t.contiguous(), tile[1], fmt.dtype, scaling.power_2_scales, tile[0] > 1, rows, columns, False, history, role)
    along, across = (Operand(data, scale_inv, fmt, tile) for data, scale_inv in (made[:2], made[2:]))
    return along._replace(other=across) if both else along if rows else across.t()


@library.custom_op("fp8cfg::quantize_blocks", mutates_args=("history",))
def quantize_blocks(
    t: Tensor, width: int, dtype: torch.dtype, power_2: bool, square: bool, rows: bool, columns: bool, stored: bool,
    history: Tensor | None, role: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The contiguous matrix `t` [R, C] in float8 `dtype` with a scale for 1 x `width` elements, or their square, and its inverse
    scales, float32; then the same of its transpose [C, R]. What `rows` or `columns` do not ask for is empty. The `width` is 128
    under block scaling, 32 under MX, whose scales are powers of two by its own rule, and 0 for a scale for each row. As a weight is
    `stored` the second matrix is [R, C] too, with scales for `width` x 1, and scales of MX are E8M0 bytes. Where `t` has an
    infinite element `history[0, role]` becomes infinite, if it is given."""
    from fp8cfg.numerics import triton_block_kernel, triton_row_kernel

    made, largest = _empty_blocks(t, width, dtype, square, rows, columns, stored), BY_DTYPE[dtype].max
    data, scale_inv, data_t, scale_inv_t = (x if x.numel() else None for x in made)
    seen = None if history is None else history[0, role]
    if width == 0:
        triton_row_kernel.cast_rows(t, largest, power_2, data, scale_inv, data_t, scale_inv_t, not stored, seen)
    else:
        highest, mx = min(torch.finfo(t.dtype).max, FLT_MAX), width if width == MX else 0
        triton_block_kernel.cast_blocks(
            t, highest, largest, power_2, square, data, scale_inv, data_t, scale_inv_t, mx, not stored, seen)
    return made


@quantize_blocks.register_fake
def _(
    t: Tensor, width: int, dtype: torch.dtype, power_2: bool, square: bool, rows: bool, columns: bool, stored: bool,
    history: Tensor | None, role: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_blocks(t, width, dtype, square, rows, columns, stored)


def _empty_blocks(
    t: Tensor, width: int, dtype: torch.dtype, square: bool, rows: bool, columns: bool, stored: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `quantize_blocks` returns, with anything in it."""
    of_scales = torch.uint8 if stored and width == MX else torch.float32

    def of(shape: tuple[int, int], tile: Tile, wanted: bool) -> tuple[Tensor, Tensor]:
        (r, c), (down, across) = shape, sizes(shape, tile)
        return (t.new_empty(shape if wanted else (0, 0), dtype=dtype),
                t.new_empty((-(-r // down), -(-c // across)) if wanted else (0, 0), dtype=of_scales))

    (r, c), other = t.shape, width if square else 1
    second = ((r, c), (width, other)) if stored else ((c, r), (other, width))
    return *of((r, c), (other, width), rows), *of(*second, columns)


def amaxes_of(tensors: Sequence[Tensor]) -> Tensor:
    """`amax_of` each of some tensors on one device, [tensors]; on a GPU each is read in one launch. It is no operator, for no
    compiler traces it: scales of shards are made after a step (shard_scales.py)."""
    if not TRITON or not tensors[0].is_cuda:
        return torch.stack([amax_of(t) for t in tensors])
    from fp8cfg.numerics import triton_kernels

    parts = torch.zeros(len(tensors), triton_kernels.PARTS, device=tensors[0].device)
    for t, of in zip(tensors, parts.unbind(), strict=True):
        if t.numel():
            triton_kernels.amaxes_of_parts(t.contiguous(), of)
    return parts.amax(1)


def fuses_store(t: Tensor) -> bool:
    """Whether `t` is where kernels can store it in float8: the conversion is the hardware's, whoever multiplies."""
    return TRITON and t.is_cuda and torch.cuda.get_device_capability(t.device) >= LEAST


def store_recorded(
    master: Tensor, scaling: Scaling, scales: Tensor | None, history: Tensor | None, parts: AmaxGroup | None
) -> Stored:
    """`store` of a matrix [out, in], whose amax is recorded in `history`. One scale for all of it is that of this moment."""
    if scaling.tile(WEIGHT, 1) is not None:
        made = store_tiles_fused(master, scaling, (1, 0) if scaling.directional(WEIGHT) else (1,), history)
        record = None if history is None else history[0, WEIGHT]
        return Stored(*made[1], *made.get(0, (None, None))) if made else store(master, scaling, record=record)
    if fuses_store(master) and fuses(master, scaling, None):
        operand = quantize_fused(master, WEIGHT, scaling, scales, history, record=True, both=False, parts=parts)
        assert operand.scale_inv is not None
        return Stored(operand.data, operand.scale_inv)
    return store(master, scaling, scale_now(master, WEIGHT, scaling, scales, history, record=True, parts=parts))


def store_scaled(t: Tensor, scaling: Scaling, scale: Tensor) -> Stored:
    """`store` of some rows of a matrix with its one scale [], which is not 0."""
    if not fuses_store(t) or not fuses(t, scaling, None):
        return store(t, scaling, scale)
    fmt, of = scaling.forward, scale.view(1)
    data, _, scale_inv = quantize_tensor(t.contiguous(), of, None, of, 0, fmt.max, fmt.dtype, False, False)
    return Stored(data, scale_inv)


def store_tiles_fused(
    t: Tensor, scaling: Scaling, axes: Sequence[int], history: Tensor | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """The matrix `t` [R, C] and its inverse scales, as `Stored` has them, for products that contract each of its dimensions
    `axes`, in one launch; empty where there is no kernel that can. An infinite amax goes into `history`, if it is given."""
    fmt, tile = scaling.forward, scaling.tile(WEIGHT, 1)
    if not axes or tile is None or not fuses_store(t) or not fuses_tiles(t, tile, scaling, None):
        return {}
    made = quantize_blocks(
        t.contiguous(), tile[1], fmt.dtype, scaling.power_2_scales, tile[0] > 1, 1 in axes, 0 in axes, True, history, WEIGHT)
    return {axis: pair for axis, pair in ((1, made[:2]), (0, made[2:])) if axis in axes}


@library.custom_op("fp8cfg::amax_where_unset", mutates_args=())
def amax_where_unset(t: Tensor, scales: Tensor | None, role: int) -> Tensor:
    """`amax_of` the contiguous matrix `t`, [1]; 0 under delayed scaling where `scales[role]` is set, and `t` is not read."""
    from fp8cfg.numerics import triton_kernels

    parts = (torch.empty if scales is None else torch.zeros)(triton_kernels.part_count(t), device=t.device)
    triton_kernels.amaxes_of_parts(t, parts, scales, role)
    return parts.amax(0, keepdim=True)


@amax_where_unset.register_fake
def _(t: Tensor, scales: Tensor | None, role: int) -> Tensor:
    return t.new_empty(1, dtype=torch.float32)


@library.custom_op("fp8cfg::quantize_tensor", mutates_args=("history",))
def quantize_tensor(
    t: Tensor, scales: Tensor | None, history: Tensor | None, amax: Tensor | None, role: int, target: float, dtype: torch.dtype,
    power_2: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contiguous matrix `t` [R, C] in float8 `dtype`, transposed [C, R] where `both`, else empty, and its inverse scale, [].
    Its amax is folded into row 0 of `history`, if it is given. A scale of this moment is made of `amax`, [1], where it is given."""
    from fp8cfg.numerics import triton_kernels

    data, transposed, scale_inv = _empty(t, dtype, both)
    other = transposed if both else None
    triton_kernels.cast(t, scales, history, role, target, BY_DTYPE[dtype].max, power_2, data, other, scale_inv, amax)
    return data, transposed, scale_inv


@quantize_tensor.register_fake
def _(
    t: Tensor, scales: Tensor | None, history: Tensor | None, amax: Tensor | None, role: int, target: float, dtype: torch.dtype,
    power_2: bool, both: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(t, dtype, both)


def _empty(t: Tensor, dtype: torch.dtype, both: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = t.shape
    transposed = t.new_empty((columns, rows) if both else (0,), dtype=dtype)
    return t.new_empty((rows, columns), dtype=dtype), transposed, t.new_empty((), dtype=torch.float32)
