"""Weights stored in FP8 on a GPU, by the Triton kernels of kernels/launch.py.

A kernel reads the weight once and writes into the stored tensors. The results equal
`fp8_weights.store` bit for bit. Scales and data are row-major, as in a state dict, and not in the
layout of the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from fp8cfg.numerics.amax import (
    AmaxGroup,
    all_reduce_max_or_nan,
    compute_amax,
    compute_amax_or_nan,
    running_max,
    sharing_group,
    tile_shape,
)
from fp8cfg.numerics.formats import FORMAT_BY_DTYPE
from fp8cfg.numerics.fp8_weights import FP8Weight, quantized_dims, store
from fp8cfg.numerics.kernels.launch import (
    HAS_TRITON,
    MX_BLOCK,
    NVFP4_BLOCK,
    can_fuse_tensor,
    can_fuse_tiles,
    cast_tiles,
    compute_amax_if_unset,
    record_and_counts,
    reduce_tile_amaxes,
    scale_inputs,
)
from fp8cfg.numerics.overflow_counts import NO_CUDA_GRAPH, overflow_counter
from fp8cfg.numerics.quantize import count_out_of_range
from fp8cfg.numerics.scaling import WEIGHT, Scaling, choose_tensor_scale
from fp8cfg.schema.scalings import Tile

FP8_CONVERSION_CAPABILITY = (8, 9)
"""The lowest CUDA compute capability whose hardware converts to FP8."""


def compute_amaxes(tensors: Sequence[Tensor], keep_nan: bool = False) -> Tensor:
    """Returns the amaxes of tensors on one device, float32 [tensors]. On a GPU each takes one
    launch.

    NaN is skipped, or with `keep_nan` kept.
    """
    if not HAS_TRITON or not tensors[0].is_cuda:
        if keep_nan:
            return torch.stack([compute_amax_or_nan(tensor) for tensor in tensors])
        return torch.stack([compute_amax(tensor) for tensor in tensors])
    from fp8cfg.numerics.kernels import tensor

    parts = torch.zeros(len(tensors), tensor.PARTS, dtype=torch.float32, device=tensors[0].device)
    for t, row in zip(tensors, parts.unbind(), strict=True):
        if t.numel():
            tensor.compute_part_amaxes(t.contiguous(), row, keep_nan=keep_nan)
    return parts.amax(1)


def can_fuse_store(t: Tensor) -> bool:
    """Whether kernels can store `t` in FP8. The hardware must convert to FP8, not multiply it."""
    if not HAS_TRITON or not t.is_cuda:
        return False
    return torch.cuda.get_device_capability(t.device) >= FP8_CONVERSION_CAPABILITY


def store_and_record(
    master: Tensor,
    scaling: Scaling,
    scales: Tensor | None,
    history: Tensor | None,
    amax_group: AmaxGroup | None,
    outputs: FP8Weight | None = None,
) -> FP8Weight:
    """Stores a weight in FP8, records its amax and counts its overflow.

    Args:
        master: The high-precision weight [out, in], or this rank's shard of it.
        scaling: The recipe.
        scales: Scales of the layer under delayed scaling, float32 [3]. None under other algorithms.
        history: Amax record of the layer.
        amax_group: Ranks with the other shards.
        outputs: Tensors to write into, if kernels can.

    Returns:
        The FP8 weight: `outputs`, or new tensors.
    """
    if outputs is not None and not _can_write(outputs, master):
        outputs = None
    record = running_max(history, WEIGHT)

    nvfp4_weight = store_nvfp4_fused(master, scaling, history, outputs, amax_group)
    if nvfp4_weight is not None:
        return nvfp4_weight

    if scaling.tile(WEIGHT, 1) is not None:
        dims = quantized_dims(scaling)
        stored = store_tiles_fused(master, scaling, dims, history, outputs, amax_group)
        if stored:
            data, scale_inv = stored[1]
            dgrad, dgrad_scale_inv = stored.get(0, (None, None))
            return FP8Weight(data, scale_inv, dgrad, dgrad_scale_inv)
        weight = store(master, scaling, record=record, amax_group=amax_group)
        if record is not None:
            count_out_of_range(master, WEIGHT, record, None, scaling.forward)
        return weight

    if can_fuse_store(master) and can_fuse_tensor(master, scaling, None):
        t = master.contiguous()
        if outputs is None:
            data, scale_inv = _empty(t, scaling.forward.dtype)
        else:
            data, scale_inv = outputs.data, outputs.scale_inv
        amax, target, power_2 = scale_inputs(t, WEIGHT, scaling, scales, amax_group)
        store_tensor(t, scales, history, amax, target, power_2, WEIGHT, data, scale_inv)
        return FP8Weight(data, scale_inv)

    scale = choose_tensor_scale(
        master, WEIGHT, scaling, scales, history, record=True, amax_group=amax_group
    )
    if record is not None:
        count_out_of_range(master, WEIGHT, record, scale, scaling.forward)
    return store(master, scaling, scale)


def store_scaled(
    t: Tensor, scaling: Scaling, scale: Tensor, record: Tensor | None = None
) -> FP8Weight:
    """Stores rows of a weight with a known scale.

    Args:
        t: Rows of the weight.
        scaling: The recipe.
        scale: Scale of the whole weight, float32 []. Not 0.
        record: Running maximum, float32 [], that has the amax of `t`. Plain torch operations count
            overflow only with it. Kernels always do.
    """
    if not can_fuse_store(t) or not can_fuse_tensor(t, scaling, None):
        if record is not None:
            count_out_of_range(t, WEIGHT, record, scale, scaling.forward)
        return store(t, scaling, scale)
    data, scale_inv = _empty(t, scaling.forward.dtype)
    # As a delayed scale of role 0 that is set: the kernel reads no amax.
    scales = scale.view(1)
    store_tensor(
        t.contiguous(), scales, None, scales, scaling.forward.max, False, 0, data, scale_inv
    )
    return FP8Weight(data, scale_inv)


def store_tiles_fused(
    t: Tensor,
    scaling: Scaling,
    dims: Sequence[int],
    history: Tensor | None = None,
    outputs: FP8Weight | None = None,
    amax_group: AmaxGroup | None = None,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Stores a weight with scales of tiles, in one read.

    Args:
        t: The weight [R, C].
        scaling: The recipe.
        dims: The dimensions that GEMMs contract.
        history: An infinite amax is recorded in it.
        outputs: Tensors to write into.
        amax_group: Ranks with the other shards of rows or columns.

    Returns:
        For each of `dims` data and inverse scales as in FP8Weight. Empty if no kernel can store
        `t`.
    """
    tile = scaling.tile(WEIGHT, 1)
    if not dims or tile is None:
        return {}
    if not can_fuse_store(t) or not can_fuse_tiles(t, tile, scaling, None):
        return {}
    t = t.contiguous()
    dtype = scaling.forward.dtype
    scale_dtype = torch.float32
    if max(tile) == MX_BLOCK:
        scale_dtype = torch.uint8  # E8M0

    data, scale_inv, amaxes = None, None, None
    if 1 in dims:
        if outputs is None:
            data, scale_inv = _empty(t, dtype, tile, scale_dtype)
        else:
            data, scale_inv = outputs.data, outputs.scale_inv
        amaxes = reduce_tile_amaxes(t, WEIGHT, scaling, 1, amax_group)
    dgrad, dgrad_scale_inv, amaxes_t = None, None, None
    if 0 in dims:
        if outputs is None:
            dgrad, dgrad_scale_inv = _empty(t, dtype, (tile[1], tile[0]), scale_dtype)
        else:
            dgrad, dgrad_scale_inv = outputs.dgrad, outputs.dgrad_scale_inv
        amaxes_t = reduce_tile_amaxes(t, WEIGHT, scaling, 0, amax_group)

    store_blocks(
        t,
        tile[1],
        scaling.power_2_scales,
        tile[0] > 1,
        data,
        scale_inv,
        dgrad,
        dgrad_scale_inv,
        history,
        amaxes,
        amaxes_t,
    )
    stored = {}
    if data is not None and scale_inv is not None:
        stored[1] = data, scale_inv
    if dgrad is not None and dgrad_scale_inv is not None:
        stored[0] = dgrad, dgrad_scale_inv
    return stored


