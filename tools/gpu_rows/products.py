"""Products of a layer one by one, as the hardware multiplies them: which operands it takes under each scaling, and how far the outputs
are from those in high precision.

A step in which one is refused says which scaling, and not which product of which formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8cfg.numerics import Scaling
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, Operand, gemm
from fp8cfg.numerics.quantize import quantize_nvfp4
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from tools.gpu_rows.contenders import SCALINGS as EVERY
from tools.gpu_rows.kernel_bits import by_kernels, draw_of, plainly
from tools.gpu_rows.worker import failure

SCALINGS = ("current", "row", "block", "mxfp8", "nvfp4")
"""Delayed scaling has the products of current scaling."""
APART = {"nvfp4": 0.3}
APART_FP8 = 0.1
"""Relative rms error of a product that is right: of E5M2 and E4M3 0.06, under NVFP4 0.18, where one is laid out wrongly 1.4."""

LARGE = {"row": ((127, 9216, 3072), (512, 9216, 1024))}
"""Rows, contracted elements and outputs of more products by scaling: that which cuBLASLt refused under scales of rows
(pytorch/ao#4582), and one of more rows and as few outputs, which goes to it."""


def products(name: str, device: str = "cuda", proof: bool = True) -> str:
    """The relative rms error of each product under the scaling of that name, weight gradients in both dtypes that they come in; without
    `proof` they have none. Raises ArithmeticError, which says of each product that is refused or wrong what is."""
    generator, scaling = torch.Generator(device).manual_seed(0), EVERY[name]
    x, w, dy = (
        torch.randn(shape, device=device, generator=generator).bfloat16()
        for shape in ((256, 512), (384, 512), (256, 384))
    )
    tensors = ((x, INPUT), (w, WEIGHT), (dy, GRAD_OUTPUT))
    (a, across_a), (b, across_b), (g, across_g) = (
        operands(t, role, scaling) for t, role in tensors
    )
    of_wgrad = WGRAD, across_g.t(), across_a.t(), dy.t() @ x
    cases = {
        "fprop": (FPROP, a, b, x @ w.t(), torch.bfloat16),
        "dgrad": (DGRAD, g, across_b.t(), dy @ w, torch.bfloat16),
        "wgrad": (*of_wgrad, torch.bfloat16),
        "wgrad in float32": (*of_wgrad, torch.float32),
    }
    for m, k, n in LARGE.get(name, ()):
        x, w = (
            torch.randn(rows, k, device=device, generator=generator).bfloat16() for rows in (m, n)
        )
        a, b = (operands(t, role, scaling)[0] for t, role in ((x, INPUT), (w, WEIGHT)))
        cases[f"{m} x {k} x {n}"] = FPROP, a, b, x @ w.t(), torch.bfloat16
    found, wrong = [], []
    for case, (slot, one, other, want, out) in cases.items():
        what = f"{case} {one.format_name} x {other.format_name}"
        try:
            got = gemm(one, other, out, None, slot).float()
            apart = (
                ((got - want.float()).norm() / want.float().norm()).item() if proof else 0.0
            )  # .item() waits for the GPU
        except Exception as e:  # the others are multiplied too
            wrong.append(f"{what} {failure(e)[:120]}")
            continue
        (found if apart < APART.get(name, APART_FP8) else wrong).append(
            f"{what} {apart:.1%}" if proof else what
        )
    if wrong:
        raise ArithmeticError("; ".join(wrong + found))
    return ", ".join(found) + (" apart" if proof else " ran")


def operands(t: Tensor, role: int, scaling: Scaling) -> tuple[Operand, Operand]:
    """`t` for products over its last dimension, and over its first, in the orientation of `t`; under NVFP4, which transforms what
    wgrad contracts, as a layer makes them."""
    if not scaling.layout.two_levels:
        made = (by_kernels if t.is_cuda else plainly)(t, role, scaling)
        return made, made
    draw = draw_of(scaling, role, 0, t.device)
    random = None if draw is None else (draw.key, draw.draw)
    along, across = (quantize_nvfp4(t, role, axis, scaling, None, random) for axis in (1, 0))
    return along, along if role == WEIGHT else across
