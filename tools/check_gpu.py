#!/usr/bin/env python3
"""Every backend under every scaling that it has on this machine, beside BF16; and the bytes that quantization writes.

    python tools/check_gpu.py                   # on a GPU, eight minutes
    python tools/check_gpu.py --small           # the same code on a CPU: small shapes, FP8 emulated, two minutes

    gemm    each product of a layer by itself: which operands the GPU refuses, and how far from high precision outputs are
    bits    how many bytes differ of tensors that are quantized under each scaling: "kernels" by fp8cfg's Triton kernels, data,
            transposes, scales and amaxes, beside plain torch code on the CPU; "te" by Transformer Engine, beside those kernels
    tiny    optimizer steps of llama_tiny
    1b      of Llama 3.2 1B cut to four layers, four sequences of 2048

A row of te has te.TransformerLayer for every layer of the model; with "parts" the same recipe runs in te.LayerNormLinear,
te.Linear, te.LayerNormMLP and torch's attention. Losses are shown side by side, @5 that of step 5; `fp8` is the share of matmul
FLOPs that ran in FP8, as observed in the first step; ms is the median of the steps after it, eagerly run (bench_gpu.py has
speeds), GiB the peak that torch allocated. Each row runs in a process of its own with a time budget: a crash costs one row, and
one over its budget is stopped and says so. What a backend's rules refuse here is a row that says why. Exits with 1 where a row
failed, bits differ or its last loss is not BF16's. `--no-proof` is for the fake GPU (tools/fake_gpu), whose products compute
nothing. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import torch

import fp8cfg
from fp8cfg.backends.choice import backend_violations
from fp8cfg.backends.te import decoder
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.hardware import find_hardware, no_cuda
from fp8cfg.schema.tables import wrapped
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu_rows import kernel_bits, products, proof, te_bits
from tools.gpu_rows.results import Results, machine, writable
from tools.gpu_rows.selection import is_selected, unknown
from tools.gpu_rows.worker import Make, Row, Worker

PLAIN = ["fp8.params=false", "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"]
PRESETS = {
    "delayed": "bf16_fp8",
    "current": "bf16_fp8_current",
    "row": "bf16_fp8_current",
    "block": "bf16_fp8_block",
    "mxfp8": "bf16_mxfp8",
    "nvfp4": "bf16_nvfp4",
}
MORE = {
    ("te", "delayed"): ["fp8.first_step=te"],
    ("native", "row"): ["fp8.granularity=row"],
    ("native", "block"): ["fp8.format=e4m3"],
    ("torchao", "row"): ["fp8.granularity=row"],
    ("msamp", "delayed"): [
        "opt_level=O2",
        "fp8.amax_history_len=16",
        "fp8.reduce_amax=false",
        "storage.accumulate=stored",
    ],
}
SCALINGS = {
    "native": list(PRESETS),
    "te": [s for s in PRESETS if s != "row"],
    "torchao": ["current", "row", "mxfp8"],
    "msamp": ["delayed"],
}
ROWS = [
    "bf16",
    *(f"{backend} {scaling}" for backend, scalings in SCALINGS.items() for scaling in scalings),
    "te delayed parts",
    "te current parts",
]
GEMM = [f"native {scaling}" for scaling in products.SCALINGS]
BITS = [
    *(f"kernels {scaling}" for scaling in kernel_bits.SCALINGS),
    *(f"te {scaling}" for scaling in te_bits.SCALINGS),
]
MODELS = {
    False: {
        "tiny": ["recipe=llama_tiny"],
        "1b": [
            "recipe=llama_1b",
            "model.num_layers=4",
            "model.seq_length=2048",
            "trainer.global_batch_size=4",
            "trainer.micro_batch_size=4",
        ],
    },
    True: {
        "tiny": [
            "recipe=llama_tiny",
            "model.num_layers=2",
            "model.hidden_size=64",
            "model.ffn_hidden_size=128",
            "model.seq_length=32",
            "trainer.global_batch_size=4",
            "trainer.micro_batch_size=4",
        ],
        "1b": [
            "recipe=llama_1b",
            "model.num_layers=1",
            "model.hidden_size=128",
            "model.ffn_hidden_size=512",
            "model.kv_channels=16",
            "model.num_attention_heads=8",
            "model.num_query_groups=2",
            "model.vocab_size=512",
            "model.seq_length=64",
            "trainer.global_batch_size=1",
            "trainer.micro_batch_size=1",
        ],
    },
}
EVERY = [
    *(("gemm", row) for row in GEMM),
    *(("bits", row) for row in BITS),
    *((model, row) for model in MODELS[False] for row in ROWS),
]
"""The rows of the table, each with its model or "gemm" or "bits"."""
FOLLOWS = 0.1
"""Share of BF16's last loss within which a row's must be. On a CPU, over 20 steps, native rows end within 0.3 % of it in the small model
and 1.6 % in llama_tiny, which is fp8.first_step=te, as TE's delayed scaling starts: under scale 1 the gradients of the first steps are
flushed to zero, more of them with more tokens, and such a row is some steps behind, of 1.3 % each at that point of the small model. An
output a tenth as large or one column aside ends 20 % and 23 % above it, input gradients eight times as large 39 %. Weight gradients that
are wrong (3 %) are not found by losses, but by `bits` and tests/gpu."""
TRAINER = [
    "data=tiny",
    "data.tokenizer=bytes",  # a model of half a billion parameters needs it for the tiny corpus
    "trainer.devices=1",
    "optim.warmup_steps=0",
    "optim.constant_steps=0",
]


def recipe_of(args: argparse.Namespace, model: str, row: str) -> fp8cfg.Recipe:
    words = [
        *MODELS[args.small][model],
        *TRAINER,
        f"trainer.max_steps={args.steps}",
        f"trainer.accelerator={args.device}",
    ]
    if row == "bf16":
        return fp8cfg.compose([*words, "precision=bf16"])
    backend, scaling, *_ = row.split()
    return fp8cfg.compose(
        [
            *words,
            f"precision={PRESETS[scaling]}",
            *PLAIN,
            *MORE.get((backend, scaling), []),
            f"backend={backend}",
        ]
    )


def train(args: argparse.Namespace, model: str, row: str) -> list[str]:
    """The cells of a row: losses, share in FP8, time, memory. Raises NotFP8Error where it did not run as planned."""
    parts = row.endswith("parts")
    if parts:
        decoder.obstacle = lambda layer, make: (
            "asked for"
        )  # in this process, which has no other row
    job = fp8cfg.build(recipe_of(args, model, row))
    layers = set(decoder.describe_decoder_layers(job.model).values())
    if row.startswith("te ") and (layers == {"te.TransformerLayer"}) == parts:
        raise ArithmeticError(f"its layers are {sorted(layers)}")
    batches, _ = run_data(job.recipe)
    losses, times, share = [], [], 0.0
    for step in range(args.steps):
        began = time.perf_counter()
        losses.append(
            train_step(job, batches, step, World()).wait().loss
        )  # which waits for the GPU
        times.append(time.perf_counter() - began)
        if not step:
            share = job.prove().share
    if not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"losses {losses}")
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if args.device == "cuda" else "-"
    shown = [f"{losses[step - 1]:.4f}" for step in shown_steps(args.steps)]
    return [*shown, f"{share:.0%}", f"{statistics.median(times[1:] or times) * 1e3:.1f}", peak]


def shown_steps(steps: int) -> list[int]:
    return sorted({1, max(1, steps // 4), max(1, steps // 2), steps})


def bits(args: argparse.Namespace, _: str, row: str) -> list[str]:
    """How many bytes differ, in one cell."""
    of, scaling = row.split()
    counts = (te_bits.te_bits if of == "te" else kernel_bits.kernel_bits)(scaling, args.device)
    return ["ran; the fake GPU's bytes are not compared" if args.no_proof else counts.verdict()]


def gemm(args: argparse.Namespace, _: str, row: str) -> list[str]:
    """How far each product is from high precision, in one cell."""
    return [products.products(row.split()[1], args.device, not args.no_proof)]


def refused(args: argparse.Namespace, model: str, row: str) -> str:
    """Why the row cannot run on this machine: what the backend's rules say; empty where it can."""
    if model == "gemm":
        return kernel_bits.refused(args.device) or refused(args, "tiny", row)
    if model == "bits":
        return (
            refused(args, "tiny", row)
            if row.startswith("te ")
            else kernel_bits.refused(args.device)
        )
    if row == "bf16":
        return ""
    found = recipe_of(args, model, row)
    return next(
        (
            str(violation).partition("; ")[0]
            for violation in backend_violations(
                found.backend, found.precision, find_hardware(args.device)
            )
        ),
        "",
    )


