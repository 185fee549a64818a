"""Scaling: from the amax of a tensor to the scale of its quantization.

FP8 has few exponent bits. A tensor is multiplied by a scale before it is rounded. The scale moves
the largest magnitude of the tensor, the amax, to the largest FP8 value:

    scale = fp8_max / 2**margin / amax
    data  = round_to_fp8(tensor * scale)

The GEMM multiplies its result by the inverse scales of both operands. Read from top to bottom:

    Scaling                the recipe of one layer; `scaled_max` is fp8_max / 2**margin
    compute_scale          from amax to scale, the division that all algorithms share
    delayed scaling        `delayed_scale` in a pass, `roll_amax_history` once per optimizer step
    current scaling        `current_scale`
    block scaling          `block_scales`: a tile of 128 elements, or 128 x 128 of a weight
    MXFP8                  `mxfp8_scales`: a tile of 32 elements, E8M0 scales
    NVFP4                  `nvfp4_scales`: a tile of 16 elements, E4M3 scales and a global scale
    choose_tensor_scale    one scale per tensor: delayed or current scaling
    compute_tile_scales    one scale per tile: the other algorithms, and current scaling by row

amax.py computes amaxes. Callers: fp8_linear.py quantizes with these scales in a pass,
amax_update.py calls `roll_amax_history` for all layers once per optimizer step. The Triton kernels
(kernels/) repeat the same formulas.

The results equal Transformer Engine 2.20 bit for bit. Each algorithm names its source there. Paths
are relative to transformer_engine/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.amax import (
    AmaxGroup,
    all_reduce_max,
    all_reduce_max_or_nan,
    compute_amax,
    compute_amax_or_nan,
    compute_tile_amax,
    record_amax,
    replace_nan,
)
from fp8cfg.numerics.formats import E2M1, E4M3, E5M2, Format, cast, reciprocal
from fp8cfg.schema.scalings import SCALINGS, Descriptor, ScalingName, Tile

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
"""Roles of the tensors of a linear layer: columns of its scales and amax history, in TE's order."""
FLT_MAX = torch.finfo(torch.float32).max

_CHOICES = {
    "kind": tuple(SCALINGS),
    "granularity": ("tensor", "row"),
    "amax_compute_algo": ("max", "most_recent"),
    "first_step": ("in_time", "te"),
}


