"""Quantization of a matrix to an operand: scale, round, and carry.

Always from float32: rounding to bfloat16 before FP8 changes 3 in 100 values.
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
    split_tiles,
)
from fp8cfg.numerics.async_copies import sent
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

    Inductor fuses loops that share no data into one C++ kernel ("horizontal fusion"). With MXFP8 it then ends in an assertion
    (try_loop_split), and quantization written in another way came out as NaN under row and block scaling. Seen with torch 2.13.
    tools/inductor_fusion.py shows it; this function goes with the first torch for which that script reports equal gradients.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        # Inductor reads it when it is imported, which takes seconds.
        os.environ.setdefault("TORCHINDUCTOR_CPP_MAX_HORIZONTAL_FUSION_SIZE", "1")
    else:
        config.cpp.max_horizontal_fusion_size = 1


limit_horizontal_fusion()


def quantize(t: Tensor, scale: Tensor, fmt: Format, carrier: torch.dtype) -> Operand:
    """Multiplies the matrix `t`, read as float32, by the scalar `scale` and rounds it to FP8, once. `carrier` is the dtype of
    the data: `fmt.dtype` for a real product, bfloat16 or float32 for an emulated one."""
    data = round_to_format(t.float() * scale, fmt, carrier)
    return Operand(data, reciprocal(scale), fmt)


def quantize_tiles(
    t: Tensor,
    tile: Tile,
    fmt: Format,
    scaling: Scaling,
    carrier: torch.dtype,
    whole: Tensor | None = None,
    random: RandomStream | None = None,
    record: Tensor | None = None,
    group: str | None = None,
) -> Operand:
    """Quantizes the matrix `t` [R, C] with a scale for each tile. `whole` is nvfp4's scale of the whole tensor. Scales of a
    carried operand that vary along the contracted dimension are multiplied into its data. With `random` the format rounds
    stochastically, by numbers that depend on the place of an element in `t` alone, not on strides. The largest amax of
    all tiles is folded into the running maximum `record`, [], if there is one. Ranks of `group` have the other parts of each tile,
    a row or a column, if it is given."""
    v = split_tiles(t, tile).float()
    encode, decode = compute_tile_scales(v, fmt, scaling, whole, t.dtype, record, group)
    uniform = None
    if random is not None:
        uniform = random.uniform(0, v.numel()).view(v.shape)
    data = round_to_format(v * encode, fmt, carrier, uniform)
    global_scale_inv = None if whole is None else reciprocal(whole)
    if carrier != fmt.dtype and scaling.layout.block > 0:
        data = data * decode.to(carrier)
        return Operand(join_tiles(data, t.shape), global_scale_inv, fmt, tile)
    return Operand(
        join_tiles(data, t.shape), decode[:, 0, :, 0], fmt, tile, global_scale_inv=global_scale_inv
    )


def count_out_of_range(
    t: Tensor, role: int, amax: Tensor, scale: Tensor | None, fmt: Format
) -> None:
    """Count what of `t`, any shape and float dtype, does not fit into `fmt` under `scale`, float32 [], or is infinite. No value of
    `t` is larger than `amax`, float32 [], in which a layer recorded it. Without a `scale` finite values fit. No kernel quantizes
    `t`, which would count it too."""
    if t.is_cuda or torch.compiler.is_compiling():
        count_overflow(t, amax, scale, role, fmt.reach)
    elif t.device.type == "cpu":
        _read_again(t, amax, scale, role, fmt.reach)


@library.custom_op("fp8cfg::count_overflow", mutates_args=("amax",), tags=NO_CUDA_GRAPH)
def count_overflow(t: Tensor, amax: Tensor, scale: Tensor | None, role: int, reach: float) -> None:
    """`count_out_of_range` on a GPU, and to a compiler. The `amax` is not written: that it might be keeps the call in a graph, behind
    what records the amax, and apart from those of other layers that read `t`."""
    if not t.is_cuda:
        _read_again(t, amax, scale, role, reach)
    elif HAS_TRITON and t.numel():
        from fp8cfg.numerics.kernels import tensor

        densest_last = sorted(
            range(t.dim()), key=t.stride, reverse=True
        )  # elements are counted in any order
        tensor.count(
            t.permute(densest_last).contiguous(),
            amax,
            scale,
            overflow_counter(t.device, role),
            reach,
        )


def _read_again(t: Tensor, amax: Tensor, scale: Tensor | None, role: int, reach: float) -> None:
    most = amax.item()
    if most < torch.inf and (scale is None or most * scale.item() <= reach):
        return
    a = t.detach().abs()
    infinite = (a == torch.inf).sum()
    beyond = infinite if scale is None else (a.float() * scale > reach).sum()
    overflow_counter(t.device, role)[:2] += torch.stack([beyond - infinite, infinite])


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
HADAMARD_MATRIX = _matrix()


def _matrix_on(device: torch.device, dtype: torch.dtype) -> Tensor:
    """MATRIX on `device`, without a copy that the host waits for: compiled code pins no memory, and keeps none of another call."""
    if device.type != "cuda":
        return HADAMARD_MATRIX.to(device, dtype)
    if torch.compiler.is_compiling():
        return build_hadamard_matrix(device).to(dtype)
    apart = (
        _get_current_dispatch_mode_stack()
    )  # whose tensors may be fake, or whose operations counted
    return sent(HADAMARD_MATRIX.to(dtype), device) if apart else _copied(device, dtype)


@functools.cache
def _copied(device: torch.device, dtype: torch.dtype) -> Tensor:
    """MATRIX on `device`, copied once a process."""
    with torch.inference_mode(False):
        return sent(HADAMARD_MATRIX.to(dtype), device)


def build_hadamard_matrix(device: torch.device) -> Tensor:
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
    Without a carrier hardware multiplies it (gemm.py): the data are a byte each, or packed where a kernel made them. The
    amax is folded into `history[0, role]`, if it is given.

    Where `t` is one of the `parts` of a tensor its first scale is that of the whole. If `both` dimensions will be contracted, one
    collective has the amaxes for both, and what contracts the first one comes too, as `Operand.columnwise`.
    """
    group = None if parts is None else parts.group_of(role)
    axes = (0, 1) if group and both and axis == 1 and scaling.directional(role) else (axis,)
    forms = [hadamard_transform(t.t()) if scaling.uses_hadamard(role, one) else t for one in axes]
    amaxes: list[Tensor | None] = [None] * len(axes)
    if group is not None:
        own = [_amax(form, carrier) for form in (forms if scaling.uses_hadamard(role, 0) else [t])]
        amaxes = [*all_reduce_max_or_nan(torch.stack(own), group).unbind()] * (
            len(axes) // len(own)
        )
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
    return made[0] if len(axes) == 1 else made[1]._replace(columnwise=made[0].t())


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
    draw = (
        RandomStream(*random, lane=axis) if random and scaling.rounds_stochastically(role) else None
    )
    mixes = scaling.uses_hadamard(role, axis)
    tile = (1, 16) if mixes else scaling.tile(role, axis)
    assert tile is not None
    if can_fuse_nvfp4(form, carrier) and tile[1] == 16:
        made = quantize_nvfp4_fused(form, tile[0] == 16, draw, history, role, amax)
    else:
        amax = compute_amax_or_nan(form) if amax is None else amax
        if history is not None:
            record_amax(history[0, role], amax)
            count_out_of_range(form, role, history[0, role], None, scaling.format_of(role))
        made = quantize_tiles(
            form,
            tile,
            scaling.format_of(role),
            scaling,
            carrier or E2M1.dtype,
            global_scale_from_amax(amax),
            draw,
        )
    return made.t() if mixes else made


def _amax(form: Tensor, carrier: torch.dtype | None) -> Tensor:
    """`compute_amax_or_nan`, by a kernel where one quantizes."""
    fuses = can_fuse_nvfp4(form, carrier)
    amax: Tensor = (
        compute_amax_if_unset(form.contiguous(), None, 0, keep_nan=True)[0]
        if fuses
        else compute_amax_or_nan(form)
    )
    return amax


def hadamard_transform(t: Tensor) -> Tensor:
    """Each 16 neighbours in a row of `t` [R, C] times diag(SIGNS) H16 / 4, in the dtype of `t`; C completed with zeros."""
    missing = -t.shape[1] % 16
    t = (F.pad(t, (0, missing)) if missing else t).contiguous()
    return (t.view(-1, 16) @ _matrix_on(t.device, t.dtype)).view(t.shape)
