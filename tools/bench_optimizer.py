#!/usr/bin/env python3
"""Time of an optimizer step per parameter, low-bit ones beside torch's AdamW: one thread, interleaved medians in one run.

    python tools/bench_optimizer.py                             # about three minutes on one core, most of it compiling
    python tools/bench_optimizer.py --only foreach O2 --runs 5
    python tools/bench_optimizer.py --sizes 8x4194304

Gradients are there already, in FP8 under O1 to O3, and weights as layers hold them. The times are CPU time of the process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from fp8cfg.numerics.codecs import codec
from fp8cfg.optim.low_bit import LowBitAdamW
from fp8cfg.optim.low_bit_step import named_columns
from fp8cfg.report.tables import table

TORCH = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False, "fused": False}}
ROWS = {
    "fp32": {},
    "bf16": {"weight": "bf16", "exp_avg": "bf16", "exp_avg_sq": "bf16", "rounding": "stochastic"},
    "O1": {"weight": "fp16_scaled", "weight_grad": "fp8_pow2"},
    "O2": {"weight": "fp16_scaled", "weight_grad": "fp8_pow2", "exp_avg": "fp8_pow2", "exp_avg_sq": "fp16_scaled"},
    "O3": {"weight": "fp8_pow2", "master_weight": "fp16_scaled", "weight_grad": "fp8_pow2", "exp_avg": "fp8_pow2", "exp_avg_sq": "fp16_scaled"},
    "blocks": {"weight": "bf16", "master_weight": "fp32", "exp_avg": "fp8_block", "exp_avg_sq": "fp8_block"},
}
LLAMA_TINY = [768 * 256, 256 * 256, 1376 * 256, 256 * 688] * 4 + [256 * 256] * 2 + [256] * 9
"""Tensors of about the sizes of recipe=llama_tiny's."""


def lengths(size: str) -> list[int]:
    if size == "llama_tiny":
        return LLAMA_TINY
    count, _, each = size.partition("x")
    return [int(each)] * int(count)


def stepper(name: str, sizes: list[int], eager: bool) -> Callable[[], object]:
    """A function that does one step of that optimizer, warmed up."""
    generator = torch.Generator().manual_seed(0)
    row = ROWS.get(name, {})
    weight = codec(row.get("weight", "fp32"))
    stored = [weight.encode(torch.randn(n, generator=generator) * 0.02) for n in sizes]
    params = {f"p{i}": nn.Parameter(data) for i, (data, *_) in enumerate(stored)}
    held = {p: (p.detach(), entry[1]) for p, entry in zip(params.values(), stored, strict=True) if len(entry) > 1}
    for p in params.values():
        p.grad_dtype = torch.float32
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    if name in TORCH:
        optimizer = torch.optim.AdamW([*params.values()], **TORCH[name])
    else:
        optimizer = LowBitAdamW(params.items(), columns=named_columns(**row), held=held, compiled=not eager)
        optimizer.store_grads()
    for _ in range(3):
        optimizer.step()
    return optimizer.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", default=["16x1048576", "llama_tiny", "256x16384"], help="COUNTxELEMENTS, or llama_tiny")
    names = [*TORCH, *ROWS, *(f"{row} eager" for row in ROWS)]
    parser.add_argument("--only", nargs="+", choices=names, default=[*TORCH, *ROWS, "O2 eager"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {name: [name] for name in args.only}
    for size in args.sizes:
        sizes, steps = lengths(size), {}
        for name in args.only:
            began = time.perf_counter()
            steps[name] = stepper(name.removesuffix(" eager"), sizes, name.endswith(" eager"))
            print(f"{size} {name}: warm after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.runs):
            for name, step in steps.items():
                began = time.process_time()
                step()
                times[name].append((time.process_time() - began) / sum(sizes) * 1e9)
        base = statistics.median(times[args.only[0]])
        for name, taken in times.items():
            rows[name] += [f"{statistics.median(taken):.2f}", f"{statistics.median(taken) / base:.2f}"]
    print(f"ns a parameter, and times {args.only[0]}")
    print(table(["step", *(word for size in args.sizes for word in (size, "x"))], list(rows.values()), right=range(1, 1 + 2 * len(args.sizes))))


if __name__ == "__main__":
    main()
