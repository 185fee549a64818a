"""Per-tensor scaling, delayed and current: a scale from the amax of a tensor or its history. Then scales of tiles.

The scale of a tensor maps its amax, the largest magnitude in it, to the largest FP8 value: scale = max / amax / 2^margin,
where a margin of m leaves m powers of two of headroom. Transformer Engine's rule (common/recipe/recipe_common.cuh,
compute_scale_from_amax; common/recipe/delayed_scaling.cu), kept here to the bit:

* the division is a true IEEE one. `448.0 / tensor` in eager torch is not: it multiplies by a reciprocal, one unit in the
  last place off in a quarter of all cases. Both operands are tensors here;
* an infinite scale (the amax is tiny) becomes the largest float32;
* an amax of zero, infinity or NaN says nothing about the next tensor: the old scale stays;
* amax ignores NaN, as fmaxf does. Looking for non-finite values is somebody else's work, on the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics.async_copies import waited
from fp8cfg.numerics.formats import E2M1, E4M3, E5M2, Format, cast, reciprocal
from fp8cfg.schema.scalings import SCALINGS, Descriptor, ScalingName, Tile


class AmaxGroup(NamedTuple):
    """The tensors of a layer that are split, each as its role (INPUT, WEIGHT, GRAD_OUTPUT) and the dimension of the matrix that the
    ranks divide, and the name of the process group that has their parts. Static, so that a compiler specialises on it.
    """

    split: tuple[tuple[int, int], ...]
    group: str

    @property
    def roles(self) -> tuple[int, ...]:
        """The roles of the tensors that are split."""
        return tuple(role for role, _ in self.split)

    def group_of(self, role: int, tile: Tile | None = None) -> str | None:
        """The group whose ranks have parts of one `tile` of a tensor of `role`, rows and columns of which 0 stands for all; None is
        the whole tensor. None where each rank has whole tiles."""
        return next(
            (
                self.group
                for one, dim in self.split
                if one == role and (tile is None or tile[dim] == 0)
            ),
            None,
        )

    def reduce(self, part: Tensor, role: int) -> Tensor:
        """The amax of a tensor of `role` from that of this rank's `part`. All ranks call it at the same points."""
        return all_reduce_max(part, self.group) if self.group_of(role) else part

    def exclude(self, roles: tuple[int, ...]) -> AmaxGroup | None:
        """The group for tensors of other roles, if there are any."""
        left = tuple(one for one in self.split if one[0] not in roles)
        return AmaxGroup(left, self.group) if left else None


def all_reduce_max(t: Tensor, group: Any) -> Tensor:
    """The elementwise maximum over the ranks of the process group of that name; a new tensor, without a gradient."""
    return waited(collectives.all_reduce, t.detach(), "max", group=group)


def all_reduce_max_or_nan(t: Tensor, group: Any) -> Tensor:
    """`largest` of float32 numbers that are not negative, NaN where a rank has NaN: by their bits, since a maximum of floats may
    leave NaN out."""
    return all_reduce_max(t.detach().view(torch.int32), group).view(torch.float32)


INPUT, WEIGHT, GRAD_OUTPUT = (
    0,
    1,
    2,
)  # columns of a layer's scales and amax history, in Transformer Engine's order
FLT_MAX = torch.finfo(torch.float32).max


_FIELDS = {
    "kind": tuple(SCALINGS),
    "granularity": ("tensor", "row"),
    "amax_compute_algo": ("max", "most_recent"),
    "first_step": ("in_time", "te"),
}


