"""Training metrics: metrics.jsonl, fp8_stats.jsonl and the loggers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from fp8cfg.data import IGNORED, Batches
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.statistics import collect_statistics
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.file_names import FP8_STATS, METRICS
from fp8cfg.run_folder.files import RunFiles, write_all
from fp8cfg.run_folder.metrics_file import Value, complete_lines, parse, writable
from fp8cfg.run_folder.metrics_file import read as read
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.loggers.run_loggers import RunLoggers
from fp8cfg.training.step import count_microbatches

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder


class MetricsLog:
    """Appends metrics to a JSON Lines file, one object per line.

    Each line is written at once, so a killed process leaves at most one incomplete line. Floats
    round-trip bit for bit. If the disk is full, lines are buffered until there is space again.
    """

    def __init__(self, folder: RunFiles, name: str, done: int | None = None) -> None:
        """Opens a log and copies the lines of an existing one.

        Drops an incomplete last line. Also drops lines of steps after `done`, since the resumed run
        writes these again.

        Args:
            folder: Run folder.
            name: File name.
            done: Optimizer steps of the checkpoint. None keeps all lines, unread.

        Raises:
            OSError: The file cannot be written.
            StrangeFile: The file is not a regular file.
            ValueError: A line is not a JSON object with a step.
        """
        path = folder.path / name
        self._at = folder, name
        self.last: dict[str, tuple[int, Value]] = {}
        """Step and value of the last copied line of each metric, if `done` is given."""
        self.holes: list[tuple[int, int]] = []
        """First and last step of each gap in the copied lines, up to step `done`."""
        coming = 1  # the next step without a line
        self._waiting = bytearray()
        with ExitStack() as stack:
            there = stack.enter_context(folder.open(name)) if folder.kind(name) else ()
            with folder.replacing(name) as new:
                for number, line in enumerate(complete_lines(there), 1):
                    if done is not None:
                        values = parse(f"{path}:{number}", line)
                        if values["step"] > done:
                            continue
                        if values["step"] > coming:
                            self.holes.append((coming, values["step"] - 1))
                        coming = max(coming, values["step"] + 1)
                        self.last |= {
                            name: (values["step"], value) for name, value in values.items()
                        }
                    write_all(new, line)
                # `replacing` closes `new` after the rename. The duplicate stays open.
                self._file = open(os.dup(new.fileno()), "ab", buffering=0)  # noqa: SIM115
        if done is not None and coming <= done:
            self.holes.append((coming, done))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends one line.

        Args:
            step: Optimizer step, counted from 1.
            values: Metrics by name.

        Raises:
            TypeError: JSON cannot represent a value, such as a tensor.
            OSError: Writing failed for another reason than a full disk.
        """
        line = json.dumps(
            {"step": step} | {k: writable(v) for k, v in values.items() if k != "step"},
            allow_nan=False,
        )
        self._waiting += line.encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def close(self) -> None:
        """Writes buffered lines and closes the file. Raises OSError if the disk is still full."""
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
            # The error that ends the run is more useful than a full disk.
            if kind is None:
                raise

    def _flush(self) -> None:
        while self._waiting:
            del self._waiting[: self._file.write(self._waiting)]


class RunLogs:
    """Log files and loggers of a run: metrics.jsonl, fp8_stats.jsonl, log.loggers.

    A context manager.

    Only the first rank has a run folder and writes. Other ranks make the same calls, because
    `statistics` runs collectives.
    """

    def __init__(self, job: Job, run: RunFolder | None, done: int, loggers: RunLoggers) -> None:
        """Opens the log files of a run.

        Args:
            job: The job.
            run: Run folder, None on ranks that write nothing.
            done: Optimizer steps done. Lines of later steps are dropped.
            loggers: Get the same metrics.

        Raises:
            ConfigError: A log is damaged, or the backend has no FP8 statistics.
            OSError: A log cannot be written.
        """
        self.job = job
        self._metrics: MetricsLog | None = None
        self._statistics: MetricsLog | None = None
        self.loggers = loggers
        self._statistics_interval = 0
        # The statistics take a forward and backward pass. Under FSDP2 this pass gathers weights, so
        # all ranks must run it.
        if run or job.prepared.fsdp2:
            self._statistics_interval = job.recipe.log.fp8_stats_every_n_steps
        # If a later log cannot be opened, the stack closes the earlier ones.
        with ExitStack() as opened:
            if run:
                self._open(run, done, opened)
            self._opened = opened.pop_all()

    def _open(self, run: RunFolder, done: int, opened: ExitStack) -> None:
        interval = self._statistics_interval
        if interval and not any(fp8_linears(self.job.model)):
            raise ConfigError(
                f"log.fp8_stats_every_n_steps={interval}: backend={self.job.choice.backend} has"
                " no FP8 statistics; set backend=native or remove it"
            )
        self._metrics = _open_log(run.files, METRICS, done, opened)
        # An existing log is opened even without an interval, to drop its later lines.
        if interval or run.files.kind(FP8_STATS):
            self._statistics = _open_log(run.files, FP8_STATS, done, opened)

    def rewind(self, run: RunFolder | None, done: int) -> None:
        """Drops the lines of steps after `done`: the run writes these steps again."""
        for log in (self._metrics, self._statistics):
            if log:
                log.close()
        if self._metrics and run:
            self._metrics = _open_log(run.files, METRICS, done, self._opened)
        if self._statistics and run:
            self._statistics = _open_log(run.files, FP8_STATS, done, self._opened)

    def write(self, done: int, values: dict[str, Value]) -> None:
        """Writes metrics of optimizer step `done`, counted from 1."""
        if self._metrics:
            self._metrics.write(done, values)
        self.loggers.write(done, values)

    def holes(self) -> str:
        """Returns a note about finished steps without a line in metrics.jsonl, or ""."""
        if not self._metrics or not self._metrics.holes:
            return ""
        gaps = []
        for first, last in self._metrics.holes:
            gaps.append(f"{first} to {last}" if first < last else str(first))
        more = f" and {len(gaps) - 4} more gaps" if len(gaps) > 4 else ""
        return (
            f"note: {METRICS} has no lines for steps {', '.join(gaps[:4])}{more}; a crash of the"
            " machine or an edit lost them, but training continues from the checkpoint as usual"
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
        """Writes FP8 statistics of the first microbatch of a step, if the step is due.

        Runs an extra eager forward and backward pass. It changes no FP8 state. All ranks call it.

        Args:
            batches: Training data.
            step: The next step, counted from 0.
            world: Ranks of the run.
        """
        if not self._statistics_interval or (step + 1) % self._statistics_interval:
            return
        job = self.job
        num_microbatches = count_microbatches(job, world)
        batch = batches.batch(step, world.rank, world.size, 0, num_microbatches)
        num_shares: float = num_microbatches * world.size
        # Masked microbatches have different numbers of targets. Their loss gets the weight that it
        # has in the step, so gradients have the same size as in training.
        if batches.samples.masked:
            num_targets = batches.target_count(step)
            if not num_targets:
                return  # the training step reports this error
            num_shares = num_targets / max(int((batch[1] != IGNORED).sum()), 1)

        def run_pass() -> None:
            with job.autocast():
                loss = job.model(*(tensor.to(job.device) for tensor in batch))
                job.backward(loss, num_shares)

        # Frees the gradients of the last step before this pass allocates new ones.
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
        self.loggers.write(step + 1, values)

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
    """Opens a log that `opened` closes. Raises ConfigError if it is damaged."""
    try:
        return opened.enter_context(MetricsLog(files, name, done))
    except ValueError as error:
        raise ConfigError(str(error)) from None
