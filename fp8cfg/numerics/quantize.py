"""Quantization of a matrix to an operand of a GEMM, in plain torch operations.

    quantize               one scale per tensor: delayed and current scaling
    quantize_tiles         one scale per tile: block scaling, MXFP8, NVFP4, current scaling by row
    quantize_nvfp4         NVFP4: the Hadamard transform, stochastic rounding, the global scale
    hadamard_transform     the transform of NVFP4
    count_out_of_range     counts values that were clipped

Everything is computed from float32: rounding to bfloat16 before FP8 changes 3 of 100 values. On a
GPU with FP8 the kernels of kernels/launch.py replace these functions.
"""

from __future__ import annotations

import functools
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fp8cfg.numerics.amax import (
    AmaxGroup,
    all_reduce_max_or_nan,
    compute_amax_or_nan,
    join_tiles,
    record_amax,
    sharing_group,
    split_tiles,
)
from fp8cfg.numerics.async_copies import copy_to_device
from fp8cfg.numerics.formats import (
    E2M1,
    Format,
    RandomStream,
    reciprocal,
    round_to_format,
)
from fp8cfg.numerics.gemm import Operand
from fp8cfg.numerics.kernels.launch import (
    HAS_TRITON,
    can_fuse_nvfp4,
    compute_amax_if_unset,
    quantize_nvfp4_fused,
)
from fp8cfg.numerics.overflow_counts import NO_CUDA_GRAPH, overflow_counter
from fp8cfg.numerics.scaling import Scaling, compute_tile_scales, global_scale_from_amax
from fp8cfg.schema.scalings import Tile