def store_nvfp4_fused(
    t: Tensor,
    scaling: Scaling,
    history: Tensor | None = None,
    outputs: FP8Weight | None = None,
    amax_group: AmaxGroup | None = None,
    amax: Tensor | None = None,
) -> FP8Weight | None:
    """Stores a weight under NVFP4.

    Args:
        t: The weight [R, C], or rows of it.
        scaling: The recipe.
        history: Amax record. The amax is folded into it.
        outputs: Tensors to write into.
        amax_group: Ranks with the other shards.
        amax: Amax of the whole weight, float32 [], if it is known.

    Returns:
        The stored weight. None under other algorithms, or if no kernel can store `t`.
    """
    if not scaling.layout.two_levels or not can_fuse_store(t) or not t.numel():
        return None
    weight = outputs
    if weight is None:
        weight = _empty_nvfp4(t, scaling)
    t = t.contiguous()
    group = sharing_group(amax_group, WEIGHT)
    if amax is None and group is not None:
        local_amax = compute_amax_if_unset(t, None, 0, keep_nan=True)[0]
        amax = all_reduce_max_or_nan(local_amax, group)
    assert weight.global_scale_inv is not None, "NVFP4 has a global scale"
    store_four_bits(
        t,
        weight.data,
        weight.scale_inv,
        weight.dgrad,
        weight.dgrad_scale_inv,
        weight.global_scale_inv,
        history,
        amax,
    )
    return weight


