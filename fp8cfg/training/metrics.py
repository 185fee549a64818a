"""Training metrics: metrics.jsonl for programs, a progress line for people, TensorBoard on request."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fp8cfg.building.job import Job
from fp8cfg.data import IGNORED, Batches
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.statistics import collect_statistics
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles, write_all
from fp8cfg.run_folder.run_folder import FP8_STATS, METRICS, TENSORBOARD, RunFolder
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.step import count_microbatches

Value = float | int | str | bool | None
# JSON has no such numbers; they are written as these strings and read back as floats.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsLog:
    """Appends to a file of one JSON object a line, written at each, so that a kill loses at most a half-written last line.

    Opening it makes the file anew from the lines of the one that is there: a half line, and what it says of steps after `done`,
    which a run that resumes there writes again, are dropped. Floats are written with the digits that give the same bits back.
    Lines that find no space wait for the next one.
    """

    def __init__(self, folder: RunFiles, name: str, done: int | None = None) -> None:
        """Opens `name` in `folder`. Raises OSError, StrangeFile, and ValueError as read() does."""
        path = folder.path / name
        self._at = folder, name
        self.last: dict[str, tuple[int, Value]] = {}
        """The last line that was found of each value, where `done` is given: its step, and the value."""
        self.holes: list[tuple[int, int]] = []
        """The first and the last step of each gap in the file that was found, up to step `done`."""
        coming = 1
        self._waiting = bytearray()
        with ExitStack() as stack:
            there = stack.enter_context(folder.open(name)) if folder.kind(name) else ()
            with folder.replacing(name) as new:
                for number, line in enumerate(_complete_lines(there), 1):
                    if done is not None:
                        values = _parse(f"{path}:{number}", line)
                        if values["step"] > done:
                            continue
                        if values["step"] > coming:
                            self.holes.append((coming, values["step"] - 1))
                        coming = max(coming, values["step"] + 1)
                        self.last |= {
                            name: (values["step"], value) for name, value in values.items()
                        }
                    write_all(new, line)
                self._file = open(os.dup(new.fileno()), "ab", buffering=0)  # noqa: SIM115
        if done is not None and coming <= done:
            self.holes.append((coming, done))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Append one line, `step` and then `values`. TypeError for a value JSON has no word for, such as a tensor; OSError, but
        not for want of space."""
        line = json.dumps(
            {"step": step} | {k: _writable(v) for k, v in values.items() if k != "step"},
            allow_nan=False,
        )
        self._waiting += line.encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def close(self) -> None:
        """Close the file; writing after it raises ValueError. Raises OSError where lines are still waiting for space."""
        try:
            if not self._file.closed:
                self._flush()
        except OSError as error:
            folder, name = self._at
            raise OSError(error.errno, error.strerror, str(folder.path / name)) from None
        finally:
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # what ends the run already says more than that lines found no space
                raise

    def _flush(self) -> None:
        while self._waiting:
            del self._waiting[: self._file.write(self._waiting)]


def read(path: Path | RunFiles, name: str = "") -> list[dict[str, Value]]:
    """The lines of the metrics.jsonl at `path`, or of the file `name` in a run folder, floats bit for bit (a NaN as the canonical
    one). A half-written last line is left out.

    Raises OSError, StrangeFile, and ValueError for any other line that is not a JSON object with a step.
    """
    folder = RunFiles.at(path if isinstance(path, RunFiles) else Path(path).parent)
    name = name or Path(path).name  # type: ignore[arg-type]
    with folder.open(name) as file:
        return [
            _parse(f"{folder.path / name}:{number}", line)
            for number, line in enumerate(_complete_lines(file), 1)
        ]


class TensorBoardLog:
    """The numbers of MetricsLog.write as TensorBoard scalars under `folder`. Needs the extra fp8cfg[tensorboard]."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed: pip install 'fp8cfg[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Add each number as a scalar at `step`; what is not a number is left to metrics.jsonl."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close."""
        self._writer.close()


