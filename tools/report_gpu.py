#!/usr/bin/env python3
"""First contact with a GPU, in one line and 25 minutes: gradients, every backend and scaling, speeds; a summary of what passed and why not.

    python tools/report_gpu.py --out gpu.txt

Where a command may take ten minutes and all of them fifteen, starting the machine included, this one, whose stages have as much less
time; rows that it does not reach say so:

    python tools/report_gpu.py --out gpu.txt --minutes 8.5

Where a command may take ten minutes and there are 26 in all, these three:

    python tools/report_gpu.py --out gpu.txt --stages probe check --minutes 8.5     # rows are appended
    python tools/report_gpu.py --out gpu.txt --stages bench --minutes 8.5
    python tools/report_gpu.py --out gpu.txt --stages tests --minutes 8.5

    probe    gradients of compiled layers beside eager ones (bench_gpu.py): where these are wrong, nothing compiled means anything
    check    every backend under every scaling: losses side by side, share in FP8, bytes of kernels and of TE (check_gpu.py)
    bench    speeds and memory beside BF16, goals, estimates and plans (bench_gpu.py)
    tests    tests/gpu and those of tests/fake_gpu that hold on a real one, where pytest is installed

The stages run in this order, each within its share of --minutes; what one leaves goes to those after it. Every line is appended to
--out and flushed as it comes, so that a run that is killed loses none. Needs fp8cfg's dependencies, pytest for the last stage, and no
network. Exits with 1 where a row failed or was stopped. `--no-proof` is for the fake GPU (tools/fake_gpu), whose products compute
nothing; it runs no tests.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fp8cfg.planning.hardware import no_cuda
from tools import bench_gpu, check_gpu
from tools.gpu_rows.results import Results, writable
from tools.gpu_rows.worker import Row

TESTS = [
    "tests/gpu",
    *(
        f"tests/fake_gpu/test_{name}.py"
        for name in ("block_products", "kernel_code", "microscaled_products", "planned_memory")
    ),
]
SHARES = {"probe": 2.0, "check": 7.0, "bench": 12.0, "tests": 4.0}
"""Minutes of 25."""


def probe(args: argparse.Namespace, minutes: float, results: Results) -> None:
    on = ["--device", "cpu"] if args.small else []
    bench_gpu.run(bench_gpu.parse([*words(args, minutes), *on, "--cases"]), results)


def check(args: argparse.Namespace, minutes: float, results: Results) -> None:
    check_gpu.run(check_gpu.parse([*words(args, minutes), "--steps", str(args.steps)]), results)


def bench(args: argparse.Namespace, minutes: float, results: Results) -> None:
    on = ["--device", "cpu"] if args.small else []
    bench_gpu.run(bench_gpu.parse([*words(args, minutes), "--no-probe", *on]), results)


def words(args: argparse.Namespace, minutes: float) -> list[str]:
    return [
        f"--minutes={minutes:.2f}",
        f"--row-seconds={args.row_seconds}",
        *(["--no-proof"] if args.no_proof else []),
        *(["--small"] if args.small else []),
    ]


def tests(args: argparse.Namespace, minutes: float, results: Results) -> None:
    """The tests by name as they end; the one at which they are stopped is the last."""
    if args.no_proof or args.small or not importlib.util.find_spec("pytest"):
        why = (
            "pytest is not installed"
            if not (args.no_proof or args.small)
            else "their values need a GPU"
        )
        results.row("tests", Row([f"not run: {why}"]))
        return
    command = [
        sys.executable,
        "-u",
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "--color=no",
        "--tb=short",
        *TESTS,
    ]
    root, given = (
        Path(__file__).parents[1],
        os.environ.get("PYTHONPATH", ""),
    )  # where libraries may be that came with the tree
    several = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(16, os.cpu_count() or 1))
    }  # one, where nothing is said (tests/conftest.py)
    process = subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**several, **os.environ, "PYTHONPATH": f"{root}{os.pathsep * bool(given)}{given}"},
    )
    try:
        stopped, last = follow(process, time.monotonic() + 60 * minutes, results)
    finally:
        end(process)
    failed = stopped or process.returncode != 0
    results.row(
        "tests",
        Row(
            [
                f"stopped: after {minutes:.1f} minutes at {last}"
                if stopped
                else f"{'failed: ' * failed}{last}"
            ],
            failed,
            stopped,
        ),
    )


def follow(process: subprocess.Popen[bytes], until: float, results: Results) -> tuple[bool, str]:
    """Says the lines of `process`, the leader of a session of its own, until it ends, or ends it at the time `until`; whether it did
    that, and the last line."""
    assert process.stdout
    held, last = b"", ""
    while (left := until - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        if not (read := os.read(process.stdout.fileno(), 1 << 16)):
            process.wait()
            return False, last
        *lines, held = (held + read).split(b"\n")
        for line in lines:
            results.say(text := line.decode(errors="replace"))
            last = text.strip("= ") or last
    end(process)
    return True, held.decode(errors="replace") or last


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the session that `process` leads: ranks and compilers that tests started would go on without it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


STAGES: dict[str, Callable[[argparse.Namespace, float, Results], None]] = {
    "probe": probe,
    "check": check,
    "bench": bench,
    "tests": tests,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=writable,
        default="gpu.txt",
        metavar="FILE",
        help="rows are appended to it, with where failed ones were; default gpu.txt",
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=list(STAGES),
        default=list(STAGES),
        help="all by default; always in the order above",
    )
    parser.add_argument(
        "--minutes", type=float, default=25, help="of all stages together; default 25"
    )
    parser.add_argument(
        "--row-seconds", type=float, default=60, metavar="SECONDS", help="of one row; default 60"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each model in check; default 20")
    parser.add_argument("--small", action="store_true", help="on a CPU, with small shapes")
    parser.add_argument(
        "--no-proof", action="store_true", help="prove no products, for the fake GPU"
    )
    args = parser.parse_args()
    if not args.small and (why := no_cuda()):
        parser.error(f"torch has no CUDA device here ({why}); write --small")
    return args


def main() -> int:
    args = parse()
    results = Results(args.out)
    chosen = [name for name in STAGES if name in args.stages]
    deadline = time.monotonic() + 60 * args.minutes
    for i, name in enumerate(chosen):
        left = (deadline - time.monotonic()) / 60
        minutes = max(0.0, left) * SHARES[name] / sum(SHARES[other] for other in chosen[i:])
        results.say(f"\n{name}: {minutes:.1f} minutes of {left:.1f}")
        try:
            STAGES[name](args, minutes, results)
        except (Exception, SystemExit) as e:  # the stages after it run
            results.row(
                name,
                Row(
                    [f"failed: {type(e).__name__}: {e}"],
                    failed=True,
                    details=traceback.format_exc(),
                ),
            )
    results.say(results.summary())
    return bool(results.failures)


if __name__ == "__main__":
    sys.exit(main())
