"""Fused quantization on a GPU: a tensor with one scale is read once under delayed scaling, and
comes row-major and transposed.

In plain torch operations a quantized tensor takes some twenty launches, and each transposed copy
another. The operator is one to a compiler too; what it computes is that of `choose_tensor_scale`
and `quantize`, of which it is a part where the hardware multiplies FP8. Weights that are stored in
float8 are written by the same kernels (store.py). torchao's kernels have no delayed scales and no
transposed copy in the same read, and Transformer Engine's come with its modules (backend=te):
neither is called from here.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, library

from fp8cfg.numerics.amax import AmaxGroup, all_reduce_max, tile_shape
from fp8cfg.numerics.formats import E2M1, FORMAT_BY_DTYPE, RandomStream
from fp8cfg.numerics.gemm import ALIGNMENT, BLOCK_WIDTH, Operand, swizzled_scale_size
from fp8cfg.numerics.overflow_counts import NO_CUDA_GRAPH, overflow_counter
from fp8cfg.numerics.scaling import FLT_MAX, Scaling
from fp8cfg.schema.scalings import Tile

MX_BLOCK = 32
"""The same under MX."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed: torch's CUDA builds bring it."""


def can_fuse_tensor(t: Tensor, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_tensor_fused` can quantize `t`: with a single scale, into float8 and no wider `carrier`."""
    if not HAS_TRITON or not t.is_cuda or carrier is not None or t.dim() != 2 or t.numel() == 0:
        return False
    return scaling.layout.tile(1, scaling.granularity, square=False) is None


def quantize_tensor_fused(
    t: Tensor,
    role: int,
    scaling: Scaling,
    scales: Tensor | None,
    history: Tensor | None,
    record: bool,
    both: bool,
    parts: AmaxGroup | None = None,
) -> Operand:
    """`t` [R, C], of any float dtype, as an operand that contracts its last dimension, and with
    `both` its first one too, as `Operand.columnwise`. The scale is that of `choose_tensor_scale`,
    and where `record` says so the amax goes into `history`.
    """
    fmt, t = scaling.format_of(role), t.contiguous()
    how = scale_inputs(t, role, scaling, scales, parts)
    data, transposed, scale_inv = quantize_tensor(
        t, scales, history if record else None, *how, role, fmt.dtype, both
    )
    return Operand(
        data, scale_inv, fmt, None, Operand(transposed, scale_inv, fmt) if both else None
    )


def scale_inputs(
    t: Tensor, role: int, scaling: Scaling, scales: Tensor | None, parts: AmaxGroup | None
) -> tuple[Tensor | None, float, bool]:
    """Of what a kernel makes the one scale of the contiguous matrix `t`: the amax, [1], where
    others have parts of the tensor, or none, [0], of scales that begin with 1; what the amax is
    brought to, and whether the scale is cut to a power of two.
    """
    fmt = scaling.format_of(role)
    target, amax = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max, None
    if scales is not None and scaling.first_step == "te":
        amax = scales[:0]  # no launch then looks for one
    elif parts is not None and role in parts.roles:
        amax = parts.reduce(compute_amax_if_unset(t, scales, role), role)
    return amax, target, scaling.power_2_scales and scales is None


def can_fuse_tiles(t: Tensor, tile: Tile, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_tiles_fused` can quantize `t`, into float8 and no wider `carrier`: with a
    float32 scale for a row, 128
    elements or their square, or an E8M0 one for 32 or their square."""
    made = {"float32": 0 in tile or max(tile) == BLOCK_WIDTH, "e8m0": max(tile) == MX_BLOCK}.get(
        scaling.layout.scale, False
    )
    return HAS_TRITON and t.is_cuda and carrier is None and made and t.dim() == 2 and t.numel() > 0


def quantize_tiles_fused(
    t: Tensor,
    role: int,
    scaling: Scaling,
    axis: int,
    both: bool,
    history: Tensor | None,
    parts: AmaxGroup | None = None,
) -> Operand:
    """`quantize_tiles` of `t` [R, C] for a product that contracts its dimension `axis`, with the
    other one in the same read where `both` are contracted, as `Operand.columnwise`. An infinite
    amax goes into `history`, if it is given. Of rows or columns of which
    others have `parts` the scales are those of the whole."""
    fmt, tile, t = scaling.format_of(role), scaling.tile(role, 1), t.contiguous()
    assert tile is not None, "there are scales of tiles"
    both = both or (
        tile[0] > 1 and tile[1] == MX_BLOCK
    )  # swizzled scales of squares are not those of the transpose
    rows, columns = both or axis == 1, both or axis == 0
    amaxes = [
        reduce_tile_amaxes(t, role, scaling, axis, parts) if wanted else None
        for axis, wanted in ((1, rows), (0, columns))
    ]
    made = quantize_blocks(
        t,
        tile[1],
        fmt.dtype,
        scaling.power_2_scales,
        tile[0] > 1,
        rows,
        columns,
        history,
        role,
        *amaxes,
    )
    along, across = (
        Operand(data, scale_inv, fmt, tile) for data, scale_inv in (made[:2], made[2:])
    )
    return along._replace(columnwise=across) if both else along if rows else across.t()


def reduce_tile_amaxes(
    t: Tensor, role: int, scaling: Scaling, axis: int, parts: AmaxGroup | None
) -> Tensor | None:
    """The amaxes of whole rows of the contiguous matrix `t` [R, C], [R], or for products that
    contract its first dimension those of
    whole columns, [C], where others have `parts` of these; else None."""
    group = None if parts is None else parts.group_of(role, scaling.tile(role, axis))
    return (
        None
        if group is None
        else all_reduce_max(t.abs().nan_to_num(0.0, posinf=torch.inf).amax(axis).float(), group)
    )


@library.custom_op("fp8cfg::quantize_blocks", mutates_args=("history",), tags=NO_CUDA_GRAPH)
def quantize_blocks(
    t: Tensor,
    width: int,
    dtype: torch.dtype,
    power_2: bool,
    square: bool,
    rows: bool,
    columns: bool,
    history: Tensor | None,
    role: int,
    amaxes: Tensor | None,
    amaxes_t: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The contiguous matrix `t` [R, C] in float8 `dtype` with a scale for 1 x `width` elements, or
    their square, and its inverse scales; then the same of its transpose [C, R]. What `rows` or
    `columns` do not ask for is empty. The `width` is 128 under block scaling, 32 under MX, whose
    scales are powers of two by its own rule, and 0 for a scale for each row. Scales are laid out as
    products read them: float32, of 1 x 128 down the rows first, and under MX bytes of E8M0,
    swizzled (gemm.py, gemm.py). Where `t` has an infinite element `history[0, role]` becomes
    infinite, if it is given. The amaxes of rows
    are `amaxes` [R], and those of columns `amaxes_t` [C], where they are given."""
    made = _empty_blocks(t, width, dtype, square, rows, columns)
    data, scale_inv, data_t, scale_inv_t = (x if x.numel() else None for x in made)
    cast_tiles(
        t,
        width,
        power_2,
        square,
        data,
        scale_inv,
        data_t,
        scale_inv_t,
        True,
        history,
        role,
        amaxes,
        amaxes_t,
    )
    return made


@quantize_blocks.register_fake
def _(
    t: Tensor,
    width: int,
    dtype: torch.dtype,
    power_2: bool,
    square: bool,
    rows: bool,
    columns: bool,
    history: Tensor | None,
    role: int,
    amaxes: Tensor | None,
    amaxes_t: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_blocks(t, width, dtype, square, rows, columns)


def cast_tiles(
    t: Tensor,
    width: int,
    power_2: bool,
    square: bool,
    data: Tensor | None,
    scale_inv: Tensor | None,
    data_t: Tensor | None,
    scale_inv_t: Tensor | None,
    transpose: bool,
    history: Tensor | None,
    role: int,
    amaxes: Tensor | None = None,
    amaxes_t: Tensor | None = None,
) -> None:
    """What `quantize_blocks` does, into tensors that are there; the second matrix is laid out as `t` is without `transpose`."""
    from fp8cfg.numerics.kernels.blocks import cast_blocks
    from fp8cfg.numerics.kernels.rows import cast_rows

    (top,) = {FORMAT_BY_DTYPE[x.dtype].max for x in (data, data_t) if x is not None}
    seen, counts = (
        (None, None) if history is None else (history[0, role], overflow_counter(t.device, role))
    )
    if width == 0:
        cast_rows(
            t,
            top,
            power_2,
            data,
            scale_inv,
            data_t,
            scale_inv_t,
            transpose,
            seen,
            amaxes,
            amaxes_t,
            counts,
        )
    else:
        highest, mx = min(torch.finfo(t.dtype).max, FLT_MAX), width if width == MX_BLOCK else 0
        cast_blocks(
            t,
            highest,
            top,
            power_2,
            square,
            data,
            scale_inv,
            data_t,
            scale_inv_t,
            mx,
            transpose,
            seen,
            counts,
        )


def _empty_blocks(
    t: Tensor, width: int, dtype: torch.dtype, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `quantize_blocks` returns, with anything in it."""
    high = width if square else 1

    def of(shape: tuple[int, int], wanted: bool) -> tuple[Tensor, Tensor]:
        r, c = shape if wanted else (0, 0)
        down, across = (
            -(-n // size) for n, size in zip((r, c), tile_shape((r, c), (high, width)), strict=True)
        )
        data = t.new_empty((r, c), dtype=dtype)
        if width == MX_BLOCK:
            return data, t.new_empty(swizzled_scale_size(r, across), dtype=torch.uint8)
        if square or width == 0:
            return data, t.new_empty((down, across), dtype=torch.float32)
        return data, t.new_empty((across, down), dtype=torch.float32).t()

    return *of((t.shape[0], t.shape[1]), rows), *of((t.shape[1], t.shape[0]), columns)


@library.custom_op("fp8cfg::compute_amax_if_unset", mutates_args=())
def compute_amax_if_unset(
    t: Tensor, scales: Tensor | None, role: int, keep_nan: bool = False
) -> Tensor:
    """`compute_amax` the contiguous matrix `t`, [1], or with `keep_nan` that of
    `compute_amax_or_nan`; 0 under delayed scaling where
    `scales[role]` is set, and `t` is not read."""
    from fp8cfg.numerics.kernels import tensor

    parts = (torch.empty if scales is None else torch.zeros)(
        tensor.num_parts(t), dtype=torch.float32, device=t.device
    )
    tensor.compute_part_amaxes(t, parts, scales, role, keep_nan)
    return parts.amax(0, keepdim=True)


@compute_amax_if_unset.register_fake
def _(t: Tensor, scales: Tensor | None, role: int, keep_nan: bool = False) -> Tensor:
    return t.new_empty(1, dtype=torch.float32)


@library.custom_op("fp8cfg::quantize_tensor", mutates_args=("history",), tags=NO_CUDA_GRAPH)
def quantize_tensor(
    t: Tensor,
    scales: Tensor | None,
    history: Tensor | None,
    amax: Tensor | None,
    target: float,
    power_2: bool,
    role: int,
    dtype: torch.dtype,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contiguous matrix `t` [R, C] in float8 `dtype`, transposed [C, R] where `both`, else
    empty, and its inverse scale, []. Its amax is folded into row 0 of `history`, if it is given. A
    scale of this moment is made of `amax`, [1], where it is given; it
    is 1 of none, [0]."""
    from fp8cfg.numerics.kernels import tensor

    data, transposed, scale_inv = _empty(t, dtype, both)
    other = transposed if both else None
    fmt, counts = (
        FORMAT_BY_DTYPE[dtype],
        None if history is None else overflow_counter(t.device, role),
    )
    tensor.cast(
        t,
        scales,
        history,
        role,
        target,
        fmt.max,
        power_2,
        data,
        other,
        scale_inv,
        amax,
        counts,
        fmt.reach,
    )
    return data, transposed, scale_inv


@quantize_tensor.register_fake
def _(
    t: Tensor,
    scales: Tensor | None,
    history: Tensor | None,
    amax: Tensor | None,
    target: float,
    power_2: bool,
    role: int,
    dtype: torch.dtype,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(t, dtype, both)


def _empty(t: Tensor, dtype: torch.dtype, both: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = t.shape
    transposed = t.new_empty((columns, rows) if both else (0,), dtype=dtype)
    return (
        t.new_empty((rows, columns), dtype=dtype),
        transposed,
        t.new_empty((), dtype=torch.float32),
    )


NVFP4_BLOCK = 16
"""Elements that share a scale."""
Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def can_fuse_nvfp4(t: Tensor, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_nvfp4_fused` can quantize `t`, for products of the hardware and no wider `carrier`."""
    return HAS_TRITON and t.is_cuda and carrier is None and t.dim() == 2 and t.numel() > 0


def quantize_nvfp4_fused(
    t: Tensor,
    square: bool,
    draw: RandomStream | None,
    history: Tensor | None,
    role: int,
    amax: Tensor | None = None,
) -> Operand:
    """The matrix `t` [R, C], of any float dtype, as an operand that contracts its last dimension,
    packed, with scales of 1x16; of 16x16 where they are `square`, and then with its other operand.
    The amax, by default that of `t`, float32 [], goes into
    `history`, if it is given."""
    tile = (NVFP4_BLOCK, NVFP4_BLOCK) if square else (1, NVFP4_BLOCK)
    random = (draw.key, draw.draw, draw.lane) if draw else (None, None, 0)
    *made, global_scale_inv = quantize_four_bits(
        t.contiguous(), square, *random, history, role, amax
    )
    along, across = (
        Operand(data, scale, E2M1, tile, global_scale_inv=global_scale_inv)
        for data, scale in (made[:2], made[2:])
    )
    return along._replace(columnwise=across) if square else along


@library.custom_op("fp8cfg::quantize_four_bits", mutates_args=("history",), tags=NO_CUDA_GRAPH)
def quantize_four_bits(
    t: Tensor,
    square: bool,
    key: Tensor | None,
    draw: Tensor | None,
    lane: int,
    history: Tensor | None,
    role: int,
    amax: Tensor | None,
) -> Made:
    """The contiguous matrix `t` [R, C] in E2M1, two to a byte, C completed with zeros to whole 16
    bytes, and its inverse scales, E4M3, swizzled; where they are `square` the same of its
    transpose, else empty; and the inverse scale of the tensor, float32 []. Rounded stochastically
    where there is a `key`. The amax, `amax` [] where others have parts of the tensor, is folded
    into
    `history[0, role]`, if it is given."""
    from fp8cfg.numerics.kernels import blocks

    made = _empty_nvfp4(t, square)
    data, scale_inv, data_t, scale_inv_t, global_scale_inv = made
    random = None if key is None or draw is None else (key, draw)
    seen, counts = (
        (None, None) if history is None else (history[0, role], overflow_counter(t.device, role))
    )
    blocks.cast_nvfp4(
        t,
        data,
        scale_inv,
        data_t if square else None,
        scale_inv_t if square else None,
        global_scale_inv,
        random,
        lane,
        seen,
        amax=amax,
        counts=counts,
    )
    return made


@quantize_four_bits.register_fake
def _(
    t: Tensor,
    square: bool,
    key: Tensor | None,
    draw: Tensor | None,
    lane: int,
    history: Tensor | None,
    role: int,
    amax: Tensor | None,
) -> Made:
    return _empty_nvfp4(t, square)


def _empty_nvfp4(t: Tensor, square: bool) -> Made:
    def of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        whole = -(-columns // ALIGNMENT) * ALIGNMENT // 2
        return (
            t.new_empty((rows, whole), dtype=torch.uint8),
            t.new_empty(swizzled_scale_size(rows, -(-columns // NVFP4_BLOCK)), dtype=torch.uint8),
        )

    rows, columns = t.shape
    return (
        *of(rows, columns),
        *of(*(columns, rows) if square else (0, 0)),
        t.new_empty((), dtype=torch.float32),
    )