MADE = {"gemm": gemm, "bits": bits}
"""What makes the rows of no model."""


def start(args: argparse.Namespace, model: str) -> Make:
    """Begins the process of a row."""
    proof.start(args.device, args.no_proof)
    return lambda row: Row(MADE.get(model, train)(args, model, row))


def line(model: str, row: str, cells: list[str]) -> str:
    head = f"{model:5} {row:16}"
    return (
        head + "".join(c.rjust(9) for c in cells[:-3]) + "".join(c.rjust(7) for c in cells[-3:])
        if len(cells) > 1
        else wrapped(cells[0], head + " ", " " * 23)
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="on a CPU, with small shapes")
    parser.add_argument("--steps", type=int, default=20, help="of each model; default 20")
    parser.add_argument("--minutes", type=float, default=8, help="of all rows together; default 8")
    parser.add_argument(
        "--row-seconds",
        type=float,
        default=60,
        metavar="SECONDS",
        help="of one row, which is stopped there; default 60",
    )
    parser.add_argument(
        "--no-proof", action="store_true", help="prove no products, for the fake GPU"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORDS",
        help="rows that have one of these words, as in: --only te bits, or all words of a quoted text, as in: --only 'te delayed'",
    )
    parser.add_argument(
        "--out",
        type=writable,
        metavar="FILE",
        help="append rows to it as they come, with where failed ones were",
    )
    args = parser.parse_args(argv)
    if text := unknown(args.only, [f"{model} {row}" for model, row in EVERY]):
        words = dict.fromkeys(word for model, row in EVERY for word in (model, *row.split()))
        parser.error(
            f"--only {text}: no row has this name; words of their names are {', '.join(words)}"
        )
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1")
    args.device = "cpu" if args.small else "cuda"
    if args.device == "cuda" and (why := no_cuda()):
        parser.error(f"torch has no CUDA device here ({why}); write --small")
    return args


