"""How much slower or faster one FP8 linear layer is than a bfloat16 one: forward and backward, both in the same run.

Prints the ratio of median times, one line a configuration. The configurations take turns, so that a busy machine slows all
of them alike. On CPU products are emulated, and the ratio is the price of the emulation; on a GPU --product scaled_mm
measures the real thing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fp8cfg.numerics import FP8Linear, Region, Scaling, fp8_linears, update_scales


def step_of(layer: nn.Module, x: torch.Tensor, g: torch.Tensor, compiled: bool) -> Callable[[], None]:
    forward = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    layers = list(fp8_linears(layer))

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        forward(x).backward(g)
        update_scales(layers)
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("tokens", 2048),
        ("in-features", 512),
        ("out-features", 1536),
        ("rounds", 9),
        ("history", 16),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--product", choices=("emulate", "scaled_mm"), default="emulate")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    options = {"device": args.device, "dtype": torch.bfloat16}
    x = torch.randn(args.tokens, args.in_features, **options).requires_grad_()
    g = torch.randn(args.tokens, args.out_features, **options)
    scalings = {"bf16": None, "delayed": Scaling(amax_history_len=args.history), "current": Scaling("current")}
    steps = {}
    for name, scaling in scalings.items():
        for mode in ("eager", "compiled"):
            layer: nn.Module = nn.Linear(args.in_features, args.out_features, bias=False, **options)
            if scaling is not None:
                layer = FP8Linear.from_linear(layer, scaling, Region(active=True), product=args.product)
            steps[f"{name} {mode}"] = step_of(layer, x, g, compiled=mode == "compiled")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= 2:  # the first rounds compile and set the scales
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["bf16 eager"])
    print(f"{args.tokens} tokens, {args.in_features} -> {args.out_features}, {args.product} on {args.device}; bf16 eager is 1")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:18s} {median / base:6.3f}   {median * 1e3:8.2f} ms, best {min(taken) * 1e3:.2f}")


if __name__ == "__main__":
    main()
