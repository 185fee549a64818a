"""Results of tools on a GPU: the machine, lines appended to a file as they come, so that a run that is killed loses none of them, and a
verdict on each row for the summary at the end."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple, TextIO

from fp8cfg.schema.tables import wrapped
from tools.gpu_rows.worker import Row

STATES = ("FAILED", "STOPPED", "MISSED", "not run", "met", "passed")
"""What may be said of a row, or of a goal (MISSED, met); what wants attention first."""

LINES = 120
"""Of a row's details, the last ones."""


class Verdict(NamedTuple):
    """What became of `row`, one of STATES, and why."""

    row: str
    state: str
    why: str = ""


class Results:
    """Prints lines to `stream`, by default standard output as it is at the time, and appends them to the file `path`."""

    def __init__(self, path: Path | None = None, stream: TextIO | None = None) -> None:
        self._path, self._stream = path, stream
        self.verdicts: list[Verdict] = []

    def say(self, text: str) -> None:
        """Print and write `text`; it is on the disk when this returns."""
        print(text, file=self._stream or sys.stdout, flush=True)
        self._append(text)

    def _append(self, text: str) -> None:
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())

    def row(self, name: str, row: Row) -> None:
        """Remember what became of the row called `name`; its details are in the file alone."""
        if row.details:
            self._append(
                textwrap.indent(
                    "\n".join(row.details.splitlines()[-LINES:]), "    | ", lambda _: True
                )
            )
        said = row.cells[0] if len(row.cells) == 1 else ""
        state, _, why = said.partition(": ")
        found = (
            "STOPPED"
            if row.stopped
            else "FAILED"
            if row.failed
            else "not run"
            if state == "not run"
            else "passed"
        )
        self.verdicts.append(Verdict(name, found, "" if found == "passed" else why))

    def goal(self, name: str, measured: float, goal: float, estimated: float = 0.0) -> None:
        """Remember whether the ratio `measured` reaches the `goal`; beside it stands what was `estimated`, where that is not 0."""
        beside = f", estimated {estimated:.2f}x" if estimated else ""
        self.verdicts.append(
            Verdict(
                f"goal {name}",
                "met" if measured >= goal else "MISSED",
                f"{measured:.2f}x of {goal:.2f}x{beside}",
            )
        )

    def summary(self) -> str:
        """Every row by what became of it, those of one reason together, what wants attention first."""
        groups: dict[tuple[str, str], list[str]] = {}
        for one in sorted(self.verdicts, key=lambda v: STATES.index(v.state)):
            groups.setdefault((one.state, one.why), []).append(one.row)
        counts = [(state, sum(v.state == state for v in self.verdicts)) for state in STATES]
        lines = ["", "summary: " + ", ".join(f"{n} {state}" for state, n in counts if n)]
        lines += [
            wrapped(f"{', '.join(rows)}{f': {why}' if why else ''}", f"{state:8}", " " * 10)
            for (state, why), rows in groups.items()
        ]
        return "\n".join(lines)

    def verdict(self) -> int:
        """Say the summary and how many rows failed; the exit code."""
        self.say(self.summary())
        self.say(f"{self.failures} failed or were stopped" if self.failures else "none failed")
        return int(bool(self.failures))

    @property
    def failures(self) -> int:
        """Rows that failed or were stopped."""
        return sum(one.state in ("FAILED", "STOPPED") for one in self.verdicts)


def writable(name: str) -> Path:
    """The file of that name, as argparse wants it: one that lines can be appended to. It makes none."""
    path = Path(name)
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
        return path
    except OSError as e:
        raise argparse.ArgumentTypeError(f"{name}: {e.strerror}") from e


def machine(device: str) -> str:
    """The GPU, or the CPU, and the versions of what multiplies on it."""
    import torch

    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread, FP8 emulated"
    return f"{where}; " + ", ".join(
        f"{name} {found}"
        for name in ("torch", "triton", "transformer-engine", "torchao")
        if (found := version(name))
    )


def version(package: str) -> str:
    """The installed version of `package`; empty where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
