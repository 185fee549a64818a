"""Quantization on a GPU by Triton kernels, as custom operators.

In plain torch operations a quantized tensor takes about twenty kernels, and each transposed copy one
more. Here it takes one launch. Under delayed scaling the launch reads the tensor once, and it writes
the result row-major and transposed. An operator is a single node to a compiler. The results equal
`choose_tensor_scale` and the functions of quantize.py bit for bit. kernels/store.py has the operators
for stored weights.

torchao's kernels have no delayed scales and no transposed copy in the same read. Transformer Engine's
kernels come only with its modules (backend=te).

    quantize_tensor_fused   one scale: delayed and current scaling          kernels/tensor.py
    quantize_tiles_fused    block scaling, MXFP8, current scaling by row    kernels/blocks.py, rows.py
    quantize_nvfp4_fused    NVFP4                                           kernels/blocks.py

Each of the three calls a custom operator, which allocates the results and launches the kernel.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, library

from fp8cfg.numerics.amax import AmaxGroup, all_reduce_max, sharing_group, tile_shape
from fp8cfg.numerics.formats import E2M1, FORMAT_BY_DTYPE, RandomStream
from fp8cfg.numerics.gemm import ALIGNMENT, BLOCK_WIDTH, Operand, swizzled_scale_size
from fp8cfg.numerics.overflow_counts import NO_CUDA_GRAPH, overflow_counter
from fp8cfg.numerics.scaling import FLT_MAX, Scaling
from fp8cfg.schema.scalings import Tile

MX_BLOCK = 32
"""Elements that share a scale under MXFP8."""
NVFP4_BLOCK = 16
"""Elements that share a scale under NVFP4."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed. torch's CUDA builds bring it."""


# --- one scale