def _empty(
    t: Tensor, dtype: torch.dtype, tile: Tile = (0, 0), scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Returns an uninitialized matrix of the shape of `t` and the scales of its tiles."""
    data = torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)
    if tile == (0, 0):
        return data, t.new_empty((), dtype=scale_dtype)
    r, c = tile_shape(t.shape, tile)
    rows, columns = t.shape
    return data, t.new_empty((-(-rows // r), -(-columns // c)), dtype=scale_dtype)


def _empty_nvfp4(t: Tensor, scaling: Scaling) -> FP8Weight:
    """Returns an uninitialized NVFP4 weight."""
    dtype, scale_dtype = scaling.forward.dtype, torch.float8_e4m3fn
    global_scale_inv = t.new_empty((), dtype=torch.float32)
    if not scaling.directional(WEIGHT):
        data, scale_inv = _empty(t, dtype, (NVFP4_BLOCK, NVFP4_BLOCK), scale_dtype)
        return FP8Weight(data, scale_inv, global_scale_inv=global_scale_inv)
    data, scale_inv = _empty(t, dtype, (1, NVFP4_BLOCK), scale_dtype)
    dgrad, dgrad_scale_inv = _empty(t, dtype, (NVFP4_BLOCK, 1), scale_dtype)
    return FP8Weight(data, scale_inv, dgrad, dgrad_scale_inv, global_scale_inv)


def _can_write(weight: FP8Weight, master: Tensor) -> bool:
    """Whether a kernel that reads `master` can write into the tensors of `weight`."""
    if weight.data.shape != master.shape:
        return False
    for t in weight:
        if t is None:
            continue
        # A subclass, such as a tensor of FSDP2, has no plain memory.
        if type(t) is not Tensor or t.device != master.device or not t.is_contiguous():
            return False
    return True


@library.custom_op(
    "fp8cfg::store_blocks",
    mutates_args=("data", "scale_inv", "dgrad", "dgrad_scale_inv", "history"),
    tags=NO_CUDA_GRAPH,
)
def store_blocks(
    t: Tensor,
    width: int,
    power_2: bool,
    square: bool,
    data: Tensor | None,
    scale_inv: Tensor | None,
    dgrad: Tensor | None,
    dgrad_scale_inv: Tensor | None,
    history: Tensor | None,
    amaxes: Tensor | None,
    amaxes_t: Tensor | None,
) -> None:
    """Quantizes a contiguous weight with scales of tiles.

    Args:
        t: Contiguous [R, C].
        width: See `quantize_blocks`.
        power_2: See `quantize_blocks`.
        square: See `quantize_blocks`.
        data: float8 [R, C] with scales of 1 x `width` or squares, written. None leaves it out.
        scale_inv: Its inverse scales, row-major, float32 or bytes of E8M0.
        dgrad: float8 [R, C] with scales of `width` x 1, written. None leaves it out.
        dgrad_scale_inv: Its inverse scales.
        history: An infinite amax is recorded in it.
        amaxes: Amaxes of rows if they are known, [R].
        amaxes_t: Amaxes of columns if they are known, [C].
    """
    cast_tiles(
        t,
        width,
        power_2,
        square,
        data,
        scale_inv,
        dgrad,
        dgrad_scale_inv,
        transpose=False,
        history=history,
        role=WEIGHT,
        amaxes=amaxes,
        amaxes_t=amaxes_t,
    )


@library.custom_op(
    "fp8cfg::store_four_bits",
    mutates_args=("data", "scale_inv", "dgrad", "dgrad_scale_inv", "global_scale_inv", "history"),
    tags=NO_CUDA_GRAPH,
)
def store_four_bits(
    t: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    dgrad: Tensor | None,
    dgrad_scale_inv: Tensor | None,
    global_scale_inv: Tensor,
    history: Tensor | None,
    amax: Tensor | None,
) -> None:
    """Quantizes a contiguous weight to E2M1, stored as E4M3 bytes with E4M3 scales, row-major.

    Args:
        t: Contiguous [R, C].
        data: [R, C], written. Its tiles are 16 x 16 without `dgrad`, and 1 x 16 with it.
        scale_inv: Its inverse scales, written.
        dgrad: [R, C] with tiles of 16 x 1, written.
        dgrad_scale_inv: Its inverse scales, written.
        global_scale_inv: float32 [], written.
        history: Amax record. The amax is folded into it.
        amax: Amax of the whole weight, float32 []. Defaults to the amax of `t`.
    """
    from fp8cfg.numerics.kernels import blocks

    record, counts = record_and_counts(t, history, WEIGHT)
    blocks.cast_nvfp4(
        t,
        data,
        scale_inv,
        dgrad,
        dgrad_scale_inv,
        global_scale_inv,
        record=record,
        transpose=False,
        amax=amax,
        counts=counts,
    )


@library.custom_op(
    "fp8cfg::store_tensor", mutates_args=("data", "scale_inv", "history"), tags=NO_CUDA_GRAPH
)
def store_tensor(
    t: Tensor,
    scales: Tensor | None,
    history: Tensor | None,
    amax: Tensor | None,
    target: float,
    power_2: bool,
    role: int,
    data: Tensor,
    scale_inv: Tensor,
) -> None:
    """Quantizes a contiguous weight with one scale. See `quantize_tensor`."""
    from fp8cfg.numerics.kernels import tensor

    fmt = FORMAT_BY_DTYPE[data.dtype]
    counts = overflow_counter(t.device, WEIGHT)
    tensor.cast(
        t,
        scales,
        history,
        role,
        target,
        fmt.max,
        power_2,
        data,
        None,
        scale_inv,
        amaxes=amax,
        counts=counts,
        reach=fmt.reach,
    )
