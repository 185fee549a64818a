#!/usr/bin/env python3
"""Planned and measured bytes of a training step on a CPU, by kind: how true `fp8cfg plan` is about memory.

    python tools/check_memory.py                                   # llama_tiny and 50M parameters, all precisions: ten minutes
    python tools/check_memory.py --size tiny precision=bf16_fp8    # one of them

`fp8cfg plan --measure` measures in the same way (fp8cfg/training/memory_measurement.py). Exits with 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse

import command
import torch

from fp8cfg.schema.tables import size, table
from fp8cfg.training.memory_measurement import BOUNDS, measure_memory

SIZES = {
    "tiny": ["recipe=llama_tiny"],
    "mid": [
        "recipe=llama_tiny",
        "model.hidden_size=512",
        "model.ffn_hidden_size=1408",
        "model.num_layers=12",
        "model.num_attention_heads=8",
        "model.num_query_groups=4",
        "model.vocab_size=16384",
        "trainer.micro_batch_size=2",
    ],
}
PRECISIONS = [
    ["precision=fp32"],
    ["precision=bf16"],
    ["precision=fp16", "precision.loss_scale=1024"],
    ["precision=bf16_fp8"],
    ["precision=bf16_fp8", "fp8.params=false"],
    ["precision=bf16_fp8_current"],
    ["precision=bf16_fp8_current", "fp8.params=false"],
    *(
        [f"precision={p}", f"opt_level={level}"]
        for p in ("bf16", "bf16_fp8")
        for level in ("O1", "O2", "O3")
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="one precision and other overrides in place of all precisions"
    )
    parser.add_argument("--size", choices=list(SIZES), help="this one alone")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], help="this one alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = {
        f"{name} {' '.join(words)} {recompute}": [
            *SIZES[name],
            *words,
            "data=tiny",
            f"model.recompute_granularity={recompute}",
        ]
        for name in ([args.size] if args.size else SIZES)
        for words in ([args.words] if args.words else PRECISIONS)
        for recompute in ([args.recompute] if args.recompute else ["none", "selective", "full"])
    }
    missed = []
    for (name, words), recipe in zip(wanted.items(), command.recipes(wanted.values()), strict=True):
        found = measure_memory(recipe)
        rows = [
            [
                kind,
                size(p),
                size(m),
                f"{p / m:.3f}" if m else "",
                f"{bound:.0%}" if (bound := BOUNDS.get(kind)) else "",
            ]
            for kind, (p, m) in found.items()
            if p or m
        ]
        print(
            table([name, "planned", "measured", "ratio", "bound"], rows, right=(1, 2, 3, 4)),
            end="\n\n",
            flush=True,
        )
        missed += [
            f"{' '.join(words)}: {kind}"
            for kind, bound in BOUNDS.items()
            if abs(found[kind][0] - found[kind][1]) > bound * found[kind][1]
        ]
    print("all within bounds" if not missed else "out of bounds:\n" + "\n".join(missed))
    return bool(missed)


if __name__ == "__main__":
    command.run(main)
