"""Source trees whose steps are timed: this one, a folder, or a revision of this repository, and a worker process for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


class NoTreeError(ValueError):
    """Neither a folder with fp8cfg in it nor a revision."""


def tree(name: str, into: Path) -> Path:
    """The folder of that name where it has fp8cfg in it; of a revision its files, written `into` a folder. Raises NoTreeError."""
    if Path(name, "fp8cfg", "__init__.py").is_file():
        return Path(name).resolve()
    made = subprocess.run(
        ["git", "-C", str(ROOT), "archive", name, "fp8cfg", "conf", "recipes"],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        raise NoTreeError(f"{name}: neither a folder with fp8cfg in it nor a revision of {ROOT}")
    into.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(into)], input=made.stdout, check=True)
    return into


class Worker:
    """A process that takes steps of the code in `root`. `ask` sends it a request of worker.py and returns the answer; raises
    RuntimeError where it has ended."""

    def __init__(self, root: Path, threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment,
        )

    def ask(self, **request: object) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            found: dict[str, Any] = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise RuntimeError(
                f"a worker ended with exit code {self.process.wait()} at {request}"
            ) from None
        return found

    def end(self) -> None:
        self.process.communicate()
