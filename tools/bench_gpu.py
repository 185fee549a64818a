#!/usr/bin/env python3
"""BF16, native FP8, Transformer Engine and torchao in one table: a linear layer, a Transformer block, whole models.

    python tools/bench_gpu.py                           # on a GPU, eight minutes
    python tools/bench_gpu.py --device cpu --small      # the same code on small shapes, under three minutes
    python tools/bench_gpu.py --only native --cases linear block

    probe    gradients of one small compiled layer beside eager ones, under each scaling: where these are wrong, no speed means anything
    linear   forward and backward with quantization: 15872 tokens, 4096 -> 16384 (Transformer Engine's published benchmark)
    block    forward and backward of one layer of Llama 3.1 8B, one sequence of 8192
    1b       one optimizer step of Llama 3.2 1B, four sequences of 2048, taken as fit takes it, on a GPU launched ahead of the one
             before; Transformer layers are compiled one by one, embedding, output layer and loss are eager
    8b       the same of Llama 3.1 8B cut to four layers, one sequence of 8192

te is what backend=te makes of a layer: te.Linear in "linear", te.TransformerLayer elsewhere, eager, as its users run it. In
"linear" and "block" all weights are BF16; in "1b" and "8b" native and te are built of one recipe, whose weights are held in FP8
where its preset has fp8.params, and torchao has its layers in the BF16 model, whose weights are BF16.

Each contender takes turns with compiled BF16, or eager where that fails, and its ratio is of these two medians: above 1 is
faster. The error is the largest rms error, beside a float32 run, of the output, the input's gradient and all weights' gradients,
relative to the rms of that; a row with more than FP8 or NVFP4 makes, or with NaN, fails, however fast it is (LIMITS in
tools/gpu_rows/row_error.py). goal is the ratio that the project wants of an H200. est is the estimate of the milliseconds by
FLOPs and bytes (tools/estimate_gpu.py), where the GPU and the scaling have one: of compiled code, without waiting for launches;
nor does the time of a pass have those of its first kernels, which the host launches on a GPU that is still busy. optim is what
the optimizer takes of the ms of a step. GiB is the measured peak, plan what fp8cfg plans for the step of a whole model of its
own. The rows of a case share a process; one over its time budget is stopped, and says so, with that process. Cases follow one
another, for each takes most of an H100's memory, and share --minutes equally; what one leaves goes to those after it. A model
that is planned to take more than is free beside BF16's is not run. Rows appear on stderr as they come, and in --out. At the end
stand the whole 8B step, of eight sequences, put together of the rows "8b" and "block" with one step of the optimizer, and every
row by what became of it. Exits with 1 where one failed or was stopped.
`--no-proof` is for the fake GPU (tools/fake_gpu), whose products compute nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

import fp8cfg
from fp8cfg.models.config import parameter_counts
from fp8cfg.planning.hardware import no_cuda
from fp8cfg.planning.layer_plan import transformer_config

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu_rows.bench_cases import CASES
from tools.gpu_rows.bench_measurement import PROBE, start
from tools.gpu_rows.contenders import CONTENDERS, Contender, unsupported
from tools.gpu_rows.estimate import Device, device_called, step
from tools.gpu_rows.results import Results, machine, writable
from tools.gpu_rows.selection import is_selected, unknown
from tools.gpu_rows.shapes import GOALS, SHAPES, WHOLE, WORDS
from tools.gpu_rows.worker import Row, Worker

BASE = CONTENDERS[0]
COLUMNS = ("ms", "est", "optim", "TFLOP/s", "tokens/s", "GiB", "plan", "xBF16", "error", "goal")
Taken = dict[tuple[str, str], tuple[float, ...]]
"""Milliseconds of compiled rows by case and scaling, of BF16 and of native: measured, estimated or 0, and of the optimizer or 0."""


def line(case: str, contender: object, cells: list[str]) -> str:
    widths = (8, 8, 7, 9, 12, 6, 6, 6, 8, 6)
    shown = (
        "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))
        if len(cells) == len(widths)
        else f"  {' '.join(cells)}"
    )
    return f"{case:7}{contender!s:27}{shown}"


def bench(args: argparse.Namespace, context: BaseContext, results: Results) -> dict[str, list[str]]:
    """The rows of each case. What became of them, and of the goals, is in `results`."""
    deadline = time.monotonic() + 60 * args.minutes
    names = [*([PROBE] if args.probe else []), *args.cases]
    rows: dict[str, list[str]] = {name: [] for name in names}
    taken: Taken = {}

    def add(name: str, what: object, worker: Worker, until: float) -> None:
        # The first row of a process makes what all of them share: a float32 run, and compiled BF16.
        budget = args.row_seconds * (1 if worker.begun else 2)
        found = worker.row_in_time(
            what,
            budget,
            until - time.monotonic(),
            f"no time left, of {args.minutes:g} minutes this case has had its share",
        )
        scaling = what.scaling if isinstance(what, Contender) else ""
        if len(found.cells) > 1:
            mine = str(what) == f"native {scaling} compiled"
            if mine or what == BASE:
                taken[name, scaling] = tuple(
                    float(cell) if cell != "-" else 0.0 for cell in found.cells[:3]
                )
            goal = (
                GOALS.get((name, scaling))
                if args.goals and mine and (name, "bf16") in taken
                else None
            )  # over compiled BF16 alone
            found = found._replace(cells=[*found.cells, f"{goal:.2f}" if goal else "-"])
            if goal:
                base, estimate = taken.get((name, "bf16"), (0.0, 0.0))[1], taken[name, scaling][1]
                ratio = float(found.cells[COLUMNS.index("xBF16")])
                results.goal(f"{name} {scaling}", ratio, goal, base / estimate if estimate else 0.0)
        rows[name].append(line(name, what, found.cells))
        results.say(rows[name][-1])
        results.row(f"{name} {what}", found)
        if name == PROBE and found.failed and not found.stopped:
            results.say(
                f"{'=' * 80}\nCOMPILED GRADIENTS FAILED under {what}: no row compiled under it means anything\n{'=' * 80}"
            )

    def case(name: str, every: Sequence[object], share: float) -> None:
        """The rows of a case, in a `share` of the time that is left."""
        began = time.monotonic()
        with Worker(context, start, args, name) as worker:
            for what in every:
                add(name, what, worker, began + max(0.0, deadline - began) * share)

    if args.probe:
        case(PROBE, args.scalings, 1.0)
    there = present(args, results) if args.cases else []
    for i, name in enumerate(args.cases):
        case(name, there, 1 / len(args.cases[i:]))
    whole(taken, args, results)
    return rows


def present(args: argparse.Namespace, results: Results) -> list[Contender]:
    """The contenders that can run here. Why others cannot is said, once for all cases."""
    found = []
    for contender in [c for c in CONTENDERS if c == BASE or is_selected(str(c), args.only)]:
        if missing := contender.missing(args.capability):
            row = Row([f"not run: {missing}"])
            results.row(str(contender), row)
            results.say(line("-", contender, row.cells))
        else:
            found.append(contender)
    return found


def whole(taken: Taken, args: argparse.Namespace, results: Results) -> None:
    """A step of the whole 8B model, put together from measured rows, for it does not fit beside BF16's: a pass for each of its
    microbatches, and its optimizer once, which takes as much longer than that of the cut model as there are more parameters."""
    recipe, cut = fp8cfg.compose(WHOLE), fp8cfg.compose([*SHAPES[False]["8b"], "trainer.devices=1"])
    passes, layers = (
        recipe.trainer.global_batch_size,
        recipe.model.num_layers - cut.model.num_layers,
    )
    more = total_parameters(recipe) / total_parameters(cut)

    def milliseconds(scaling: str) -> float:
        (step, _, optimizer), (block, *_) = taken["8b", scaling], taken["block", scaling]
        return passes * (step - optimizer + layers * block) + more * optimizer

    def estimated(scaling: str) -> float:
        return sum(step(args.known, scaling, fp8cfg.compose([*WHOLE, *WORDS[scaling]])).values())

    for scaling in [s for name, s in taken if name == "8b" and s != "bf16"]:
        if all((name, s) in taken for name in ("8b", "block") for s in ("bf16", scaling)):
            base, mine = milliseconds("bf16"), milliseconds(scaling)
            goal = GOALS.get(("8b whole", scaling)) if args.goals else None
            expected = estimated("bf16") / estimated(scaling) if args.known else 0.0
            how = f"{passes} x (8b - optim + {layers} x block) + {more:.2f} x optim"
            results.say(
                f"8b whole, {scaling}: {how} = {mine:,.0f} ms, BF16 {base:,.0f} ms: {base / mine:.2f}x"
                + (f", estimated {expected:.2f}x" if expected else "")
                + (f", goal {goal:.2f}x" if goal else "")
            )
            if goal:
                results.goal(f"8b whole {scaling}", base / mine, goal, expected)


def total_parameters(recipe: fp8cfg.Recipe) -> int:
    return parameter_counts(transformer_config(recipe))["total"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="small shapes, and compilation without code generation"
    )
    parser.add_argument("--minutes", type=float, default=8, help="of all rows together; default 8")
    parser.add_argument(
        "--row-seconds",
        type=float,
        default=60,
        metavar="SECONDS",
        help="of one row, which is stopped there; the first of a process has twice that; default 60",
    )
    parser.add_argument(
        "--no-proof", action="store_true", help="prove no products, for the fake GPU"
    )
    parser.add_argument(
        "--no-probe", dest="probe", action="store_false", help="leave the gradient probe out"
    )
    parser.add_argument(
        "--cases",
        nargs="*",
        choices=list(CASES),
        default=list(CASES),
        help="all by default; none: the gradient probe alone",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORDS",
        help="contenders whose name has one of these words, as in: --only te bf16, or all words of a quoted text, as in: "
        "--only 'native delayed'; compiled BF16 always",
    )
    parser.add_argument(
        "--out",
        type=writable,
        metavar="FILE",
        help="append rows to it as they come, with where failed ones were",
    )
    args = parser.parse_args(argv)
    if text := unknown(args.only, [str(contender) for contender in CONTENDERS]):
        parser.error(
            f"--only {text}: no contender has this name; their names are {', '.join(map(str, CONTENDERS))}"
        )
    if args.device == "cuda" and (why := no_cuda()):
        parser.error(f"torch has no CUDA device here ({why}); write --device cpu --small")
    args.compiler = "aot_eager" if args.small else "inductor"
    args.capability = torch.cuda.get_device_capability() if args.device == "cuda" else None
    args.known = device_called(torch.cuda.get_device_name()) if args.device == "cuda" else None
    args.goals = not args.small and not args.no_proof and args.known == Device.of("h200")
    args.scalings = [
        s
        for s in WORDS
        if s != "bf16"
        and not unsupported(s, args.capability)
        and is_selected(f"native {s} compiled", args.only)
    ]
    return args


def run(args: argparse.Namespace, results: Results) -> dict[str, list[str]]:
    """The head of the table, and its rows as they come."""
    context = multiprocessing.get_context(
        "forkserver"
    )  # which loads torch once, and never touches the GPU itself
    context.set_forkserver_preload(
        ["__main__", "tools.bench_gpu", "fiddle", "fp8cfg.composition.hydra_application"]
    )
    results.say(head(args))
    return bench(args, context, results)


def head(args: argparse.Namespace) -> str:
    return f"{machine(args.device)}; compiled by {args.compiler}\n" + line(
        "case", "", list(COLUMNS)
    )


def main() -> int:
    args = parse()
    results = Results(args.out, sys.stderr)
    rows = run(args, results)
    print("\n".join([head(args), *(row for found in rows.values() for row in found)]))
    return results.verdict()


if __name__ == "__main__":
    sys.exit(main())
