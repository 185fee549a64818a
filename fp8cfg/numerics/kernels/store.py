"""Fused storing of weights in float8 on a GPU: read once, and written where they are held.

The kernels are those of launch.py; what they write is that of `store`.
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
    tile_shape,
)
from fp8cfg.numerics.formats import FORMAT_BY_DTYPE
from fp8cfg.numerics.fp8_weights import FP8Weight, store
from fp8cfg.numerics.kernels.launch import (
    HAS_TRITON,
    MX_BLOCK,
    NVFP4_BLOCK,
    can_fuse_tensor,
    can_fuse_tiles,
    cast_tiles,
    compute_amax_if_unset,
    reduce_tile_amaxes,
    scale_inputs,
)
from fp8cfg.numerics.overflow_counts import NO_CUDA_GRAPH, overflow_counter
from fp8cfg.numerics.quantize import count_out_of_range
from fp8cfg.numerics.scaling import WEIGHT, Scaling, choose_tensor_scale
from fp8cfg.schema.scalings import Tile

LEAST = (8, 9)
"""The least CUDA compute capability whose hardware converts to FP8."""


def compute_amaxes(tensors: Sequence[Tensor], keep_nan: bool = False) -> Tensor:
    """`amax_of` each of some tensors on one device, or with `keep_nan` `amax_or_nan`, [tensors]; on
    a GPU each is read in one
    launch."""
    if not HAS_TRITON or not tensors[0].is_cuda:
        return torch.stack(
            [(compute_amax_or_nan if keep_nan else compute_amax)(t) for t in tensors]
        )
    from fp8cfg.numerics.kernels import tensor

    parts = torch.zeros(len(tensors), tensor.PARTS, dtype=torch.float32, device=tensors[0].device)
    for t, of in zip(tensors, parts.unbind(), strict=True):
        if t.numel():
            tensor.compute_part_amaxes(t.contiguous(), of, keep_nan=keep_nan)
    return parts.amax(1)


def can_fuse_store(t: Tensor) -> bool:
    """Whether `t` is where kernels can store it in float8: the conversion is the hardware's, whoever multiplies."""
    return HAS_TRITON and t.is_cuda and torch.cuda.get_device_capability(t.device) >= LEAST


def store_and_record(
    master: Tensor,
    scaling: Scaling,
    scales: Tensor | None,
    history: Tensor | None,
    parts: AmaxGroup | None,
    held: FP8Weight | None = None,
) -> FP8Weight:
    """`store` of a matrix [out, in], whose amax is recorded in `history`, and its overflow counted.
    One scale for all of it is that of this moment. Kernels write into the tensors that are `held`,
    where they can, and give these back.
    """
    held = held if held is not None and _writable(held, master) else None
    if four := store_nvfp4_fused(master, scaling, history, held, parts):
        return four
    if scaling.tile(WEIGHT, 1) is not None:
        made = store_tiles_fused(
            master, scaling, (1, 0) if scaling.directional(WEIGHT) else (1,), history, held, parts
        )
        record = None if history is None else history[0, WEIGHT]
        if made:
            return FP8Weight(*made[1], *made.get(0, (None, None)))
        stored = store(master, scaling, record=record, parts=parts)
        if record is not None:
            count_out_of_range(master, WEIGHT, record, None, scaling.forward)
        return stored
    if can_fuse_store(master) and can_fuse_tensor(master, scaling, None):
        t = master.contiguous()
        data, scale_inv = held[:2] if held else _empty(t, scaling.forward.dtype)
        store_tensor(
            t,
            scales,
            history,
            *scale_inputs(t, WEIGHT, scaling, scales, parts),
            WEIGHT,
            data,
            scale_inv,
        )
        return FP8Weight(data, scale_inv)
    scale = choose_tensor_scale(
        master, WEIGHT, scaling, scales, history, record=True, amax_group=parts
    )
    if history is not None:
        count_out_of_range(master, WEIGHT, history[0, WEIGHT], scale, scaling.forward)
    return store(master, scaling, scale)


def store_scaled(
    t: Tensor, scaling: Scaling, scale: Tensor, record: Tensor | None = None
) -> FP8Weight:
    """`store` of some rows of a matrix with its one scale [], which is not 0. Kernels count its
    overflow, and plain operations do
    where there is a `record`, [], of its amax."""
    if not can_fuse_store(t) or not can_fuse_tensor(t, scaling, None):
        if record is not None:
            count_out_of_range(t, WEIGHT, record, scale, scaling.forward)
        return store(t, scaling, scale)
    made, of = _empty(t, scaling.forward.dtype), scale.view(1)
    store_tensor(t.contiguous(), of, None, of, scaling.forward.max, False, 0, *made)
    return FP8Weight(*made)