def limit_horizontal_fusion() -> None:
    """Works around a bug in Inductor's code for CPUs.

    Inductor fuses loops that share no data into one C++ kernel ("horizontal fusion"). With MXFP8 it
    then fails in an assertion (try_loop_split). Quantization that was written in another way
    returned NaN under row and block scaling. Seen with torch 2.13. tools/inductor_fusion.py
    reproduces it. Remove this function with the first torch for which that script reports equal
    gradients.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        # Inductor reads the variable when it is imported. Importing it here would take seconds.
        os.environ.setdefault("TORCHINDUCTOR_CPP_MAX_HORIZONTAL_FUSION_SIZE", "1")
    else:
        config.cpp.max_horizontal_fusion_size = 1


limit_horizontal_fusion()


def quantize(t: Tensor, scale: Tensor, fmt: Format, carrier: torch.dtype) -> Operand:
    """Quantizes a matrix with one scale.

    Args:
        t: The matrix, of any float dtype.
        scale: float32 [].
        fmt: The format.
        carrier: Dtype of the data: `fmt.dtype` for a real GEMM, bfloat16 or float32 for an emulated
            one.
    """
    data = round_to_format(t.float() * scale, fmt, carrier)
    return Operand(data, reciprocal(scale), fmt)


def quantize_tiles(
    t: Tensor,
    tile: Tile,
    fmt: Format,
    scaling: Scaling,
    carrier: torch.dtype,
    global_scale: Tensor | None = None,
    random: RandomStream | None = None,
    record: Tensor | None = None,
    group: str | None = None,
) -> Operand:
    """Quantizes a matrix with a scale for each tile.

    Args:
        t: The matrix [R, C].
        tile: Rows and columns that share a scale.
        fmt: The format.
        scaling: The recipe.
        carrier: See `quantize`.
        global_scale: NVFP4's scale of the whole tensor, float32 [].
        random: The random numbers of stochastic rounding. They depend on the place of an element in
            `t`, not on strides. None rounds to nearest.
        record: Running maximum, float32 [], that the largest amax is folded into.
        group: Name of the process group with the other shards of each tile, which is a row or a
            column.
    """
    v = split_tiles(t, tile).float()
    encode, decode = compute_tile_scales(v, fmt, scaling, global_scale, t.dtype, record, group)
    uniform = None
    if random is not None:
        uniform = random.uniform(0, v.numel()).view(v.shape)
    data = round_to_format(v * encode, fmt, carrier, uniform)
    global_scale_inv = None
    if global_scale is not None:
        global_scale_inv = reciprocal(global_scale)

    is_carried = carrier != fmt.dtype
    if is_carried and scaling.layout.block:
        # The scales vary along the contracted dimension, so the GEMM cannot apply them to its
        # result.
        data = data * decode.to(carrier)
        return Operand(join_tiles(data, t.shape), global_scale_inv, fmt, tile)
    scale_inv = decode[:, 0, :, 0]
    return Operand(
        join_tiles(data, t.shape), scale_inv, fmt, tile, global_scale_inv=global_scale_inv
    )


# --- NVFP4


def quantize_nvfp4(
    t: Tensor,
    role: int,
    axis: int,
    scaling: Scaling,
    carrier: torch.dtype | None,
    random: tuple[Tensor, Tensor] | None = None,
    history: Tensor | None = None,
    amax_group: AmaxGroup | None = None,
    both: bool = False,
) -> Operand:
    """Quantizes a matrix under NVFP4.

    Args:
        t: The matrix [R, C], or this rank's shard of it.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        axis: The dimension that the GEMM contracts.
        scaling: The recipe.
        carrier: Dtype of the data of an emulated GEMM. None is a real GEMM.
        random: Key and number of draws of the layer, for stochastic rounding of gradients.
        history: Amax record. The amax is folded into `history[0, role]`.
        amax_group: Ranks with the other shards. The global scale covers the whole tensor.
        both: Whether GEMMs contract both dimensions.

    Returns:
        The operand in the orientation of `t`. With the Hadamard transform R is padded to a multiple
        of 16 with zeros. If ranks share the tensor and `both` is set, one collective reduces the
        amaxes of both dimensions, and the operand of the first dimension comes as
        `Operand.columnwise`.
    """
    group = sharing_group(amax_group, role)
    axes = [axis]
    if group is not None and both and axis == 1 and scaling.directional(role):
        # One collective for both dimensions. The transformed matrix comes first, so that its memory
        # is free before the other is quantized.
        axes = [0, 1]
    matrices = []
    for contracted in axes:
        matrix = t
        if scaling.uses_hadamard(role, contracted):
            matrix = hadamard_transform(t.t())
        matrices.append(matrix)

    amaxes: list[Tensor | None] = [None] * len(axes)
    if group is not None:
        sources = [t]  # without a transform both dimensions have the same amax
        if scaling.uses_hadamard(role, 0):
            sources = matrices
        local = torch.stack([_amax_or_nan(source, carrier) for source in sources])
        reduced = all_reduce_max_or_nan(local, group).unbind()
        amaxes = [*reduced] * (len(axes) // len(sources))

    operands = []
    for contracted, amax in zip(axes, amaxes, strict=True):
        record = None
        if contracted == axis:  # a tensor that is quantized along both dimensions is recorded once
            record = history
        operands.append(
            _quantize_nvfp4_matrix(
                matrices.pop(0), role, contracted, scaling, carrier, random, record, amax
            )
        )
    if len(operands) == 1:
        return operands[0]
    columnwise, rowwise = operands
    return rowwise._replace(columnwise=columnwise.t())


def _quantize_nvfp4_matrix(
    matrix: Tensor,
    role: int,
    axis: int,
    scaling: Scaling,
    carrier: torch.dtype | None,
    random: tuple[Tensor, Tensor] | None,
    history: Tensor | None,
    amax: Tensor | None,
) -> Operand:
    """Quantizes the matrix that a GEMM reads, transformed or not.

    `amax`, float32 [], covers the whole tensor. None computes it from the matrix.
    """
    fmt = scaling.format_of(role)
    stream = None
    if random is not None and scaling.rounds_stochastically(role):
        stream = RandomStream(*random, lane=axis)
    is_transformed = scaling.uses_hadamard(role, axis)
    tile = scaling.tile(role, axis)
    if is_transformed:
        tile = (1, 16)  # the transform has moved the contracted dimension to the end
    assert tile is not None
    if can_fuse_nvfp4(matrix, carrier) and tile[1] == 16:
        is_square = tile[0] == 16
        operand = quantize_nvfp4_fused(matrix, is_square, stream, history, role, amax)
    else:
        if amax is None:
            amax = compute_amax_or_nan(matrix)
        if history is not None:
            record_amax(history[0, role], amax)
            count_out_of_range(matrix, role, history[0, role], None, fmt)
        global_scale = global_scale_from_amax(amax)
        operand = quantize_tiles(
            matrix, tile, fmt, scaling, carrier or E2M1.dtype, global_scale, stream
        )
    if is_transformed:
        operand = operand.t()
    return operand


def _amax_or_nan(t: Tensor, carrier: torch.dtype | None) -> Tensor:
    """`compute_amax_or_nan`, by a kernel if one quantizes `t`."""
    if not can_fuse_nvfp4(t, carrier):
        return compute_amax_or_nan(t)
    amax: Tensor = compute_amax_if_unset(t.contiguous(), None, 0, keep_nan=True)
    return amax[0]


# --- overflow counts


def count_out_of_range(
    t: Tensor, role: int, amax: Tensor, scale: Tensor | None, fmt: Format
) -> None:
    """Counts the values of a tensor that are clipped or infinite (overflow_counts.py).

    Call it only for tensors that no kernel quantizes: kernels count themselves.

    Args:
        t: Any shape and float dtype.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        amax: float32 []. No value of `t` is larger.
        scale: float32 []. None if all finite values fit.
        fmt: The format.
    """
    if t.is_cuda or torch.compiler.is_compiling():
        count_overflow(t, amax, scale, role, fmt.reach)
    elif t.device.type == "cpu":
        _count_on_host(t, amax, scale, role, fmt.reach)


# `amax` is not written. A graph keeps an operator that writes something, runs it after what records
# the amax, and does not merge it with calls of other layers that read `t`.
@library.custom_op("fp8cfg::count_overflow", mutates_args=("amax",), tags=NO_CUDA_GRAPH)
def count_overflow(t: Tensor, amax: Tensor, scale: Tensor | None, role: int, reach: float) -> None:
    """`count_out_of_range` on a GPU, and in compiled code."""
    if not t.is_cuda:
        _count_on_host(t, amax, scale, role, reach)
    elif HAS_TRITON and t.numel():
        from fp8cfg.numerics.kernels import tensor

        # Elements are counted in any order. In the order of memory no copy is needed.
        by_stride = sorted(range(t.dim()), key=t.stride, reverse=True)
        counts = overflow_counter(t.device, role)
        tensor.count(t.permute(by_stride).contiguous(), amax, scale, counts, reach)


def _count_on_host(t: Tensor, amax: Tensor, scale: Tensor | None, role: int, reach: float) -> None:
    largest = amax.item()
    if largest < torch.inf and (scale is None or largest * scale.item() <= reach):
        return  # all values fit: `t` is not read again
    magnitudes = t.detach().abs()
    num_infinite = (magnitudes == torch.inf).sum()
    num_clipped = torch.zeros_like(num_infinite)
    if scale is not None:
        num_clipped = (magnitudes.float() * scale > reach).sum() - num_infinite
    overflow_counter(t.device, role)[:2] += torch.stack([num_clipped, num_infinite])


# --- the Hadamard transform of NVFP4

# fmt: off
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Random signs of the transform, from Transformer Engine's get_wgrad_sign_vector."""
# fmt: on
NEGATIVE_SIGNS = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
"""Bit i is set if sign i is negative."""


