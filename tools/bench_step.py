#!/usr/bin/env python3
"""Process time of one optimizer step under several precisions, eager and compiled: of this code, or beside that of another tree.

    python tools/bench_step.py                        # dim 256, 4 layers, sequence 256, batch 4; ten minutes
    python tools/bench_step.py --quick                # what is not compiled, dim 128, 2 layers, sequence 128, batch 2: under a minute
    python tools/bench_step.py --only "bf16 eager" "bf16_fp8 eager" --runs 5 --hidden 512 --minutes 30
    python tools/bench_step.py --quick --against HEAD~20            # a revision, or a folder with fp8cfg in it
    python tools/bench_step.py --profile "bf16_fp8 eager"           # and where the time of that step goes

Rounds are interleaved in one run: each takes a step of every precision, of every tree. With --against a second process of this
code says how much two runs of the same code differ. After two thirds of --minutes no other precision is made ready, and rounds end
with the time, the first three excepted. On a machine that does other things, too, read the least times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import command
from step_times.trees import ROOT, NoTreeError, Worker, tree

import fp8cfg
from fp8cfg.schema.tables import table

EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
PRECISIONS = {
    "bf16": ["precision=bf16"],
    "bf16_fp8": ["precision=bf16_fp8"],
    "bf16_fp8 fp8.params=false": ["precision=bf16_fp8", "fp8.params=false"],
    "bf16_fp8_current": ["precision=bf16_fp8_current", EVERYWHERE],
    "fp16_fp8": ["precision=fp16_fp8"],
    "O2": ["precision=bf16_fp8", "opt_level=O2"],
    "O3": ["precision=bf16_fp8", "opt_level=O3"],
    "bf16_fp8_current row": ["precision=bf16_fp8_current", EVERYWHERE, "fp8.granularity=row"],
    "bf16_fp8_block": ["precision=bf16_fp8_block"],
    "bf16_mxfp8": ["precision=bf16_mxfp8"],
    "bf16_nvfp4": ["precision=bf16_nvfp4"],
    "fp32": ["precision=fp32"],
}
CONFIGS = {
    f"{name} {mode}": (words, mode == "compiled")
    for mode in ("eager", "compiled")
    for name, words in PRECISIONS.items()
}
LEFT_OUT = ("fp32", "bf16_nvfp4", "bf16_fp8_current row")
DEFAULT = [name for name in CONFIGS if not name.startswith(LEFT_OUT)]
THIS, AGAIN, OTHER = "this", "again", "other"
Times = dict[str, dict[str, list[float]]]
"""Seconds of each step, by precision and by tree."""


def recipe_words(args: argparse.Namespace, words: list[str]) -> list[str]:
    return [
        "recipe=llama_tiny",
        "data=tiny",
        f"model.hidden_size={args.hidden}",
        f"model.ffn_hidden_size={args.ffn or 128 * round(args.hidden / 48)}",
        f"model.num_layers={args.layers}",
        "model.num_attention_heads=8",
        "model.num_query_groups=8",
        f"model.seq_length={args.seq}",
        f"trainer.micro_batch_size={args.batch}",
        f"trainer.global_batch_size={args.batch}",
        *words,
    ]


def said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def made_ready(args: argparse.Namespace, workers: dict[str, Worker], until: float) -> list[str]:
    """The precisions that all workers have ready to be stepped."""
    ready = []
    for name in args.only:
        words, compiled = CONFIGS[name]
        if ready and time.monotonic() > until:
            said(f"{name}: left out, for want of time (--minutes {args.minutes:g})")
            continue
        began = time.monotonic()
        answers = [
            worker.ask(make=name, words=recipe_words(args, words), compiled=compiled)
            for worker in workers.values()
        ]
        if refused := next((answer["refused"] for answer in answers if "refused" in answer), None):
            said(f"{name}: left out, refused by a tree: {refused[0]}")
            continue
        ready.append(name)
        said(f"{name}: warm after {time.monotonic() - began:.0f} s")
    return ready


def rounds(
    args: argparse.Namespace, workers: dict[str, Worker], ready: list[str], until: float
) -> Times:
    times: Times = {name: {side: [] for side in workers} for name in ready}
    for done in range(args.runs):
        if done >= 3 and time.monotonic() > until:
            said(f"{done} of {args.runs} rounds, for want of time (--minutes {args.minutes:g})")
            break
        for name in ready:
            for side in [*workers][:: 1 if done % 2 else -1]:  # none is always the first
                times[name][side].append(workers[side].ask(step=name)["seconds"])
        said(f"round {done + 1} of {args.runs}")
    return times


def alone(times: Times) -> str:
    base = statistics.median(next(iter(times.values()))[THIS])
    rows = [
        [
            n,
            f"{statistics.median(t[THIS]):.3f}",
            f"{min(t[THIS]):.3f}",
            f"{statistics.median(t[THIS]) / base:.2f}",
        ]
        for n, t in times.items()
    ]
    return table(["step", "median s", "least s", f"x {next(iter(times))}"], rows, right=(1, 2, 3))


def beside(times: Times) -> str:
    """The ratios of this tree to the other, and to itself in another process; which are above what the latter explain."""
    ratios = {
        n: [
            how(t[THIS]) / how(t[side])
            for side in (OTHER, AGAIN)
            for how in (min, statistics.median)
        ]
        for n, t in times.items()
    }
    noise = max(abs(least - 1) for _, _, least, _ in ratios.values())
    rows = [
        [
            n,
            *(f"{how(t[side]):.3f}" for side in (THIS, OTHER) for how in (min, statistics.median)),
            *(f"{r:.3f}" for r in ratios[n]),
        ]
        for n, t in times.items()
    ]
    heads = [
        "step",
        "least s",
        "median s",
        "other's least",
        "median",
        "ratio of least",
        "of medians",
        "to itself: least",
        "medians",
    ]
    slower = [f"{n} ({found[0]:.3f})" for n, found in ratios.items() if found[0] > 1 + noise]
    return f"{table(heads, rows, right=range(1, 9))}\nnoise of least times {100 * noise:.1f} %; slower by more: {', '.join(slower) or 'none'}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        "runs": 15,
        "hidden": 256,
        "ffn": 0,
        "layers": 4,
        "seq": 256,
        "batch": 4,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time of the whole run (default: 10)"
    )
    parser.add_argument("--quick", action="store_true", help="eager code alone, of a smaller model")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CONFIGS),
        metavar="STEP",
        help=f"among {', '.join(CONFIGS)}",
    )
    parser.add_argument(
        "--against",
        metavar="TREE",
        help="a revision of this repository, or a folder with fp8cfg in it",
    )
    parser.add_argument("--profile", choices=list(CONFIGS), metavar="STEP")
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(
            only=[name for name in DEFAULT if name.endswith("eager")],
            hidden=128,
            layers=2,
            seq=128,
            batch=2,
        )
    args = parser.parse_args(argv)
    args.only = args.only or DEFAULT
    if args.profile:
        args.only = list(dict.fromkeys([*args.only, args.profile]))
    return args


def main() -> None:
    args, began = parse(), time.monotonic()
    command.recipes(recipe_words(args, CONFIGS[name][0]) for name in args.only)
    with tempfile.TemporaryDirectory() as folder:
        trees = {THIS: ROOT}
        if args.against:
            try:
                trees |= {OTHER: tree(args.against, Path(folder)), AGAIN: ROOT}
            except NoTreeError as e:
                raise fp8cfg.ConfigError(f"--against {e}") from None
        workers = {side: Worker(root, args.threads) for side, root in trees.items()}
        try:
            ready = made_ready(args, workers, began + 40 * args.minutes)
            if not ready:
                raise fp8cfg.ConfigError(
                    f"--only {' '.join(args.only)}: one of the trees takes none of them"
                )
            times = rounds(args, workers, ready, began + 60 * args.minutes)
            print(beside(times) if args.against else alone(times))
            if args.profile in ready:
                print(f"\n{args.profile}\n{workers[THIS].ask(profile=args.profile)['table']}")
        finally:
            for worker in workers.values():
                worker.end()


if __name__ == "__main__":
    command.run(main)
