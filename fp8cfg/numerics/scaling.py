"""Per-tensor scaling, delayed and current: a scale from the amax of a tensor or its history. block_scaling.py scales by tiles.

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
from typing import Literal

import torch
from torch import Tensor

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.formats import E4M3, E5M2, Format
from fp8cfg.scalings import SCALINGS, Descriptor, ScalingName

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
    squares, 128x128 under block, 32x32 under mxfp8, 16x16 under nvfp4, which serve fprop and dgrad alike. `hadamard` and
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

    def multiplied(self, high_precision: tuple[bool, bool, bool]) -> bool:
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

    def transforms(self, role: int, axis: int) -> bool:
        """Whether a tensor of `role` goes through the Hadamard transform for a product that contracts its dimension `axis`."""
        return (
            self.hadamard
            and role != WEIGHT
            and axis == 0
            and "random_hadamard_transform" in self.layout.keys
        )

    def rounds_at_random(self, role: int) -> bool:
        """Whether a tensor of `role` is rounded stochastically."""
        return self.stochastic and role == GRAD_OUTPUT and "stochastic_rounding" in self.layout.keys

    def directional(self, role: int) -> bool:
        """Whether a tensor of `role` is quantized once for each of its two dimensions."""
        return self.tile(role, 0) != self.tile(role, 1)


def amax_of(t: Tensor) -> Tensor:
    """Largest magnitude in `t`, any shape and float dtype, as a float32 scalar tensor. NaN is skipped, infinity is not;
    0 for an empty tensor. One pass over `t`; no synchronisation on an accelerator."""
    t = t.detach()
    if t.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=t.device)
    if (
        torch.compiler.is_compiling()
    ):  # a comparison with NaN is false; unlike isnan() it vectorises
        a = t.abs()
        return torch.where(a >= 0, a, 0).amax().float()
    if t.device.type == "cpu":  # ten times faster than abs().amax(), but NaN wins in it
        low, high = torch.aminmax(t)
        amax = torch.maximum(high, -low).float()
        if not amax.isnan():
            return amax
    clean = t.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return clean.abs().amax().float()


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


def roll(
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


def range_used(amax_now: Tensor, scale: Tensor, reach: Tensor) -> Tensor:
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


def scale_now(
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
        amax = amax_of(t)
        if record and history is not None:
            record_amax(history[0, role], amax)
        return scales_of(amax if parts is None else parts.amax(amax, role), role, scaling)
    if not record and scaling.first_step == "te":
        return scales[role]
    amax = amax_of(t)
    if record and history is not None:
        record_amax(history[0, role], amax)
    if scaling.first_step == "te":
        return scales[role]
    return scales_of(amax if parts is None else parts.amax(amax, role), role, scaling, scales[role])


def scales_of(amaxes: Tensor, role: int, scaling: Scaling, there: Tensor | None = None) -> Tensor:
    """The scales of tensors of one `role` with these amaxes, float32 of any shape: under delayed scaling those that are `there`,
    where they are not 0, else those of this moment."""
    fmt = scaling.format_of(role)
    if there is not None:
        return torch.where(there == 0, scale_from_amax(amaxes, fmt, scaling.margin), there)
    scale = scale_from_amax(amaxes, fmt)
    return floor_to_power_of_2(scale) if scaling.power_2_scales else scale