def _compute_hadamard_matrix() -> Tensor:
    """Returns diag(SIGNS) H16 / 4, float32 [16, 16], by Sylvester's construction."""
    h = torch.ones(1, 1, dtype=torch.float32)
    while len(h) < 16:
        upper = torch.cat([h, h], 1)
        lower = torch.cat([h, -h], 1)
        h = torch.cat([upper, lower])
    return torch.tensor(SIGNS, dtype=torch.float32)[:, None] * h / 4


HADAMARD_MATRIX = _compute_hadamard_matrix()


def hadamard_transform(t: Tensor) -> Tensor:
    """Multiplies each 16 neighbors in a row of `t` [R, C] by diag(SIGNS) H16 / 4, in the dtype of
    `t`.

    C is padded to a multiple of 16 with zeros. The transform spreads outliers over 16 elements.
    Both operands of wgrad are transformed, which cancels in the product.
    Source: Transformer Engine, common/hadamard_transform.
    """
    missing = -t.shape[1] % 16
    if missing:
        t = F.pad(t, (0, missing))
    t = t.contiguous()
    return (t.view(-1, 16) @ _hadamard_matrix(t.device, t.dtype)).view(t.shape)


def _hadamard_matrix(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns HADAMARD_MATRIX on `device`. The host does not wait for the copy."""
    if device.type != "cuda":
        return HADAMARD_MATRIX.to(device, dtype)
    if torch.compiler.is_compiling():
        # Compiled code pins no memory and keeps no tensor of another call.
        return build_hadamard_matrix(device).to(dtype)
    if _get_current_dispatch_mode_stack():
        # A mode may make fake tensors or count operations. The cache must not hold its tensor.
        return copy_to_device(HADAMARD_MATRIX.to(dtype), device)
    return _cached_hadamard_matrix(device, dtype)


@functools.cache
def _cached_hadamard_matrix(device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be saved for backward
        return copy_to_device(HADAMARD_MATRIX.to(dtype), device)


def build_hadamard_matrix(device: torch.device) -> Tensor:
    """Computes HADAMARD_MATRIX on `device`.

    In Sylvester's matrix the sign in row i and column j is the parity of the bits of i & j.
    """
    n = torch.arange(16, device=device)
    bits = n[:, None] & n
    bits = bits ^ (bits >> 2)
    parity = bits ^ (bits >> 1) ^ (NEGATIVE_SIGNS >> n)[:, None]
    return (1 - 2 * (parity & 1)) * 0.25