def run(args: argparse.Namespace, results: Results) -> None:
    """The rows, as they come."""
    context = multiprocessing.get_context(
        "forkserver"
    )  # which loads torch once, and never touches the GPU itself
    context.set_forkserver_preload(
        [
            "__main__",
            "tools.check_gpu",
            "fiddle",
            "fp8cfg.composition.hydra_application",
            "fp8cfg.models.transformer",
        ]
    )
    deadline = time.monotonic() + 60 * args.minutes
    results.say(wrapped(machine(args.device)))
    results.say(
        line("model", "", [*(f"@{step}" for step in shown_steps(args.steps)), "fp8", "ms", "GiB"])
    )
    bf16: dict[str, float] = {}  # last losses, by model
    for model, row in EVERY:
        if not is_selected(f"{model} {row}", args.only):
            continue
        why = refused(args, model, row)
        found = Row([f"not run: {why}"])
        if not why:
            with Worker(context, start, args, model) as worker:
                found = worker.row_in_time(
                    row,
                    args.row_seconds,
                    deadline - time.monotonic(),
                    f"no time left of {args.minutes:g} minutes",
                )
        results.say(line(model, row, found.cells))
        if len(found.cells) > 1:
            last = float(found.cells[-4])
            if row != "bf16" and model not in bf16:
                results.say(f"note: {model} has no loss of bf16 to hold this one against")
            base = bf16.setdefault(model, last) if row == "bf16" else bf16.get(model, last)
            if abs(last - base) > FOLLOWS * base and not args.no_proof:
                found = Row([f"failed: loss {last:.4f}, BF16's is {base:.4f}"], failed=True)
                results.say(line(model, row, found.cells))
        results.row(f"{model} {row}", found)


def main() -> int:
    args = parse()
    results = Results(args.out)
    run(args, results)
    return results.verdict()


if __name__ == "__main__":
    sys.exit(main())
