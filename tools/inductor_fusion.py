#!/usr/bin/env python3
"""Shows that Inductor's horizontal fusion fails on compiled FP8 layers on a CPU (torch 2.13).

    python tools/inductor_fusion.py [--fusion-size 16]

Prints the norm of the gradients of Linear, GELU, Linear under MXFP8, eager and compiled.
fp8cfg sets the fusion size to 1, Inductor's default is 16. Exits with an error if compilation fails or the norms differ.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch._inductor.config as inductor
from torch import nn

import fp8cfg


def gradient_norm(compiled: bool) -> float:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)
    model = nn.Sequential(*layers).bfloat16()
    words = ["precision=bf16_mxfp8", "fp8.params=false", "fp8.output_layer=true"]
    fp8 = fp8cfg.convert_model(model, fp8cfg.compose(words))
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(64, 64, dtype=torch.bfloat16) * 1e-3
    with fp8.autocast():
        (torch.compile(model) if compiled else model)(x).backward(gradient)
    return sum(p.grad.double().square().sum().item() for p in model.parameters()) ** 0.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fusion-size", type=int, default=16)
    fusion_size = parser.parse_args().fusion_size
    eager = gradient_norm(compiled=False)
    inductor.cpp.max_horizontal_fusion_size = fusion_size
    compiled = gradient_norm(compiled=True)
    print(f"torch {torch.__version__}, fusion size {fusion_size}: {eager:.4g}, {compiled:.4g}")
    sys.exit(not abs(compiled / eager - 1) < 0.05)
