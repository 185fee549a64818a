#!/usr/bin/env python3
"""Train one recipe under several precisions and seeds, and print how far each is from fp32 and from bf16.

    python tools/compare_losses.py --jobs 2 --results losses.jsonl       # llama_tiny on the standard library: 1 to 2 hours
    python tools/compare_losses.py --steps 6 --seeds 1 data=tiny         # a quick look
    python tools/compare_losses.py --levels --steps 600                  # the low-precision chart, with and without FP8 products
    python tools/compare_losses.py --row "precision=bf16_fp8 fp8.margin=2" --row "short: precision=bf16_fp8 fp8.amax_history_len=4"

A row is the overrides of a precision, after a name and a colon where it shall have another name than these; fp32 and bf16 are
always there. Words after the options are overrides for all runs. Each run has one thread; --jobs of them go side by side. A run
that stands in the results file is not repeated: take another file after the code has changed.

The first ten steps, where runs have not yet diverged by chance, compare arithmetic: the mean and the largest distance of their
training losses from those of fp32. The validation losses of several seeds compare training; distances from fp32 and bf16 are means
over the seeds, each against the run with the same seed. Bytes a parameter are measured: weights, masters, gradients, moments and
their scales, as they are between two steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import command
import measure_bytes

import fp8cfg
from fp8cfg.schema.tables import table

CURRENT = "precision=bf16_fp8_current fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
ROWS = {
    "fp32": "precision=fp32",
    "bf16": "precision=bf16",
    "delayed": "precision=bf16_fp8",
    "current": CURRENT,
    "current, e4m3 gradients": f"{CURRENT} fp8.format=e4m3",
    "current, by row": f"{CURRENT} fp8.granularity=row",
    "delayed, margin 5": "precision=bf16_fp8 fp8.margin=5",
    "delayed, margin 5, e4m3 gradients": "precision=bf16_fp8 fp8.margin=5 fp8.format=e4m3",
    "block": "precision=bf16_fp8_block",
    "mxfp8": "precision=bf16_mxfp8",
    "nvfp4": "precision=bf16_nvfp4",
}
LEVELS = {
    "fp32": ROWS["fp32"],
    "bf16": ROWS["bf16"],
    **{name: measure_bytes.ROWS[name] for name in ("FP16 AMP", "TE")},
    **{
        f"{level}{products}": f"{words} opt_level={level}"
        for products, words in (("", "precision=fp32"), (", FP8 products", CURRENT))
        for level in measure_bytes.LEVELS
    },
}
"""The rows of the chart, its levels with and without products in FP8."""
Run = dict[str, Any]


def train(words: list[str]) -> Run:
    """The training losses of every step, the last validation loss and the bytes of a parameter of one run."""
    import torch

    from fp8cfg.parallel.process_group import World
    from fp8cfg.training.compile import compiles
    from fp8cfg.training.data import run_data
    from fp8cfg.training.evaluation import evaluate, validation_batches
    from fp8cfg.training.memory_measurement import tensors_by_kind
    from fp8cfg.training.step import train_step

    torch.set_num_threads(1)
    began, recipe = time.perf_counter(), fp8cfg.compose(words)
    job, world = fp8cfg.build(recipe), World()
    batches, held_out = run_data(recipe)
    if compiles(recipe, job.plan, job.device.type, job.choice.backend):
        job.compile_model()
    losses = []
    for step in range(recipe.trainer.max_steps):
        losses.append(train_step(job, batches, step, world).wait().loss)
        if step == 0:
            job.prove()
    val_loss = evaluate(job, validation_batches(recipe, held_out, world), world)
    each = sum(t.nbytes for tensors in tensors_by_kind(job).values() for t in tensors) / sum(
        p.numel() for p in job.model.parameters()
    )
    return {
        "words": words,
        "losses": losses,
        "val_loss": val_loss,
        "bytes": each,
        "seconds": time.perf_counter() - began,
    }


def finished(path: Path | None) -> list[Run]:
    """The runs in a results file, of which a half-written last line is cut off."""
    if path is None or not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def run_all(wanted: list[list[str]], jobs: int, path: Path | None) -> list[Run]:
    """The run of each list of words, from the results file or trained now."""
    runs = {tuple(run["words"]): run for run in finished(path)}
    missing = [words for words in wanted if tuple(words) not in runs]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they load torch
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, future in enumerate(
            as_completed([pool.submit(train, words) for words in missing]), 1
        ):
            run = future.result()
            runs[tuple(run["words"])] = run
            if path:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
            print(
                f"{number}/{len(missing)} {run['val_loss']:.4f} {run['seconds']:.0f} s: {' '.join(run['words'])}",
                file=sys.stderr,
                flush=True,
            )
    return [runs[tuple(words)] for words in wanted]


def summary(found: dict[str, list[Run]], levels: bool) -> str:
    """The table, and below it which rows do not keep to fp32 and bf16. `found` holds the runs of each row, seed by seed."""
    rows, apart, early_of = [], {}, {}
    for name, runs in found.items():
        losses = [r["val_loss"] for r in runs]
        apart[name] = {
            of: statistics.mean(
                r["val_loss"] / other["val_loss"] - 1
                for r, other in zip(runs, found[of], strict=True)
            )
            for of in ("fp32", "bf16")
        }
        early = [
            abs(a - b)
            for run, exact in zip(runs, found["fp32"], strict=True)
            for a, b in zip(run["losses"][:10], exact["losses"][:10], strict=True)
        ]
        early_of[name] = statistics.mean(early)
        rows.append(
            [
                name,
                f"{statistics.mean(losses):.4f}",
                f"{statistics.stdev(losses) if len(losses) > 1 else 0.0:.4f}",
                *(f"{d:+.2%}" for d in apart[name].values()),
                f"{early_of[name]:.4f}",
                f"{max(early):.4f}",
                f"{runs[0]['bytes']:.2f}",
            ]
        )
    lines = [
        table(
            ["precision", "val loss", "sd", "vs fp32", "vs bf16", "first 10", "largest", "B/param"],
            rows,
            right=range(1, 8),
        )
    ]
    if levels:
        in_fp8 = {
            name
            for name, runs in found.items()
            if any(word.startswith("precision=") and "fp8" in word for word in runs[0]["words"])
        }
        off = [
            name
            for name, distance in apart.items()
            if not distance["fp32"] <= (0.01 if name in in_fp8 else 0.005)
        ]
        return "\n".join(
            [
                *lines,
                f"above fp32 by more than 0.5 %, or 1 % with FP8 products: {', '.join(off) or 'none'}",
            ]
        )
    spread = max(r["val_loss"] for r in found["bf16"]) - min(r["val_loss"] for r in found["bf16"])
    mean = {name: statistics.mean(r["val_loss"] for r in runs) for name, runs in found.items()}
    early_off = [name for name, distance in early_of.items() if not distance < 0.02]
    late_off = [name for name in found if not mean[name] <= mean["bf16"] * 1.02 + spread]
    return "\n".join(
        [
            *lines,
            f"mean distance from fp32 over the first ten steps of 0.02 or more: {', '.join(early_off) or 'none'}",
            f"above bf16 by more than 2 % and the spread of its seeds ({spread:.4f}): {', '.join(late_off) or 'none'}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="llama_tiny")
    parser.add_argument(
        "--row", action="append", metavar="[NAME:] WORDS", help=f"default: {'; '.join(ROWS)}"
    )
    parser.add_argument("--levels", action="store_true", help=f"these rows: {'; '.join(LEVELS)}")
    parser.add_argument("--seeds", type=command.count, default=3)
    parser.add_argument("--steps", type=command.count, default=200)
    parser.add_argument("--jobs", type=command.count, default=1)
    parser.add_argument(
        "--results", type=Path, metavar="FILE.jsonl", help="where finished runs are kept"
    )
    parser.add_argument("words", nargs="*")
    args = parser.parse_intermixed_args()
    rows = LEVELS if args.levels else ROWS
    if args.row:
        named = (row.rpartition(": ") for row in args.row)
        rows = {
            "fp32": ROWS["fp32"],
            "bf16": ROWS["bf16"],
            **{name or words: words for name, _, words in named},
            **(LEVELS if args.levels else {}),
        }
    wanted = [
        [
            f"recipe={args.recipe}",
            f"trainer.seed={seed}",
            f"trainer.max_steps={args.steps}",
            f"optim.warmup_steps={min(20, args.steps // 2)}",
            "trainer.limit_val_batches=16",
            *args.words,
            *words.split(),
        ]
        for words, seed in itertools.product(rows.values(), range(args.seeds))
    ]
    command.recipes(wanted)
    runs = run_all(wanted, args.jobs, args.results)
    print(
        summary(
            {name: runs[i * args.seeds : (i + 1) * args.seeds] for i, name in enumerate(rows)},
            args.levels,
        )
    )


if __name__ == "__main__":
    command.run(main)
