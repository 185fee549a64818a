"""Worker process of a table: makes its rows one after another, each within a time budget; a crash or a stop costs one row.

Rows may share what is dear to make, such as a compiled model to take turns with: it stays in the process from row to row, and the
process that follows one that was stopped makes it again. So does the one that follows a row after which the GPU takes no call any
more: an illegal access to memory, say, stays with the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple


class Row(NamedTuple):
    """The cells of a row, or, where it `failed` or was `stopped`, one cell that says why, and `details` of that in many lines: where
    the process was, and what it and others that it started wrote to stderr."""

    cells: list[str]
    failed: bool = False
    stopped: bool = False
    details: str = ""


PATIENCE = 20
"""Seconds in which a process that was killed is gone; one that a GPU's driver holds is left, and the rows after it run."""


class NotRun(Exception):
    """Why a row cannot run here, which is no failure of it."""


Make = Callable[[Any], Row]


class Worker:
    """`start(*arguments)` runs in the process, once, and gives what makes a row of the value that `row` is given."""

    def __init__(self, context: BaseContext, start: Callable[..., Make], *arguments: Any) -> None:
        self._context, self._start, self._arguments = context, start, arguments
        self._process: Any = None

    @property
    def begun(self) -> bool:
        """Whether there is a process, which has made what its rows share."""
        return self._process is not None

    def row(self, what: object, seconds: float) -> Row:
        """The row of `what`. One that takes longer than `seconds` is stopped, and says so."""
        began = time.monotonic()
        if self._process is None:
            self._begin()
        try:
            self._pipe.send(what)
            if self._pipe.poll(max(0.0, seconds - (time.monotonic() - began))):
                row: Row
                row, lost = self._pipe.recv()
                if lost:
                    self.end()
                return row
        except (EOFError, ConnectionError):
            self._process.join(PATIENCE)
            said = self._said()
            self.end()
            last = said.strip().splitlines()[-1][:200] if said.strip() else ""
            return Row(
                [f"failed: died with exit code {self._code} {last}".rstrip()],
                failed=True,
                details=said,
            )
        where = self._where()
        self.end()
        return Row(
            [f"stopped: over its time budget of {seconds:.3g} s"],
            failed=True,
            stopped=True,
            details=where,
        )

    def row_in_time(self, what: object, budget: float, left: float, why: str) -> Row:
        """The row of `what`, whose budget is of so many seconds, where all together have so many `left`; `why` is said where these do
        not suffice."""
        if left <= 0:
            return Row([f"not run: {why}"])
        found = self.row(what, min(budget, left))
        return (
            found._replace(cells=[f"stopped: {why}"]) if found.stopped and left < budget else found
        )

    def end(self) -> None:
        """End the process, whatever it is at."""
        if self._process is not None:
            self._process.kill()
            self._process.join(PATIENCE)
            self._code = self._process.exitcode
            self._pipe.close()
            self._log.close()
            self._process = None

    def _begin(self) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115, closed by end()
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=_work, args=(theirs, self._log.name, self._start, self._arguments)
        )  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    def _said(self) -> str:
        """What was written to stderr since this was asked last."""
        return self._log.read().decode(errors="replace")

    def _where(self) -> str:
        """The lines at which the threads of the process are, and what it wrote before; within a second."""
        said = self._said()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        until = time.monotonic() + 1
        while not (stacks := self._said()) and time.monotonic() < until:
            time.sleep(0.05)
        return said + stacks

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _work(pipe: Any, log: str, start: Callable[..., Make], arguments: tuple[Any, ...]) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.register(signal.SIGUSR1, file=2)
    make: Make | None = None
    with open(log, encoding="utf-8", errors="replace") as said:
        while True:
            try:
                what = pipe.recv()
            except EOFError:
                return
            said.seek(0, os.SEEK_END)
            try:
                make = make or start(*arguments)
                row = make(what)
            except NotRun as e:
                row = Row([f"not run: {e}"])
            except Exception as e:
                heard = said.read()
                row = Row([failure(e, heard)], failed=True, details=traceback.format_exc() + heard)
            pipe.send((row, row.failed and _lost_device()))


def _lost_device() -> bool:
    """Gives back the memory of a row that failed. Whether the GPU, if this process has used one, takes no call any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return True
    return False


def failure(e: BaseException, heard: str = "") -> str:
    """One line on why a row failed: errors of fp8cfg in their own words, of a command that failed what was `heard` of it."""
    text = " ".join(str(e).split())
    if isinstance(e, subprocess.CalledProcessError):  # Triton's C compiler, say
        errors = [line for line in heard.splitlines() if "error" in line] or heard.splitlines()[-1:]
        text = " ".join(
            [
                f"{e.cmd if isinstance(e.cmd, str) else e.cmd[0]} ended with {e.returncode}",
                *errors[:1],
            ]
        )
    ours = type(e).__module__.startswith("fp8cfg.") or isinstance(e, ArithmeticError)
    return f"failed: {text if ours else f'{type(e).__name__}: {text}'}"[:300]
