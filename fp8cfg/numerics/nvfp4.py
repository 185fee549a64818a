"""NVFP4: four-bit quantization with two-level scales, Hadamard transform and stochastic rounding. Blackwell multiplies it, and
everything else emulates it.

Four bits hold eight magnitudes, and three things help them to train (NVIDIA, "Pretraining Large Language Models with NVFP4",
arXiv:2509.25149; pytorch/custom_recipes/reference_nvfp4.py of Transformer Engine 2.20):

* two levels of scales, see block_scaling.py; weights in squares of 16x16, so that forward and backward see one weight;
* a random Hadamard transform of both operands of wgrad. It mixes 16 tokens into 16 sums, which spreads an outlier; it is
  orthogonal, and (H a)ᵀ (H b) = aᵀ b takes it out again. Its signs are fixed;
* stochastic rounding of gradients, whose errors would otherwise all lean the same way.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fp8cfg.numerics.amax_group import AmaxGroup, largest_or_nan
from fp8cfg.numerics.block_scaling import amax_or_nan, first_level_of
from fp8cfg.numerics.formats import E2M1
from fp8cfg.numerics.fused_nvfp4 import fuses_four_bits, quantize_four_bits_fused
from fp8cfg.numerics.fused_quantize import amax_where_unset
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.host_copy import sent
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import Scaling, record_amax
from fp8cfg.numerics.stochastic_rounding import Random
from fp8cfg.numerics.unfused_counts import count_values


def _matrix() -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float32)
    while len(h) < 16:  # Sylvester's construction
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.tensor(SIGNS, dtype=torch.float32)[:, None] * h / 4


SIGNS = (
    1,
    1,
    1,
    -1,
    1,
    -1,
    -1,
    -1,
    -1,
    -1,
    -1,
    1,
    -1,
    1,
    -1,
    -1,
)  # Transformer Engine's, get_wgrad_sign_vector
NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
MATRIX = _matrix()


def _matrix_on(device: torch.device, dtype: torch.dtype) -> Tensor:
    """MATRIX on `device`, without a copy that the host waits for: compiled code pins no memory, and keeps none of another call."""
    if device.type != "cuda":
        return MATRIX.to(device, dtype)
    if torch.compiler.is_compiling():
        return matrix_made_on(device).to(dtype)
    apart = (
        _get_current_dispatch_mode_stack()
    )  # whose tensors may be fake, or whose operations counted
    return sent(MATRIX.to(dtype), device) if apart else _copied(device, dtype)


@functools.cache
def _copied(device: torch.device, dtype: torch.dtype) -> Tensor:
    """MATRIX on `device`, copied once a process."""
    with torch.inference_mode(False):
        return sent(MATRIX.to(dtype), device)


def matrix_made_on(device: torch.device) -> Tensor:
    """MATRIX, computed on `device`: of Sylvester's matrix the sign in row i and column j is the parity of the bits of i & j."""
    n = torch.arange(16, device=device)
    bits = n[:, None] & n
    bits = bits ^ (bits >> 2)
    bits = (bits ^ (bits >> 1) ^ (NEGATIVE >> n)[:, None]) & 1
    return (1 - 2 * bits) * 0.25


def quantize_nvfp4(
    t: Tensor,
    role: int,
    axis: int,
    scaling: Scaling,
    carrier: torch.dtype | None,
    random: tuple[Tensor, Tensor] | None = None,
    history: Tensor | None = None,
    parts: AmaxGroup | None = None,
    both: bool = False,
) -> Operand:
    """The matrix `t` [R, C] for a product over its dimension `axis`, in the orientation of `t`; R completed to a multiple of 16
    by zeros where the transform is applied. `random`, the key and the count of a layer's draws, is what a gradient is rounded by.
    Without a carrier hardware multiplies it (microscaled_mm.py): the data are a byte each, or packed where a kernel made them. The
    amax is folded into `history[0, role]`, if it is given.

    Where `t` is one of the `parts` of a tensor its first scale is that of the whole. If `both` dimensions will be contracted, one
    collective has the amaxes for both, and what contracts the first one comes too, as `Operand.other`.
    """
    group = None if parts is None else parts.over(role)
    axes = (0, 1) if group and both and axis == 1 and scaling.directional(role) else (axis,)
    forms = [hadamard(t.t()) if scaling.transforms(role, one) else t for one in axes]
    amaxes: list[Tensor | None] = [None] * len(axes)
    if group is not None:
        own = [_amax(form, carrier) for form in (forms if scaling.transforms(role, 0) else [t])]
        amaxes = [*largest_or_nan(torch.stack(own), group).unbind()] * (len(axes) // len(own))
    made = []
    for one, amax in zip(
        axes, amaxes, strict=True
    ):  # the transformed form first, which is then let go
        made.append(
            _quantized(
                forms.pop(0),
                role,
                one,
                scaling,
                carrier,
                random,
                history if one == axis else None,
                amax,
            )
        )
    return made[0] if len(axes) == 1 else made[1]._replace(other=made[0].t())


def _quantized(
    form: Tensor,
    role: int,
    axis: int,
    scaling: Scaling,
    carrier: torch.dtype | None,
    random: tuple[Tensor, Tensor] | None,
    history: Tensor | None,
    amax: Tensor | None,
) -> Operand:
    """The matrix that a product over dimension `axis` reads, transformed or not, with a first scale of `amax`, float32 [], where
    that is given, and of its own else."""
    draw = Random(*random, lane=axis) if random and scaling.rounds_at_random(role) else None
    mixes = scaling.transforms(role, axis)
    tile = (1, 16) if mixes else scaling.tile(role, axis)
    assert tile is not None
    if fuses_four_bits(form, carrier) and tile[1] == 16:
        made = quantize_four_bits_fused(form, tile[0] == 16, draw, history, role, amax)
    else:
        amax = amax_or_nan(form) if amax is None else amax
        if history is not None:
            record_amax(history[0, role], amax)
            count_values(form, role, history[0, role], None, scaling.format_of(role))
        made = quantize_tiles(
            form,
            tile,
            scaling.format_of(role),
            scaling,
            carrier or E2M1.dtype,
            first_level_of(amax),
            draw,
        )
    return made.t() if mixes else made


def _amax(form: Tensor, carrier: torch.dtype | None) -> Tensor:
    """`amax_or_nan`, by a kernel where one quantizes."""
    fuses = fuses_four_bits(form, carrier)
    amax: Tensor = (
        amax_where_unset(form.contiguous(), None, 0, keep_nan=True)[0]
        if fuses
        else amax_or_nan(form)
    )
    return amax


def hadamard(t: Tensor) -> Tensor:
    """Each 16 neighbours in a row of `t` [R, C] times diag(SIGNS) H16 / 4, in the dtype of `t`; C completed with zeros."""
    missing = -t.shape[1] % 16
    t = (F.pad(t, (0, missing)) if missing else t).contiguous()
    return (t.view(-1, 16) @ _matrix_on(t.device, t.dtype)).view(t.shape)