def can_fuse_tensor(t: Tensor, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_tensor_fused` can quantize `t`: one scale, and no `carrier` but float8."""
    if not _has_kernels(t, carrier):
        return False
    return scaling.layout.tile(1, scaling.granularity, square=False) is None


def _has_kernels(t: Tensor, carrier: torch.dtype | None) -> bool:
    return HAS_TRITON and t.is_cuda and carrier is None and t.dim() == 2 and t.numel() > 0


def quantize_tensor_fused(
    t: Tensor,
    role: int,
    scaling: Scaling,
    scales: Tensor | None,
    history: Tensor | None,
    record: bool,
    both: bool,
    amax_group: AmaxGroup | None = None,
) -> Operand:
    """Quantizes a matrix with the scale of `choose_tensor_scale`.

    Args:
        t: The matrix [R, C], of any float dtype.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        scales: See `choose_tensor_scale`.
        history: See `choose_tensor_scale`.
        record: Whether to fold the amax into `history`.
        both: Whether GEMMs contract both dimensions. The operand of the first one comes as
            `Operand.columnwise`.
        amax_group: See `choose_tensor_scale`.
    """
    fmt = scaling.format_of(role)
    t = t.contiguous()
    if not record:
        history = None
    amax, target, power_2 = scale_inputs(t, role, scaling, scales, amax_group)
    data, transposed, scale_inv = quantize_tensor(
        t, scales, history, amax, target, power_2, role, fmt.dtype, both
    )
    columnwise = None
    if both:
        columnwise = Operand(transposed, scale_inv, fmt)
    return Operand(data, scale_inv, fmt, columnwise=columnwise)


def scale_inputs(
    t: Tensor, role: int, scaling: Scaling, scales: Tensor | None, amax_group: AmaxGroup | None
) -> tuple[Tensor | None, float, bool]:
    """Returns the inputs from which a kernel computes the scale of a tensor.

    Args:
        t: Contiguous [R, C].
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        scales: See `choose_tensor_scale`.
        amax_group: See `choose_tensor_scale`.

    Returns:
        amax: [1], if other ranks have shards of the tensor. [0], no amax, if scales begin with 1.
            None if the kernel reads the amax itself.
        target: `Scaling.scaled_max`. The scale moves the amax to it.
        power_2: Whether to round the scale down to a power of two.
    """
    amax = None
    if scales is not None and scaling.first_step == "te":
        amax = scales[:0]  # no launch reads an amax
    elif amax_group is not None and role in amax_group.roles:
        amax = amax_group.reduce(compute_amax_if_unset(t, scales, role), role)
    power_2 = scaling.power_2_scales and scales is None
    return amax, scaling.scaled_max(role), power_2


# --- tiles


def can_fuse_tiles(t: Tensor, tile: Tile, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_tiles_fused` can quantize `t`, and no `carrier` but float8 is needed.

    The kernels have float32 scales of rows, of 128 elements and of 128 x 128, and E8M0 scales of 32
    and 32 x 32.
    """
    if scaling.layout.scale == "float32":
        has_kernel = 0 in tile or max(tile) == BLOCK_WIDTH
    elif scaling.layout.scale == "e8m0":
        has_kernel = max(tile) == MX_BLOCK
    else:
        has_kernel = False
    return has_kernel and _has_kernels(t, carrier)


def quantize_tiles_fused(
    t: Tensor,
    role: int,
    scaling: Scaling,
    axis: int,
    both: bool,
    history: Tensor | None,
    amax_group: AmaxGroup | None = None,
) -> Operand:
    """Quantizes a matrix as `quantize_tiles` does.

    Args:
        t: The matrix [R, C], of any float dtype.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        axis: The dimension that the GEMM contracts.
        both: Whether GEMMs contract both dimensions. The same launch writes the other operand, which
            comes as `Operand.columnwise`.
        history: An infinite amax is recorded in `history[0, role]`.
        amax_group: Ranks with the other shards of rows or columns.
    """
    fmt = scaling.format_of(role)
    tile = scaling.tile(role, 1)
    assert tile is not None, "this scaling has tiles"
    t = t.contiguous()
    is_square = tile[0] > 1
    # Swizzled scales of squares cannot be read along the other dimension, so both are written.
    both = both or (is_square and tile[1] == MX_BLOCK)
    writes_rows = both or axis == 1
    writes_columns = both or axis == 0
    amaxes, amaxes_t = None, None
    if writes_rows:
        amaxes = reduce_tile_amaxes(t, role, scaling, 1, amax_group)
    if writes_columns:
        amaxes_t = reduce_tile_amaxes(t, role, scaling, 0, amax_group)
    data, scale_inv, data_t, scale_inv_t = quantize_blocks(
        t,
        tile[1],
        fmt.dtype,
        scaling.power_2_scales,
        is_square,
        writes_rows,
        writes_columns,
        history,
        role,
        amaxes,
        amaxes_t,
    )
    rowwise = Operand(data, scale_inv, fmt, tile)
    columnwise = Operand(data_t, scale_inv_t, fmt, tile)
    if both:
        return rowwise._replace(columnwise=columnwise)
    if writes_rows:
        return rowwise
    return columnwise.t()


def reduce_tile_amaxes(
    t: Tensor, role: int, scaling: Scaling, axis: int, amax_group: AmaxGroup | None
) -> Tensor | None:
    """Returns the amaxes of whole rows or columns whose shards are on several ranks.

    Args:
        t: This rank's shard, contiguous [R, C].
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        axis: The dimension that the GEMM contracts: 1 for rows, 0 for columns.
        amax_group: Ranks with the other shards.

    Returns:
        float32 [R] or [C]. None if this rank has whole tiles.
    """
    group = sharing_group(amax_group, role, scaling.tile(role, axis))
    if group is None:
        return None
    magnitudes = t.abs().nan_to_num(0.0, posinf=torch.inf)
    return all_reduce_max(magnitudes.amax(axis).float(), group)


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
    """Quantizes a contiguous matrix and its transpose with scales of tiles.

    Args:
        t: Contiguous [R, C].
        width: Elements that share a scale: 128 under block scaling, 32 under MXFP8, 0 for a whole
            row.
        dtype: float8 dtype of the data.
        power_2: Whether to round scales down to powers of two. Not read under MXFP8.
        square: Whether a scale covers `width` x `width` elements instead of 1 x `width`.
        rows: Whether to write the matrix. Otherwise its tensors are empty.
        columns: Whether to write the transpose.
        history: An infinite amax is recorded in `history[0, role]`.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        amaxes: Amaxes of rows if they are known, [R].
        amaxes_t: Amaxes of columns if they are known, [C].

    Returns:
        Data [R, C] and inverse scales, then data [C, R] and inverse scales of the transpose. Scales
        are laid out as GEMMs read them: float32, column-major for tiles of 1 x 128; under MXFP8
        bytes of E8M0, swizzled (gemm.py).
    """
    outputs = _empty_blocks(t, width, dtype, square, rows, columns)
    data, scale_inv, data_t, scale_inv_t = outputs
    cast_tiles(
        t,
        width,
        power_2,
        square,
        data=_skip_empty(data),
        scale_inv=_skip_empty(scale_inv),
        data_t=_skip_empty(data_t),
        scale_inv_t=_skip_empty(scale_inv_t),
        transpose=True,
        history=history,
        role=role,
        amaxes=amaxes,
        amaxes_t=amaxes_t,
    )
    return outputs


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


def _skip_empty(output: Tensor) -> Tensor | None:
    """Returns an argument of a kernel: None for a result that is not written.

    An operator returns an empty tensor for it, because it cannot return None.
    """
    if output.numel() == 0:
        return None
    return output


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
    """Writes the results of `quantize_blocks` into tensors. None leaves a direction out.

    Without `transpose` the second matrix has the layout of `t`.
    """
    # Triton is imported only if a kernel runs.
    from fp8cfg.numerics.kernels.blocks import cast_blocks
    from fp8cfg.numerics.kernels.rows import cast_rows

    output = data
    if output is None:
        output = data_t
    assert output is not None, "at least one direction is written"
    fp8_max = FORMAT_BY_DTYPE[output.dtype].max
    record, counts = record_and_counts(t, history, role)
    if width == 0:
        cast_rows(
            t,
            fp8_max,
            power_2,
            data,
            scale_inv,
            data_t,
            scale_inv_t,
            transpose=transpose,
            record=record,
            amaxes=amaxes,
            amaxes_t=amaxes_t,
            counts=counts,
        )
    else:
        mx = 0
        if width == MX_BLOCK:
            mx = width
        cast_blocks(
            t,
            min(torch.finfo(t.dtype).max, FLT_MAX),
            fp8_max,
            power_2,
            square,
            data,
            scale_inv,
            data_t,
            scale_inv_t,
            mx=mx,
            transpose=transpose,
            record=record,
            counts=counts,
        )


def record_and_counts(
    t: Tensor, history: Tensor | None, role: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns where a kernel records the amax and counts overflow, or None without a history.

    Args:
        t: The tensor that is quantized.
        history: Amax record of its layer.
        role: INPUT, WEIGHT or GRAD_OUTPUT.

    Returns:
        The running maximum, float32 [], and the counter, float32 [4].
    """
    if history is None:
        return None, None
    return history[0, role], overflow_counter(t.device, role)


def _empty_blocks(
    t: Tensor, width: int, dtype: torch.dtype, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns uninitialized tensors for the results of `quantize_blocks`."""
    height = 1
    if square:
        height = width

    def empty(num_rows: int, num_columns: int, is_written: bool) -> tuple[Tensor, Tensor]:
        if not is_written:
            num_rows, num_columns = 0, 0
        shape = (num_rows, num_columns)
        r, c = tile_shape(shape, (height, width))
        tiles_down, tiles_across = -(-num_rows // r), -(-num_columns // c)
        data = t.new_empty(shape, dtype=dtype)
        if width == MX_BLOCK:
            size = swizzled_scale_size(num_rows, tiles_across)
            return data, t.new_empty(size, dtype=torch.uint8)
        if square or width == 0:
            return data, t.new_empty((tiles_down, tiles_across), dtype=torch.float32)
        # cuBLAS reads the scales of 1 x 128 column-major.
        return data, t.new_empty((tiles_across, tiles_down), dtype=torch.float32).t()

    num_rows, num_columns = t.shape
    data, scale_inv = empty(num_rows, num_columns, rows)
    data_t, scale_inv_t = empty(num_columns, num_rows, columns)
    return data, scale_inv, data_t, scale_inv_t


# --- operators of kernels/tensor.py


@library.custom_op("fp8cfg::compute_amax_if_unset", mutates_args=())
def compute_amax_if_unset(
    t: Tensor, scales: Tensor | None, role: int, keep_nan: bool = False
) -> Tensor:
    """Returns the amax of a contiguous matrix, float32 [1].

    NaN is skipped, or with `keep_nan` kept. Returns 0 without reading `t` if `scales[role]` is set.
    """
    from fp8cfg.numerics.kernels import tensor

    parts = torch.empty(tensor.num_parts(t), dtype=torch.float32, device=t.device)
    if scales is not None:
        parts.zero_()  # the kernel writes nothing if the scale is set
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
    """Quantizes a contiguous matrix with one scale.

    Args:
        t: Contiguous [R, C].
        scales: Scales of delayed scaling, float32 [3]. None under current scaling.
        history: Amax record. The amax is folded into `history[0, role]`.
        amax: From `scale_inputs`.
        target: From `scale_inputs`.
        power_2: From `scale_inputs`.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        dtype: float8 dtype of the data.
        both: Whether to write the transpose.

    Returns:
        Data [R, C]; the transpose [C, R], or [0] without `both`; the inverse scale, float32 [].
    """
    from fp8cfg.numerics.kernels import tensor

    data, transposed, scale_inv = _empty(t, dtype, both)
    fmt = FORMAT_BY_DTYPE[dtype]
    counts = None
    if history is not None:
        counts = overflow_counter(t.device, role)
    tensor.cast(
        t,
        scales,
        history,
        role,
        target,
        fmt.max,
        power_2,
        data,
        _skip_empty(transposed),
        scale_inv,
        amaxes=amax,
        counts=counts,
        reach=fmt.reach,
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
    """Returns uninitialized tensors for the results of `quantize_tensor`."""
    rows, columns = t.shape
    data = t.new_empty((rows, columns), dtype=dtype)
    transposed_shape: tuple[int, ...] = (0,)
    if both:
        transposed_shape = (columns, rows)
    transposed = t.new_empty(transposed_shape, dtype=dtype)
    return data, transposed, t.new_empty((), dtype=torch.float32)


# --- NVFP4

NVFP4Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def can_fuse_nvfp4(t: Tensor, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_nvfp4_fused` can quantize `t`, for a real GEMM."""
    return _has_kernels(t, carrier)


def quantize_nvfp4_fused(
    t: Tensor,
    square: bool,
    draw: RandomStream | None,
    history: Tensor | None,
    role: int,
    amax: Tensor | None = None,
) -> Operand:
    """Quantizes a matrix under NVFP4, packed.

    Args:
        t: The matrix [R, C], of any float dtype. The GEMM contracts its last dimension.
        square: Whether a scale covers 16 x 16 elements. Then the operand of the other dimension
            comes as `Operand.columnwise`.
        draw: The random numbers of stochastic rounding. None rounds to nearest.
        history: Amax record. The amax is folded into `history[0, role]`.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        amax: Amax of the whole tensor, float32 []. Defaults to the amax of `t`.
    """
    tile = (1, NVFP4_BLOCK)
    if square:
        tile = (NVFP4_BLOCK, NVFP4_BLOCK)
    key, num_draws, lane = None, None, 0
    if draw is not None:
        key, num_draws, lane = draw
    data, scale_inv, data_t, scale_inv_t, global_scale_inv = quantize_four_bits(
        t.contiguous(), square, key, num_draws, lane, history, role, amax
    )
    rowwise = Operand(data, scale_inv, E2M1, tile, global_scale_inv=global_scale_inv)
    if not square:
        return rowwise
    columnwise = Operand(data_t, scale_inv_t, E2M1, tile, global_scale_inv=global_scale_inv)
    return rowwise._replace(columnwise=columnwise)


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
) -> NVFP4Tensors:
    """Quantizes a contiguous matrix to E2M1.

    Args:
        t: Contiguous [R, C].
        square: Whether a scale covers 16 x 16 elements instead of 1 x 16. Then the transpose is
            written.
        key: Key of stochastic rounding, int32 [2]. None rounds to nearest.
        draw: Number of draws, int32 [].
        lane: The lane of stochastic rounding.
        history: Amax record. The amax is folded into `history[0, role]`.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        amax: Amax of the whole tensor, float32 [], if `t` is a shard of it.

    Returns:
        Data, two elements to a byte, rows padded to whole 16 bytes; inverse scales, E4M3, swizzled;
        data and scales of the transpose, or empty tensors; the inverse global scale, float32 [].
    """
    from fp8cfg.numerics.kernels import blocks

    outputs = _empty_nvfp4(t, square)
    data, scale_inv, data_t, scale_inv_t, global_scale_inv = outputs
    record, counts = record_and_counts(t, history, role)
    random = None
    if key is not None and draw is not None:
        random = key, draw
    blocks.cast_nvfp4(
        t,
        data,
        scale_inv,
        _skip_empty(data_t),
        _skip_empty(scale_inv_t),
        global_scale_inv,
        random=random,
        lane=lane,
        record=record,
        amax=amax,
        counts=counts,
    )
    return outputs


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
) -> NVFP4Tensors:
    return _empty_nvfp4(t, square)


def _empty_nvfp4(t: Tensor, square: bool) -> NVFP4Tensors:
    """Returns uninitialized tensors for the results of `quantize_four_bits`."""

    def empty(rows: int, columns: int, is_written: bool) -> tuple[Tensor, Tensor]:
        if not is_written:
            rows, columns = 0, 0
        bytes_per_row = -(-columns // ALIGNMENT) * ALIGNMENT // 2
        scale_bytes = swizzled_scale_size(rows, -(-columns // NVFP4_BLOCK))
        data = t.new_empty((rows, bytes_per_row), dtype=torch.uint8)
        return data, t.new_empty(scale_bytes, dtype=torch.uint8)

    rows, columns = t.shape
    data, scale_inv = empty(rows, columns, is_written=True)
    data_t, scale_inv_t = empty(columns, rows, is_written=square)
    global_scale_inv = t.new_empty((), dtype=torch.float32)
    return data, scale_inv, data_t, scale_inv_t, global_scale_inv
