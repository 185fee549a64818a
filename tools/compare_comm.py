#!/usr/bin/env python3
"""Sum gradients over ranks in different codecs, and print the error of the sum and the bytes that a rank sends.

    python tools/compare_comm.py                     # 2, 4 and 8 ranks, threads of one process: seconds
    python tools/compare_comm.py --processes         # real processes over gloo, without the two emulated ways
    python tools/compare_comm.py --ranks 2 64 --elements 20000

Errors are norms, of the difference from the exact sum over the exact sum. Two ways are for reference and emulated here: every
rank sends FP8 to every other one (all-gather, one rounding; also what ZeRO-2 gets when only the owner needs the sum), and MS-AMP's
ring, where FP8 itself is added up, scaled down by the root of the number of ranks beforehand.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from fp8cfg.numerics.amax import compute_amax_or_nan
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.formats import E4M3, cast, pow2_scale
from fp8cfg.parallel.process_group import Traffic, World
from fp8cfg.parallel.quantized_allreduce import sum_over_ranks
from fp8cfg.schema.tables import table
from tools.gradient_sums.threaded_ranks import on_threads

GRADIENTS = ("independent", "correlated", "heavy-tailed", "cancelling")
CODECS = ("fp32", "bf16", "fp8", "fp8_pow2")
EMULATED = ("fp8 all-gather", "fp8 ring")
PARTS = (0.6, 0.3, 0.09, 0.01)
"""Sizes of the tensors, each with its scale, as shares of all elements."""
Errors = dict[tuple[str, int], float]


def gradients(kind: str, rank: int, elements: int) -> list[Tensor]:
    """The gradients of one rank. Correlated ones are a tenth noise; of cancelling ones, which change their sign from rank to rank,
    a twentieth is noise and remains; the magnitudes of heavy-tailed ones are log-normal, of sigma 2."""
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(rank + 1)
    found = []
    for i, part in enumerate(PARTS):
        count = max(int(part * elements), 1)
        mean, noise = torch.randn(count, generator=common), torch.randn(count, generator=own)
        if kind == "correlated":
            noise = mean + 0.1 * noise
        elif kind == "heavy-tailed":
            noise = noise * torch.exp(2 * torch.randn(count, generator=own))
        elif kind == "cancelling":
            noise = mean * (-1) ** rank + 0.05 * noise
        found.append(noise * 10.0 ** -(i + 3))
    return found


def all_gather(every: list[list[Tensor]]) -> list[Tensor]:
    """Each rank decodes and adds up what all have sent."""
    c = get_codec("fp8")
    return [
        torch.stack([c.decode(c.encode(t)) for t in ts]).sum(0) for ts in zip(*every, strict=True)
    ]


def ring(every: list[list[Tensor]]) -> list[Tensor]:
    """FP8 sums that go from rank to rank, under one scale for all, which leaves room for sqrt(N) times the amax."""
    found = []
    for ts in zip(*every, strict=True):
        scale = pow2_scale(
            torch.stack([compute_amax_or_nan(t) for t in ts]).amax(), E4M3.max
        ) / math.sqrt(len(ts))
        total = cast(ts[0] * scale, E4M3)
        for t in ts[1:]:
            total = cast(total.float() + cast(t * scale, E4M3).float(), E4M3)
        found.append(total.float() / scale)
    return found


def error(found: list[Tensor], kind: str, ranks: int, elements: int) -> float:
    """Of the tensors together, each by the norm of its exact sum."""
    exact = [
        torch.stack(ts).double().sum(0)
        for ts in zip(*(gradients(kind, rank, elements) for rank in range(ranks)), strict=True)
    ]
    return math.sqrt(
        sum(
            ((a.double() - b).norm() / b.norm()).item() ** 2 * part
            for a, b, part in zip(found, exact, PARTS, strict=True)
        )
    )


def summed(elements: int, world: World) -> tuple[Errors, dict[str, float]]:
    """Errors by way and gradients on the first rank, and bytes that a rank sends for an element."""
    errors, sent = {}, {}
    for i, kind in enumerate(GRADIENTS):
        for name in CODECS:
            world.traffic.clear()
            mine = gradients(kind, world.rank, elements)
            sum_over_ranks(mine, name, world)
            if world.first:
                errors[name, i] = error(mine, kind, world.size, elements)
            sent[name] = sum(world.traffic.bytes.values()) / sum(t.numel() for t in mine)
    return errors, sent


def in_threads(ranks: int, elements: int) -> tuple[Errors, dict[str, float]]:
    """The same, and the emulated ways."""
    errors, sent = on_threads(ranks, partial(summed, elements))[0]
    sent |= {"fp8 all-gather": ranks - 1.0, "fp8 ring": 2 * (ranks - 1) / ranks}
    for i, kind in enumerate(GRADIENTS):
        every = [gradients(kind, rank, elements) for rank in range(ranks)]
        for name, found in zip(EMULATED, (all_gather(every), ring(every)), strict=True):
            errors[name, i] = error(found, kind, ranks, elements)
    return errors, sent


def one_process(rank: int, ranks: int, elements: int, folder: str) -> None:
    """The same by one of several processes, of which the first writes down what it finds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting{ranks}", rank=rank, world_size=ranks
    )
    found = summed(elements, World(rank, ranks, Traffic()))
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def in_processes(ranks: int, elements: int) -> tuple[Errors, dict[str, float]]:
    """What `summed` gives in processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_process, (ranks, elements, folder), nprocs=ranks)
        return torch.load(Path(folder) / "found.pt")


def report(found: dict[int, tuple[Errors, dict[str, float]]]) -> str:
    """Two tables: errors by gradients, way and number of ranks; bytes by way and number of ranks."""
    names = [name for name in (*CODECS, *EMULATED) if (name, 0) in next(iter(found.values()))[0]]
    ranks = [f"{count} ranks" for count in found]
    right = range(2, 2 + len(ranks))
    errors = [
        [
            kind,
            name,
            *(
                f"{e[name, i]:.2g}" if e[name, i] < 1e-4 else f"{e[name, i]:.4f}"
                for e, _ in found.values()
            ),
        ]
        for i, kind in enumerate(GRADIENTS)
        for name in names
    ]
    sent = [["bytes sent", name, *(f"{s[name]:.3f}" for _, s in found.values())] for name in names]
    return "\n\n".join(
        [
            table(["error of the sum", "sent as", *ranks], errors, right),
            table(["an element", "sent as", *ranks], sent, right),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--elements", type=int, default=200_000)
    parser.add_argument("--processes", action="store_true")
    args = parser.parse_args()
    if min(args.ranks) < 2 or any(count % 2 for count in args.ranks) or args.elements < 1:
        sys.exit(
            "compare_comm: --ranks must be even, for gradients that cancel, and --elements positive"
        )
    torch.set_num_threads(1)
    measure = in_processes if args.processes else in_threads
    print(report({count: measure(count, args.elements) for count in args.ranks}))


if __name__ == "__main__":
    main()
