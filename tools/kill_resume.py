#!/usr/bin/env python3
"""Kill runs with SIGKILL at random moments, resume them each time, and compare their metrics with those of an uninterrupted run,
bit for bit: everything in metrics.jsonl but the seconds.

    python tools/kill_resume.py                                       # ten kills
    python tools/kill_resume.py --kills 3 precision=bf16_fp8_current
    python tools/kill_resume.py --kills 3 --ranks 2 opt_level=O3 storage.shard=zero2
    python tools/kill_resume.py --rows --kills 3 --ranks 1,2 trainer.max_steps=60    # every row of the chart: ten minutes
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

import command
from measure_bytes import counts, rows

from fp8cfg.run_folder.metrics_file import MEASURED, read_metrics

WORDS = [
    "recipe=llama_tiny",
    "data=tiny",
    "trainer.max_steps=150",
    "checkpoint.every_n_steps=3",
    "trainer.val_check_interval=20",
    "trainer.limit_val_batches=1",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=384",
    "model.seq_length=64",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=4",
]


def losses(root: Path) -> list[dict[str, object]]:
    """The metrics of the run under `root`, without what measures time."""
    (folder,) = root.iterdir()
    return [
        {k: v for k, v in line.items() if k not in MEASURED}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def progress(root: Path) -> int:
    """Lines of metrics that the run under `root` has written so far."""
    file = next(root.glob("*/metrics.jsonl"), None)
    return file.read_bytes().count(b"\n") if file else 0


def family(pid: int) -> list[int]:
    """A process and all that it started, torchrun's ranks among them, which are sessions of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in family(int(child)))]


def kill_at_random(command: list[str], root: Path, rng: random.Random) -> int:
    """Start `command`, let it do some steps, kill it somewhere in the next ones, saves among them; its lines of metrics."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = progress(root) + rng.randint(1, 8)
    while progress(root) < until and process.poll() is None:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.2))
    if process.poll() is not None:
        sys.exit(f"ended by itself with {process.returncode}: {process.communicate()[1].decode()}")
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return progress(root)


def to_the_end(run: list[str]) -> None:
    """Run a command; what fails has said why on stderr, and ends this one with its exit code."""
    done = subprocess.run(run, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)


def compared(words: list[str], ranks: int, kills: int, rng: random.Random) -> tuple[str, bool]:
    """Where a run was killed, how its metrics differ from those of an uninterrupted one, and whether they do not."""
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        start = [*launch, "fp8cfg", *WORDS, *words]
        to_the_end([*start, f"log.dir={whole}"])
        part, lines = [*start, f"log.dir={killed}"], []
        for _ in range(kills):
            lines.append(kill_at_random(part, killed, rng))
            part = [*launch, "fp8cfg", "resume", *map(str, killed.iterdir())]
        to_the_end(part)
        want, got = losses(whole), losses(killed)
    apart = next((f"DIFFERENT: {b}, not {a}" for a, b in zip_longest(want, got) if a != b), "")
    return (
        f"killed after {', '.join(map(str, lines))} of {len(want)} lines: {apart or 'equal'}",
        not apart,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="every row of the low-precision chart")
    parser.add_argument("--kills", type=command.count, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=counts, default=[1], metavar="N[,N]")
    parser.add_argument("words", nargs="*")
    args = parser.parse_intermixed_args()
    rng, good = random.Random(args.seed), True
    words = {
        ranks: {
            name: [*row.split(), *args.words]
            for name, row in (rows(ranks) if args.rows else {"": "precision=bf16_fp8"}).items()
        }
        for ranks in args.ranks
    }
    for ranks in args.ranks:
        command.recipes(([*WORDS, *row] for row in words[ranks].values()), ranks)
    for ranks in args.ranks:
        for name, row in words[ranks].items():
            text, equal = compared(row, ranks, args.kills, rng)
            print(f"{name:13s} {ranks} rank{'s'[: ranks > 1]}, {text}".strip(), flush=True)
            good &= equal
    return 0 if good else 1


if __name__ == "__main__":
    command.run(main)
