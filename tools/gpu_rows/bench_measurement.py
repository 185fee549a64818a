"""Measurement of tools/bench_gpu.py's rows, in the process of a case: the gradient probe, and a contender timed in turns with compiled
BF16."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fp8cfg
from fp8cfg.parallel.process_group import World
from fp8cfg.training.compile import compare
from fp8cfg.training.data import run_data
from tools.gpu_rows import proof
from tools.gpu_rows.bench_cases import CASES, ModelCase, ModuleCase, Runner
from tools.gpu_rows.contenders import CONTENDERS, Contender
from tools.gpu_rows.estimate import OF_PEAK, device_called
from tools.gpu_rows.row_error import error, right
from tools.gpu_rows.shapes import SHAPES, WORDS
from tools.gpu_rows.stopwatch import mark, seconds
from tools.gpu_rows.worker import Make, Row, failure

PROBE = "probe"


AHEAD = 10_000_000
"""Cycles, some five milliseconds, that a GPU is busy before a pass is timed: the host launches the first kernels meanwhile, as it does
in a run, and they follow one another."""


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds of one pass: between events on a GPU, of this process's processor time on a CPU."""
    if device == "cuda":
        torch.cuda._sleep(AHEAD)
    start = mark(device)
    step()
    end = mark(device)
    if device == "cuda":
        torch.cuda.synchronize()
    return seconds(start, end)


def measure(
    case: ModuleCase | ModelCase,
    contender: Contender,
    base: Runner | None,
    device: str,
    proof: bool = True,
) -> tuple[Runner, list[str]]:
    """Builds and times `contender` in turns with `base`; the cells of its row. Raises ArithmeticError where `proof` is wanted and what it
    computes is wrong."""
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    runner = warmed(case, contender)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    runner.step()
    peak = f"{(torch.cuda.max_memory_allocated() - held) / 2**30:.1f}" if device == "cuda" else "-"
    wrong = computed(case, contender, runner, proof)
    times: list[list[float]] = [[], []]
    optimizer: list[float] = []
    until = time.monotonic() + 4
    while len(times[0]) < 5 or (len(times[0]) < 25 and time.monotonic() < until):
        for taken, r in zip(times, (runner, base or runner), strict=True):
            taken.append(timed(r.step, device))
        if runner.optimizer:
            optimizer.append(runner.optimizer())
    took, other = map(statistics.median, times)
    rates = f"{case.flops / took / 1e12:.3g}", f"{case.tokens / took:,.0f}"
    planned = f"{runner.planned / 2**30:.1f}" if runner.planned else "-"
    ratio = f"{other / took:.2f}" if base or contender.backend == "torch" else "-"
    stepped = f"{statistics.median(optimizer) * 1e3:.2f}" if optimizer else "-"
    return runner, [
        f"{took * 1e3:.2f}",
        estimated(case, contender, device),
        stepped,
        *rates,
        peak,
        planned,
        ratio,
        f"{wrong:.1e}",
    ]


def estimated(case: ModuleCase | ModelCase, contender: Contender, device: str) -> str:
    """The cell of estimated milliseconds."""
    found = device_called(torch.cuda.get_device_name()) if device == "cuda" else None
    scaling = {"tensorwise": "current", "rowwise": "row"}.get(contender.scaling, contender.scaling)
    return f"{case.estimate(found, scaling) * 1e3:.2f}" if found and scaling in OF_PEAK else "-"


def computed(
    case: ModuleCase | ModelCase, contender: Contender, runner: Runner, proof: bool
) -> float:
    """The error of what `runner` computed last, which may be any without `proof`."""
    wrong = error(runner.found(), case.want)
    return right(wrong, contender.scaling) if proof else wrong


def warmed(case: ModuleCase | ModelCase, contender: Contender) -> Runner:
    runner = case.runner(contender)
    for _ in range(3):
        runner.step()
    return runner


def start(args: argparse.Namespace, name: str) -> Make:
    """Begins the process of a case; what stands in every ratio of it is made with its first row."""
    prepare(args)
    if name == PROBE:
        return lambda scaling: Row([probe(args, scaling)])
    case = CASES[name](args, SHAPES[args.small][name])
    collect(args.device)  # the float32 run, which refers to itself
    bases: list[Runner] = []

    def make(contender: Any) -> Row:
        for one in CONTENDERS[:2] if contender.backend != "torch" and not bases else ():
            try:
                base = warmed(case, one)
                computed(case, one, base, not args.no_proof)
                bases[:] = [base]
                break
            except Exception as e:  # its own row says it
                print(failure(e), file=sys.stderr)
        runner, cells = measure(
            case, contender, bases[0] if bases else None, args.device, not args.no_proof
        )
        if not bases and contender.backend == "torch":
            bases.append(runner)
        del runner
        collect(args.device)
        return Row(cells)

    return make


def collect(device: str) -> None:
    """Give back the memory of what nothing refers to, to other processes too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def prepare(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # many configurations of one class in one process
    proof.start(args.device, args.no_proof)


def probe(args: argparse.Namespace, scaling: str) -> str:
    """How far compiled gradients are from eager ones. Raises NotFP8Error, which says so, where these are wrong."""
    alone = ["backend=native", "trainer.devices=1", f"trainer.accelerator={args.device}"]
    job = fp8cfg.build(fp8cfg.compose([*SHAPES[True]["1b"], *WORDS[scaling], *alone]))
    if args.compiler != "inductor":  # else as a run is compiled, with the options of the job
        job.compiler = lambda: partial(
            torch.compile, fullgraph=True, dynamic=False, backend=args.compiler
        )  # type: ignore[method-assign]
    batches, _ = run_data(job.recipe)
    apart = compare(job, batches, 0, World())
    return (
        "compiled, and not compared with eager code"
        if args.no_proof
        else f"compiled gradients are the eager ones, {apart:.2%} apart at most"
    )
