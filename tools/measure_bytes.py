#!/usr/bin/env python3
"""Measured bytes of a parameter, by kind, for every row of the low-precision chart: one process, and several ranks over gloo.

    python tools/measure_bytes.py                        # llama_tiny, one rank and two: three minutes on two cores
    python tools/measure_bytes.py --ranks 1 model.num_layers=8

Bytes are those that stay from one step to the next, after two steps. Scales are those of whole tensors and of blocks; histories of
amaxes are not among them. Of several ranks it is the fullest. The chart's number is for linear layers alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import command
import torch
import torch.distributed as dist

import fp8cfg
from fp8cfg.parallel.process_group import World
from fp8cfg.planning import remarks
from fp8cfg.schema.storage import resolve_state_dtypes
from fp8cfg.schema.tables import table
from fp8cfg.training.data import run_data
from fp8cfg.training.memory_measurement import tensors_by_kind
from fp8cfg.training.step import train_step

SMALL = [
    "recipe=llama_tiny",
    "data=tiny",
    "trainer.micro_batch_size=2",
    "trainer.global_batch_size=4",
    "trainer.max_steps=2",
    "optim.warmup_steps=1",
    "trainer.compile=off",
]
FP8 = "precision=bf16_fp8 fp8.output_layer=true"
LEVELS = ("O1", "O2", "O3")
ROWS = {
    "FP16 AMP": "precision=fp16 storage.weight=fp32 precision.loss_scale=1024",
    "TE": f"{FP8} fp8.params=false storage.weight=fp32",
    "Megatron BF16": "precision=bf16",
    **{level: f"{FP8} opt_level={level}" for level in LEVELS},
}
"""The rows of the low-precision chart as overrides."""
SHARDED = {
    f"{level}, {shard}": f"{ROWS[level]} storage.shard={shard}"
    for level in ("O2", "O3")
    for shard in ("zero1", "zero2")
}
"""Rows that differ from those on several ranks alone."""
SPLIT = {
    "none": (),
    "zero1": ("master_weight", "exp_avg", "exp_avg_sq"),
    "zero2": ("master_weight", "exp_avg", "exp_avg_sq", "weight_grad"),
}


def rows(ranks: int) -> dict[str, str]:
    """All rows that there are on so many ranks."""
    return ROWS if ranks == 1 else ROWS | SHARDED


def counts(text: str) -> list[int]:
    """Numbers of ranks, as in `1,2`. Raises ValueError for any other text."""
    return [command.count(word) for word in text.split(",")]


def measured(words: list[str], world: World) -> dict[str, float]:
    """Bytes of a parameter on this rank."""
    job = fp8cfg.build(fp8cfg.compose(words))
    batches, _ = run_data(job.recipe)
    for step in range(2):
        train_step(job, batches, step, world)
    count = sum(p.numel() for p in job.model.parameters())
    return {
        kind: sum(t.nbytes for t in tensors) / count
        for kind, tensors in tensors_by_kind(job).items()
    }


def words_of(ranks: int, words: list[str]) -> dict[str, list[str]]:
    """All rows on so many ranks as overrides, with `words` on top."""
    return {name: [*SMALL, *row.split(), *words] for name, row in rows(ranks).items()}


def on_rank(rank: int, ranks: int, words: list[str], folder: str) -> None:
    """All rows on one of several ranks, into a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    found = {
        name: measured(row, World(rank, ranks)) for name, row in words_of(ranks, words).items()
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def charted(recipe: fp8cfg.Recipe, ranks: int) -> float:
    """The chart's bytes of a parameter of a linear layer on each of so many ranks."""
    columns = remarks.chart_row(recipe, resolve_state_dtypes(recipe.precision))
    split = remarks.bytes_per_parameter(
        {**dict.fromkeys(columns, "none"), **{k: columns[k] for k in SPLIT[recipe.storage.shard]}}
    )
    return remarks.bytes_per_parameter(columns) - split * (1 - 1 / ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=counts, default=[1, 2], metavar="N[,N]")
    parser.add_argument("words", nargs="*", default=[])
    args = parser.parse_intermixed_args()
    recipes = {
        ranks: command.recipes(words_of(ranks, args.words).values(), ranks) for ranks in args.ranks
    }
    run_data(
        recipes[args.ranks[0]][0]
    )  # raises ConfigError here, and not in each process, where there is none
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(on_rank, (ranks, args.words, folder), nprocs=ranks)
            each = [
                torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)
            ]
        lines = []
        for name, recipe in zip(rows(ranks), recipes[ranks], strict=True):
            kinds = max((found[name] for found in each), key=lambda kinds: sum(kinds.values()))
            lines.append(
                [
                    name,
                    *(f"{n:.2f}" for n in kinds.values()),
                    f"{sum(kinds.values()):.2f}",
                    f"{charted(recipe, ranks):.3g}",
                ]
            )
        print(
            table(
                [f"{ranks} rank{'s'[: ranks > 1]}", *each[0]["O1"], "total", "chart"],
                lines,
                right=range(1, 8),
            ),
            end="\n\n",
        )


if __name__ == "__main__":
    command.run(main)
