"""Products of a layer one by one, as the hardware multiplies them: which operands it takes under each scaling, and how far the outputs
are from those in high precision.

A step in which one is refused says which scaling, and not which product of which formats.
"""

from __future__ import annotations

import torch

from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, gemm
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from tools.gpu_rows.bench_cases import SCALINGS as EVERY
from tools.gpu_rows.kernel_bits import by_kernels, plainly
from tools.gpu_rows.worker import failure

SCALINGS = ("current", "row", "block", "mxfp8")
"""Delayed scaling has the products of current scaling."""
APART = 0.1
"""Relative rms error of a product that is right: of E5M2 and E4M3 0.06, where one is laid out wrongly 1.4."""

LARGE = {"row": ((127, 9216, 3072), (512, 9216, 1024))}
"""Rows, contracted elements and outputs of more products by scaling: that which cuBLASLt refused under scales of rows
(pytorch/ao#4582), and one of more rows and as few outputs, which goes to it."""


def products(name: str, device: str = "cuda", proof: bool = True) -> str:
    """The relative rms error of each product under the scaling of that name, weight gradients in both dtypes that they come in; without
    `proof` they have none. Raises ArithmeticError, which says of each product that is refused or wrong what is."""
    generator, scaling = torch.Generator(device).manual_seed(0), EVERY[name]
    x, w, dy = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in ((256, 512), (384, 512), (256, 384)))
    made = by_kernels if x.is_cuda else plainly
    a, b, g = (made(t, role, scaling) for t, role in ((x, INPUT), (w, WEIGHT), (dy, GRAD_OUTPUT)))
    cases = {"fprop": (FPROP, a, b, x @ w.t(), torch.bfloat16), "dgrad": (DGRAD, g, b.t(), dy @ w, torch.bfloat16),
             "wgrad": (WGRAD, g.t(), a.t(), dy.t() @ x, torch.bfloat16), "wgrad in float32": (WGRAD, g.t(), a.t(), dy.t() @ x, torch.float32)}
    for m, k, n in LARGE.get(name, ()):
        x, w = (torch.randn(rows, k, device=device, generator=generator).bfloat16() for rows in (m, n))
        cases[f"{m} x {k} x {n}"] = FPROP, made(x, INPUT, scaling), made(w, WEIGHT, scaling), x @ w.t(), torch.bfloat16
    found, wrong = [], []
    for case, (slot, one, other, want, out) in cases.items():
        what = f"{case} {one.kind} x {other.kind}"
        try:
            got = gemm(one, other, out, None, slot).float()
            apart = ((got - want.float()).norm() / want.float().norm()).item() if proof else 0.0  # .item() waits for the GPU
        except Exception as e:  # the others are multiplied too
            wrong.append(f"{what} {failure(e)[:120]}")
            continue
        (found if apart < APART else wrong).append(f"{what} {apart:.1%}" if proof else what)
    if wrong:
        raise ArithmeticError("; ".join(wrong + found))
    return ", ".join(found) + (" apart" if proof else " ran")
