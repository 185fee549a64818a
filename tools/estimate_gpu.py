#!/usr/bin/env python3
"""Estimated speeds of FP8 over BF16 on a GPU, by FLOPs and bytes: bench_gpu.py's linear layer, block and whole models, and the 8B step.

    python tools/estimate_gpu.py --gpu h200

Needs no GPU and measures nothing: tools/gpu_rows/estimate.py has the assumptions, which are printed too. bench_gpu.py prints the same
figures (est) beside what it measures, to be held against one another in the first real run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fp8cfg
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema.tables import size, table, wrapped
from tools.gpu_rows import estimate
from tools.gpu_rows.estimate import OF_BANDWIDTH, OF_PEAK, OF_PEAK_ATTENTION, Device
from tools.gpu_rows.shapes import GOALS, SHAPES, WHOLE, WORDS

ONE = ["trainer.devices=1", "model.seq_length=8192"]


def speeds(
    device: Device, scalings: list[str], goals: dict[tuple[str, str], float]
) -> list[list[str]]:
    """A row for each case and scaling: milliseconds, times BF16, the goal, where there is one."""
    rows = []
    base: dict[str, float] = {}
    for scaling in scalings:
        seconds = {
            "linear 15872 x 4096 -> 16384": estimate.linear(
                device, scaling, *SHAPES[False]["linear"]
            )
        }
        recipe = fp8cfg.compose(
            [
                *SHAPES[False]["block"],
                "model.num_layers=1",
                "trainer.micro_batch_size=1",
                *WORDS[scaling],
            ]
        )
        seconds["block of llama_8b"] = sum(
            estimate.layers(device, scaling, recipe, output_layer=False).values()
        )
        for name, words in (
            ("llama_8b step, 8 x 8192 tokens", WHOLE),
            ("llama_8b cut to 4 layers, a step", SHAPES[False]["8b"]),
        ):
            seconds[name] = sum(
                estimate.step(
                    device, scaling, fp8cfg.compose([*words, *ONE, *WORDS[scaling]])
                ).values()
            )
        base = base or seconds
        for name, taken in seconds.items():
            case = "linear" if name.startswith("linear") else "8b whole" if "8 x" in name else name
            goal = goals.get((case, scaling))
            rows.append(
                [
                    name,
                    scaling,
                    f"{taken * 1e3:.2f}",
                    f"{base[name] / taken:.2f}",
                    f"{goal:.2f}" if goal else "",
                ]
            )
    return sorted(rows, key=lambda row: list(base).index(row[0]))


def parts(device: Device, scaling: str) -> str:
    """What takes the time of the 8B step."""
    found = estimate.step(device, scaling, fp8cfg.compose([*WHOLE, *WORDS[scaling]]))
    return f"llama_8b step, {scaling}: " + ", ".join(
        f"{what} {seconds * 1e3:.0f} ms" for what, seconds in found.items()
    )


def transposes(device: Device) -> str:
    """What it takes to transpose weights that are stored in FP8 in each backward pass of the 8B step, and to keep the transposes."""
    recipe = fp8cfg.compose([*WHOLE, *WORDS["delayed"]])
    passes, whole = (
        recipe.trainer.global_batch_size,
        sum(estimate.step(device, "delayed", recipe).values()),
    )
    taken = passes * estimate.transposes(device, recipe)
    kept = sum(p.in_features * p.out_features for p in plan_layers(recipe) if p.fp8)
    return f"fp8.params: transposes of weights in {passes} backward passes {taken * 1e3:.0f} ms, {taken / whole:.1%} of the step; kept (fp8.keep_transpose_cache) they take {size(kept)}"


def whole_memory(gpu: str) -> str:
    """What the 8B step needs, and where that is more than the GPU has, what trains there."""
    found = fp8cfg.plan(fp8cfg.compose([*WHOLE, *WORDS["delayed"]]), gpu)
    instead = ""
    if found.write:
        words = " ".join(found.write)
        instead = f"; bench_gpu.py puts it together from layers, and what trains there is {words}"
    return wrapped(f"llama_8b step: {size(found.widest.total)} on one GPU{instead}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=list(estimate.BANDWIDTH), default="h200")
    args = parser.parse_args()
    device, blackwell = Device.of(args.gpu), args.gpu.startswith("b")
    scalings = [
        "bf16",
        "delayed",
        "current",
        "row",
        *(["mxfp8", "nvfp4"] if blackwell else ["block"]),
    ]
    print(
        f"{args.gpu}: {device.bf16 / 1e12:g} and {device.fp8 / 1e12:g} TFLOP/s in BF16 and FP8, {device.bandwidth / 1e12:g} TB/s. Nothing is measured."
    )
    print(
        f"assumed: {', '.join(f'{s} products {OF_PEAK[s]:.0%}' for s in scalings)} of the peak, attention {OF_PEAK_ATTENTION:.0%}, "
        f"bandwidth {OF_BANDWIDTH:.0%}"
    )
    goals = GOALS if args.gpu == "h200" else {}
    print(
        wrapped(
            "goals: the project's own (config.py), set for an H200 before anything was measured on one"
            if goals
            else f"no goals: there are goals for an H200 alone, none for {args.gpu}"
        )
    )
    print(
        table(
            ["estimated", "scaling", "ms", "x BF16", "goal"],
            speeds(device, scalings, goals),
            right=(2, 3, 4),
        )
    )
    print(
        "\n".join(
            [
                *(parts(device, scaling) for scaling in ("bf16", "delayed")),
                whole_memory(args.gpu),
                transposes(device),
            ]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