@dataclass(frozen=True)
class Scaling:
    """The scaling recipe of one linear layer.

    `margin`, `interval`, `amax_history_len`, `amax_compute_algo` and `first_step` mean something under delayed scaling alone.
    `interval` moves scales every that many optimizer steps. `first_step` says what scales a tensor before its history has
    anything to say: its own amax ("in_time"), or 1 ("te"), with which Transformer Engine flushes small first gradients to
    zero. "te" also saves compiled code a second read of each tensor, since the amax is then only recorded.

    `granularity` is for current scaling: one scale a tensor, or one for each row along the contracted dimension. With
    `power_2_scales` scales of current and block scaling are rounded down to a power of two. `weights_2d` scales weights in
    squares, 128x128 under block, 32x32 under mxfp8, 16x16 under nvfp4, which serve fprop and dgrad alike. `hadamard_transform` and
    `stochastic` are nvfp4's transform of both operands of wgrad and its rounding of gradients."""

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
        for field, allowed in _FIELDS.items():
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"Scaling.{field}={getattr(self, field)!r}; choose one of {', '.join(allowed)}"
                )
        if self.interval < 1 or self.amax_history_len < 1:
            raise ValueError(
                f"Scaling: interval={self.interval} and amax_history_len={self.amax_history_len}"
                " must be at least 1"
            )

    @property
    def layout(self) -> Descriptor:
        """The descriptor of this scaling in the table of scalings."""
        return SCALINGS[self.kind]

    def has_hardware_gemms(self, high_precision: tuple[bool, bool, bool]) -> bool:
        """Whether torch has these products on a GPU, where those of `high_precision` are not in FP8."""
        return (
            all(high_precision[1:])
            or ("e4m3" if self.backward == self.forward else "hybrid") in self.layout.multiplied
        )

    def format_of(self, role: int) -> Format:
        return self.backward if role == GRAD_OUTPUT else self.forward

    def tile(self, role: int, axis: int) -> tuple[int, int] | None:
        """Rows and columns of a matrix that share a scale, where the product contracts its dimension `axis`; 0 stands for
        all. None is one scale for the matrix, whatever is contracted."""
        return self.layout.tile(axis, self.granularity, square=role == WEIGHT and self.weights_2d)

    def fresh_state(self, roles: int = 3, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Scales [roles] and amax history of delayed scaling before the first pass: a scale of 0 stands for "not set yet".
        Nothing of any other scaling."""
        if not self.layout.history:
            return {}
        first = torch.ones if self.first_step == "te" else torch.zeros
        history = torch.zeros(self.amax_history_len, roles, dtype=torch.float32, device=device)
        return {
            "fp8_scale": first(roles, dtype=torch.float32, device=device),
            "fp8_amax_history": history,
        }

    def uses_hadamard(self, role: int, axis: int) -> bool:
        """Whether a tensor of `role` goes through the Hadamard transform for a product that contracts its dimension `axis`."""
        return (
            self.hadamard
            and role != WEIGHT
            and axis == 0
            and "random_hadamard_transform" in self.layout.keys
        )

    def rounds_stochastically(self, role: int) -> bool:
        """Whether a tensor of `role` is rounded stochastically."""
        return self.stochastic and role == GRAD_OUTPUT and "stochastic_rounding" in self.layout.keys

    def directional(self, role: int) -> bool:
        """Whether a tensor of `role` is quantized once for each of its two dimensions."""
        return self.tile(role, 0) != self.tile(role, 1)


def compute_amax(t: Tensor) -> Tensor:
    """Largest magnitude in `t`, any shape and float dtype, as a float32 scalar tensor. NaN is skipped, infinity is not;
    0 for an empty tensor. One pass over `t`; no synchronisation on an accelerator."""
    t = t.detach()
    if t.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=t.device)
    return replace_nan(t.abs()).amax().float()


def replace_nan(magnitudes: Tensor) -> Tensor:
    """Replaces NaN by 0 in a tensor without negative numbers."""
    return torch.where(magnitudes >= 0, magnitudes, 0)  # a comparison with NaN is false


def scale_from_amax(
    amax: Tensor, fmt: Format, margin: int = 0, old: Tensor | float = 1.0, largest: float = FLT_MAX
) -> Tensor:
    """Scales, float32 and of the shape of `amax`, which bring `amax` to `fmt.max` / 2^margin; `largest` where that is
    infinite, `old` where amax is 0, infinite or NaN. With `old` = 1 this is current scaling, and a delayed scale that has no
    history yet."""
    return _scale(amax, torch.full_like(amax, fmt.max * 2.0**-margin), old, largest)


def _scale(amax: Tensor, target: Tensor, old: Tensor | float, largest: float = FLT_MAX) -> Tensor:
    scale = torch.div(target, amax)
    scale = torch.where(
        scale == torch.inf, largest, scale
    )  # neither is negative; comparisons take fewer launches than isinf
    return torch.where((amax > 0) & (amax < torch.inf), scale, old)


def floor_to_power_of_2(scale: Tensor) -> Tensor:
    """Positive normal float32 `scale`, any shape, without its mantissa: the power of two at or below it."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def roll_amax_history(
    history: Tensor, scale: Tensor, amax_now: Tensor, target: Tensor, algo: str
) -> tuple[Tensor, Tensor]:
    """One update of delayed scaling for any number of tensors: `history` [length, ...], the others [...], all float32.

    Row 0 of a history gathers the amax of the step under way, `amax_now` is that row reduced over the ranks, and the rows
    from 1 on are the past, oldest first. `target` is the FP8 maximum / 2^margin of each tensor. Returns the new history and
    scales. This is the fused kernel of Transformer Engine, the one that runs on GPUs (delayed_scaling.cu, kernel_bulk): a
    tensor that saw nothing (amax 0) neither rolls nor moves; under "max" an infinite amax freezes the scale for as long as
    it stays in the window; NaN loses against every number, as in fmaxf."""
    last = torch.where(amax_now != 0, amax_now, history[0])
    amax = (
        last
        if algo == "most_recent"
        else torch.cat([history[1:], last[None]]).fmax(torch.zeros_like(last)).amax(0)
    )
    rolled = torch.cat([torch.zeros_like(last)[None], history[2:], last[None]])[: len(history)]
    seen = last != 0
    return torch.where(seen, rolled, history), torch.where(seen, _scale(amax, target, scale), scale)


