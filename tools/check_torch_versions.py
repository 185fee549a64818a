#!/usr/bin/env python3
"""Run the numerics, a compiled run and a short training on a CPU with the oldest and the newest torch that pyproject.toml allows,
and print a table of them; exit code 1 where anything failed.

    python tools/check_torch_versions.py                                   # makes two environments, and removes them
    python tools/check_torch_versions.py --torch-index URL --newest 2.13.0   # torch's CPU wheels; the default index may have CUDA ones
    python tools/check_torch_versions.py --env PYTHON --env PYTHON         # environments that are there: torch, our requirements, pytest
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TINY = [
    "recipe=llama_tiny",
    "data=tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.seq_length=32",
    "trainer.accelerator=cpu",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=4",
    "trainer.val_check_interval=30",
    "trainer.limit_val_batches=1",
    "optim.warmup_steps=1",
]
TRAIN = ["-m", "fp8cfg", *TINY, "precision=bf16_fp8"]
NUMERICS = [
    f"tests/numerics/test_{name}.py"
    for name in ("block_scaling", "codecs", "formats", "linear", "range_expansion", "scaling")
]
"""Of tensors and layers alone: the others train, on whatever device is there."""


class Check(NamedTuple):
    """A command for the Python of an environment, and the pattern that what it prints must have where it is right, whose first
    group is the result."""

    name: str
    command: list[str]
    result: str


CHECKS = [
    Check(
        "numerics",
        ["-m", "pytest", "-p", "no:cacheprovider", *NUMERICS, "-m", "not slow"],
        r"(\d+ passed[^\n]*?) in ",
    ),
    # Under float32 nothing is cast after a product, which is where torch 2.11 loses gradients.
    Check(
        "compiled, fp32",
        [*TRAIN, "precision.compute=fp32", "trainer.compile=on", "trainer.max_steps=3"],
        r"(?s)compiled gradients of the first microbatch match the eager ones.*(training loss [\d.]+)",
    ),
    Check(
        "compiled, bf16",
        [*TRAIN, "trainer.compile=on", "trainer.max_steps=3"],
        r"(?s)compiled gradients of the first microbatch match the eager ones.*(training loss [\d.]+)",
    ),
    Check(
        "training",
        [*TRAIN, "trainer.compile=off", "trainer.max_steps=30"],
        r"(training loss [\d.]+)",
    ),
]


def requirements() -> dict[str, str]:
    """The requirements of pyproject.toml by name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    return {re.split(r"[^\w.-]", line)[0]: line for line in listed}


def made(folder: Path, torch: str, index_url: str | None) -> str:
    """A new environment in `folder` with the requirement `torch` and ours; its Python. Raises CalledProcessError."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = ["--index-url", index_url] if index_url else []
    others = [line for name, line in requirements().items() if name != "torch"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, *index, torch],
        [*pip, *others, "pytest", "hypothesis"],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def versions(python: str) -> tuple[str, str]:
    """The versions of torch and Python of an environment. Raises CalledProcessError."""
    code = "import platform, torch; print(torch.__version__, platform.python_version())"
    found = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    return found[0], found[1]


def run(python: str, check: Check) -> tuple[bool, str]:
    """Whether `check` is right in this environment, and its result, or the last line of what it printed."""
    with tempfile.TemporaryDirectory() as logs:
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        more = [f"log.dir={logs}"] if "fp8cfg" in check.command else []
        done = subprocess.run(
            [python, *check.command, *more],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode == 0 and (found := re.search(check.result, done.stdout)):
        return True, found[1]
    last = (done.stdout.strip().splitlines() or ["printed nothing"])[-1]
    return False, f"FAILED, exit code {done.returncode}: {last}"


def rows(python: str) -> Iterator[tuple[bool, str]]:
    """A line of the table for each check, and whether it is right."""
    torch, own = versions(python)
    for check in CHECKS:
        began = time.perf_counter()
        right, result = run(python, check)
        yield (
            right,
            f"{torch:<14} {own:<8} {check.name:<14} {time.perf_counter() - began:7.1f}  {result}",
        )


def environments(options: argparse.Namespace, root: Path) -> Iterator[tuple[str, str | None]]:
    """Each environment's Python, or what pip said where it could not be made."""
    if options.env:
        yield from ((path, None) for path in options.env)
        return
    for name, torch in {
        "oldest": f"torch=={options.oldest}",
        "newest": f"torch=={options.newest}" if options.newest else "torch",
    }.items():
        try:
            yield made(root / name, torch, options.torch_index), None
        except subprocess.CalledProcessError as e:
            yield torch, (e.stderr.strip().splitlines() or [str(e)])[-1]
        shutil.rmtree(root / name, ignore_errors=True)


def arguments() -> argparse.Namespace:
    least = requirements()["torch"].partition(">=")[2].partition(",")[0]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--oldest", metavar="VERSION", default=least, help="default: %(default)s, of pyproject.toml"
    )
    parser.add_argument("--newest", metavar="VERSION", help="default: the newest of the index")
    parser.add_argument(
        "--torch-index", metavar="URL", help="pip's, for torch and what it requires"
    )
    parser.add_argument(
        "--env",
        metavar="PYTHON",
        action="append",
        help="the Python of an environment that is there; no other is made",
    )
    options = parser.parse_args()
    if options.env and (options.newest or options.torch_index or options.oldest != least):
        parser.error("--env makes no environment; drop --oldest, --newest and --torch-index")
    for version in filter(None, (options.oldest, options.newest)):
        if not re.fullmatch(r"\d+(\.\d+)+(\.?(a|b|rc|dev|post)\d+)*(\+\w+)?", version):
            parser.error(f"{version}: no version of torch; write one such as {least}.0")
    for path in options.env or ():
        try:
            versions(path)
        except (OSError, subprocess.CalledProcessError):
            parser.error(f"--env {path}: no Python that imports torch")
    return options


def main() -> int:
    options, all_right = arguments(), True
    print(f"{'torch':<14} {'Python':<8} {'what':<14} {'seconds':>7}  result")
    with tempfile.TemporaryDirectory() as root:
        for python, unmade in environments(options, Path(root)):
            if unmade:
                all_right = False
                print(f"{python:<39} {'':7}  FAILED, no environment: {unmade}", flush=True)
                continue
            for right, line in rows(python):
                all_right &= right
                print(line, flush=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
