#!/usr/bin/env python3
"""Time of one optimizer step under several precisions, eager and compiled, beside compiled bf16: one thread, interleaved
medians in one run.

    python tools/bench_step.py                      # dim 512, 4 layers, sequence 512, batch 4: about 15 minutes on one core
    python tools/bench_step.py --quick              # what is not compiled, dim 128, 2 layers, sequence 128, batch 2: under a minute
    python tools/bench_step.py --runs 5 --hidden 256
    python tools/bench_step.py --profile            # and where the time of the compiled FP8 step goes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import command
import torch

import fp8cfg
from fp8cfg.report.tables import table
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed.world import World
from fp8cfg.training.train_step import train_step

EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
PRECISIONS = {
    "bf16": ["precision=bf16"], "bf16_fp8": ["precision=bf16_fp8"], "bf16_fp8 fp8.params=false": ["precision=bf16_fp8", "fp8.params=false"],
    "bf16_fp8_current": ["precision=bf16_fp8_current", EVERYWHERE],
    "bf16_fp8_current row": ["precision=bf16_fp8_current", EVERYWHERE, "fp8.granularity=row"],
    "bf16_fp8_block": ["precision=bf16_fp8_block"], "bf16_mxfp8": ["precision=bf16_mxfp8"], "bf16_nvfp4": ["precision=bf16_nvfp4"],
    "fp32": ["precision=fp32"],
}
CONFIGS = {f"{name} {mode}": (words, mode == "compiled") for name, words in PRECISIONS.items() for mode in ("compiled", "eager")}
DEFAULT = [n for n in CONFIGS if not n.startswith(("fp32 eager", "bf16_nvfp4", "bf16_fp8_current row"))]


def stepper(args: argparse.Namespace, words: list[str], compiled: bool) -> Callable[[], float]:
    """A function that does one optimizer step, warmed up."""
    recipe = fp8cfg.compose([
        "recipe=llama_tiny", "data=tiny", f"model.hidden_size={args.hidden}", f"model.ffn_hidden_size={args.ffn or 128 * round(args.hidden / 48)}",
        f"model.num_layers={args.layers}", "model.num_attention_heads=8", "model.num_query_groups=8", f"model.seq_length={args.seq}",
        f"trainer.micro_batch_size={args.batch}", f"trainer.global_batch_size={args.batch}", *words])
    job, count = fp8cfg.build(recipe), iter(range(10**9))
    batches, _ = run_data(recipe)
    if compiled:
        job.compile_model()

    def step() -> float:
        return train_step(job, batches, next(count), World()).loss

    for _ in range(3):
        step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"runs": 15, "hidden": 512, "ffn": 0, "layers": 4, "seq": 512, "batch": 4, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quick", action="store_true", help="eager code alone, of a smaller model")
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS))
    parser.add_argument("--profile", action="store_true")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(only=[name for name in DEFAULT if name.endswith("eager")], hidden=128, layers=2, seq=128, batch=2)
    args = parser.parse_args()
    args.only = args.only or DEFAULT
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64  # several configurations of one class in one process
    steps = {}
    for name in args.only:
        began = time.perf_counter()
        steps[name] = stepper(args, *CONFIGS[name])
        print(f"{name}: warm after {time.perf_counter() - began:.0f} s", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.runs):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    base = statistics.median(times[args.only[0]])
    rows = [[n, f"{statistics.median(t):.3f}", f"{min(t):.3f}", f"{statistics.median(t) / base:.2f}"] for n, t in times.items()]
    print(table(["step", "median s", "least s", f"x {args.only[0]}"], rows, right=(1, 2, 3)))
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        for name in ("bf16 compiled", "bf16_fp8 compiled"):
            with profile(activities=[ProfilerActivity.CPU]) as found:
                steps[name]()
            print(f"\n{name}\n" + found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=48))


if __name__ == "__main__":
    command.run(main)