@dataclass(frozen=True)
class Scaling:
    """The scaling recipe of one layer.

    Attributes:
        kind: The algorithm, a row of the table in schema/scalings.py.
        forward: Format of inputs and weights.
        backward: Format of the gradients of outputs.
        margin: Delayed scaling: headroom of the scale in powers of two.
        interval: Delayed scaling: optimizer steps between two updates of the scales.
        amax_history_len: Delayed scaling: length of the history in optimizer steps.
        amax_compute_algo: Delayed scaling: the largest amax of the history, or the newest one.
        first_step: Delayed scaling: the scale of a tensor without a history. "in_time" takes the
            amax of the tensor itself. "te" takes 1, as Transformer Engine does, which flushes small
            first gradients to zero. "te" saves compiled code a second read of each tensor.
        granularity: Current scaling: one scale for a tensor, or for each row along the contracted
            dimension.
        power_2_scales: Current and block scaling: round scales down to a power of two.
        weights_2d: Block scaling, MXFP8 and NVFP4: square tiles of weights, which fprop and dgrad
            share.
        hadamard: NVFP4: the Hadamard transform of both operands of wgrad.
        stochastic: NVFP4: stochastic rounding of gradients.
    """

    kind: ScalingName = "delayed"
    forward: Format = E4M3
    backward: Format = E5M2
    margin: int = 0
    interval: int = 1
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    first_step: Literal["in_time", "te"] = "in_time"
    granularity: Literal["tensor", "row"] = "tensor"
    power_2_scales: bool = False
    weights_2d: bool = False
    hadamard: bool = True
    stochastic: bool = True

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(f"Scaling.{field}={value!r}; choose one of {', '.join(choices)}")
        if self.interval < 1 or self.amax_history_len < 1:
            raise ValueError(
                f"Scaling: interval={self.interval} and amax_history_len={self.amax_history_len}"
                " must be at least 1"
            )

    @property
    def layout(self) -> Descriptor:
        """The row of this algorithm in the table of scalings."""
        return SCALINGS[self.kind]

    def format_of(self, role: int) -> Format:
        """Returns the format of tensors of `role`."""
        if role == GRAD_OUTPUT:
            return self.backward
        return self.forward

    def scaled_max(self, role: int) -> float:
        """Returns the value that a scale moves the amax to: the largest FP8 value / 2**margin."""
        fp8_max = self.format_of(role).max
        if not self.layout.history:
            return fp8_max  # only delayed scaling has a margin
        return fp8_max * 2.0**-self.margin

    def tile(self, role: int, axis: int) -> Tile | None:
        """Returns the rows and columns that share a scale, if the GEMM contracts dimension `axis`.

        0 stands for the whole dimension. None is one scale for the matrix and both dimensions.
        """
        is_square = role == WEIGHT and self.weights_2d
        return self.layout.tile(axis, self.granularity, square=is_square)

    def directional(self, role: int) -> bool:
        """Whether a tensor of `role` is quantized twice, once for each of its two dimensions."""
        return self.tile(role, 0) != self.tile(role, 1)

    def uses_hadamard(self, role: int, axis: int) -> bool:
        """Whether `role` is transformed for a GEMM that contracts dimension `axis`: wgrad."""
        if not self.hadamard or "random_hadamard_transform" not in self.layout.keys:
            return False
        return role != WEIGHT and axis == 0

    def rounds_stochastically(self, role: int) -> bool:
        """Whether tensors of `role` are rounded stochastically."""
        if not self.stochastic or "stochastic_rounding" not in self.layout.keys:
            return False
        return role == GRAD_OUTPUT

    def has_hardware_gemms(self, high_precision: tuple[bool, bool, bool]) -> bool:
        """Whether torch has the FP8 GEMMs of this scaling on a GPU.

        Args:
            high_precision: Which of fprop, dgrad and wgrad are not in FP8.
        """
        if all(high_precision[1:]):
            return True  # no gradient is in FP8, so its format does not matter
        fp8_format = "hybrid"
        if self.backward == self.forward:
            fp8_format = "e4m3"
        return fp8_format in self.layout.multiplied

    @property
    def first_scale(self) -> float:
        """Delayed scaling: the scale before the first update. 0 stands for "not set yet"."""
        if self.first_step == "te":
            return 1.0
        return 0.0

    def fresh_state(self, roles: int = 3, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Returns the state of delayed scaling before the first step, and {} for other algorithms.

        Args:
            roles: Number of tensors of the layer.
            device: Device of the state.

        Returns:
            fp8_scale: float32 [roles]. See `first_scale`.
            fp8_amax_history: float32 [amax_history_len, roles]. See `roll_amax_history`.
        """
        if not self.layout.history:
            return {}
        scale = torch.full((roles,), self.first_scale, dtype=torch.float32, device=device)
        history = torch.zeros(self.amax_history_len, roles, dtype=torch.float32, device=device)
        return {"fp8_scale": scale, "fp8_amax_history": history}


# --- scale


def compute_scale(
    amax: Tensor,
    scaled_max: Tensor | float,
    fallback: Tensor | float = 1.0,
    highest: float = FLT_MAX,
) -> Tensor:
    """Computes the scales that move amaxes to `scaled_max`.

    Source: compute_scale_from_amax in common/recipe/recipe_common.cuh.

    Args:
        amax: float32 of any shape.
        scaled_max: The largest FP8 value / 2**margin.
        fallback: The scale for an amax of 0, infinity or NaN. Such an amax says nothing about the
            next tensor: delayed scaling keeps its old scale.
        highest: The scale instead of infinity, which a tiny amax gives.

    Returns:
        float32 of the shape of `amax`.
    """
    # torch.div of two tensors rounds once, as TE does. `448.0 / amax` in eager torch multiplies by
    # the reciprocal: one unit in the last place off in a quarter of all cases.
    if not isinstance(scaled_max, Tensor):
        scaled_max = torch.full_like(amax, scaled_max)
    scale = torch.div(scaled_max, amax)
    # Amax and scale are at least 0. Comparisons take fewer kernels than isinf and isfinite.
    scale = torch.where(scale == torch.inf, highest, scale)
    is_usable = (amax > 0) & (amax < torch.inf)
    return torch.where(is_usable, scale, fallback)


def floor_to_power_of_2(scale: Tensor) -> Tensor:
    """Rounds positive normal float32 scales of any shape down to powers of two."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # clears the mantissa


# --- delayed scaling


def delayed_scale(amax: Tensor, role: int, scaling: Scaling, stored_scale: Tensor) -> Tensor:
    """Returns the scale of delayed scaling in a forward or backward pass.

    `roll_amax_history` has set the scale from past steps, so a kernel reads the tensor only once.
    Values above the past amaxes saturate.

    Args:
        amax: Amax of the tensor itself, float32 of any shape. Used until the first update.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        stored_scale: Scale of the layer, of the shape of `amax`. 0 before the first update.
    """
    first_scale = compute_scale(amax, scaling.scaled_max(role))
    return torch.where(stored_scale == 0, first_scale, stored_scale)


def roll_amax_history(
    history: Tensor, scale: Tensor, step_amax: Tensor, scaled_max: Tensor, algo: str
) -> tuple[Tensor, Tensor]:
    """Rolls the amax histories of any number of tensors and computes their next scales.

    `amax_update.update_scales` calls it once per optimizer step, outside of compiled code.
    Source: kernel_bulk in common/recipe/delayed_scaling.cu, TE's fused update on GPUs.

    Args:
        history: float32 [length, ...]. Row 0 is the running maximum of this step, rows 1 and up are
            past steps, oldest first.
        scale: Scales of this step, float32 [...].
        step_amax: Row 0 reduced over the ranks, float32 [...].
        scaled_max: `Scaling.scaled_max` of each tensor, float32 [...].
        algo: "max" takes the largest amax of the history, "most_recent" the amax of this step.

    Returns:
        The new history and the new scales. A tensor with amax 0 keeps both: it did not run. Under
        "max" an infinite amax freezes the scale until it leaves the history.
    """
    # TE falls back to the local amax if the reduced one is 0.
    newest = torch.where(step_amax != 0, step_amax, history[0])
    zeros = torch.zeros_like(newest)
    if algo == "most_recent":
        amax = newest
    else:
        window = torch.cat([history[1:], newest[None]])
        amax = window.fmax(zeros).amax(0)  # fmax turns NaN into 0, so that NaN loses

    # Row 1, the oldest step, leaves, and this step becomes the last row. Row 0 starts at 0 again.
    # The slice is for a history of one row, which has no past steps.
    rolled = torch.cat([zeros[None], history[2:], newest[None]])[: len(history)]
    new_scale = compute_scale(amax, scaled_max, fallback=scale)

    has_run = newest != 0
    return torch.where(has_run, rolled, history), torch.where(has_run, new_scale, scale)


def compute_range_used(step_amax: Tensor, scale: Tensor, reach: Tensor) -> Tensor:
    """Computes which multiple of the representable range the amaxes of a step were.

    Args:
        step_amax: float32 of any shape.
        scale: The scales of the step. 0 if they were not set: each tensor had its own scale.
        reach: `Format.reach`, the largest magnitude that is not clipped.

    Returns:
        float32. Above 1 if values were clipped, infinite for an infinite amax, 0 for a scale of 0.
    """
    return torch.where(step_amax == torch.inf, step_amax, step_amax * scale / reach)


# --- current scaling


def current_scale(amax: Tensor, role: int, scaling: Scaling) -> Tensor:
    """Returns the scale of current scaling: each tensor is scaled by its own amax.

    All finite values fit, but a kernel reads the tensor twice.
    Source: common/recipe/current_scaling.cu.

    Args:
        amax: float32 of any shape.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
    """
    scale = compute_scale(amax, scaling.scaled_max(role))
    if scaling.power_2_scales:
        scale = floor_to_power_of_2(scale)
    return scale


# --- one scale for a tensor


def choose_tensor_scale(
    tensor: Tensor,
    role: int,
    scaling: Scaling,
    scales: Tensor | None,
    history: Tensor | None,
    record: bool,
    amax_group: AmaxGroup | None = None,
) -> Tensor:
    """Chooses the scale of a tensor under delayed or current scaling, and records its amax.

    Args:
        tensor: The tensor, or this rank's shard of it.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        scales: Scales of the layer under delayed scaling, float32 [3]. None under current scaling.
        history: Amax record of the layer, float32 [length, 3]. Row 0 is the running maximum.
        record: Whether to fold the amax of `tensor` into `history`.
        amax_group: Ranks with the other shards. The scale covers the whole tensor. The record gets
            the amax of the shard, because `update_scales` reduces the records.

    Returns:
        float32 [].
    """
    if scales is not None and scaling.first_step == "te":
        # The scale is always set, so the amax is only recorded.
        if record and history is not None:
            record_amax(history[0, role], compute_amax(tensor))
        return scales[role]

    amax = compute_amax(tensor)
    if record and history is not None:
        record_amax(history[0, role], amax)
    if amax_group is not None:
        amax = amax_group.reduce(amax, role)
    stored_scale = None
    if scales is not None:
        stored_scale = scales[role]
    return scales_from_amaxes(amax, role, scaling, stored_scale)


def scales_from_amaxes(
    amaxes: Tensor, role: int, scaling: Scaling, stored_scales: Tensor | None = None
) -> Tensor:
    """Returns the scales of tensors with known amaxes, under delayed or current scaling.

    Args:
        amaxes: float32 of any shape.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        stored_scales: Scales of the layers under delayed scaling, of the shape of `amaxes`. None
            under current scaling.
    """
    if stored_scales is None:
        return current_scale(amaxes, role, scaling)
    return delayed_scale(amaxes, role, scaling, stored_scales)


# --- one scale for each tile


class TileScales(NamedTuple):
    """The scales of the tiles of a matrix.

    The two are no exact reciprocals if `decode` is rounded to a narrow dtype.

    Attributes:
        encode: float32. Elements are multiplied by it before they are rounded.
        decode: float32. It dequantizes the rounded elements.
    """

    encode: Tensor
    decode: Tensor


def block_scales(
    amax: Tensor, fmt: Format, power_2: bool, input_dtype: torch.dtype = torch.float32
) -> TileScales:
    """Returns the scales of block scaling: float32, one for 128 elements or 128 x 128 of a weight.

    Sources: DeepSeek-V3, arXiv:2412.19437, section 3.3; common/transpose/
    quantize_transpose_vector_blockwise.cu and quantize_transpose_square_blockwise.cu.

    Args:
        amax: Amaxes of the tiles, float32 of any shape.
        fmt: Format of the elements.
        power_2: Whether to round scales down to powers of two.
        input_dtype: Dtype of the matrix. TE limits a scale to its largest number.
    """
    highest = min(torch.finfo(input_dtype).max, FLT_MAX)
    return _float32_scales(amax, fmt, power_2, highest)


def _float32_scales(amax: Tensor, fmt: Format, power_2: bool, highest: float) -> TileScales:
    scale = compute_scale(amax, fmt.max, highest=highest)
    if power_2:
        scale = floor_to_power_of_2(scale)
    return TileScales(scale, reciprocal(scale))


def mxfp8_scales(amax: Tensor, fmt: Format) -> TileScales:
    """Returns the scales of MXFP8: powers of two, one for 32 elements.

    They are rounded up, so that nothing saturates. E8M0 stores the exponent in one byte: 0 is
    2^-127, 254 is the largest exponent, 255 is NaN.
    Sources: OCP Microscaling Formats 1.0; float_to_e8m0 in common/util/ptx.cuh.

    Args:
        amax: Amaxes of the tiles, float32 of any shape. NaN if a tile has one.
        fmt: Format of the elements.
    """
    # full() instead of tensor(): the host would wait for the copy of a constant.
    inverse_max = torch.full((), 1.0 / fmt.max, dtype=torch.float32, device=amax.device)
    unrounded = amax * inverse_max

    # float32 has 8 bits of exponent above 23 bits of mantissa. A mantissa above 0 raises the
    # exponent by one. Below 2^-127 there is no smaller power of two, and above 2^127 no larger one.
    bits = unrounded.view(torch.int32)
    byte = bits >> 23
    mantissa = bits & 0x7FFFFF
    is_at_most_smallest = (byte == 0) & (mantissa <= 0x400000)
    rounds_up = (mantissa > 0) & (byte < 254) & ~is_at_most_smallest
    byte = torch.where(torch.isinf(unrounded), 254, byte + rounds_up)

    decode = (byte << 23).view(torch.float32)
    decode = torch.where(byte == 0, 2.0**-127, decode)  # subnormal: its bits are not the exponent
    encode = ((254 - byte) << 23).view(torch.float32)
    encode = torch.where(byte == 254, 2.0**-127, encode)
    encode = torch.where(byte == 0, 1.0, encode)  # TE does not scale such a tile

    is_nan = torch.isnan(unrounded)
    encode = torch.where(is_nan, torch.nan, encode)
    decode = torch.where(is_nan, torch.nan, decode)
    return TileScales(encode, decode)


def encode_e8m0(decode: Tensor) -> Tensor:
    """Returns the E8M0 bytes of powers of two, float32 from 2^-127 on: their exponents."""
    return (decode.view(torch.int32) >> 23).to(torch.uint8)  # all exponent bits of NaN are set


def nvfp4_scales(amax: Tensor, global_scale: Tensor) -> TileScales:
    """Returns the scales of NVFP4: E4M3, one for 16 elements or 16 x 16 of a weight.

    E4M3 reaches only 448, so there is a second level: the global scale, float32, of the whole
    tensor. The GEMM multiplies by the inverse of both. `decode` does not include the global scale.
    Sources: arXiv:2509.25149; common/transpose/quantize_transpose_vector_blockwise_fp4.cu.

    Args:
        amax: Amaxes of the tiles, float32 of any shape. NaN if a tile has one.
        global_scale: From `compute_global_scale`, float32 [].
    """
    e2m1_max = torch.full((), E2M1.max, dtype=torch.float32, device=amax.device)
    unrounded = (amax * (global_scale * reciprocal(e2m1_max))).clamp(max=FLT_MAX)
    decode = cast(unrounded, E4M3).float()
    # The encode scale makes up for the rounding of the decode scale.
    encode = reciprocal(decode * reciprocal(global_scale)).clamp(max=FLT_MAX)
    return TileScales(encode, decode)


def compute_global_scale(tensor: Tensor, group: str | None = None) -> Tensor:
    """Returns the global scale of NVFP4, float32 [].

    Args:
        tensor: The tensor, or this rank's shard of it.
        group: Name of the process group with the other shards.
    """
    amax = compute_amax_or_nan(tensor)
    if group is not None:
        amax = all_reduce_max_or_nan(amax, group)
    return global_scale_from_amax(amax)


def global_scale_from_amax(amax: Tensor) -> Tensor:
    """Returns the global scale of a tensor with this amax, float32 [].

    It moves the largest E4M3 scale to 448.
    Source: ComputeGlobalEncodeScaleFP4 in
    common/transpose/quantize_transpose_vector_blockwise_fp4.cu.
    """
    scale = torch.div(torch.full_like(amax, E4M3.max * E2M1.max), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def tile_scales_from_amaxes(
    amax: Tensor,
    fmt: Format,
    scaling: Scaling,
    global_scale: Tensor | None,
    input_dtype: torch.dtype = torch.float32,
) -> TileScales:
    """Returns the scales of tiles with these amaxes, float32 of any shape.

    This is the only choice between the algorithms with tiles. It reads the table in
    schema/scalings.py.
    """
    if scaling.layout.scale == "e8m0":
        return mxfp8_scales(amax, fmt)
    if scaling.layout.scale == "e4m3":
        assert global_scale is not None, "NVFP4 has a global scale"
        return nvfp4_scales(amax, global_scale)
    if scaling.layout.block:
        return block_scales(amax, fmt, scaling.power_2_scales, input_dtype)
    return _float32_scales(amax, fmt, scaling.power_2_scales, FLT_MAX)  # current scaling by row


def compute_tile_scales(
    tiles: Tensor,
    fmt: Format,
    scaling: Scaling,
    global_scale: Tensor | None,
    input_dtype: torch.dtype = torch.float32,
    record: Tensor | None = None,
    group: str | None = None,
) -> TileScales:
    """Computes the scales of the tiles of a matrix, float32 [A, 1, B, 1] each.

    Args:
        tiles: The matrix as tiles [A, r, B, c], from `split_tiles`.
        fmt: Format of the elements.
        scaling: The recipe.
        global_scale: Scale of the whole tensor under NVFP4, float32 [].
        input_dtype: Dtype of the matrix before it was converted to float32.
        record: Running maximum, float32 [], that the largest amax is folded into.
        group: Name of the process group with the other shards of each tile, which is a row or a
            column.
    """
    # E8M0 and E4M3 scales can be NaN, and a tile with NaN gets such a scale. float32 scales skip it.
    keep_nan = scaling.layout.scale != "float32"
    amax = compute_tile_amax(tiles, keep_nan)
    if record is not None and amax.numel():
        record_amax(record, replace_nan(amax).amax())
    if group is not None and keep_nan:
        amax = all_reduce_max_or_nan(amax, group)
    elif group is not None:
        amax = all_reduce_max(amax, group)
    encode, decode = tile_scales_from_amaxes(amax, fmt, scaling, global_scale, input_dtype)
    return TileScales(_materialize(encode), _materialize(decode))


def _materialize(scales: Tensor) -> Tensor:
    """Writes scales [A, 1, B, 1] to memory in compiled code."""
    if not torch.compiler.is_compiling():
        return scales
    # Inductor would compute a scale again for each element of its tile. A tensor that is read by
    # stride must be in memory. The strides are constants: `scales.stride()` breaks compilation
    # under autocast.
    a, _, b, _ = scales.shape
    return scales.contiguous().as_strided((a, 1, b, 1), (b, b, 1, 1))
