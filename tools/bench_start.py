#!/usr/bin/env python3
"""Start-up times beside a bare Hydra application's, interleaved in one run: medians of whole processes.

    python tools/bench_start.py [--runs 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fp8cfg.report.tables import table

ROOT = Path(__file__).resolve().parents[1]
HYDRA_APP = """import hydra
from omegaconf import DictConfig
@hydra.main(config_path=None, version_base="1.3")
def main(cfg: DictConfig) -> None:
    print(cfg)
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "app.py"
        app.write_text(HYDRA_APP)
        typo = ["-m", "fp8cfg", "fp8.margn=1"]
        commands = {
            "bare Hydra app --help": [str(app), "--help"], "python -c pass": ["-c", "pass"],
            "fp8cfg --help": ["-m", "fp8cfg", "--help"], "fp8cfg fp8.margn=1 (an error)": typo,
            "import fp8cfg": ["-c", "import fp8cfg"], "import torch": ["-c", "import torch"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.runs):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=False)
                times[name].append(time.perf_counter() - began)
    base = statistics.median(times["bare Hydra app --help"])
    rows = [[name, f"{statistics.median(t) * 1000:.0f} ms", f"{min(t) * 1000:.0f} ms", f"{statistics.median(t) / base:.2f}"]
            for name, t in times.items()]
    print(table(["command", "median", "least", "x Hydra --help"], rows, right=(1, 2, 3)))


if __name__ == "__main__":
    main()