def store_tiles_fused(
    t: Tensor,
    scaling: Scaling,
    axes: Sequence[int],
    history: Tensor | None = None,
    held: FP8Weight | None = None,
    parts: AmaxGroup | None = None,
) -> dict[int, tuple[Tensor, Tensor]]:
    """The matrix `t` [R, C] and its inverse scales, as `FP8Weight` has them, for products that
    contract each of its dimensions `axes`, in one read; empty where there is no kernel that can.
    They are in the tensors that are `held`, if these are given. An infinite amax goes into
    `history`, if it is given. Scales of rows or columns of which others have `parts` are those of
    the
    whole."""
    fmt, tile = scaling.forward, scaling.tile(WEIGHT, 1)
    if (
        not axes
        or tile is None
        or not can_fuse_store(t)
        or not can_fuse_tiles(t, tile, scaling, None)
    ):
        return {}
    of_scales = torch.uint8 if max(tile) == MX_BLOCK else torch.float32

    def room(axis: int) -> tuple[Tensor | None, Tensor | None]:
        if axis not in axes:
            return None, None
        if held:
            return (held.data, held.scale_inv) if axis else (held.dgrad, held.dgrad_scale_inv)
        return _empty(t, fmt.dtype, tile if axis else (tile[1], tile[0]), of_scales)

    into, t = {axis: room(axis) for axis in (1, 0)}, t.contiguous()
    amaxes = [
        reduce_tile_amaxes(t, WEIGHT, scaling, axis, parts) if axis in axes else None
        for axis in (1, 0)
    ]
    store_blocks(
        t, tile[1], scaling.power_2_scales, tile[0] > 1, *into[1], *into[0], history, *amaxes
    )
    return {
        axis: (data, scale_inv)
        for axis, (data, scale_inv) in into.items()
        if data is not None and scale_inv is not None
    }


def store_nvfp4_fused(
    t: Tensor,
    scaling: Scaling,
    history: Tensor | None = None,
    held: FP8Weight | None = None,
    parts: AmaxGroup | None = None,
    amax: Tensor | None = None,
) -> FP8Weight | None:
    """`store` of the matrix `t` under NVFP4, in the tensors that are `held`, if these are given,
    with its amax into `history`; of some rows of a matrix with the `amax` [] of it all. None under
    other scalings, and where there is no kernel that can.
    """
    if not scaling.layout.two_levels or not can_fuse_store(t) or not t.numel():
        return None
    held, t = held or _empty_four_bits(t, scaling), t.contiguous()
    if amax is None and (group := parts and parts.group_of(WEIGHT)):
        amax = all_reduce_max_or_nan(compute_amax_if_unset(t, None, 0, keep_nan=True)[0], group)
    _, _, dgrad, dgrad_scale_inv, global_scale_inv = held
    assert global_scale_inv is not None, "there are two levels"
    store_four_bits(
        t, held.data, held.scale_inv, dgrad, dgrad_scale_inv, global_scale_inv, history, amax
    )
    return held


def _empty(
    t: Tensor, dtype: torch.dtype, tile: Tile = (0, 0), of_scales: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A matrix of the shape of `t`, and the scales of its tiles, with anything in them."""
    down, across = (
        -(-n // size) for n, size in zip(t.shape, tile_shape(t.shape, tile), strict=True)
    )
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format), t.new_empty(
        () if tile == (0, 0) else (down, across), dtype=of_scales
    )


def _empty_four_bits(t: Tensor, scaling: Scaling) -> FP8Weight:
    """What `store` makes of `t` under NVFP4, with anything in it."""
    square, dtype = not scaling.directional(WEIGHT), scaling.forward.dtype
    data, scale_inv = _empty(
        t, dtype, (NVFP4_BLOCK if square else 1, NVFP4_BLOCK), torch.float8_e4m3fn
    )
    dgrad, dgrad_scale_inv = (
        (None, None) if square else _empty(t, dtype, (NVFP4_BLOCK, 1), torch.float8_e4m3fn)
    )
    return FP8Weight(data, scale_inv, dgrad, dgrad_scale_inv, t.new_empty((), dtype=torch.float32))


def _writable(held: FP8Weight, master: Tensor) -> bool:
    """Whether a kernel that reads `master` can write into the tensors that are `held`."""
    there = [t for t in held if t is not None]
    return held.data.shape == master.shape and all(
        type(t) is Tensor and t.device == master.device and t.is_contiguous() for t in there
    )


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
    """The contiguous matrix `t` [R, C], a weight, into float8 `data` [R, C] with scales for 1 x
    `width` elements, or their square, and into `dgrad` [R, C] with scales for `width` x 1, or
    either alone. The `width` is that of `quantize_blocks`. Scales are
    row-major, float32 or bytes of E8M0."""
    cast_tiles(
        t,
        width,
        power_2,
        square,
        data,
        scale_inv,
        dgrad,
        dgrad_scale_inv,
        False,
        history,
        WEIGHT,
        amaxes,
        amaxes_t,
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
    """The contiguous matrix `t` [R, C], a weight, in E2M1 into E4M3 `data` [R, C], with E4M3 scales
    for 16x16 elements, or, where there is a `dgrad` [R, C], for 1x16 and there for 16x1; row-major.
    The `amax` is that of `t` where none is given, and is folded
    into `history`, if that is."""
    from fp8cfg.numerics.kernels import blocks

    seen, counts = (
        (None, None)
        if history is None
        else (history[0, WEIGHT], overflow_counter(t.device, WEIGHT))
    )
    blocks.cast_nvfp4(
        t,
        data,
        scale_inv,
        dgrad,
        dgrad_scale_inv,
        global_scale_inv,
        record=seen,
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
    """The contiguous matrix `t` into float8 `data` and its inverse scale, by the rule of `quantize_tensor`."""
    from fp8cfg.numerics.kernels import tensor

    fmt, counts = FORMAT_BY_DTYPE[data.dtype], overflow_counter(t.device, WEIGHT)
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
        amax,
        counts,
        fmt.reach,
    )
