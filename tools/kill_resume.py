#!/usr/bin/env python3
"""Kill a run with SIGKILL at random moments, resume it each time, and compare its losses with an uninterrupted run's, bit for
bit.

    python tools/kill_resume.py                       # ten kills
    python tools/kill_resume.py --kills 3 precision=bf16_fp8_current
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fp8cfg.training.metrics import read

WORDS = ["recipe=llama_tiny", "data=tiny", "precision=bf16_fp8", "trainer.max_steps=60", "checkpoint.every_n_steps=5",
         "trainer.val_check_interval=20", "trainer.limit_val_batches=1", "model.num_layers=2", "model.hidden_size=128",
         "model.ffn_hidden_size=384", "trainer.micro_batch_size=8"]


def losses(folder: Path) -> list[tuple[object, ...]]:
    """Everything in metrics.jsonl that does not measure time."""
    return [tuple((k, v) for k, v in line.items() if k != "seconds") for line in read(folder / "metrics.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*")
    args = parser.parse_intermixed_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as root:
        def start(name: str) -> list[str]:
            return [sys.executable, "-m", "fp8cfg", *WORDS, *args.words, f"log.dir={root}/{name}"]

        began = time.perf_counter()
        subprocess.run(start("whole"), check=True, stdout=subprocess.DEVNULL)
        length = time.perf_counter() - began
        whole = next(Path(root, "whole").iterdir())
        command, folder = start("killed"), None
        for kill in range(args.kills):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(timeout=rng.uniform(0.2, 0.9) * length)
                print(f"run {kill}: ended by itself with {process.returncode}")
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            folders = list(Path(root, "killed").iterdir()) if Path(root, "killed").is_dir() else []
            folder = folders[0] if folders else None
            if folder and (folder / "recipe.yaml").is_file():
                command = [sys.executable, "-m", "fp8cfg", "resume", str(folder)]
                done = len(read(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").is_file() else 0
                print(f"kill {kill + 1}: {done} lines of metrics, checkpoints {sorted(p.name for p in (folder / 'checkpoints').iterdir())}")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        folder = folder or next(Path(root, "killed").iterdir())
        same = losses(folder) == losses(whole)
        print(f"{len(losses(whole))} lines of metrics: {'equal' if same else 'DIFFERENT'}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