class Progress:
    """One line on how far a run is: redrawn in place on a terminal; elsewhere a plain line every `every` steps.

    `say` gets the plain lines in place of the console. `console` and `clock` (seconds) are for tests. Whatever is printed meanwhile
    appears above the line.
    """

    def __init__(
        self,
        max_steps: int,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.max_steps = max_steps
        self.every = every
        self._say = say
        self._console = console or Console()
        self._clock = clock
        self._start: tuple[int, float] | None = None
        redraw = say is None and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, refresh_per_second=4) if redraw else None

    def update(self, step: int, loss: float, lr: float, tokens_per_s: float) -> None:
        """Show the state after optimizer step `step` (the first is 1)."""
        self._start = self._start or (step, self._clock())
        line = (
            f"step {step}/{self.max_steps}  loss {loss:.4f}  lr {lr:.3g}  {tokens_per_s:,.0f}"
            " tokens/s"
        )
        line += f"  ETA {self._eta(step)}"
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif step % self.every != 0 and step != self.max_steps:
            return
        elif self._say:
            self._say(line)
        else:
            # Not console.print: it would wrap the line at the width it assumes where there is no terminal.
            self._console.file.write(line + "\n")
            self._console.file.flush()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _eta(self, step: int) -> str:
        """Time left at the pace since the first update, h:mm:ss; unknown at that update itself."""
        first_step, began = self._start or (step, 0.0)
        if step <= first_step:
            return "-:--:--"
        elapsed = self._clock() - began
        seconds = round((self.max_steps - step) * elapsed / (step - first_step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _writable(value: Value) -> Value:
    """Returns the value as JSON has it. See NON_FINITE."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _parse(place: str, line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not a line of metrics: {_quote(line)}; delete that line"
        ) from error
    if not isinstance(raw, dict) or type(raw.get("step")) is not int:
        raise ValueError(
            f"{place}: a line of metrics without a step: {_quote(line)}; delete that line"
        )
    values = {}
    for name, value in raw.items():
        values[name] = NON_FINITE.get(value, value) if isinstance(value, str) else value
    return values


def _quote(line: bytes) -> str:
    """Returns the beginning of a line for an error."""
    return repr(line[:80].decode(errors="replace").rstrip())


def _complete_lines(lines: Iterable[bytes]) -> Iterable[bytes]:
    """Leaves out a half-written last line."""
    return (line for line in lines if line.endswith(b"\n"))


class RunLogs:
    """Logs of a run: metrics.jsonl, fp8_stats.jsonl and TensorBoard. A context manager.

    Without a run folder, as on all ranks but the first, nothing is written.
    """

    def __init__(self, job: Job, run: RunFolder | None, done: int) -> None:
        """Opens the logs of `run`, and drops their lines of steps after `done`.

        Raises:
            ConfigError: A log cannot be read, or the recipe's `log` keys ask for one that is not
                available.
            OSError: A log cannot be written.
        """
        self.job = job
        self._metrics: MetricsLog | None = None
        self._statistics: MetricsLog | None = None
        self._board: TensorBoardLog | None = None
        self._statistics_interval = 0
        # With FSDP2 all ranks take part in the passes, which gather weights.
        if run or job.prepared.fsdp2:
            self._statistics_interval = job.recipe.log.fp8_stats_every_n_steps
        with ExitStack() as opened:
            if run:
                self._open(run, done, opened)
            self._opened = opened.pop_all()

    def _open(self, run: RunFolder, done: int, opened: ExitStack) -> None:
        interval = self._statistics_interval
        if interval and not any(fp8_linears(self.job.model)):
            raise ConfigError(
                f"log.fp8_stats_every_n_steps={interval}: backend {self.job.choice.backend} has"
                " no such statistics; write backend=native or drop it"
            )
        self._metrics = _open_log(run.files, METRICS, done, opened)
        # An existing log is opened in any case, to drop its later lines.
        if interval or run.files.kind(FP8_STATS):
            self._statistics = _open_log(run.files, FP8_STATS, done, opened)
        if self.job.recipe.log.tensorboard:
            try:
                self._board = TensorBoardLog(run.files.folder(TENSORBOARD, make=True).path)
            except ImportError as error:
                raise ConfigError(f"log.tensorboard=true: {error}") from None
            opened.callback(self._board.close)

    def write(self, done: int, values: dict[str, Value]) -> None:
        """Writes values of optimizer step `done`, counted from 1."""
        if self._metrics:
            self._metrics.write(done, values)
        if self._board:
            self._board.write(done, values)

    def holes(self) -> str:
        """Returns a note on finished steps without a line in metrics.jsonl, or ""."""
        if not self._metrics or not self._metrics.holes:
            return ""
        gaps = []
        for first, last in self._metrics.holes:
            gaps.append(f"{first} to {last}" if first < last else str(first))
        more = f" and {len(gaps) - 4} more gaps" if len(gaps) > 4 else ""
        return (
            f"note: {METRICS} has no lines of steps {', '.join(gaps[:4])}{more}, which the"
            " checkpoint has; a crash of the machine or an edit lost them, and training is as before"
        )

    def evaluated(self, done: int) -> bool:
        """Whether metrics.jsonl had a validation loss of step `done` when it was opened."""
        return self._metrics is None or self.found(done, "val_loss") is not None

    def found(self, done: int, name: str) -> Value:
        """Returns the value that metrics.jsonl had for step `done` when it was opened, or None."""
        if self._metrics is None:
            return None
        step, value = self._metrics.last.get(name, (0, None))
        return value if step == done else None

    def statistics(self, batches: Batches, step: int, world: World) -> None:
        """Writes statistics of the FP8 tensors in the first microbatch of a step, if due.

        They take an eager forward and backward pass, and change nothing. All ranks call it.

        Args:
            batches: Data of the run.
            step: Step that is about to begin, counted from 0.
            world: Ranks of the run.
        """
        if not self._statistics_interval or (step + 1) % self._statistics_interval:
            return
        job = self.job
        num_microbatches = count_microbatches(job, world)
        batch = batches.batch(step, world.rank, world.size, 0, num_microbatches)
        num_shares: float = num_microbatches * world.size
        if batches.samples.masked:
            num_targets = batches.target_count(step)
            if not num_targets:
                return  # the step itself reports that no token has a loss
            num_shares = num_targets / max(int((batch[1] != IGNORED).sum()), 1)

        def run_pass() -> None:
            with job.autocast():
                loss = job.model(*(tensor.to(job.device) for tensor in batch))
                job.backward(loss, num_shares)

        # Two sets of gradients would need memory at once.
        job.optimizer.zero_grad()
        if job.prepared.fsdp2:
            from fp8cfg.parallel import fsdp  # here: it takes a second to load

            fsdp.prepare_microbatch(job.model, job.prepared.shard, last=True)
        values: dict[str, Value] = {}
        for tensor in collect_statistics(job.model, run_pass, job.optimizer.masters):
            fields = tensor._asdict()
            if self._statistics:
                self._statistics.write(step + 1, fields)
            for name, value in fields.items():
                values[f"fp8/{tensor.layer}/{tensor.tensor}/{name}"] = value
        if self._board:
            self._board.write(step + 1, values)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


def _open_log(files: RunFiles, name: str, done: int, opened: ExitStack) -> MetricsLog:
    try:
        return opened.enter_context(MetricsLog(files, name, done))
    except ValueError as error:
        raise ConfigError(str(error)) from None
