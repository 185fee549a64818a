#!/usr/bin/env python3
"""Train small models of TRL, PEFT, x-transformers, timm and torchvision themselves on a CPU, converted by fp8cfg.convert_model and
built by fp8cfg.build, beside the plain ones, and print a table; exit code 1 where losses differ, a layer that was planned did not run
in FP8, an output layer did, or weights do not load both ways.

    python tools/check_libraries.py                          # makes an environment, and removes it
    python tools/check_libraries.py --torch-index URL          # torch's CPU wheels; the default index may have CUDA ones
    python tools/check_libraries.py --keep FOLDER            # the environment stays there, and is used again
    python tools/check_libraries.py --env PYTHON timm        # an environment that is there; cases by their names
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.environments import ROOT, made

SCRIPT = ROOT / "tools" / "libraries" / "cases.py"
LIBRARIES = {
    "trl": "1.16.0",
    "peft": "0.21.2",
    "x-transformers": "2.31.10",
    "timm": "1.0.31",
    "torchvision": "0.28.0",
}
"""Versions that fit that torch."""
CASES = [
    ("trl", "converted"),
    ("trl", "built"),
    ("peft", "converted"),
    ("peft", "built"),
    ("peft_after", "converted"),
    ("x_transformers", "converted"),
    ("x_transformers", "built"),
    ("timm", "converted"),
    ("timm", "built"),
    ("torchvision", "converted"),
    ("torchvision", "built"),
]
"""Case and way, as tools/libraries/cases.py has them."""


def run(python: str, case: str, way: str) -> tuple[bool, str]:
    """Whether the case is right in this environment, and its result, or the last line of what it printed."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [python, str(SCRIPT), case, way],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    last = (done.stdout.strip().splitlines() or ["printed nothing"])[-1]
    return done.returncode == 0 and bool(found), found[
        -1
    ] if found else f"FAILED, exit code {done.returncode}: {last}"


def arguments() -> argparse.Namespace:
    names = sorted({case for case, _ in CASES})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "case", nargs="*", help=f"cases to run, of {', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--torch-index", metavar="URL", help="pip's, for torch and what it requires"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="where the environment is made, and stays"
    )
    parser.add_argument(
        "--env", metavar="PYTHON", help="the Python of an environment that is there; none is made"
    )
    options = parser.parse_args()
    if unknown := [case for case in options.case if case not in names]:
        parser.error(f"{unknown[0]}: no such case; choose from {', '.join(names)}")
    if options.env and (options.keep or options.torch_index):
        parser.error("--env makes no environment; drop --keep and --torch-index")
    return options


def main() -> int:
    options, all_right = arguments(), True
    with tempfile.TemporaryDirectory() as folder:
        try:
            python = options.env or made(
                options.keep or Path(folder),
                options.torch_index,
                [*(f"{name}=={version}" for name, version in LIBRARIES.items()), "accelerate"],
            )
        except subprocess.CalledProcessError as e:
            print(f"FAILED, no environment: {(e.stderr.strip().splitlines() or [str(e)])[-1]}")
            return 1
        print(f"{'case':<15} {'way':<10} {'seconds':>7}  result")
        for case, way in CASES:
            if options.case and case not in options.case:
                continue
            began = time.perf_counter()
            right, result = run(python, case, way)
            all_right &= right
            print(f"{case:<15} {way:<10} {time.perf_counter() - began:7.1f}  {result}", flush=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