def compute_range_used(amax_now: Tensor, scale: Tensor, reach: Tensor) -> Tensor:
    """Amaxes of a step as multiples of what the formats reach under the scales that it had, float32 and broadcast: values beyond 1
    were clipped. Infinite for an infinite amax; 0 for a scale of 0, which was not set yet: each tensor had its own then.
    """
    return torch.where(amax_now == torch.inf, amax_now, amax_now * scale / reach)


def record_amax(record: Tensor, amax: Tensor) -> None:
    """Fold `amax`, [], into the running maximum `record`, []: one launch, and no copy where none is traced. NaN is left out."""
    if torch.compiler.is_compiling():
        record.copy_(torch.fmax(record, amax))
    else:
        torch.fmax(record, amax, out=record)


def choose_tensor_scale(
    t: Tensor,
    role: int,
    scaling: Scaling,
    scales: Tensor | None,
    history: Tensor | None,
    record: bool,
    parts: AmaxGroup | None = None,
) -> Tensor:
    """The float32 scalar scale to quantize `t` with in this pass.

    Under delayed scaling that is `scales[role]`; a scale of 0 was never set. Under current scaling `scales`, [3], is None. `record`
    folds the amax of `t` into the running maximum `history[0, role]` of `history` [length, 3], if there is one. Where `t`
    is one of the `parts` of a tensor, a scale of its amax is that of the whole; amaxes that are recorded are those of the part, for
    `update_scales` reduces them."""
    if scales is None:
        amax = compute_amax(t)
        if record and history is not None:
            record_amax(history[0, role], amax)
        return scales_from_amaxes(
            amax if parts is None else parts.reduce(amax, role), role, scaling
        )
    if not record and scaling.first_step == "te":
        return scales[role]
    amax = compute_amax(t)
    if record and history is not None:
        record_amax(history[0, role], amax)
    if scaling.first_step == "te":
        return scales[role]
    return scales_from_amaxes(
        amax if parts is None else parts.reduce(amax, role), role, scaling, scales[role]
    )


def scales_from_amaxes(
    amaxes: Tensor, role: int, scaling: Scaling, there: Tensor | None = None
) -> Tensor:
    """The scales of tensors of one `role` with these amaxes, float32 of any shape: under delayed scaling those that are `there`,
    where they are not 0, else those of this moment."""
    fmt = scaling.format_of(role)
    if there is not None:
        return torch.where(there == 0, scale_from_amax(amaxes, fmt, scaling.margin), there)
    scale = scale_from_amax(amaxes, fmt)
    return floor_to_power_of_2(scale) if scaling.power_2_scales else scale


class TileScales(NamedTuple):
    """The scales of the tiles of a matrix, float32: `encode` multiplies the elements before rounding, `decode` dequantizes the
    rounded ones.
    """

    encode: Tensor
    decode: Tensor


