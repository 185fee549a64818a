#!/usr/bin/env python3
"""Time of an optimizer step per parameter, low-bit ones beside torch's AdamW: interleaved medians in one run.

    python tools/bench_optimizer.py                             # about three minutes on one core, most of it compiling
    python tools/bench_optimizer.py --only foreach O2 --runs 5
    python tools/bench_optimizer.py --sizes 8x4194304 --threads 2

Gradients are there already, in FP8 under O1 to O3, and weights as layers hold them. The times are CPU time of the process with one
thread, which is the default, and of the clock with more: then let nothing else run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from fp8cfg.numerics.codecs import get_codec
from fp8cfg.optim.low_bit.adam import LowBitAdamW
from fp8cfg.optim.low_bit.columns import named_columns
from fp8cfg.schema.tables import table

TORCH = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False, "fused": False},
}
ROWS = {
    "fp32": {},
    "bf16": {"weight": "bf16", "exp_avg": "bf16", "exp_avg_sq": "bf16", "rounding": "stochastic"},
    "O1": {"weight": "fp16_scaled", "weight_grad": "fp8_pow2"},
    "O2": {
        "weight": "fp16_scaled",
        "weight_grad": "fp8_pow2",
        "exp_avg": "fp8_pow2",
        "exp_avg_sq": "fp16_scaled",
    },
    "O3": {
        "weight": "fp8_pow2",
        "master_weight": "fp16_scaled",
        "weight_grad": "fp8_pow2",
        "exp_avg": "fp8_pow2",
        "exp_avg_sq": "fp16_scaled",
    },
    "blocks": {
        "weight": "bf16",
        "master_weight": "fp32",
        "exp_avg": "fp8_block",
        "exp_avg_sq": "fp8_block",
    },
}
LLAMA_TINY = (
    [768 * 256, 256 * 256, 1376 * 256, 256 * 688] * 4 + [256 * 256],
    [256 * 256] + [256] * 9,
)
"""Tensors of about the sizes of recipe=llama_tiny's: linear layers, and what has float32 weights and gradients under a level."""
LEVELS = ("O1", "O2", "O3")


def lengths(size: str) -> tuple[list[int], list[int]]:
    if size == "llama_tiny":
        return LLAMA_TINY
    count, _, each = size.partition("x")
    if not (count.isdigit() and each.isdigit()):
        raise argparse.ArgumentTypeError(f"{size}: write COUNTxELEMENTS, or llama_tiny")
    return [int(each)] * int(count), []


def checked(size: str) -> str:
    lengths(size)
    return size


def stepper(name: str, linear: list[int], others: list[int], eager: bool) -> Callable[[], object]:
    """A function that does one step of that optimizer, warmed up."""
    generator = torch.Generator().manual_seed(0)
    row = ROWS.get(name, {})
    codecs = [get_codec(row.get("weight", "fp32"))] * len(linear) + [
        get_codec(row.get("weight", "fp32") if name not in LEVELS else "fp32")
    ] * len(others)
    stored = [
        weight.encode(torch.randn(n, generator=generator) * 0.02)
        for n, weight in zip(linear + others, codecs, strict=True)
    ]
    params = {f"p{i}": nn.Parameter(data) for i, (data, *_) in enumerate(stored)}
    held = {
        p: partial(tuple, (p.detach(), entry[1]))
        for p, entry in zip(params.values(), stored, strict=True)
        if len(entry) > 1
    }
    for p in params.values():
        p.grad_dtype = torch.float32
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    if name in TORCH:
        optimizer = torch.optim.AdamW([*params.values()], **TORCH[name])
    else:
        named, apart = (
            list(params.items()),
            {k: v for k, v in row.items() if name not in LEVELS or k.startswith("exp_avg")},
        )
        groups = [
            {"params": named[: len(linear)], "columns": named_columns(**row)},
            {"params": named[len(linear) :], "columns": named_columns(**apart)},
        ]
        optimizer = LowBitAdamW(
            [group for group in groups if group["params"]], encoded_weights=held, compiled=not eager
        )
    grads = [p.grad for p in params.values()]
    for _ in range(3):
        for p, grad in zip(params.values(), grads, strict=True):
            p.grad = grad
        if isinstance(optimizer, LowBitAdamW):
            optimizer.store_grads()
        optimizer.step()
    return optimizer.step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=checked,
        default=["16x1048576", "llama_tiny", "256x16384"],
        help="COUNTxELEMENTS, or llama_tiny",
    )
    names = [*TORCH, *ROWS, *(f"{row} eager" for row in ROWS)]
    parser.add_argument("--only", nargs="+", choices=names, default=[*TORCH, *ROWS, "O2 eager"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    rows: dict[str, list[str]] = {name: [name] for name in args.only}
    for size in args.sizes:
        (linear, others), steps = lengths(size), {}
        for name in args.only:
            began = time.perf_counter()
            steps[name] = stepper(
                name.removesuffix(" eager"), linear, others, name.endswith(" eager")
            )
            print(f"{size} {name}: warm after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(args.runs):
            for name, step in steps.items():
                began = clock()
                step()
                times[name].append((clock() - began) / sum(linear + others) * 1e9)
        base = statistics.median(times[args.only[0]])
        for name, taken in times.items():
            rows[name] += [
                f"{statistics.median(taken):.2f}",
                f"{statistics.median(taken) / base:.2f}",
            ]
    print(f"ns a parameter, and times {args.only[0]}")
    print(
        table(
            ["step", *(word for size in args.sizes for word in (size, "x"))],
            list(rows.values()),
            right=range(1, 1 + 2 * len(args.sizes)),
        )
    )


if __name__ == "__main__":
    main()
