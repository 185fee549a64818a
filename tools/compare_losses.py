#!/usr/bin/env python3
"""Train one recipe under several precisions and seeds, and print how far each is from fp32.

    python tools/compare_losses.py                                  # llama_tiny on the standard library, about 20 minutes
    python tools/compare_losses.py --steps 20 --seeds 1 data=tiny   # a quick look

The first ten steps, where runs have not yet diverged by chance, compare arithmetic; the validation losses of several seeds
compare training. Words after the options are overrides for all runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import fp8cfg
from fp8cfg.report.tables import table
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed import World
from fp8cfg.training.loop import validation_batches
from fp8cfg.training.step import evaluate, prove_engagement, train_step


def train(words: list[str]) -> tuple[list[float], float]:
    """Losses of every step and the final validation loss of one run."""
    recipe = fp8cfg.compose(words)
    job, world = fp8cfg.build(recipe), World()
    batches, held_out = run_data(recipe)
    losses = []
    for step in range(recipe.trainer.max_steps):
        losses.append(train_step(job, batches, step, world).loss)
        if step == 0:
            prove_engagement(job)
    return losses, evaluate(job, validation_batches(recipe, held_out, world), world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama_tiny")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "bf16_fp8", "bf16_fp8_current"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("words", nargs="*")
    args = parser.parse_intermixed_args()
    found: dict[str, list[tuple[list[float], float]]] = {p: [] for p in args.precision}
    for seed in range(args.seeds):
        for precision in args.precision:
            began = time.perf_counter()
            words = [f"recipe={args.recipe}", f"precision={precision}", f"trainer.seed={seed}", f"trainer.max_steps={args.steps}",
                     f"optim.warmup_steps={min(20, args.steps // 2)}", "trainer.limit_val_batches=16", *args.words]
            found[precision].append(train(words))
            print(f"seed {seed} {precision}: {found[precision][-1][1]:.4f} ({time.perf_counter() - began:.0f} s)", file=sys.stderr)
    reference = found[args.precision[0]]
    rows = []
    for precision, runs in found.items():
        values = [v for _, v in runs]
        mean, sd = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        early = [a - b for (one, _), (other, _) in zip(runs, reference, strict=True) for a, b in zip(one[:10], other[:10], strict=True)]
        base = statistics.mean(v for _, v in reference)
        rows.append([precision, f"{mean:.4f}", f"{sd:.4f}", f"{mean / base - 1:+.2%}", f"{statistics.mean(early):+.4f}",
                     f"{max(map(abs, early)):.4f}"])
    head = ["precision", "val loss", "sd", f"vs {args.precision[0]}", "first 10 steps, mean", "largest"]
    print(table(head, rows, right=range(1, 6)))


if __name__ == "__main__":
    main()