def split_tiles(t: Tensor, tile: Tile) -> Tensor:
    """The matrix `t` [R, C] as [R / r, r, C / c, c] for tiles of r x c, completed with zeros; a view where none are missing.
    A size of 0 is the whole dimension."""
    (rows, columns), (r, c) = t.shape, tile_shape(t.shape, tile)
    if rows % r or columns % c:
        t = F.pad(t, (0, -columns % c, 0, -rows % r))
        if torch.compiler.is_compiling():  # written out; see `join_tiles`
            t = t.as_strided(t.shape, (t.shape[1], 1))
    return t.view(t.shape[0] // r, r, t.shape[1] // c, c)


def tile_shape(shape: tuple[int, ...], tile: Tile) -> Tile:
    """Rows and columns of a tile of a matrix of `shape`."""
    return tile[0] or max(1, shape[0]), tile[1] or max(1, shape[1])


def join_tiles(v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tiled`, contiguous."""
    a, r, b, c = v.shape
    # What is read by stride has to be in memory. Fused with what is around it, Inductor's C++ of incomplete tiles leaves elements
    # unwritten. Seen with torch 2.13; it ends with the torch that passes the test of few columns without it.
    if torch.compiler.is_compiling() and shape != (a * r, b * c):
        return v.contiguous().as_strided(shape, (b * c, 1))
    return v.reshape(a * r, b * c)[: shape[0], : shape[1]].contiguous()


def expand_scales(scales: Tensor, shape: tuple[int, ...], tile: Tile) -> Tensor:
    """Scales [R / r, C / c] of the tiles of a matrix of `shape` [R, C], one for each of its elements."""
    r, c = tile_shape(shape, tile)
    return scales.repeat_interleave(r, 0)[: shape[0]].repeat_interleave(c, 1)[:, : shape[1]]


def compute_tile_amax(v: Tensor, keep_nan: bool) -> Tensor:
    """Largest magnitude in each tile of `v` [A, r, B, c], float32 [A, 1, B, 1]. NaN is kept, or else skipped as in fmaxf."""
    magnitudes = v.float().abs()
    if not keep_nan:
        magnitudes = replace_nan(magnitudes)
    return magnitudes.amax((1, 3), keepdim=True)


def compute_tile_scales(
    v: Tensor,
    fmt: Format,
    scaling: Scaling,
    whole: Tensor | None,
    dtype: torch.dtype = torch.float32,
    record: Tensor | None = None,
    group: str | None = None,
) -> TileScales:
    """The scales of the tiles of `v` [A, r, B, c] under `scaling`, [A, 1, B, 1]. `whole` is the first level of nvfp4, `dtype`
    what `v` was before it was float32: block scales go no higher than its largest number. The largest amax of all tiles is folded
    into the running maximum `record`, [], if there is one. Of tiles, rows or columns, whose other parts ranks of `group` have,
    amaxes are the largest over these.
    """
    keep_nan = scaling.layout.scale != "float32"
    amax = compute_tile_amax(v, keep_nan)
    if record is not None and amax.numel():
        record_amax(record, replace_nan(amax).amax())
    if group is not None:
        amax = (all_reduce_max_or_nan if keep_nan else all_reduce_max)(amax, group)
    return TileScales(
        *(_written_out(s) for s in tile_scales_from_amaxes(amax, fmt, scaling, whole, dtype))
    )


def _written_out(scales: Tensor) -> Tensor:
    """`scales` itself. A compiler would work a scale out again for each element that it scales, bit by bit; what is read by
    stride has to be in memory."""
    if not torch.compiler.is_compiling():
        return scales
    a, _, b, _ = (
        scales.shape
    )  # strides written out: those of `scales` upset the compiler under autocast
    return scales.contiguous().as_strided((a, 1, b, 1), (b, b, 1, 1))


def tile_scales_from_amaxes(
    amax: Tensor,
    fmt: Format,
    scaling: Scaling,
    whole: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> TileScales:
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
    return TileScales(scale, reciprocal(scale))


def _e8m0(amax: Tensor, fmt: Format) -> TileScales:
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
    return TileScales(
        torch.where(broken, torch.nan, encode), torch.where(broken, torch.nan, decode)
    )


def encode_e8m0(decode: Tensor) -> Tensor:
    """Float32 powers of two from 2^-127 on as E8M0, bytes: the exponent's bits. NaN has all of them."""
    return (decode.view(torch.int32) >> 23).to(torch.uint8)


def compute_global_scale(t: Tensor, group: str | None = None) -> Tensor:
    """nvfp4's scale of a whole tensor, a float32 scalar: it brings the largest E4M3 scale of a tile to 448. Where ranks of `group`
    have other parts of the tensor, the scale is that of the largest over these."""
    amax = compute_amax_or_nan(t)
    return global_scale_from_amax(amax if group is None else all_reduce_max_or_nan(amax, group))


def compute_amax_or_nan(t: Tensor) -> Tensor:
    """Largest magnitude in `t`, any shape, NaN where it has a NaN, float32 []; 0 of no elements."""
    t = t.detach()
    if t.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=t.device)
    low, high = torch.aminmax(t)  # makes no copy of `t`, as abs() does
    return torch.maximum(high, -low).float()


def global_scale_from_amax(amax: Tensor) -> Tensor:
    """That of a tensor of the amax [], float32."""
    scale = torch.div(torch.full_like(amax, E4M3.max * E2M1.max), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def _two_levels(amax: Tensor, whole: Tensor) -> TileScales:
    """E4M3 scales that decode with `whole`'s reciprocal, which stays outside of the product."""
    sixth = reciprocal(torch.full((), 6.0, dtype=torch.float32, device=amax.device))
    decode = cast((amax * (whole * sixth)).clamp(max=FLT_MAX), E4M3).float()
    encode = reciprocal(decode * reciprocal(whole)).clamp(max=FLT_MAX)
    return TileScales(encode, decode)
