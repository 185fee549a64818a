"""Bytes of Transformer Engine's quantizers beside those of fp8cfg: of its kernels on a GPU, of plain torch code on a CPU.

NVFP4 is compared as Transformer Engine's own test of its kernels does, rounded to nearest and not transformed: its random numbers
are others, and its transform is fused with the quantization, where fp8cfg rounds it to the tensor's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8cfg.backends.te.rules import HAS
from fp8cfg.numerics import E2M1, E4M3, E5M2, Format, Scaling, compute_amax, compute_scale
from fp8cfg.numerics.gemm import hardware_layout, swizzle_scales
from fp8cfg.numerics.scaling import INPUT, WEIGHT, encode_e8m0
from tools.gpu_rows.byte_counts import ByteCounts
from tools.gpu_rows.kernel_bits import by_kernels, plainly


def te_bits(scaling: str, device: str = "cuda") -> ByteCounts:
    """Bytes of both under the scaling of that name, in E4M3 and in E5M2, of NVFP4 in E2M1."""
    counts = ByteCounts()
    for x in matrices(device):
        for fmt in (E2M1,) if scaling == "nvfp4" else (E4M3, E5M2):
            SCALINGS[scaling](
                counts, x, fmt, f"{x.dtype} of amax {compute_amax(x).item():.3g} in {fmt.name}"
            )
    return counts


def matrices(device: str) -> list[Tensor]:
    """Like activations; over many magnitudes, with a block of zeros; and so small that some scales leave float32."""
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(512, 768, device=device, generator=g)
    spread = x * torch.exp(4 * torch.randn(x.shape, device=device, generator=g))
    spread[:128, :128] = 0
    return [
        t.to(dtype)
        for t in (x, spread, spread * 1e-20)
        for dtype in (torch.bfloat16, torch.float32)
    ]


def _library(fmt: Format) -> tuple[Any, Any]:
    import transformer_engine.pytorch as te

    return te, getattr(te.DType, f"kFloat8{fmt.name.upper()}")


def _delayed(counts: ByteCounts, x: Tensor, fmt: Format, where: str) -> None:
    te, kind = _library(fmt)
    scales = (compute_scale(compute_amax(x), fmt.max) * 1.5).repeat(
        3
    )  # some saturate, as under a scale of the past
    amax, history = torch.zeros(1, device=x.device), torch.zeros(1, 3, device=x.device)
    theirs = te.Float8Quantizer(scales[:1].clone(), amax, kind)(x)
    _one_scale(counts, x, Scaling(forward=fmt), theirs, where, scales, history)
    counts.compare("amaxes", history[0, :1], amax, where)


def _current(counts: ByteCounts, x: Tensor, fmt: Format, where: str) -> None:
    te, kind = _library(fmt)
    _one_scale(
        counts,
        x,
        Scaling("current", forward=fmt),
        te.Float8CurrentScalingQuantizer(kind, x.device)(x),
        where,
    )


def _one_scale(
    counts: ByteCounts, x: Tensor, scaling: Scaling, theirs: Any, where: str, *state: Tensor
) -> None:
    ours = _made(x, INPUT, scaling, *state)
    counts.compare("data", ours.data.view(torch.uint8), theirs._data, where)
    counts.compare("scales", ours.scale_inv.view(1), theirs._scale_inv.view(1), where)
    if theirs._transpose is not None:  # Blackwell needs none
        counts.compare("transposes", ours.t().data.view(torch.uint8), theirs._transpose, where)


def _block(counts: ByteCounts, x: Tensor, fmt: Format, where: str) -> None:
    te, kind = _library(fmt)
    (r, c), bytes_ = x.shape, torch.uint8
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)
    for power_2 in (True,) if HAS["block"].multiplied_as_mxfp8(capability) else (True, False):
        scaling = Scaling("block", forward=fmt, power_2_scales=power_2, weights_2d=True)
        lines, squares = (
            te.Float8BlockQuantizer(
                kind, rowwise=True, columnwise=True, force_pow_2_scales=power_2, block_scaling_dim=d
            )(x)
            for d in (1, 2)
        )
        made, tiles = _made(x, INPUT, scaling), _made(x, WEIGHT, scaling)
        counts.compare("data", made.data.view(bytes_), lines._rowwise_data, where)
        counts.compare("scales", made.scale_inv.t(), lines._rowwise_scale_inv[:, :r], where)
        counts.compare("transposes", made.t().data.view(bytes_), lines._columnwise_data, where)
        counts.compare("scales", made.t().scale_inv.t(), lines._columnwise_scale_inv[:, :c], where)
        counts.compare("data", tiles.data.view(bytes_), squares._rowwise_data, f"{where}, 128x128")
        counts.compare(
            "scales",
            tiles.scale_inv,
            squares._rowwise_scale_inv[:, : c // 128],
            f"{where}, 128x128",
        )


def _mxfp8(counts: ByteCounts, x: Tensor, fmt: Format, where: str) -> None:
    te, kind = _library(fmt)
    theirs, made = (
        te.MXFP8Quantizer(kind, rowwise=True, columnwise=True)(x),
        _made(x, INPUT, Scaling("mxfp8", forward=fmt)),
    )
    counts.compare("data", made.data.view(torch.uint8), theirs._rowwise_data, where)
    _e8m0(counts, made.scale_inv, theirs._rowwise_scale_inv, where)
    counts.compare(
        "transposes", made.t().data.t().view(torch.uint8), theirs._columnwise_data, where
    )
    _e8m0(counts, made.t().scale_inv, theirs._columnwise_scale_inv.t(), where)


def _nvfp4(counts: ByteCounts, x: Tensor, fmt: Format, where: str) -> None:
    import transformer_engine.pytorch as te

    for square in (False, True):
        scaling = Scaling(
            "nvfp4", forward=fmt, backward=fmt, weights_2d=True, hadamard=False, stochastic=False
        )
        theirs = te.NVFP4Quantizer(rowwise=True, columnwise=True, with_2d_quantization=square)(x)
        role, at, history = (
            WEIGHT if square else INPUT,
            f"{where}{', 16x16' * square}",
            torch.zeros(1, 3, device=x.device),
        )
        made = _made(x, role, scaling, None, history)
        across = made.t() if square else _made(x.t().contiguous(), role, scaling)
        for what, ours, data, scale_inv in (
            ("data", made, theirs._rowwise_data, theirs._rowwise_scale_inv),
            ("transposes", across, theirs._columnwise_data, theirs._columnwise_scale_inv),
        ):
            codes, scales = hardware_layout(ours)
            counts.compare(what, codes, data, at)
            counts.compare(
                "scales", scales, swizzle_scales(scale_inv.view(torch.uint8).contiguous()), at
            )
        counts.compare("amaxes", history[0, role : role + 1], theirs._amax_rowwise, at)


def _e8m0(counts: ByteCounts, ours: Tensor, theirs: Tensor, where: str) -> None:
    """Scales of MX, those of kernels as products read them."""
    kernels = ours.dim() == 1
    counts.compare(
        "scales",
        ours if kernels else encode_e8m0(ours),
        swizzle_scales(theirs.contiguous()) if kernels else theirs,
        where,
    )


def _made(x: Tensor, *how: Any) -> Any:
    return (by_kernels if x.is_cuda else plainly)(x, *how)


SCALINGS = {
    "delayed": _delayed,
    "current": _current,
    "block": _block,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
