#!/usr/bin/env python3
"""Kill a run with SIGKILL at random moments, resume it each time, and compare its losses with an uninterrupted run's, bit for
bit.

    python tools/kill_resume.py                       # ten kills
    python tools/kill_resume.py --kills 3 precision=bf16_fp8_current
    python tools/kill_resume.py --kills 3 --ranks 2 opt_level=O3 storage.shard=zero2
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
from pathlib import Path

from fp8cfg.training.metrics import read

WORDS = ["recipe=llama_tiny", "data=tiny", "precision=bf16_fp8", "trainer.max_steps=150", "checkpoint.every_n_steps=3",
         "trainer.val_check_interval=20", "trainer.limit_val_batches=1", "model.num_layers=2", "model.hidden_size=128",
         "model.ffn_hidden_size=384", "trainer.micro_batch_size=8"]


def losses(folder: Path) -> list[tuple[object, ...]]:
    """Everything in metrics.jsonl that does not measure time."""
    return [tuple((k, v) for k, v in line.items() if k != "seconds") for line in read(folder / "metrics.jsonl")]


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
    time.sleep(rng.uniform(0, 0.4))
    if process.poll() is not None:
        sys.exit(f"ended by itself with {process.returncode}: {process.communicate()[1].decode()}")
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return progress(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("words", nargs="*")
    args = parser.parse_intermixed_args()
    rng = random.Random(args.seed)
    launch = [sys.executable, "-m"]
    if args.ranks > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m"]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")

        def start(root: Path) -> list[str]:
            return [*launch, "fp8cfg", *WORDS, *args.words, f"log.dir={root}"]

        subprocess.run(start(whole), check=True, stdout=subprocess.DEVNULL)
        command = start(killed)
        for kill in range(args.kills):
            lines = kill_at_random(command, killed, rng)
            run = next(killed.iterdir())
            command = [*launch, "fp8cfg", "resume", str(run)]
            print(f"kill {kill + 1}: {lines} lines of metrics, checkpoints {sorted(p.name for p in (run / 'checkpoints').iterdir())}")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        want, got = losses(next(whole.iterdir())), losses(next(killed.iterdir()))
        print(f"{len(want)} lines of metrics after {args.kills} kills: {'equal' if got == want else 'DIFFERENT'}")
        sys.exit(0 if got == want else 1)


if __name__ == "__main__":
    main()
