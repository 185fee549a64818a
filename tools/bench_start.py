#!/usr/bin/env python3
"""Start-up times of every verb beside a bare Hydra application's and NeMo-Run's, interleaved in one run: medians of whole
processes.

    python tools/bench_start.py [--runs 15] [--nemo-python PYTHON]

PYTHON is the interpreter of an environment with nemo_run, which does not share one with our Hydra. What ends with another
exit code than it should is marked.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fp8cfg.schema.tables import table

ROOT = Path(__file__).resolve().parents[1]
HYDRA_APP = """import hydra
from omegaconf import DictConfig
@hydra.main(config_path=None, version_base="1.3")
def main(cfg: DictConfig) -> None:
    print(cfg)
main()
"""
NEMO_APP = """import nemo_run as run
def train(steps: int = 1) -> None:
    print(steps)
if __name__ == "__main__":
    run.cli.main(train)
"""
BASE = "bare Hydra app --help"
FP8 = ["recipe=llama_8b", "precision=bf16_fp8"]
VERBS = {
    "--help": ["--help"],
    "a typo, fp8.margn=1": ["fp8.margn=1"],
    "completion --words fp8.ma": ["completion", "--words", "fp8.ma"],
    "list": ["list"],
    "explain fp8.margin": ["explain", "fp8.margin", *FP8],
    "diff": ["diff", "recipe=llama_8b", "--", *FP8],
    "check": ["check", *FP8],
    "export --yaml": ["export", "--yaml", *FP8],
    "schema": ["schema"],
    "plan": ["plan", *FP8],
    "--cfg job": ["--cfg", "job", *FP8],
    "doctor": ["doctor"],
}
Command = tuple[list[str], int]
"""A command line, and the exit code that it should end with."""


def commands(folder: Path, nemo: str | None) -> dict[str, Command]:
    """What is measured, by its name."""
    for name, text in (("hydra_app.py", HYDRA_APP), ("nemo_app.py", NEMO_APP)):
        (folder / name).write_text(text)
    app = [sys.executable, str(folder / "hydra_app.py")]
    found = {
        "python -c pass": ([sys.executable, "-c", "pass"], 0),
        BASE: ([*app, "--help"], 0),
        "bare Hydra app --cfg job": ([*app, "--cfg", "job"], 0),
    }
    found |= {
        f"fp8cfg {name}": ([sys.executable, "-m", "fp8cfg", *argv], 2 if "typo" in name else 0)
        for name, argv in VERBS.items()
    }
    if nemo:
        found["NeMo-Run app --help"] = ([nemo, str(folder / "nemo_app.py"), "--help"], 0)
    return found | {"import torch": ([sys.executable, "-c", "import torch"], 0)}


def without_nemo(python: str | None) -> str | None:
    """Why NeMo-Run cannot be measured; None where it can."""
    if not python:
        return "no --nemo-python given"
    try:
        done = subprocess.run(
            [python, "-c", "import nemo_run"], capture_output=True, text=True, check=False
        )
    except OSError as e:
        return f"{python}: {e.strerror}"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--nemo-python", metavar="PYTHON")
    args = parser.parse_args()
    missing = without_nemo(args.nemo_python)
    with tempfile.TemporaryDirectory() as folder:
        measured = commands(Path(folder), None if missing else args.nemo_python)
        times: dict[str, list[float]] = {name: [] for name in measured}
        wrong: dict[str, str] = {}
        for _ in range(args.runs):
            for name, (command, code) in measured.items():
                began = time.perf_counter()
                done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
                times[name].append(time.perf_counter() - began)
                if done.returncode != code:
                    wrong[name] = f"exit code {done.returncode}"
    base = statistics.median(times[BASE])
    rows = [
        [
            name,
            f"{statistics.median(t) * 1000:.0f} ms",
            f"{min(t) * 1000:.0f} ms",
            f"{statistics.median(t) / base:.2f}",
            wrong.get(name, ""),
        ]
        for name, t in times.items()
    ]
    if missing:
        rows.append(["NeMo-Run app --help", "", "", "", missing])
    print(table(["command", "median", "least", "x Hydra --help", ""], rows, right=(1, 2, 3)))


if __name__ == "__main__":
    main()
