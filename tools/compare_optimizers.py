#!/usr/bin/env python3
"""Train one small model with optimizers that store their state in different codecs, and print validation loss and bytes.

    python tools/compare_optimizers.py                                   # 600 steps, three seeds: about an hour on one core
    python tools/compare_optimizers.py --steps 120 --seeds 1 --rows AdamW O1 O2 O3
    python tools/compare_optimizers.py recipe=llama_tiny precision=bf16  # words before the options are overrides for all runs

As in MS-AMP, weights and gradients are narrow in linear layers alone, moments everywhere. Bytes are those of weights, masters,
gradients and moments as stored, a parameter, scales included; the float32 working copies that the model computes with are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import nn

import fp8cfg
from fp8cfg.job import Job
from fp8cfg.optim.groups import param_groups
from fp8cfg.optim.low_bit import LowBitAdamW
from fp8cfg.optim.low_bit_step import named_columns
from fp8cfg.report.tables import table
from fp8cfg.training.data import run_data, validation_batches
from fp8cfg.training.distributed import World
from fp8cfg.training.step import evaluate

SMALL = ["recipe=llama_tiny", "precision=fp32", "model.num_layers=2", "model.hidden_size=96", "model.ffn_hidden_size=256",
         "model.num_attention_heads=4", "model.num_query_groups=4", "model.seq_length=128", "optim.lr=1e-3"]
MOMENTS = {"exp_avg": "fp8_pow2", "exp_avg_sq": "fp16_scaled"}
O2 = {"weight": "fp16_scaled", "weight_grad": "fp8_pow2", **MOMENTS}
ROWS: dict[str, dict[str, str]] = {
    "AdamW": {},
    "O1": {"weight": "fp16_scaled", "weight_grad": "fp8_pow2"},
    "O2": O2,
    "O3": {**O2, "weight": "fp8_pow2", "master_weight": "fp16_scaled"},
    "O2 exact": {**O2, "weight_grad": "fp8", "exp_avg": "fp8"},
    "O2 stochastic": {**O2, "rounding": "stochastic"},
    "O3 fp32 master": {**O2, "weight": "fp8_pow2", "master_weight": "fp32"},
    "bf16 moments": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "block moments": {"exp_avg": "fp8_block", "exp_avg_sq": "fp8_block"},
    "bf16 all": {"weight": "bf16", "exp_avg": "bf16", "exp_avg_sq": "bf16", "rounding": "stochastic"},
    "FP8 no master": {**O2, "weight": "fp8_pow2"},
    "FP8 second moment": {**O2, "exp_avg_sq": "fp8_pow2"},
}


def optimizer_of(job: Job, row: str) -> torch.optim.Optimizer:
    """torch's AdamW, or the low-bit one with the columns of `row`."""
    o, model = job.recipe.optim, job.model
    groups = param_groups(model, o.weight_decay)
    options = {"lr": o.lr, "betas": o.betas, "eps": o.eps}
    if row == "AdamW":
        return torch.optim.AdamW(groups, fused=True, **options)
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    narrow, plain = named_columns(**ROWS[row]), named_columns(exp_avg=ROWS[row].get("exp_avg", "fp32"), exp_avg_sq=ROWS[row].get("exp_avg_sq", "fp32"))
    split = [{**group, "params": [(n, p) for n, p in group["params"] if (id(p) in linear) == inside], "columns": narrow if inside else plain}
             for group in groups for inside in (True, False)]
    return LowBitAdamW([group for group in split if group["params"]], seed=job.recipe.trainer.seed, **options)


def stored_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    """Persistent bytes a parameter, while gradients are there."""
    params = list(model.parameters())
    grads = sum(p.grad.nbytes for p in params if p.grad is not None)
    if isinstance(optimizer, LowBitAdamW):
        state = optimizer.state_tensors()
        kept = sum(p.nbytes for name, p in model.named_parameters() if f"{name}.weight" not in state)
        grads += sum(t.nbytes for stored in optimizer.stored_grads.values() for t in stored)
    else:
        state = {f"{i}.{k}": t for i, entry in enumerate(optimizer.state.values()) for k, t in entry.items() if k != "step"}
        kept = sum(p.nbytes for p in params)
    return (kept + grads + sum(t.nbytes for t in state.values())) / sum(p.numel() for p in params)


def train(words: list[str], row: str) -> tuple[float, float]:
    """Final validation loss, and bytes a parameter."""
    recipe, world = fp8cfg.compose(words), World()
    job = fp8cfg.build(recipe)
    batches, held_out = run_data(recipe)
    optimizer = optimizer_of(job, row)
    for step in range(recipe.trainer.max_steps):
        optimizer.zero_grad()
        tokens, targets = batches.batch(step)
        with job.autocast():
            job.backward(job.model(tokens, targets))
        nn.utils.clip_grad_norm_(job.model.parameters(), recipe.trainer.gradient_clip_val)
        job.schedule.apply(optimizer, step)
        optimizer.step()
    return evaluate(job, validation_batches(recipe, held_out, world), world), stored_bytes(optimizer, job.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("words", nargs="*", default=[])
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {row: [] for row in args.rows}
    for seed in range(args.seeds):
        for row in args.rows:
            began = time.perf_counter()
            words = [*SMALL, f"trainer.seed={seed}", f"trainer.max_steps={args.steps}", f"optim.warmup_steps={min(20, args.steps // 2)}",
                     "trainer.limit_val_batches=16", *args.words]
            found[row].append(train(words, row))
            print(f"seed {seed} {row}: {found[row][-1][0]:.4f} ({time.perf_counter() - began:.0f} s)", file=sys.stderr)
    base = statistics.mean(loss for loss, _ in found[args.rows[0]])
    rows = []
    for row, runs in found.items():
        losses = [loss for loss, _ in runs]
        mean = statistics.mean(losses)
        rows.append([row, f"{mean:.4f}", f"{mean / base - 1:+.2%}", f"{runs[0][1]:.2f}", " ".join(f"{loss:.4f}" for loss in losses)])
    print(table(["optimizer", "val loss", f"vs {args.rows[0]}", "B/param", "each seed"], rows, right=(1, 2, 3)))


if __name__ == "__main__":
    main()
